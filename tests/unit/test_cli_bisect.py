"""The search of `fxopt bisect`, on commands that only pretend to make rewrites.

With real ones it is in tests/integration/test_bisect_command.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fxopt.cli import run
from fxopt.cli_bisect import base_environment, first_failing, following


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_the_first_failing_rewrite_is_found_in_as_many_steps_as_a_binary_search_takes(count):
    for bad in range(1, count + 1):
        asked = []
        assert first_failing(count, lambda n, bad=bad, asked=asked: asked.append(n) or n >= bad) == (bad - 1, bad)
        assert len(asked) <= (count - 1).bit_length() and all(0 < n < count for n in asked)


def test_a_step_that_cannot_tell_gives_way_to_a_neighbour():
    asked: list[int] = []
    assert first_failing(10, lambda n: asked.append(n) or (None if n == 5 else n >= 7)) == (6, 7)
    assert asked[:2] == [5, 4] and asked.count(5) == 1


def test_where_all_between_cannot_tell_they_are_all_suspects():
    assert first_failing(10, lambda n: None if 3 <= n <= 6 else n >= 7) == (2, 7)
    assert first_failing(4, lambda n: None) == (0, 4)


COMMAND = """
import os, sys
from fxopt import bisect

given = os.environ.get("FXOPT_BISECT")
limit, mode = 9 if given is None else int(given), os.environ.get("FXOPT_MODE", "tune")
log = os.environ.get("FXOPT_BISECT_LOG")
rewrites = bisect.of_process(None if given is None else limit, "0_0")
for n in range(1, 10):
    rewrites is None or rewrites.take(f"pass_{n}", f"node_{n}")
print("the command speaks")
"""


@pytest.fixture
def bisect(tmp_path, capfd, monkeypatch):
    """Bisects a command that makes nine rewrites and exits with a Python expression over `limit` and `mode`."""

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def run_it(code: str, *options: str) -> tuple[int, str, str]:
        script = tmp_path / "command.py"
        script.write_text(COMMAND + f"sys.exit({code})\n")
        exit_code = run(["bisect", *options, "--", sys.executable, str(script)])
        captured = capfd.readouterr()
        return exit_code, captured.out, captured.err

    return run_it


def test_bisect_prints_each_step_and_then_the_rewrite_with_its_remedy(bisect, monkeypatch):
    monkeypatch.setenv("FXOPT_DISABLE", "another")
    code, out, err = bisect("3 if limit >= 6 else 0")
    assert code == 0
    steps = [line.partition(" (exit code")[0] for line in out.splitlines()]
    assert steps[:6] == [
        "every rewrite, as decided now: fails",
        "every rewrite, as planned: fails",
        "no rewrite: succeeds",
        "the first 4 of 9 rewrites: succeeds",
        "the first 6 of 9 rewrites: fails",
        "the first 5 of 9 rewrites: succeeds",
    ]
    assert steps[6] == "the command fails from rewrite 6 on:"
    assert steps[7].startswith("  6  pass_6 at node_6 ")
    assert "FXOPT_DISABLE=another,pass_6 " in out and "FXOPT_DUMP=" in out
    assert "the command speaks" in err and "the command speaks" not in out


def test_bisect_asks_a_neighbour_of_a_step_that_exits_with_125(bisect):
    code, out, _ = bisect("125 if limit == 4 else limit >= 6")
    assert code == 0 and "the first 4 of 9 rewrites: cannot tell (exit code 125" in out
    assert "the command fails from rewrite 6 on:" in out


def test_bisect_names_every_suspect_where_steps_cannot_tell(bisect):
    code, out, _ = bisect("125 if 2 <= limit <= 7 else limit > 7")
    assert code == 0 and "one of the rewrites 2 to 8" in out
    assert "  2  pass_2 " in out and "  8  pass_8 " in out and "  9  pass_9 " not in out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("0", "does not fail with every rewrite"),
        ("125", "does not fail with every rewrite"),
        ("1", "fails without any rewrite, too: not fxopt's doing"),
        ("mode == 'tune'", "fails only in the run that tunes"),
    ],
)
def test_bisect_says_where_there_is_nothing_to_find(bisect, code, message):
    exit_code, _, err = bisect(code)
    assert exit_code == 1
    assert message in err.splitlines()[-1]


def test_bisect_refuses_a_command_of_several_processes_with_rewrites(bisect):
    twice = "[log and bisect.Bisection(None, bisect.Path(log)).take('pass_1', 'node_1')] and 1"
    code, _, err = bisect(twice)
    assert code == 1 and "several processes of the command make rewrites" in err


def test_bisect_keeps_the_list_of_rewrites_where_it_is_asked_to(bisect, tmp_path):
    log = tmp_path / "kept.tsv"
    code, _, _ = bisect("limit >= 6", "--log", str(log))
    assert code == 0 and len(log.read_text().splitlines()) == 9


def test_bisect_of_a_command_that_is_not_there_is_an_error_that_names_it(capfd):
    assert run(["bisect", "no-such-program", "--flag"]) == 1
    assert "fxopt: error: no-such-program cannot be run: No such file" in capfd.readouterr().err


def test_bisect_has_a_plan_store_of_its_own_unless_one_was_chosen(tmp_path):
    own = base_environment({"A": "b", "FXOPT_BISECT": "3"}, tmp_path)
    assert own == {"A": "b", "FXOPT_PLAN_DIR": str(tmp_path)}
    assert base_environment({"FXOPT_PLAN_DIR": "/mine"}, tmp_path)["FXOPT_PLAN_DIR"] == "/mine"


def test_the_steps_of_bisect_follow_plans_and_keep_a_mode_of_inductors():
    assert following({}) == following({"FXOPT_MODE": "tune"}) == {"FXOPT_MODE": "apply"}
    assert following({"FXOPT_MODE": "max-autotune"}) == {"FXOPT_MODE": "max-autotune"}


def test_a_pass_that_cannot_be_loaded_is_a_warning_beside_the_others(capsys, monkeypatch):
    import warnings

    from fxopt import registry

    monkeypatch.setattr(registry, "discover", lambda: warnings.warn("broken one", stacklevel=1) or {})
    assert run(["passes", "list"]) == 0
    assert "fxopt: warning: broken one" in capsys.readouterr().err


def test_deprecations_in_what_passes_import_are_no_warnings_of_the_list(capsys, monkeypatch):
    import warnings

    from fxopt import registry

    monkeypatch.setattr(registry, "discover", lambda: warnings.warn("old one", DeprecationWarning, stacklevel=1) or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as Python does by itself
        assert run(["passes", "list"]) == 0
    assert "old one" not in capsys.readouterr().err
