from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxopt.cli import main, run
from fxopt.options import describe_options
from fxopt.plan import PassUse, Plan, PlanStore, plan_key

KEY = plan_key(graph="one")


@pytest.fixture
def store(plan_dir: Path) -> PlanStore:
    store = PlanStore(plan_dir)
    use = PassUse(name="freeze_weights", stage="config")
    store.save(Plan(key=KEY, decision="candidate", freeze=True, passes=[use], profile={"kernels": 12}))
    return store


def rows(text: str) -> list[dict[str, str]]:
    header, *lines = (line.split("\t") for line in text.splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_version_tells_all_three_versions(capsys):
    assert run(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    import torch

    assert set(versions) == {"fxopt", "torch", "python"}
    # The package's metadata may leave out the build ("+cu130") that torch itself states.
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_options_shows_every_option(capsys):
    assert run(["options"]) == 0
    shown = rows(capsys.readouterr().out)
    assert [row["name"] for row in shown] == [row.name for row in describe_options()]
    pairs = next(row for row in shown if row["name"] == "pairs")
    assert (pairs["default"], pairs["environment"]) == ("30", "FXOPT_PAIRS")


def test_passes_list_shows_the_registered_passes(capsys, monkeypatch):
    from dataclasses import dataclass

    from fxopt import registry
    from fxopt.labels import Axis
    from fxopt.verify import Precision

    @dataclass(frozen=True)
    class Doubler(registry.GraphPass):
        """Doubles what is small.

        And more words, which a listing leaves out.
        """

        name = "doubler"
        answers = frozenset({Axis.MEMORY_BOUND})
        stage = registry.Stage.JOINT
        precision = Precision.FP32

    monkeypatch.setattr(registry, "discover", lambda: {"doubler": Doubler})
    assert run(["passes", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "doubler",
            "stage": "joint",
            "answers": ["memory_bound"],
            "precision": "fp32",
            "does": "Doubles what is small.",
        }
    ]


def test_a_pass_that_cannot_be_loaded_is_a_warning_beside_the_others(capsys, monkeypatch):
    import warnings

    from fxopt import registry

    monkeypatch.setattr(registry, "discover", lambda: warnings.warn("broken one", stacklevel=1) or {})
    assert run(["passes", "list"]) == 0
    assert "fxopt: warning: broken one" in capsys.readouterr().err


def test_plans_list_finds_the_plan_directory_of_the_environment(capsys, store):
    assert run(["plans", "list"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["key"], row["decision"], row["frozen"], row["passes"]) == (
        KEY[:12],
        "candidate",
        "yes",
        "freeze_weights",
    )


def test_a_plan_directory_on_the_command_line_wins(capsys, store, tmp_path):
    assert run(["plans", "list", "--plan-dir", str(tmp_path / "other")]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no plans in {tmp_path / 'other' / 'plans'}" in captured.err


def test_plans_list_shows_a_broken_file_and_goes_on(capsys, store):
    other = plan_key(graph="two")
    store.path(other).write_text("{")
    assert run(["plans", "list"]) == 0
    problems = {row["key"]: row["problem"] for row in rows(capsys.readouterr().out)}
    assert problems[KEY[:12]] == ""
    assert "line 1, column 2" in problems[other[:12]]


@pytest.mark.parametrize("key", [KEY, KEY[:6]])
def test_plans_show_takes_a_key_or_its_beginning(capsys, store, key):
    assert run(["plans", "show", key, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert Plan(**shown) == store.load(KEY)


def test_plans_show_is_readable_without_json(capsys, store):
    assert run(["plans", "show", KEY]) == 0
    out = capsys.readouterr().out
    assert "decision        candidate\n" in out
    assert '"kernels": 12' in out


def test_plans_remove_deletes_the_plan(capsys, store):
    assert run(["plans", "remove", KEY[:8]]) == 0
    assert str(store.path(KEY)) in capsys.readouterr().out
    assert store.load(KEY) is None


@pytest.mark.parametrize("command", ["show", "remove"])
@pytest.mark.parametrize("key", ["zzz", "", "../../etc/passwd"])
def test_a_key_that_no_plan_has_is_an_error_on_stderr(capsys, store, command, key):
    assert run(["plans", command, key]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"fxopt: error: no plan in {store.plans_dir} begins with {key!r}" in captured.err
    assert store.load(KEY) is not None


def test_a_beginning_that_several_plans_have_removes_none(capsys, store):
    others = [plan_key(n=n) for n in range(17)]  # seventeen keys over sixteen digits: two begin alike
    for key in others:
        store.save(Plan(key=key, decision="baseline"))
    digits = [key[0] for key in others]
    twice = next(digit for digit in digits if digits.count(digit) > 1)
    assert run(["plans", "remove", twice]) == 1
    assert "give more of the key" in capsys.readouterr().err
    assert all(store.load(key) is not None for key in others)


def test_a_broken_plan_is_an_error_without_a_traceback(capsys, store):
    store.path(KEY).write_text("{")
    assert run(["plans", "show", KEY]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fxopt: error: plan file ") and "set aside" in error
    assert "Traceback" not in error


def test_a_bad_environment_variable_is_an_error_that_names_it(capsys, monkeypatch):
    monkeypatch.setenv("FXOPT_PAIRS", "lots")
    assert run(["plans", "list"]) == 1
    assert "environment variable FXOPT_PAIRS" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["plans", "shew"], ["nothing"], ["version", "--jsn"], ["plans", "show"], []]
)
def test_a_wrong_command_line_exits_with_2(capsys, arguments):
    assert run(arguments) == 2


def test_help_exits_with_0_and_names_the_commands(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("version", "options", "passes", "plans"))


def test_main_exits_with_the_code_of_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2


def test_output_to_a_pipe_has_no_colours_and_no_boxes(plan_dir):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "80"}
    for arguments, code in ((["--help"], 0), (["options"], 0), (["plans", "shew"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "fxopt.cli", *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == code
        text = done.stdout + done.stderr
        assert text and not {"\x1b", "─", "│"} & set(text)


def test_importing_the_command_line_imports_nothing_heavy():
    script = (
        "import sys, fxopt.cli, fxopt.options, fxopt.plan; "
        "print(*sorted({'torch', 'pandas', 'typer', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
