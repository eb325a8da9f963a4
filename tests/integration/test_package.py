"""The wheel, built and installed elsewhere: what somebody who types `pip install fxopt` gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("fxopt", "profiler_core", "passes", "case_studies")


def checked(command: list[str], **keywords) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **keywords)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy: setuptools leaves build/ and *.egg-info beside the sources, and takes up an old build/.
    source = tmp_path_factory.mktemp("source") / "fxopt"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    checked([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    checked(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--target", str(target), str(wheel)]
    )  # fmt: skip
    return target


def python(installed: Path, script: str, tmp_path: Path) -> str:
    """Runs a script that sees the installed package, and not the repository."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return checked([sys.executable, "-c", script], cwd=tmp_path, env=environment)


def test_the_wheel_holds_every_module_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert sources <= names
    assert "fxopt/py.typed" in names


def test_the_wheel_holds_nothing_else_at_the_top(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {*PACKAGES, "fxopt-0.1.0.dist-info"}


def test_the_wheel_states_what_it_needs(installed, tmp_path):
    script = """if True:
        import json
        from importlib.metadata import distribution
        found = distribution("fxopt")
        print(json.dumps([found.version, found.metadata["Requires-Python"], found.requires]))
    """
    version, python_range, requires = json.loads(python(installed, script, tmp_path))
    assert (version, python_range) == ("0.1.0", ">=3.10")
    assert "torch<2.15,>=2.11" in requires
    assert any(line.startswith("transformers") and 'extra == "case-studies"' in line for line in requires)


def test_every_entry_point_of_the_installed_package_is_declared(installed, tmp_path):
    script = """if True:
        import json
        from importlib.metadata import distribution
        print(json.dumps({f"{p.group}:{p.name}": p.value for p in distribution("fxopt").entry_points}))
    """
    declared = {
        "console_scripts:fxopt": "fxopt.cli:main",
        "torch_dynamo_backends:profile_guided": "fxopt.backend:profile_guided",
    }
    for path in (REPOSITORY / "passes").glob("*.py"):  # a pass is named as its file, and its class as well
        name = "".join(map(str.capitalize, path.stem.split("_")))
        if f"class {name}(" in path.read_text(encoding="utf-8"):
            declared[f"fxopt.passes:{path.stem}"] = f"passes.{path.stem}:{name}"
    assert len(declared) > 10
    assert json.loads(python(installed, script, tmp_path)) == declared


def test_torch_finds_the_backend_without_fxopt_having_been_imported(installed, tmp_path):
    script = """if True:
        import sys
        import torch
        assert "profile_guided" in torch._dynamo.list_backends()
        assert "fxopt" not in sys.modules, "listing the backends imported fxopt"
        from torch._dynamo.backends.registry import lookup_backend
        backend = lookup_backend("profile_guided")
        import fxopt
        print(fxopt.__file__)
        assert callable(backend) and backend.__module__.startswith("fxopt")
    """
    assert python(installed, script, tmp_path).strip() == str(installed / "fxopt" / "__init__.py")


def test_torch_compile_takes_the_backend_by_name(installed, tmp_path):
    # Wrapping compiles nothing yet: the name alone is resolved, and an unknown one would raise here.
    script = """if True:
        import sys
        import torch
        assert "fxopt" not in sys.modules
        torch.compile(torch.nn.Linear(2, 2), backend="profile_guided")
        assert "fxopt.backend" in sys.modules
    """
    python(installed, script, tmp_path)


def test_the_registry_finds_the_passes_of_the_installed_package(installed, tmp_path):
    script = """if True:
        import warnings
        warnings.simplefilter("error")
        from fxopt.registry import discover
        print(*sorted(discover()))
    """
    found = python(installed, script, tmp_path).split()
    assert {"freeze_weights", "promote_matmul_precision", "cuda_graphs"} <= set(found)


def test_the_installed_command_runs(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = installed / "bin" / "fxopt"
    assert command.exists()
    shown = json.loads(
        checked([sys.executable, str(command), "version", "--json"], cwd=tmp_path, env=environment)
    )
    assert shown["fxopt"] == "0.1.0"
