"""The `fxopt` command: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fxopt.cli import main, run
from fxopt.options import describe_options
from fxopt.plan import PassUse, Plan, PlanStore, plan_key
from fxopt.registry import discover

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


@pytest.fixture
def doubler(monkeypatch):
    """A pass that is the only one registered."""
    from dataclasses import dataclass

    from fxopt import registry
    from fxopt.labels import Axis
    from fxopt.verify import Precision

    @dataclass(frozen=True)
    class Doubler(registry.GraphPass):
        """Doubles what is small.

        And more words, which a listing leaves out.
        """

        name: ClassVar[str] = "doubler"
        answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
        stage: ClassVar[registry.Stage] = registry.Stage.JOINT
        precision: ClassVar[Precision] = Precision.FP32
        after: ClassVar[tuple[str, ...]] = ("halver",)

        #: what is not small
        #: is left alone
        small: float = 0.5
        times: int = 2  # how often
        names: tuple[str, ...] = ("a",)

    monkeypatch.setattr(registry, "discover", lambda: {"doubler": Doubler})
    return Doubler


def test_passes_list_shows_the_registered_passes(capsys, doubler):
    assert run(["passes", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "doubler",
            "stage": "joint",
            "answers": ["memory_bound"],
            "precision": "fp32",
            "devices": ["cpu", "cuda"],
            "does": "Doubles what is small.",
            "from": __name__,  # of no distribution: its module
        }
    ]


def test_passes_list_tells_the_distribution_of_an_installed_pass(capsys):
    assert run(["passes", "list"]) == 0
    listed = {row["name"]: row for row in rows(capsys.readouterr().out)}
    assert listed["cuda_graphs"]["from"].startswith("fxopt ")
    assert (listed["cuda_graphs"]["stage"], listed["cuda_graphs"]["devices"]) == ("runtime", "cuda")


def test_passes_show_tells_options_with_type_default_and_meaning(capsys, doubler):
    assert run(["passes", "show", "doubler", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["options"] == [
        {"name": "small", "type": "float", "default": "0.5", "meaning": "what is not small is left alone"},
        {"name": "times", "type": "int", "default": "2", "meaning": "how often"},
        {"name": "names", "type": "tuple[str, ...]", "default": "('a',)", "meaning": ""},
    ]
    assert shown["after"] == ["halver"] and shown["before"] == []
    assert shown["source"].startswith(f"{__file__}:")
    assert shown["results"]["plans"] == 0


def test_passes_show_is_readable_without_json(capsys, doubler, store):
    assert run(["passes", "show", "doubler"]) == 0
    out = capsys.readouterr().out
    for line in (
        "answers    memory_bound\n",
        "after      halver\n",
        "small: float = 0.5  what is not small is left alone\n",
        "FXOPT_DISABLE=doubler\n",
        f"results seen in {store.plans_dir}\n  none: no plan there has tried it\n",
    ):
        assert line in out
    assert f"  {__doc__}" in out  # no page: the module's own words


def test_passes_show_finds_the_page_in_the_tree_of_the_module(tmp_path):
    from fxopt.cli_passes import documentation

    module = tmp_path / "passes" / "doubler.py"
    page = tmp_path / "docs" / "passes" / "doubler.md"
    for path in (module, page):
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert documentation(module, "doubler") == page
    assert documentation(module, "halver") is None
    beside = module.with_suffix(".md")
    beside.write_text("")
    assert documentation(module, "doubler") == beside


def test_passes_show_prints_the_page_where_there_is_one(capsys, doubler, tmp_path, monkeypatch):
    from fxopt import cli_passes

    page = tmp_path / "doubler.md"
    page.write_text("# doubler\n\n## What it answers\n")
    monkeypatch.setattr(cli_passes, "documentation", lambda file, name: page)
    assert run(["passes", "show", "doubler"]) == 0
    out = capsys.readouterr().out
    assert f"documentation: {page}\n  # doubler\n\n  ## What it answers\n" in out
    assert __doc__ not in out


def test_passes_show_tells_what_the_plans_say(capsys, store):
    kept = Plan(
        key=plan_key(graph="kept"),
        created="2026-02-01T00:00:00+00:00",
        decision="candidate",
        passes=[PassUse(name="cuda_graphs", stage="runtime"), PassUse(name="freeze_weights", stage="config")],
        paired={"ratio": 1.5, "low": 1.4, "high": 1.6},
        environment={"device_name": "NVIDIA H200"},
    )
    tried = {"name": "cuda_graphs", "passes": ["cuda_graphs"], "outcome": "rejected", "reason": "wrong: NaN"}
    store.save(kept)
    store.save(Plan(key=plan_key(graph="no"), created="2026-01-01T00:00:00", decision="baseline", reports=[tried]))
    assert run(["passes", "show", "cuda_graphs"]) == 0
    out = capsys.readouterr().out
    for line in (
        "2 plans: 1 kept, 1 rejected, 0 failed, 0 out of reach; the newest of 2026-02-01T00:00:00+00:00\n",
        f"2026-02-01  {kept.key[:12]}  NVIDIA H200  kept with freeze_weights, 0 rewritten: 1.50x (1.40-1.60)\n",
        "1 x rejected: wrong: NaN\n",
    ):
        assert line in out
    assert run(["passes", "show", "cuda_graphs", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [plan["speedup"] for plan in results["in"]] == [1.5, None]


def test_passes_show_warns_of_a_plan_that_it_cannot_read(capsys, store):
    store.path(plan_key(graph="two")).write_text("{")
    assert run(["passes", "show", "freeze_weights"]) == 0
    captured = capsys.readouterr()
    assert "fxopt: warning: " in captured.err and "line 1, column 2" in captured.err
    assert "1 plan: 1 kept" in captured.out


def test_an_unknown_pass_is_an_error_that_names_those_like_it(capsys):
    assert run(["passes", "show", "cuda_graph"]) == 1
    assert "no pass is named 'cuda_graph'; did you mean 'cuda_graphs'" in capsys.readouterr().err
    assert run(["passes", "show", "zzz"]) == 1
    assert f"there are {', '.join(sorted(discover()))}" in capsys.readouterr().err


def test_passes_new_writes_the_files_and_says_what_is_next(capsys, tmp_path):
    arguments = ["--dir", str(tmp_path / "new"), "--stage", "post_grad", "--answers", "memory_bound,cast_traffic"]
    assert run(["passes", "new", "merge-scales", *arguments]) == 0
    assert f"pip install -e {tmp_path / 'new'}" in capsys.readouterr().out
    text = (tmp_path / "new" / "merge_scales.py").read_text()
    assert "Stage.POST_GRAD" in text and "Axis.CAST_TRAFFIC" in text
    assert run(["passes", "new", "merge-scales", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fxopt: error: nothing is overwritten") and error.count("\n") == 1


# -- rules and ceilings


def test_rules_lists_every_rule_with_its_condition_and_reference(capsys):
    from fxopt.rules import RULES

    assert run(["rules"]) == 0
    shown = rows(capsys.readouterr().out)
    assert [row["name"] for row in shown] == [rule.name for rule in RULES]
    assert all(row["condition"] and row["headroom"] and row["why"] and row["reference"] for row in shown)
    assert not any(row["overridden"] for row in shown)


def test_rules_marks_what_a_file_or_the_environment_overrides(capsys, tmp_path, monkeypatch):
    file = tmp_path / "limits.toml"
    file.write_text("[launch_bound]\nlaunch_gap = 0.5\n")
    for arguments in (["--thresholds", str(file)], []):
        assert run(["rules", "--json", *arguments]) == 0
        shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert shown["launch_bound"]["overridden"] == {"launch_bound.launch_gap": "0.15 -> 0.5"}
        assert shown["launch_bound"]["thresholds"] == {"launch_bound.launch_gap": 0.5}
        assert "launch_gap > 0.5" in shown["launch_bound"]["condition"]
        assert sum(bool(row["overridden"]) for row in shown.values()) == 1
        monkeypatch.setenv("FXOPT_THRESHOLDS", str(file))


def test_a_file_with_an_unknown_threshold_is_refused_with_the_nearest(capsys, tmp_path):
    file = tmp_path / "limits.toml"
    file.write_text("[launch_bound]\nlaunch_gab = 0.5\n")
    assert run(["rules", "--thresholds", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'launch_bound.launch_gab'" in captured.err and "launch_bound.launch_gap" in captured.err


@pytest.fixture
def measured(monkeypatch):
    """Ceilings without the measuring: each is a tenth faster than the one before. Returns the list of them."""
    from profiler_core import roofline

    made: list[roofline.Ceilings] = []

    def measure(device):
        rate = 1e11 * 1.1 ** len(made)
        now = f"2026-01-0{len(made) + 1}T00:00:00+00:00"
        made.append(roofline.Ceilings("a CPU", 1e10, {"float32": rate}, now, {"torch": "2.x"}))
        return made[-1]

    monkeypatch.setattr(roofline, "measure_ceilings", measure)
    return made


def test_ceilings_measures_once_says_so_and_keeps_them_with_the_plans(capsys, measured, plan_dir):
    assert run(["ceilings", "--device", "cpu"]) == 0
    first = capsys.readouterr()
    assert "measured now" in first.err and str(plan_dir / "ceilings") in first.err
    for line in ("copy                    10.0 GB/s\n", "100 GFLOP/s, ridge at 10.0 FLOP/byte\n", "2026-01-01", "2.x"):
        assert line in first.out
    (file,) = (plan_dir / "ceilings").glob("*.json")
    assert f"{file}\n" in first.out
    assert run(["ceilings", "--device", "cpu"]) == 0
    second = capsys.readouterr()
    assert (second.out, second.err, len(measured)) == (first.out, "", 1)


def test_ceilings_measures_again_where_it_is_asked_to_and_keeps_that(capsys, measured, plan_dir):
    for arguments in ([], ["--measure"], []):
        assert run(["ceilings", "--device", "cpu", "--json", *arguments]) == 0
        shown = json.loads(capsys.readouterr().out)
    assert len(measured) == 2
    assert shown["measured"].startswith("2026-01-02")
    (rate,) = shown["rates"]
    assert (rate["flops_per_s"], rate["ridge_flop_per_byte"]) == (pytest.approx(1.1e11), pytest.approx(11))
    assert len(list((plan_dir / "ceilings").glob("*.json"))) == 1


def test_ceilings_where_they_cannot_be_kept_are_shown_with_a_warning(capsys, measured, plan_dir):
    plan_dir.write_text("a file where the folder should be")
    assert run(["ceilings", "--device", "cpu", "--json"]) == 0
    captured = capsys.readouterr()
    assert "fxopt: warning: device ceilings cannot be kept" in captured.err
    assert json.loads(captured.out)["file"] is None


@pytest.mark.parametrize(
    ("device", "message"), [("cuda:99", "no cuda:99 here"), ("abacus", "'abacus' is not a device"), ("meta", "meta")]
)
def test_ceilings_of_a_device_that_is_not_there_is_an_error(capsys, measured, device, message):
    assert run(["ceilings", "--device", device]) == 1
    assert message in capsys.readouterr().err and not measured


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


def test_plans_diff_shows_what_two_plans_differ_in(capsys, store):
    other = plan_key(graph="two")
    added = PassUse(name="pad_matmul", options={"least": 8}, stage="joint")
    uses = [PassUse(name="freeze_weights", stage="config"), added]
    store.save(Plan(key=other, decision="candidate", freeze=True, passes=uses, profile={"kernels": 11}))
    assert run(["plans", "diff", KEY[:8], other[:8]]) == 0
    found = {row["value"]: (row["first"], row["second"]) for row in rows(capsys.readouterr().out)}
    assert found == {
        "passes[1].name": ("", "pad_matmul"),
        "passes[1].options.least": ("", "8"),
        "passes[1].stage": ("", "joint"),
        "profile.kernels": ("12", "11"),
    }
    assert run(["plans", "diff", KEY, KEY, "--json"]) == 0 and json.loads(capsys.readouterr().out) == []


def test_plans_remove_deletes_the_plan(capsys, store):
    assert run(["plans", "remove", KEY[:8]]) == 0
    assert str(store.path(KEY)) in capsys.readouterr().out
    assert store.load(KEY) is None


def told(key: str, created: str = "2020-01-01T00:00:00+00:00", **more: Any) -> Plan:
    graph = {"of": "Encoder (model.py:12)", "inputs": ["float32[4, 8]", "int"], "operators": 3, "precision": "bf16"}
    return Plan(
        key=key,
        created=created,
        decision="candidate",
        profile={"graph": graph},
        paired={"ratio": 1.5, "low": 1.4, "high": 1.6},
        environment={"device_name": "NVIDIA H200"},
        **more,
    )


def test_plans_list_tells_what_sets_plans_apart(capsys, store):
    other = plan_key(graph="two")
    store.save(told(other))
    assert run(["plans", "list"]) == 0
    listed = {row["key"]: row for row in rows(capsys.readouterr().out)}
    names = ("of", "inputs", "device", "precision", "ratio")
    assert tuple(listed[other[:12]][name] for name in names) == (
        "Encoder (model.py:12)",
        "float32[4, 8], int",
        "NVIDIA H200",
        "bf16",
        "1.5",
    )
    assert {listed[KEY[:12]][name] for name in names} == {""}  # a plan of an older version says nothing of it
    assert run(["plans", "list", "--json"]) == 0
    ratios = {row["key"]: row["ratio"] for row in json.loads(capsys.readouterr().out)}
    assert ratios == {KEY[:12]: None, other[:12]: 1.5}


def test_plans_remove_all_takes_broken_ones_and_those_set_aside_too(capsys, store):
    store.path(plan_key(graph="two")).write_text("{")
    aside = store.path(KEY).with_name(f"{KEY}.json.corrupt.1")
    aside.write_text("{")
    assert run(["plans", "remove", "--all", "--yes"]) == 0
    assert capsys.readouterr().out == f"removed 2 plans and 1 set aside as broken in {store.plans_dir}\n"
    assert not list(store.plans_dir.glob("*.json*"))
    assert run(["plans", "remove", "--all", "--yes"]) == 0
    assert f"no plans to remove in {store.plans_dir}" in capsys.readouterr().err


def test_plans_remove_older_than_goes_by_the_date_of_the_decision(capsys, store):
    old, broken = plan_key(graph="old"), plan_key(graph="two")
    store.save(told(old))
    store.path(broken).write_text("{")
    assert run(["plans", "remove", "--older-than", "30", "--yes"]) == 0
    assert capsys.readouterr().out == f"removed 1 plan in {store.plans_dir}\n"
    assert store.read(old) is None and store.read(KEY) is not None and store.path(broken).exists()
    os.utime(store.path(broken), (1000, 1000))  # of a broken one the file's date is what there is
    assert run(["plans", "remove", "--older-than", "30", "--yes"]) == 0
    assert not store.path(broken).exists() and store.read(KEY) is not None


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, False), ("n\n", 1, True)])
def test_plans_remove_asks_before_it_deletes_several(capsys, store, monkeypatch, answer, code, left):
    import io

    assert run(["plans", "remove", "--all"]) == 1
    assert "1 plan in" in (said := capsys.readouterr().err) and "give --yes" in said and store.read(KEY)
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert run(["plans", "remove", "--all"]) == code
    assert (store.read(KEY) is not None) == left
    assert ("nothing was removed" in capsys.readouterr().err) == left


@pytest.mark.parametrize("words", [[], ["3f", "--all"], ["--all", "--older-than", "3"], ["--older-than", "-1"]])
def test_plans_remove_takes_one_way_to_say_which(capsys, store, words):
    assert run(["plans", "remove", *words]) == 2
    assert store.read(KEY) is not None


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
    assert error.startswith(f"fxopt: error: plan file {store.path(KEY)} is broken at line 1, column 2")
    assert error.endswith(f"It was left in place: `fxopt plans remove {KEY[:12]}` deletes it\n")
    assert "Traceback" not in error


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_commands_that_only_read_change_nothing_in_the_store(capsys, store):
    broken = plan_key(graph="two")
    store.path(broken).write_text("{")
    before = contents(store.root)
    page = str(store.path(broken))
    for words in (
        ["plans", "list"],
        ["plans", "show", KEY],
        ["plans", "show", broken],
        ["plans", "diff", KEY, broken],
        ["passes", "show", "freeze_weights"],
        ["report", page],
        ["diff", page, page],
        ["explain", "addmm", page],
    ):
        run(words)
        captured = capsys.readouterr()
        assert "set aside" not in captured.err
        said = f"fxopt plans remove {broken[:12]}` deletes"
        assert (said in captured.err) == (broken in words or page in words or words == ["plans", "list"]), words
    assert contents(store.root) == before
    assert run(["plans", "remove", broken]) == 0 and not store.path(broken).exists()


def test_looking_at_a_plan_does_not_count_as_its_use(store, monkeypatch):
    touched = []
    monkeypatch.setattr(os, "utime", lambda path, **_times: touched.append(path))
    assert store.read(KEY) is not None and not touched
    assert store.load(KEY) is not None and touched == [store.path(KEY)]


def test_a_bad_environment_variable_is_an_error_that_names_it(capsys, monkeypatch):
    monkeypatch.setenv("FXOPT_PAIRS", "lots")
    assert run(["plans", "list"]) == 2
    assert "environment variable FXOPT_PAIRS" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["plans", "shew"], ["nothing"], ["version", "--jsn"], ["plans", "show"], []]
)
def test_a_wrong_command_line_exits_with_2(capsys, arguments):
    assert run(arguments) == 2


def test_help_exits_with_0_and_names_the_commands(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("version", "options", "passes", "plans", "rules", "ceilings", "bisect"))


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


@pytest.mark.parametrize(
    ("script", "heavy"),
    [
        ("import fxopt.cli, fxopt.options, fxopt.plan, fxopt.seen", {"torch", "pandas", "typer", "rich"}),
        ("import fxopt.cli; fxopt.cli.run(['--help'])", {"torch", "pandas"}),
        ("import fxopt.cli; fxopt.cli.run(['plans', 'list'])", {"torch", "pandas"}),
    ],
    ids=["import", "help", "plans"],
)
def test_the_command_line_imports_nothing_heavy(script, heavy):
    script = f"{script}; import sys; sys.exit(', '.join(sorted({heavy} & set(sys.modules))) or 0)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_told_as_other_commands_tell_it(capsys):
    assert run(["--version"]) == 0
    option = capsys.readouterr().out
    assert run(["version"]) == 0
    assert option == capsys.readouterr().out and "fxopt" in option and "torch" in option


@pytest.mark.parametrize(
    "arguments", [["--precision", "fp12"], ["-o", "nosuch=1"], ["--time-limit", "-3"], ["--objective", "foo"]]
)
def test_an_option_that_is_none_is_a_wrong_command_line(tmp_path, capsys, arguments):
    script = tmp_path / "nothing.py"
    script.write_text("raise SystemExit('it was run')\n")
    assert run(["optimize", *arguments, str(script)]) == 2
    assert "it was run" not in capsys.readouterr().err
