"""The documentation's blocks run, and its tables are the code's."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from profiler_core import counters
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "profiling.md"
EVERY = (ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
#: tests/integration/test_tutorial.py and test_quick_start.py follow them, file by file and command by command
FOLLOWED = (ROOT / "docs" / "tutorial.md", ROOT / "docs" / "quick_start.md")
RUNS = "<!-- runs on a CPU -->"
PAGES = tuple(page for page in EVERY if page not in FOLLOWED and RUNS in page.read_text(encoding="utf-8"))
PRINTED = re.compile(r"^<!-- printed -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: How a page's blocks are tuned: what they print is what counts, on a machine that may be busy.
QUICK = {
    "FXOPT_TIME_LIMIT": "1",
    "FXOPT_PAIRS": "6",
    "FXOPT_ITERATIONS": "2",
    "FXOPT_VERIFY_INPUTS": "0",
    "FXOPT_THRESHOLDS": "thresholds.toml",
    "OMP_NUM_THREADS": "1",
}
THRESHOLDS = "[compute_bound_modelled]\nflop_fraction = 0.0\n[memory_bound_modelled]\nbandwidth_fraction = 0.0\n"


def blocks(page: Path) -> list[tuple[int, str, bool]]:
    """(line before its first, text, whether it is marked to run) of every Python block."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^({RUNS}\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(2)), m[2], bool(m[1])) for m in found]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[str]:
    """The lines of every shell block, continued ones joined, without comments."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


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


def test_every_python_block_runs_or_says_why_not() -> None:
    for page in EVERY:
        text = page.read_text(encoding="utf-8")
        marked = re.findall(r"^<!-- (?:runs on a CPU|file: \S+|not run: .+) -->\n```python$", text, re.MULTILINE)
        assert len(marked) == text.count("```python\n"), f"{name_of(page)} has a block without a mark"
        for above, block, _ in blocks(page):
            ast.parse("\n" * above + block, page.name)


#: Runs the script of each folder named on stdin, in it, and leaves what it printed and its traceback there. One process
#: for all pages, for each would import torch.
RUNNER = """
import contextlib, pathlib, os, runpy, sys, traceback
import torch
for folder in map(pathlib.Path, sys.stdin.read().splitlines()):
    os.chdir(folder)
    with open("printed", "w") as printed, contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(next(map(str, folder.glob("*.py"))), run_name="__main__")
        except BaseException:
            pathlib.Path("error").write_text(traceback.format_exc())
    torch._dynamo.reset()
    pathlib.Path("ended").touch()
"""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """By page, the folder in which its blocks have run: of all pages whose test was asked for."""
    folders: dict[Path, Path] = {}
    for item in request.session.items:
        page = getattr(item, "callspec", None) and item.callspec.params.get("page")
        if page is None or item.originalname != "test_the_blocks_marked_to_run_do_so_one_after_another":
            continue
        # One script with every block at its own line, so that an error names the line of the page.
        lines: list[str] = []
        for above, text, marked in blocks(page):
            if marked:
                lines += [""] * (above - len(lines)) + text.splitlines()
        folders[page] = tmp_path_factory.mktemp(page.stem)
        (folders[page] / f"{page.stem}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folders[page] / "thresholds.toml").write_text(THRESHOLDS)
    shared = tmp_path_factory.mktemp("pages")
    environment = {
        **os.environ,
        **QUICK,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(shared),
        "FXOPT_PLAN_DIR": str(shared / "plans"),
    }
    asked = "\n".join(map(str, folders.values()))
    run = subprocess.run(
        [sys.executable, "-c", RUNNER], input=asked, cwd=shared, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert run.returncode == 0, run.stderr
    return folders


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_marked_to_run_do_so_one_after_another(page: Path, ran: dict[Path, Path]) -> None:
    if page.stem == "onednn_linear":
        import torch

        if not torch.backends.mkl.is_available():
            pytest.skip("this torch has no MKL, whose packed layers the page shows")
    assert not (error := ran[page] / "error").exists(), error.read_text()
    assert (ran[page] / "ended").exists()
    printed = (ran[page] / "printed").read_text()
    for block in PRINTED.findall(page.read_text(encoding="utf-8")):
        assert as_printed(block, printed), f"{page.name} shows\n{block}\nand its blocks print\n{printed}"


def command_line(line: str) -> list[str]:
    """The arguments of a line that calls `fxopt`; none of any other line."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words[:1] == ["fxopt"] else []


