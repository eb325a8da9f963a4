"""The files of a new pass: an installable package of one pass, beside which nothing of fxopt has to change.

The example that the files hold is a working one, and its test passes as it is written.
"""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import re
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fxopt import toml_file
from fxopt.cli_output import did_you_mean
from fxopt.labels import Axis
from fxopt.registry import ENTRY_POINT_GROUP, Stage

STAGES = (Stage.JOINT, Stage.POST_GRAD)
# What setuptools and pytest would take the module for.
TAKEN = {"setup": "setuptools", "conftest": "pytest"}


class ScaffoldError(ValueError):
    """The pass cannot be written; the message says what is in the way."""


def new_pass(given: str, directory: Path | None, *, stage: str, answers: Sequence[str], known: Collection[str]) -> str:
    """Writes the files and returns what to tell the user.

    given: the pass's name, an identifier (hyphens become underscores). directory: where, or None for a folder of the
    pass's name. stage: "joint" or "post_grad". answers: names of axes. known: names of passes that are taken.
    Raises ScaffoldError.
    """
    name = given.replace("-", "_")
    values = substitutions(name, _stage(stage), _axes(answers))
    directory = Path(name) if directory is None else directory.expanduser()
    project = directory / "pyproject.toml"
    files = {
        directory / f"{name}.py": "graph_pass.py.txt",
        directory / f"test_{name}.py": "test_graph_pass.py.txt",
        directory / f"{name}.md": "pass.md.txt",
    }
    if directory.exists() and not directory.is_dir():
        raise ScaffoldError(f"{directory} is a file; give a folder with --dir")
    there = [str(path) for path in files if path.exists()]
    if there:
        raise ScaffoldError(f"nothing is overwritten, and there is already {', '.join(there)}")
    _check_name(name, given, directory, known)
    entry = f'{name} = "{name}:{values["cls"]}"'
    to_add = _entry_point_lines(project, name, entry) if project.exists() else ""
    if not project.exists():
        files = {project: "pyproject.toml.txt", **files}
    texts = {path: _template(source).substitute(values) for path, source in files.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ScaffoldError(f"{error.filename} cannot be written: {error.strerror}") from error
    return _next_steps(name, directory, list(files), to_add)


def substitutions(name: str, stage: Stage, axes: Sequence[Axis]) -> dict[str, str]:
    """What stands for each name of the templates."""
    from fxopt.rules import RULES

    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    # A pass may be named "candidate", "axis", "false" or "exception".
    while (
        re.search(rf"\b{cls}\b", _template("graph_pass.py.txt").template)
        or keyword.iskeyword(cls)
        or hasattr(builtins, cls)
    ):
        cls += "Rewrite"
    # A label of the whole graph has no nodes, so that no node can be asked for it.
    of_graphs = {rule.axis for rule in RULES if rule.scope == "graph"}
    by_node = not of_graphs & set(axes)
    labelled = (
        "            elif not context.answers(node, self.answers):\n"
        '                yield Candidate(node.name, "it has none of the labels that this pass answers")\n'
    )
    label_test = (
        "def test_without_the_label_nothing_is_rewritten():\n"
        f'    testing.refuses({cls}(), scaled_twice, torch.randn(4, 8), because="none of the labels", labels=())\n\n\n'
    )
    return {
        "name": name,
        "cls": cls,
        "distribution": f"fxopt-{name.replace('_', '-').lower()}",
        "stage": stage.value,
        "stage_member": stage.name,
        "axes": ", ".join(axis.value for axis in axes),
        "axis_members": ", ".join(f"Axis.{axis.name}" for axis in axes),
        "labelled": labelled if by_node else "",
        "label_test": label_test if by_node else "",
        "unlabelled_reason": "- it has none of the labels above\n" if by_node else "",
        "fxopt_version": _version(),
    }


def _version() -> str:
    import fxopt

    return fxopt.__version__


def _template(name: str) -> Template:
    return Template((resources.files("fxopt") / "templates" / name).read_text(encoding="utf-8"))


def _stage(given: str) -> Stage:
    if given in [stage.value for stage in STAGES]:
        return Stage(given)
    known = [stage.value for stage in Stage]
    hint = "" if given in known else did_you_mean(given, known)
    raise ScaffoldError(
        f"a new pass can be for the stage {' or '.join(stage.value for stage in STAGES)}, not {given!r}{hint}. For the "
        "others start from passes/freeze_weights.py (config) and passes/cuda_graphs.py (runtime)"
    )


def _axes(given: Sequence[str]) -> list[Axis]:
    known = [axis.value for axis in Axis]
    names = list(dict.fromkeys(stripped for name in given if (stripped := name.strip())))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ScaffoldError(f"no label is named {name!r}{hint}")
    if not names:
        raise ScaffoldError(f"--answers names no label; there are {', '.join(known)}")
    return [Axis(name) for name in names]


def _check_name(name: str, given: str, directory: Path, known: Collection[str]) -> None:
    # ASCII, and letters or digits at both ends: it names a distribution as well.
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name):
        raise ScaffoldError(f"{given!r} is no name for a module: use letters, digits and underscores, as in fuse_gelu")
    if keyword.iskeyword(name):
        raise ScaffoldError(f"{name!r} is a keyword of Python; choose another name")
    if name in known:
        raise ScaffoldError(f"a pass named {name!r} is registered already (`fxopt passes show {name}`)")
    if name in TAKEN or name.startswith("test_"):
        raise ScaffoldError(f"{TAKEN.get(name, 'pytest')} would take {name}.py for its own; choose another name")
    spec = importlib.util.find_spec(name)
    # A folder without __init__.py on the path is importable in name only, and gives way to a module.
    folders = {Path(place).resolve() for place in (spec.submodule_search_locations or ())} if spec else set()
    if spec is not None and (spec.origin is not None or folders != {directory.resolve()}):
        raise ScaffoldError(f"a module named {name!r} is importable already ({spec.origin}); choose another name")


