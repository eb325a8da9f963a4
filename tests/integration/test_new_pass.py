"""A package that `fxopt passes new` wrote, installed beside an installed fxopt: found, tested, proposed, reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")


def python(*arguments: str, path: tuple[Path, ...] = (), cwd: Path, **variables: str) -> str:
    """Runs this interpreter where it sees the packages in `path`, and not the repository; returns its stdout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def fxopt_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fxopt, built and installed into a folder of its own."""
    # From a copy: setuptools leaves build/ and *.egg-info beside the sources.
    source = tmp_path_factory.mktemp("source") / "fxopt"
    for name in ("fxopt", "profiler_core", "passes"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    site = tmp_path_factory.mktemp("fxopt_site")
    python(*PIP, "--target", str(site), str(source), cwd=source)
    return site


@pytest.fixture(scope="module", params=["joint", "post_grad"])
def package(request: pytest.FixtureRequest, fxopt_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was written, by the installed command."""
    directory = tmp_path_factory.mktemp("written") / "merge_scales"
    arguments = ["passes", "new", "merge-scales", "--dir", str(directory), "--stage", request.param]
    told = python(str(fxopt_site / "bin" / "fxopt"), *arguments, path=(fxopt_site,), cwd=directory.parent)
    assert f"pip install -e {directory}" in told
    return directory


@pytest.fixture(scope="module")
def installed(package: Path, fxopt_site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both packages, installed into folders of their own."""
    source = shutil.copytree(package, tmp_path_factory.mktemp("copy") / "merge_scales")
    site = tmp_path_factory.mktemp("pass_site")
    python(*PIP, "--target", str(site), str(source), cwd=source)
    return fxopt_site, site


def test_its_own_test_passes_as_it_was_written(package, fxopt_site):
    told = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(package), path=(fxopt_site,), cwd=package)
    assert "7 passed" in told


def test_fxopt_finds_it_by_its_entry_point_alone(installed, tmp_path):
    listed = json.loads(python("-m", "fxopt.cli", "passes", "list", "--json", path=installed, cwd=tmp_path))
    names = {row["name"]: row["from"] for row in listed}
    assert names["merge_scales"] == "fxopt-merge-scales 0.1.0"
    assert names["cuda_graphs"].startswith("fxopt ")


def test_show_tells_its_option_and_finds_no_page_that_is_not_installed(installed, tmp_path):
    arguments = ["-m", "fxopt.cli", "passes", "show", "merge_scales", "--json"]
    shown = json.loads(python(*arguments, path=installed, cwd=tmp_path))
    (option,) = shown["options"]
    assert (option["name"], option["type"], option["default"]) == ("largest", "float", "1000000.0")
    assert option["meaning"].startswith("products of constants above this")
    assert shown["source"].startswith(str(installed[1])) and shown["documentation"] is None
    assert shown["docstring"].startswith("merge_scales: two multiplications")


SCRIPT = """if True:
    import json

    import torch

    import fxopt
    from fxopt.cli import run
    from profiler_core import roofline

    # A device whose memory is far slower than any: the graph is then memory-bound however busy this machine is.
    made = roofline.Ceilings("test", 1.0, {"float32": 1e12}, "2026-01-01T00:00:00+00:00", {})
    roofline.ceilings = lambda device, store: made

    def scaled_twice(x):
        return torch.relu(x * 2.0 * 3.0)

    quick = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1, "on_error": "raise"}
    quick["fallback_by_default"] = True  # torch's own kernels: no C++ has to be compiled
    x = torch.randn(64, 64)
    with torch.no_grad():
        y = torch.compile(scaled_twice, backend="profile_guided", options=quick)(x)
    torch.testing.assert_close(y, scaled_twice(x))
    print(json.dumps(fxopt.last_report().to_json()["graphs"][0]["candidates"]))
    run(["passes", "show", "merge_scales", "--json"])
"""


def test_torch_compile_proposes_it_verifies_it_and_the_plan_is_seen(installed, tmp_path, plan_dir):
    told = python("-c", SCRIPT, path=installed, cwd=tmp_path, FXOPT_PASSES="merge_scales")
    candidates, shown = told.split("\n", 1)
    (candidate,) = json.loads(candidates)
    assert candidate["passes"] == ["merge_scales"]
    (report,) = candidate["reports"]
    assert (report["matched"], report["rewritten"], report["error"]) == (1, 1, "")
    assert candidate["verdict"]["ok"] and candidate["paired"]["ratio"] > 0
    results = json.loads(shown)["results"]
    assert results["plans"] == 1 and results["kept"] + results["rejected"] == 1
    assert results["directory"] == str(plan_dir / "plans")
