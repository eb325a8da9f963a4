"""How commands end that are interrupted, in one line that says what was kept, or whose program fails by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fxopt.cli import run


def interrupt(*_arguments: object, **_options: object) -> None:
    raise KeyboardInterrupt


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("fxopt: interrupted") == 1 and captured.out == ""
    return captured.err.rstrip().splitlines()[-1]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that Ctrl-C ends before it has done anything, and a function of a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "interrupted_module.py").write_text("def work():\n    raise KeyboardInterrupt\n")
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt\n")
    return tmp_path


@pytest.mark.parametrize("what", ["script.py", "interrupted_module:work"])
@pytest.mark.parametrize(
    ("command", "kept"),
    [("profile", "nothing was profiled"), ("optimize", "no graph was decided"), ("bench", "no graph was decided")],
)
def test_a_program_that_is_interrupted(program, capsys, command: str, kept: str, what: str) -> None:
    assert run([command, "--quiet", what]) == 130
    assert last_line(capsys) == f"fxopt: interrupted; {kept}, and nothing is left behind"
    assert {path.name for path in program.iterdir()} - {"__pycache__"} == {"script.py", "interrupted_module.py"}


def test_plans_that_were_made_before_are_told(program, capsys) -> None:
    decided = "from fxopt.report.model import GraphReport, remember\n" + "".join(
        f"remember(GraphReport(key='{name}', source={source!r}, plan_path='{name}.json'))\n"
        for name, source in (("a", "tuned"), ("b", "tuned"), ("c", "plan"))
    )
    (program / "script.py").write_text(f"{decided}raise KeyboardInterrupt\n")
    assert run(["optimize", "script.py", "--save", "report.json", "--quiet"]) == 130
    assert last_line(capsys) == "fxopt: interrupted; 2 graphs were decided before, and the plans kept"
    assert (program / "report.json").exists()


def test_commands_that_measure(capsys, monkeypatch, tmp_path) -> None:
    from fxopt import doctor
    from profiler_core import roofline

    monkeypatch.setenv("FXOPT_PLAN_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "examine", interrupt)
    monkeypatch.setattr(roofline, "ceilings", interrupt)
    for words in (["doctor"], ["ceilings", "--measure"]):
        assert run(words) == 130
        assert last_line(capsys).startswith("fxopt: interrupted; files are written whole or not at all")


def test_a_search_that_is_interrupted_ends_with_its_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", interrupt)
    assert run(["bisect", "--", "true"]) == 130
    assert "fxopt: interrupted; " in capsys.readouterr().err


# ---- the program's own errors ----


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_module.py").write_text("def work():\n    return [1][2]\n")
    (tmp_path / "failing.py").write_text("import failing_module\n\nfailing_module.work()\n")


@pytest.mark.parametrize("command", ["profile", "optimize", "bench"])
def test_an_error_of_the_function_is_told_as_its_own(failing, capsys, command: str) -> None:
    assert run([command, "failing_module:work", "--quiet"]) == 1
    captured = capsys.readouterr()
    lines = captured.err.rstrip().splitlines()
    assert "IndexError: list index out of range" in lines and "return [1][2]" in captured.err
    assert lines[-1] == "fxopt: error: the call of failing_module:work failed, as told above"
    assert "fxopt/cli_run.py" not in captured.err and captured.out == ""


def test_a_script_that_fails_before_a_graph_is_not_told_that_it_has_none(failing, capsys) -> None:
    assert run(["optimize", "failing.py", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "the program's own error, above, came before a graph was compiled" in said
    assert "graph_breaks" not in said


def test_an_error_of_fxopts_own_is_not_told_as_the_programs(failing, tmp_path, monkeypatch) -> None:
    from fxopt import measure

    (tmp_path / "working_module.py").write_text("import torch\n\n\ndef work():\n    return torch.ones(2)\n")
    monkeypatch.delattr(measure, "noise_floor")
    with pytest.raises(AttributeError, match="noise_floor"):
        run(["bench", "working_module:work", "--quiet"])
