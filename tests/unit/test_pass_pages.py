"""docs/passes: a page for every built-in pass, whose tables, reasons and numbers are the code's and the results'."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT, table

from fxopt.cli_passes import options
from fxopt.registry import Pass, discover

FOLDER = ROOT / "docs" / "passes"
PASSES = {name: cls for name, cls in sorted(discover().items()) if cls.__module__.startswith("passes.")}
#: case of a result -> how the tables call it
CASES = {"gpt2": "GPT-2"}


def page(name: str) -> Path:
    return FOLDER / f"{name}.md"


def listed(values: tuple[str, ...] | list[str]) -> str:
    return ", ".join(values)


def test_every_pass_has_a_page_and_every_page_a_pass() -> None:
    assert [path.stem for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"] == list(PASSES)


def test_the_index_is_the_registry() -> None:
    rows = [
        [
            f"[`{name}`]({name}.md)",
            cls.stage.value,
            listed(sorted(axis.value for axis in cls.answers)),
            cls.precision.value,
            listed(cls.devices),
            (cls.__doc__ or "").partition("\n")[0],
        ]
        for name, cls in PASSES.items()
    ]
    assert table("# Passes", FOLDER / "README.md") == rows


@pytest.mark.parametrize("name", PASSES)
def test_the_table_of_a_pass_is_its_class(name: str) -> None:
    cls = PASSES[name]
    row = [
        cls.stage.value,
        listed(sorted(axis.value for axis in cls.answers)),
        cls.precision.value,
        listed(cls.devices),
        *(listed(getattr(cls, field)) for field in ("after", "before", "needs", "enables", "conflicts")),
    ]
    assert table(f"# {name}", page(name)) == [row]


@pytest.mark.parametrize("name", PASSES)
def test_the_options_are_the_fields(name: str) -> None:
    rows = [[f"`{o['name']}`", f"`{o['default']}`", o["meaning"]] for o in options(PASSES[name])]
    below = page(name).read_text(encoding="utf-8").split("## Options\n", 1)[1]
    assert (table("## Options", page(name)) == rows) if rows else below.startswith("\nNone.")


def reasons(cls: type[Pass]) -> set[str]:
    """Every reason for which the source refuses, f-strings as they are written.

    Those are what `applicable` and `refuse` return, and the second argument of a Candidate.
    """
    source = inspect.getsource(sys.modules[cls.__module__])
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in ("applicable", "refuse"):
            found += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Candidate" and len(node.args) > 1:
            found.append(node.args[1])
    texts = set()
    for value in found:
        text = ast.get_source_segment(source, value) or ""
        assert re.fullmatch(r"""f?"[^"]*"|f?'[^']*'""", text), f"{cls.name}: not one string: {text}"
        texts.add(text.removeprefix("f")[1:-1])
    return texts - {""}


@pytest.mark.parametrize("name", PASSES)
def test_every_reason_for_refusing_is_on_the_page_and_no_other(name: str) -> None:
    section = page(name).read_text(encoding="utf-8").split("## When it refuses\n", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"^- `([^`]+)`", section, re.MULTILINE)) == reasons(PASSES[name])


def milliseconds(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"


def device(environment: dict[str, Any]) -> str:
    threads = f", {environment['threads']} threads" if environment["device_type"] == "cpu" else ""
    return environment["device_name"] + threads


def newest(trial: dict[str, Any]) -> str:
    """The pass that the trial added, which older results list last; "" where it added several, or took one away."""
    if "step" not in trial:
        return trial["passes"][-1]
    return trial["subject"] if trial["step"] == "add" else ""


def trials(name: str) -> list[list[str]]:
    """A row for each trial in results/ whose newest pass is `name`, and that was timed."""
    rows = []
    for path in sorted((ROOT / "results").glob("*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if "fxopt" not in data or "workload" not in data:
            continue
        for graph in data["fxopt"]["graphs"]:
            for trial in graph["candidates"]:
                paired, verdict = trial["paired"], trial["verdict"]
                if newest(trial) != name or paired is None:
                    continue
                rows.append(
                    [
                        f"{CASES[data['case']]}, {device(data['environment'])}",
                        data["workload"]["precision"],
                        ", ".join(trial["passes"]),
                        f"{paired['ratio']:.2f}x ({paired['low']:.2f} to {paired['high']:.2f})",
                        f"{milliseconds(graph['baseline_kernel_ns'])} -> {milliseconds(trial['kernel_ns'])}",
                        f"{verdict['baseline_rel_l2']:.1e} -> {verdict['rel_l2']:.1e}",
                        trial["outcome"] if trial["outcome"] == "kept" else trial["reason"].partition(";")[0],
                        f"`{path.relative_to(ROOT)}`",
                    ]
                )
    return rows


@pytest.mark.parametrize("name", PASSES)
def test_what_it_gained_is_what_the_results_say(name: str) -> None:
    assert table("## What it gained where", page(name)) == trials(name)
