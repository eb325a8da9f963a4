"""What is imported by name exists, also within functions and in the files that run on a GPU alone."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: where a module is looked for, in the order of pyproject.toml's `pythonpath`
FOLDERS = [ROOT, *(ROOT / name for name in ("tests", "tests/unit", "tests/benchmarks", "tests/browser", "tools"))]
PACKAGES = ("fxopt", "profiler_core", "passes", "case_studies")
FILES = sorted(path for folder in (*PACKAGES, "tests", "tools") for path in (ROOT / folder).rglob("*.py"))


def source_of(module: str) -> Path | None:
    for folder in FOLDERS:
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def names_of(file: Path) -> frozenset[str] | None:
    """The names that a module's own level binds and its submodules; None where `import *` or `__getattr__` add more."""
    found: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(file.read_text()).body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case _:
                todo.extend(ast.iter_child_nodes(node))
    if found & {"*", "__getattr__"}:
        return None
    if file.name == "__init__.py":
        found.update(path.stem for path in file.parent.iterdir() if source_of_part(path))
    return frozenset(found)


def source_of_part(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def absent(text: str) -> list[tuple[int, str]]:
    """(line, module.name) of what is imported from a module of this project that does not have it."""
    missing = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        file = source_of(node.module)
        if file is None:
            if node.module.partition(".")[0] in PACKAGES and not (ROOT / node.module.replace(".", "/")).is_dir():
                missing.append((node.lineno, node.module))
            continue
        names = names_of(file)
        if names is not None:
            missing += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names if alias.name not in names]
    return missing


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from passes.split_products import block_of", []),
        ("from passes.kernels import launch", []),
        ("from passes import kernels", []),
        ("def f():\n    from passes.split_products import no_such_name", [(2, "passes.split_products.no_such_name")]),
        ("from passes import no_such_pass", [(1, "passes.no_such_pass")]),
        ("from fxopt.no_such_module import anything", [(1, "fxopt.no_such_module")]),
        ("from made_profiles import no_such_name", [(1, "made_profiles.no_such_name")]),
        ("from os import path", []),
    ],
)
def test_what_is_absent_is_found(line, expected):
    assert absent(line) == expected


def test_every_imported_name_exists():
    assert len(FILES) > 200
    found = {str(file.relative_to(ROOT)): missing for file in FILES if (missing := absent(file.read_text()))}
    assert found == {}