def parses(arguments: list[str]) -> None:
    """Has the command itself take the line apart, without running it. Raises click's UsageError."""
    import typer

    from fxopt.cli import build_app

    context = typer.main.get_command(build_app()).make_context("fxopt", list(arguments))
    while isinstance(context.command, typer.core.TyperGroup):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert name and command
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", [page for page in EVERY if commands(page)], ids=name_of)
def test_every_command_in_a_page_is_one(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in commands(page):
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[0] == "fxopt":
            parses(command_line(line))
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:.*## ", makefile, re.MULTILINE), line
        elif words[0] == "python" and words[1] == "-m":
            assert words[2] in ("pip", "pytest", "venv") or importlib.util.find_spec(words[2]), line
        elif words[0] == "python" and "/" in words[1]:
            assert (ROOT / words[1]).is_file() or page in FOLLOWED, line
        else:
            assert page in FOLLOWED or words[0] in ("python", "pip", "torchrun"), line


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_every_command_in_a_sentence_is_one(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^- `fxopt [^`]*`", "", text, flags=re.MULTILINE)  # messages
    for command in re.findall(r"`(fxopt [^`]+)`", text):
        try:
            parses(shlex.split(command)[1:])
        except Exception as error:
            # A sentence need not give every argument. The classes are click's or typer's own, by version.
            few = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError", "Exit")
            assert few or "requires an argument" in str(error), f"{command}: {error}"


def test_the_table_of_options_is_the_codes() -> None:
    from fxopt.options import describe_options

    rows = [
        [
            f"`{row.name}`",
            f"`{row.default}`" if row.default else "",
            f"`{row.environment}`" if row.environment else "",
            row.allowed,
            row.description,
        ]
        for row in describe_options()
    ]
    assert table("## All of them", ROOT / "docs" / "options.md") == rows


def test_the_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    texts = []
    for folder in ("fxopt", "profiler_core", "passes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                    texts.append("".join(map(str, parts)))
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        message
        for start in re.findall(r"^(?:- |\| )((?:`[^`]+`(?:, | \.\.\. )?)+)", text, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", start)
    ]
    assert len(quoted) > 40
    for message in quoted:
        pattern = re.sub(r"\{[^}]*\}", "{}", message).strip()
        assert any(pattern in known for known in texts), f"no message of the code says {message!r}"


def test_the_readme_says_of_every_pass_what_it_answers() -> None:
    from fxopt.registry import discover

    rows = table("### What answers what", ROOT / "README.md")
    named = {name for _, passes in rows for name in re.findall(r"`(\w+)`", passes)}
    assert named == {name for name, cls in discover().items() if cls.__module__.startswith("passes.")}


def test_the_passes_for_graphs_with_gradients_are_those_that_say_so() -> None:
    from fxopt.registry import discover

    text = " ".join((ROOT / "docs" / "passes" / "README.md").read_text(encoding="utf-8").split())
    listed = re.search(r"\*\*gradients\*\*: .*?: ((?:`\w+`(?:, | and )?)+)", text)
    assert listed is not None
    known = {name for name, cls in discover().items() if cls.__module__.startswith("passes.") and cls.gradients}
    assert set(re.findall(r"`(\w+)`", listed[1])) == known


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


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            other = page.parent / path if path else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), target


def test_every_page_is_in_the_reading_order() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    linked = {(ROOT / "docs" / target).resolve() for target in targets if "://" not in target}
    pages = {page for page in EVERY if page.parent == ROOT / "docs" and page.name != "README.md"}
    assert pages <= linked


def test_importing_profiler_core_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, profiler_core; from profiler_core import measured, record;"
        "print([m for m in ('torch', 'pandas', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
