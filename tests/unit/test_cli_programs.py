"""What is wrong with a command that runs a program, told before its model is measured, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxopt import registry
from fxopt.cli import run

MODULE = """
import torch

def make():
    return torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)

def good():
    print("it was called")
    model, x = make()
    return model, (x,)

def only_model(): return make()[0]
def nothing(): return None
def flat(): return (*make(), torch.randn(4, 8))
def swapped(): return make()[::-1]
def listed(): return list(make())
def two_models(): return make()[0], make()[0]
def a_type(): return Kind
class Kind(torch.nn.Linear): pass
instance = make()[0]
number = 3
"""
PASS = """
import dataclasses
from fxopt import registry
from fxopt.labels import Axis
from fxopt.verify import Precision

@registry.register
@dataclasses.dataclass(frozen=True)
class Own(registry.GraphPass):
    \"\"\"Does nothing.\"\"\"
    name = "own_pass_of_a_program"
    answers = frozenset({Axis.MEMORY_BOUND})
    stage = registry.Stage.JOINT
    precision = Precision.FP32
"""
SCRIPT = """
import threading, torch
print("it was run")
def work():
    model = torch.nn.Linear(8, 8).eval()
    try:
        with torch.no_grad():
            model(torch.randn(4, 8))
    except Exception:
        pass
    print("the model ran")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_module.py").write_text(MODULE)
    (tmp_path / "own_pass.py").write_text(PASS)
    (tmp_path / "registering.py").write_text(f"{PASS}\n{MODULE}")
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nwork()\n")
    (tmp_path / "threaded.py").write_text(f"{SCRIPT}\nt = threading.Thread(target=work)\nt.start()\nt.join()\n")
    (tmp_path / "registers.py").write_text(f"import own_pass\n{SCRIPT}\nwork()\n")
    for name in ("own_module", "own_pass", "registering"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


# ---- passes that the options name ----


@pytest.mark.parametrize("command", ["optimize", "bench"])
@pytest.mark.parametrize(
    ("option", "near"), [("passes=freeze_weight", "'freeze_weights'"), ("disable=cuda_graph", "'cuda_graphs'")]
)
def test_a_misspelt_pass_is_told_before_a_function_is_called(programs, capsys, command, option, near) -> None:
    assert run([command, "own_module:good", "-o", option]) == 2
    captured = capsys.readouterr()
    name, _, wrong = option.partition("=")
    assert f"fxopt: error: option '{name}': no pass is named '{wrong}'; did you mean {near}" in captured.err
    assert "it was called" not in captured.out


def test_a_variable_that_names_no_pass_is_told_as_such(programs, capsys, monkeypatch) -> None:
    monkeypatch.setenv("FXOPT_DISABLE", "cuda_graphs,zzz")
    assert run(["optimize", "own_module:good"]) == 2
    said = "environment variable FXOPT_DISABLE: no pass is named 'zzz'; there are attention_backend, "
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threading itself says nothing
@pytest.mark.parametrize("command", ["optimize", "bench"])
@pytest.mark.parametrize("script", ["script.py", "threaded.py"])
def test_a_script_with_a_misspelt_pass_ends_at_its_model(programs, capsys, command: str, script: str) -> None:
    assert run([command, script, "-o", "passes=freeze_weight"]) == 2
    captured = capsys.readouterr()
    assert "it was run" in captured.out and "the model ran" not in captured.out
    first, *_, last = [line for line in captured.err.splitlines() if line.startswith("fxopt: ")]
    assert first.startswith("fxopt: warning: option 'passes': no pass is named 'freeze_weight'")
    assert last.startswith("fxopt: error: option 'passes': no pass is named 'freeze_weight'; did you mean")


@pytest.mark.parametrize("program", ["registering:good", "registers.py"])
def test_a_pass_that_the_program_registers_can_be_named(programs, capsys, program: str) -> None:
    try:
        assert run(["optimize", program, "-q", "-o", "disable=own_pass_of_a_program", "-o", "mode=apply"]) == 0
    finally:
        registry.unregister("own_pass_of_a_program")
    assert "fxopt: error" not in capsys.readouterr().err


# ---- functions that return something else ----


@pytest.mark.parametrize("command", ["profile", "optimize", "bench"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("only_model", "returned a Linear, not (model, inputs): return model, (x,)"),
        ("nothing", "returned None, not (model, inputs), and "),
        ("flat", "returned a tuple (Linear, Tensor, Tensor), not (model, inputs): all inputs belong into one tuple"),
        ("swapped", "returned a tuple (Tensor, Linear), not (model, inputs): return model, (x,)"),
        ("listed", "returned a list (Linear, Tensor), not (model, inputs): return model, (x,)"),
        ("two_models", "returned a tuple (Linear, Linear), not (model, inputs)"),
        ("a_type", "returned the class Kind, not (model, inputs): return model, (x,)"),
        ("Kind", "is a class, not a function: name one that returns (model, inputs)"),
        ("instance", "is a Linear, not a function: name one that returns (model, inputs)"),
        ("number", "is a int, not a function: name one that returns (model, inputs)"),
    ],
)
def test_what_a_function_returns_is_told_where_it_cannot_be_meant(programs, capsys, command, name, said) -> None:
    assert run([command, f"own_module:{name}", "--quiet"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()[-1:]
    assert line.startswith(f"fxopt: error: own_module:{name} {said}") and captured.out == ""
    assert "TORCH_LOGS" not in captured.err


# ---- what is said at the end ----


def test_no_line_for_the_program_where_nothing_was_kept(programs, capsys) -> None:
    assert run(["optimize", "own_module:good", "-o", "mode=apply"]) == 0
    captured = capsys.readouterr()
    assert "to have it in the program" not in captured.err and "nothing to put into the program" in captured.err


def test_the_line_for_the_program_where_something_was_kept(programs, capsys, monkeypatch) -> None:
    import fxopt
    from fxopt.report.model import GraphReport, Report

    class Fast:
        report = Report(graphs=[GraphReport(key="a", decision="candidate", source="tuned")])
        _untimed = False

    monkeypatch.setattr(fxopt, "optimize", lambda *_args, **_options: Fast)
    assert run(["optimize", "own_module:good", "-o", "pairs=7"]) == 0
    assert "to have it in the program:  model = fxopt.optimize(model, inputs, pairs=7)" in capsys.readouterr().err


def test_the_line_of_a_script_says_how_its_model_is_compiled() -> None:
    from fxopt.cli_run import _line
    from fxopt.rerouted import Rerouted

    state = Rerouted({}, lambda model: model)
    line = 'model = torch.compile(model, backend="profile_guided", options={"precision": "bf16"})'
    assert _line(state, {"precision": "bf16"}) == line
    state.compiled = 1
    assert _line(state, {}) == 'torch.compile(..., backend="profile_guided")'


def test_a_sentence_ends_with_one_full_stop() -> None:
    import torch

    model = torch.compile(torch.nn.Linear(2, 2), backend="profile_guided", options={"nosuch": 1})
    with pytest.warns(UserWarning, match=r"accepted too\. The model runs on plain Inductor\."):
        model(torch.ones(1, 2))


# ---- sets of counters, and files that cannot be written ----


@pytest.mark.parametrize(("counters", "near"), [("lots", ""), ("3", ""), ("Quick", "; did you mean 'quick'?")])
def test_what_is_no_set_of_counters_is_refused_before_the_program_runs(programs, capsys, counters, near) -> None:
    assert run(["profile", "script.py", "--counters", counters]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"fxopt: error: --counters {counters}: no set of counters; there are none, quick, full{near}\n"
    )


def unwritable(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """As root sees /proc: no permission is missing, and no file can be made."""
    import os

    original, make = os.open, Path.mkdir

    def refusing(path: object, *arguments: object, **options: object) -> int:
        if any(str(path).startswith(str(place)) for place in places):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return original(path, *arguments, **options)  # type: ignore[arg-type]

    def no_folder(path: Path, *arguments: object, **options: object) -> None:
        if any(str(path).startswith(str(place)) for place in places):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        make(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(Path, "mkdir", no_folder)


@pytest.mark.parametrize("command", ["profile", "optimize", "bench"])
@pytest.mark.parametrize("option", ["--save", "--html"])
def test_a_file_that_cannot_be_written_is_told_before_the_program_runs(
    programs, capsys, monkeypatch, command: str, option: str
) -> None:
    file = programs / "proc" / "x.json"
    file.parent.mkdir()
    unwritable(monkeypatch, file.parent)
    assert run([command, "script.py", option, str(file)]) == 1
    captured = capsys.readouterr()
    said = f"{option} {file} cannot be written: No such file or directory; give another place"
    assert captured.err == f"fxopt: error: {said}\n" and captured.out == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [("report=proc/x.json", "'report': proc/x.json cannot"), ("dump=proc/dumps", "'dump': proc/dumps: no file can")],
)
def test_so_are_the_files_of_options(programs, capsys, monkeypatch, option: str, said: str) -> None:
    (programs / "proc").mkdir()
    unwritable(monkeypatch, Path("proc"), programs / "proc")
    assert run(["optimize", "script.py", "-o", option]) == 1
    captured = capsys.readouterr()
    assert f"fxopt: error: option {said} be" in captured.err and captured.out == ""


def test_one_file_for_two_forms_is_refused(programs, capsys) -> None:
    assert run(["profile", "script.py", "--save", "x", "--html", "./x"]) == 1
    assert "--html and --save both write x: give each a file of its own" in capsys.readouterr().err


def test_looking_whether_files_can_be_written_leaves_nothing_behind(tmp_path) -> None:
    from profiler_core.files import why_no_folder, why_not_written

    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for name in ("new", "old", "link"):
        assert why_not_written(tmp_path / name) == ""
    for place in (tmp_path, tmp_path / "a", tmp_path / "a" / "b" / "c"):
        assert why_no_folder(place) == ""
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "old").read_text() == "old"
    assert "directory" in why_no_folder(tmp_path / "old" / "b" / "c") and why_no_folder(tmp_path / "old")
    assert "name too long" in why_not_written(tmp_path / ("x" * 300)).lower()


def test_what_fails_later_is_one_line_after_the_result(programs, capsys, monkeypatch) -> None:
    from fxopt.report import html, sources
    from fxopt.report.model import GraphReport, Report

    sources.write(Report(graphs=[GraphReport(key="a")]), "saved.json")

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device", ".page.html.12.tmp")

    monkeypatch.setattr(html, "write", full)
    assert run(["report", "saved.json", "--html", "page.html", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "fxopt: error: page.html cannot be written: No space left on device; give another place\n"
    )
    assert '"graphs"' in captured.out


def test_a_stream_is_written_into_and_not_replaced(tmp_path) -> None:
    import os
    import threading

    from profiler_core.files import why_not_written, write_atomically

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert why_not_written(pipe) == ""
    write_atomically(pipe, "text")
    reader.join(10)
    assert read == ["text"] and pipe.is_fifo()
