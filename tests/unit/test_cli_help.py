"""Help that teaches: every command says what it is for, shows an example that parses, and what to read next."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from pathlib import Path

import pytest

from fxopt.cli import build_app, run

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"


def commands() -> dict[tuple[str, ...], object]:
    import typer

    found: dict[tuple[str, ...], object] = {}

    def walk(command, path):
        if path:
            found[path] = command
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*path, name))

    walk(typer.main.get_command(build_app()), ())
    return found


COMMANDS = commands()


def parses(words: list[str]) -> None:
    """Raises where the command line is a wrong one; runs nothing."""
    path = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else tuple(words[:1])
    COMMANDS[path].make_context(path[-1], words[len(path) :])  # type: ignore[attr-defined]


def test_the_commands_are_those_that_there_should_be():
    wanted = "doctor profile load optimize report explain diff passes rules plans bench"
    assert set(wanted.split()) <= {path[0] for path in COMMANDS}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_what_for_with_an_example_that_parses_and_what_is_next(capsys, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*path, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    text = captured.out
    assert text.startswith(f"Usage: fxopt {' '.join(path)}") and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    examples = re.findall(r"Example: fxopt (.+?)(?= Example: | Next: | [A-Z][^ ]* [a-z])", flat)
    assert examples and "Next: " in flat
    for example in examples:
        parses(shlex.split(example))


def test_every_command_and_every_option_of_it_stands_on_its_page():
    text = PAGE.read_text(encoding="utf-8")
    for path, command in COMMANDS.items():
        assert f"`fxopt {' '.join(path)}" in text or f"fxopt {' '.join(path)} " in text, path
        if path[0] in ("profile", "optimize", "bench", "load", "report", "explain", "diff", "doctor"):
            section = text.split(f"## `fxopt {path[0]}`", 1)[1].split("\n## ", 1)[0]
            for parameter in command.params:  # type: ignore[attr-defined]
                name = parameter.opts[0]
                assert not name.startswith("-") or name == "--help" or f"`{name}" in section, (path, name)


def test_every_command_line_on_the_page_parses():
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("fxopt ")]
    assert len(ours) > 15
    for words in ours:
        parses(words)


@pytest.mark.parametrize("command", ["profile", "optimize", "bench"])
def test_an_option_of_the_program_before_the_dashes_is_told_where_it_belongs(capsys, command):
    assert run([command, "train.py", "--epochs", "3"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"fxopt {command} train.py -- --epochs 3" in said


@pytest.mark.parametrize("command", ["profile", "optimize", "bench"])
def test_a_program_that_is_not_there_is_an_error_with_the_nearest_name(capsys, tmp_path, monkeypatch, command):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run([command, "trian.py"]) == 1
    assert "trian.py: there is no such file; did you mean 'train.py'?" in capsys.readouterr().err
    assert run([command, "some.module"]) == 1
    assert "a module is run with -m some.module" in capsys.readouterr().err
    assert run([command]) == 2
    assert "no program was given" in " ".join(capsys.readouterr().err.split())


def test_ctrl_c_is_an_exit_code_and_no_traceback(capsys, monkeypatch):
    from fxopt import doctor

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert run(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch):
    from fxopt import doctor

    def closed():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(doctor, "examine", closed)
    for stream in ("stdout", "stderr"):  # typer replaces both
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    assert run(["doctor"]) == 0


def test_a_folder_that_is_not_there_is_told_before_anything_runs(capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    assert run(["profile", str(script), "--html", str(tmp_path / "nowhere" / "page.html")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "there is no folder" in captured.err
    assert run(["profile", str(script), "--json", "--markdown"]) == 1
    assert "give one of them" in capsys.readouterr().err