def _entry_point_lines(project: Path, name: str, entry: str) -> str:
    """What has to be added to a pyproject.toml that is there; "" where it is in it already."""
    group: Any = read_project(project)
    for part in ("project", "entry-points", ENTRY_POINT_GROUP):
        group = group.get(part) if isinstance(group, dict) else None
    table = f'[project.entry-points."{ENTRY_POINT_GROUP}"]'
    if not isinstance(group, dict):
        return f"to it:\n\n    {table}\n    {entry}"
    if name not in group:
        return f"to its {table}:\n\n    {entry}"
    stated = f'{name} = "{group[name]}"'
    if stated != entry:
        raise ScaffoldError(f"{project} has {stated} already; remove it or choose another name")
    return ""


def read_project(path: Path) -> dict[str, Any]:
    """A pyproject.toml as data. Raises ScaffoldError naming the place of what is no TOML."""
    try:
        return toml_file.read(path)
    except ValueError as error:
        raise ScaffoldError(str(error)) from error


def _next_steps(name: str, directory: Path, written: Sequence[Path], to_add: str) -> str:
    lines = [f"wrote {path}" for path in written]
    if to_add:
        lines += ["", f"{directory / 'pyproject.toml'} was there and is left alone. Add {to_add}"]
        lines += ["", f"and the module {name} to what it packages."]
    steps = {
        f"pip install -e {directory}": "the pass is then found wherever fxopt runs",
        f"pytest {directory}": f"the example passes; change {name}.py and its test together",
        f"fxopt passes show {name}": "what is known of it, and what it gained once it has run",
        "FXOPT_DUMP=dumps python SCRIPT": "numbered graphs before and after each pass",
    }
    width = max(map(len, steps))
    return "\n".join([*lines, "", "next:", *(f"  {step:<{width}}  {what}" for step, what in steps.items())])
