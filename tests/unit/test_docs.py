"""The documentation's blocks run, and its tables are the code's."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiler_core import counters
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "profiling.md"
PASSES = sorted((ROOT / "docs" / "passes").glob("[!R]*.md"))
PAGES = (PAGE, ROOT / "README.md", *PASSES)
TUTORIAL = ROOT / "docs" / "tutorial.md"  # tests/integration/test_tutorial.py follows it
LINKING = (*PAGES, TUTORIAL, ROOT / "docs" / "passes" / "README.md")
RUNS = "<!-- runs on a CPU -->"
PRINTED = re.compile(r"^<!-- printed -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str, bool]]:
    """(line before its first, text, whether it is marked to run) of every Python block."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^({RUNS}\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(2)), m[2], bool(m[1])) for m in found]


def table(heading: str, page: Path = PAGE) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = page.read_text(encoding="utf-8")
    assert f"{heading}\n" in text, f"{page.name} has no heading {heading!r}"
    lines = text.split(f"{heading}\n", 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def as_printed(block: str, output: str) -> bool:
    """Whether the lines of `block` follow one another in `output`; three dots stand for anything within a line."""
    pattern = re.escape(block.rstrip("\n")).replace(r"\.\.\.", "[^\n]*")
    return re.search(rf"^{pattern}$", output, re.MULTILINE) is not None


@pytest.mark.parametrize("page", (*PAGES, TUTORIAL), ids=lambda page: page.name)
def test_every_python_block_is_python(page: Path) -> None:
    found = blocks(page)
    assert found
    for above, text, _ in found:
        ast.parse("\n" * above + text, page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_marked_to_run_do_so_one_after_another(page: Path, tmp_path: Path) -> None:
    if page.stem == "onednn_linear":
        import torch

        if not torch.backends.mkl.is_available():
            pytest.skip("this torch has no MKL, whose packed layers the page shows")
    # One script with every block at its own line, so that an error names the line of the page.
    lines: list[str] = []
    for above, text, marked in blocks(page):
        if marked:
            lines += [""] * (above - len(lines)) + text.splitlines()
    assert lines, f"no block of {page.name} is marked {RUNS}"
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for block in PRINTED.findall(page.read_text(encoding="utf-8")):
        assert as_printed(block, run.stdout), f"{page.name} shows\n{block}\nand its blocks print\n{run.stdout}"


def test_the_table_of_counters_is_the_codes() -> None:
    rows = [
        [
            f"`{c.key}`",
            c.axis,
            c.aggregation,
            c.unit,
            str(c.passes),
            "yes" if c.key in counters.QUICK else "no",
            c.meaning,
        ]
        for c in counters.COUNTERS
    ]
    assert table("The twenty (`profiler_core.counters.COUNTERS`):") == rows


def test_the_table_of_passes_is_the_codes() -> None:
    quick, full = str(counters.QUICK_PASSES), str(counters.FULL_PASSES)
    rows = [[chip, f"{known // 10}.{known % 10}", quick, full] for chip, known in counters.CHIPS.items()]
    assert table("## Counters") == rows


@pytest.mark.parametrize(
    "heading, columns", [("### Columns of `kernels`", KERNEL_COLUMNS), ("### Columns of `nodes`", NODE_COLUMNS)]
)
def test_every_column_is_explained_in_its_order(heading: str, columns: dict[str, str]) -> None:
    assert [row[0].strip("`") for row in table(heading)] == list(columns)


def test_every_argument_of_profile_is_explained_with_its_default() -> None:
    from profiler_core.live import profile

    parameters = {p.name: p.default for p in inspect.signature(profile).parameters.values() if p.kind is p.KEYWORD_ONLY}
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("## Profiling a function") if "`, `" not in row[0]}
    assert list(rows) == list(parameters)
    told = {name: value for name, value in rows.items() if parameters[name] is not None or value == "None"}
    assert {name: ast.literal_eval(value) for name, value in told.items()} == {name: parameters[name] for name in told}


def test_the_function_is_called_as_often_as_the_page_says(tmp_path: Path) -> None:
    import torch

    import profiler_core

    calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x + 1

    profiler_core.profile(fn, torch.ones(4), iterations=2, warmup=0, store=tmp_path)
    assert calls == max(0, 1) + 1 + 2 + 1 + 2


def test_links_lead_somewhere() -> None:
    for page in LINKING:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("#"):
                assert target[1:] in anchors, f"{page.name}: {target}"
            elif "://" not in target:
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_importing_profiler_core_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, profiler_core; from profiler_core import measured, record;"
        "print([m for m in ('torch', 'pandas', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
