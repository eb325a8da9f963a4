"""`fxopt load`, `report`, `explain` and `diff`: every form of output, and errors that name file, place and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_profiles import two_calls

from fxopt.cli import run
from profiler_core.profiles import Profile


@pytest.fixture
def saved(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    two_calls().save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace as torch.profiler writes it, with one operator."""
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 5}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    return path


def test_a_trace_is_loaded_saved_and_shown_again(trace, tmp_path, capsys):
    saved = tmp_path / "saved.json"
    assert run(["load", str(trace), "--json", "--save", str(saved)]) == 0
    captured = capsys.readouterr()
    assert [row for row in Profile.from_json(json.loads(captured.out)).nodes["node"]] == ["aten::mm"]
    assert f"saved {saved}" in captured.err
    assert run(["report", str(saved), "--json"]) == 0
    assert Profile.from_json(json.loads(capsys.readouterr().out)).total_ns == 5000


def test_the_terminal_form_has_no_control_codes_in_a_pipe_and_fits_80_columns(saved, capsys):
    assert run(["report", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert run(["diff", str(saved), str(saved)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


def test_markdown_goes_to_stdout(saved, capsys):
    assert run(["report", str(saved), "--markdown"]) == 0
    assert "| --- |" in capsys.readouterr().out.replace("---:", "---")


def test_a_page_is_written_whole_and_nothing_is_printed_when_quiet(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run(["report", str(saved), "--html", str(page), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "profile.json"]


def test_a_node_is_explained_from_the_newest_file_of_the_folder(saved, capsys):
    node = str(two_calls().nodes["node"].iloc[0])
    assert run(["explain", node, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"] == node
    assert run(["explain", node]) == 0
    text = capsys.readouterr().out
    assert node in text and "\x1b" not in text


def test_a_name_that_is_not_there_is_answered_with_the_nearest(saved, capsys):
    node = str(two_calls().nodes["node"].iloc[0])
    assert run(["explain", node + "x", str(saved)]) == 1
    assert node in capsys.readouterr().err


def test_explain_without_a_file_says_how_to_write_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["explain", "mm"]) == 1
    assert "--save profile.json" in capsys.readouterr().err


def test_two_files_are_compared(saved, trace, capsys):
    assert run(["diff", str(saved), str(trace), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize(
    "text, said",
    [(None, "no such file"), ("", "empty"), ("{", "line 1"), ('{"graphs": 3}', "profile"), ("hello", "not JSON")],
)
@pytest.mark.parametrize("command", ["report", "load"])
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path, capsys, command, text, said):
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_text(text)
    assert run([command, str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and str(file) in captured.err and "Traceback" not in captured.err
    if command == "report":
        assert said in captured.err
