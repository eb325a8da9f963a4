"""The study of labels on a CPU: its cases, how they are judged, and saved profiles labelled again."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_profiles
import pytest
import torch

from case_studies import label_kernels, label_kernels_cuda, label_kernels_dev, label_kernels_holdout, labels
from case_studies.label_kernels import Case, axes
from case_studies.labels import Outcome
from fxopt.labels import Axis, Label
from profiler_core.profiles import Profile
from profiler_core.roofline import Ceilings

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "case_studies"
H200 = Ceilings(
    "NVIDIA H200",
    4.2e12,
    {"float32": 5e13, "tf32": 4e14, "bfloat16": 7.9e14, "float16": 7.9e14},
    "2026-01-01T00:00:00+00:00",
    {"last_level_cache_bytes": 50 << 20},
)


def case(**fields: Any) -> Case:
    given: dict[str, Any] = {
        "name": "copy", "axis": Axis.MEMORY_BOUND, "build": lambda device: torch.ones, "kernel": "copy",
        "expected": axes(Axis.MEMORY_BOUND), "forbidden": axes(Axis.COMPUTE_BOUND), "note": "a copy",
    }  # fmt: skip
    return Case(**{**given, **fields})


def found(*members: Axis) -> tuple[Label, ...]:
    return tuple(Label(axis, "kernel", (), "copy", (), "high", 1.0, "why") for axis in members)


COUNTERS = {
    "dram_throughput": 90.0, "l2_throughput": 40.0, "sm_throughput": 5.0, "tensor_active": 0.0, "eligible_warps": 0.1,
    "dram_read_bytes": 2.6e8, "dram_write_bytes": 2.6e8, "instructions": 1e6, "threads_per_instruction": 32.0,
    "local_load_bytes": 0.0, "achieved_occupancy": 90.0, "l2_hit_rate": 10.0,
}  # fmt: skip


def profile_of(*kernels: tuple[str, int, dict[str, Any]]) -> Profile:
    """Two calls of kernels outside of graphs: (name, duration in ns, other fields)."""
    outside = {"launch": "", "graph": "", "nodes": (), "method": "none", "confidence": "none", "operator": "",
               "top_operator": "", "family": "custom", "grid": (1056, 1, 1), "block": (256, 1, 1)}  # fmt: skip
    rows, at = [], made_profiles.T
    for iteration in range(2):
        for name, duration, fields in kernels:
            shape = {key: value for key, value in fields.items() if key not in COUNTERS}
            rows.append(made_profiles.kernel(name, at, duration, **{**outside, **shape, "iteration": iteration}))
            at += duration + 1000
    made = made_profiles.build(rows, [])
    made.launches = ()
    made.wall_ns = float(sum(duration for _, duration, _ in kernels))
    made.environment = {
        "device_name": "NVIDIA H200", "device_type": "cuda", "sm_count": 132, "capability": [9, 0],
        "clocks": {"sm_mhz_min": 1980, "drifted": False, "driver": "x"},
    }  # fmt: skip
    made.kernels["counters"] = "measured"
    for key, value in COUNTERS.items():
        made.kernels[key] = [fields.get(key, value) for _ in range(2) for _, _, fields in kernels]
    return made


# --- the registry ---------------------------------------------------------------------------------------------------


def test_every_axis_has_three_development_kernels_that_must_show_it_and_some_that_must_not() -> None:
    development = label_kernels.cases("development")
    for axis in Axis:
        made = [c for c in development if c.axis is axis]
        assert len(made) >= 3, axis
        assert all(axis in c.expected for c in made), axis
        if axis is not Axis.OPAQUE_LIBRARY:  # every library's kernel may be called opaque, and no other comes near it
            assert any(axis in c.forbidden for c in development), axis
    negatives = [c for c in development if c.axis is None]
    assert len(negatives) >= 8 and all(c.forbidden for c in negatives)


def test_the_sets_are_marked_and_names_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c.set for c in label_kernels.cases("development")} == {"development"}
    mine = case(name="mine", set="development")  # whatever it says
    monkeypatch.setattr(label_kernels_holdout, "CASES", (mine,))
    assert label_kernels.cases("holdout") == (replace(mine, set="holdout"),)
    everything = label_kernels.cases()
    assert len({c.name for c in everything}) == len(everything) == len(label_kernels_dev.CASES) + 1
    monkeypatch.setattr(label_kernels_holdout, "CASES", (case(name=label_kernels_dev.CASES[0].name),))
    with pytest.raises(ValueError, match=f"two cases are called '{label_kernels_dev.CASES[0].name}'"):
        label_kernels.cases()
    with pytest.raises(ValueError, match="no set 'training'; there are development, holdout, all"):
        label_kernels.cases("training")


def test_a_case_says_something_that_can_be_right_and_wrong() -> None:
    graph_axes = {Axis.LAUNCH_BOUND}
    for c in label_kernels.cases():
        assert c.expected or c.forbidden, c.name
        assert not c.expected & c.forbidden, c.name
        assert len(c.note) > 10 or "As" in c.note, c.name
        re.compile(c.kernel)
        assert (c.expected | c.forbidden <= graph_axes) == (c.scope == "graph"), c.name


def test_launches_name_kernels_that_exist_and_pass_what_they_take() -> None:
    """Grid, block and arguments of each launch() against the parameters in the CUDA source."""
    launched = set()
    for file in FOLDER.glob("label_kernels_*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "launcher":
                name, _, _, arguments = call.args
                assert isinstance(name, ast.Constant) and isinstance(name.value, str)
                assert isinstance(arguments, ast.List)
                source = label_kernels_cuda.SOURCES[name.value]
                head = re.search(rf"\b{name.value}\((.*?)\) \{{", source, re.DOTALL)
                assert head is not None and source.startswith('extern "C" __global__ void'), name.value
                assert len(arguments.elts) == head.group(1).count(",") + 1, name.value
                launched.add(name.value)
    assert launched == set(label_kernels_cuda.SOURCES)


def test_inputs_are_the_same_each_time_and_leave_the_random_state() -> None:
    cpu, state = torch.device("cpu"), torch.get_rng_state()
    assert torch.equal(label_kernels.floats(cpu, 8, 8), label_kernels.floats(cpu, 8, 8))
    assert label_kernels.floats(cpu, 64).abs().max() <= 0.5
    assert label_kernels.floats(cpu, 4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert label_kernels.indices(cpu, 100, 7).max() < 7
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cycle_visits_every_element_before_it_returns() -> None:
    following = label_kernels.cycle(torch.device("cpu"), 50)
    at, seen = 0, []
    for _ in range(50):
        at = int(following[at])
        seen.append(at)
    assert sorted(seen) == list(range(50)) and at == 0 and following.dtype == torch.int32


# --- judging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Outcome(case(), found(Axis.MEMORY_BOUND)), ""),
        (Outcome(case(), found(Axis.MEMORY_BOUND, Axis.L2_BOUND)), ""),  # neither expected nor forbidden
        (Outcome(case(), found()), "lacks memory_bound"),
        (Outcome(case(), found(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND)), "must not be compute_bound"),
        (Outcome(case(), found(Axis.COMPUTE_BOUND)), "lacks memory_bound; must not be compute_bound"),
        (Outcome(case(), found(Axis.MEMORY_BOUND), failed="no GPU"), "failed: no GPU"),
        (Outcome(case(axis=None, expected=axes()), found()), ""),
        (Outcome(case(axis=None, expected=axes()), failed="no GPU"), "failed: no GPU"),
    ],
)
def test_right_is_all_that_is_expected_and_nothing_that_is_forbidden(outcome: Outcome, why: str) -> None:
    assert outcome.right == (why == "") and outcome.why == why


def test_the_summary_counts_by_set_and_axis() -> None:
    holdout = replace(case(), set="holdout")
    outcomes = [
        Outcome(case(name="a"), found(Axis.MEMORY_BOUND)),
        Outcome(case(name="b"), found(Axis.COMPUTE_BOUND)),
        Outcome(case(name="c", axis=None, expected=axes()), found()),
        Outcome(case(name="d", axis=None, expected=axes()), failed="out of memory"),
        Outcome(holdout, found(Axis.MEMORY_BOUND)),
    ]
    rows = labels.summary(outcomes)
    assert rows["development"]["memory_bound"] == {
        "cases": 2, "right": 1, "share": 0.5, "missed": ["b"], "in_error": [],
    }  # fmt: skip
    assert rows["development"]["compute_bound"]["in_error"] == ["b"]
    assert rows["development"]["negative"] == {"cases": 2, "right": 1, "share": 0.5}
    assert rows["development"]["all"] == {"cases": 4, "right": 2, "share": 0.5}
    assert rows["holdout"]["all"] == {"cases": 1, "right": 1, "share": 1.0}


@pytest.mark.parametrize(("right", "of", "enough"), [(9, 10, True), (8, 10, False), (0, 0, True)])
def test_nine_of_ten_holdout_cases_must_be_right_and_development_never_fails(right: int, of: int, enough: bool) -> None:
    wrong = Outcome(case(name="wrong"), found())
    holdout = [
        Outcome(replace(case(), set="holdout"), found(*([Axis.MEMORY_BOUND] if i < right else []))) for i in range(of)
    ]
    assert labels.passed([wrong, wrong, *holdout]) is enough


def test_the_kernel_in_question_is_the_longest_that_matches() -> None:
    profile = profile_of(
        ("fill", 900_000, {}),
        ("copy_small", 1_000, {"dram_throughput": 5.0}),
        ("copy_large", 100_000, {}),
        ("copy_small", 2_000, {"dram_throughput": 5.0}),
    )
    outcome = labels.judge(case(), profile, H200)
    assert outcome.kernel == "copy_large" and outcome.right
    assert outcome.numbers["dram_throughput"] == 90.0 and outcome.numbers["grid"] == [1056, 1, 1]
    assert outcome.numbers["clocks"] == {"sm_mhz_min": 1980, "drifted": False}
    assert {label.launch for label in outcome.labels} == {"copy_large"}
    assert labels.judge(case(kernel=""), profile, H200).kernel == "fill"
    lost = labels.judge(case(kernel="gemm"), profile, H200)
    assert not lost.right and lost.failed == "no kernel matches 'gemm'; there were: copy_large, copy_small, fill"


def test_a_kernel_of_many_launches_counts_by_their_sum() -> None:
    profile = profile_of(("copy_once", 50_000, {}), *[("copy_often", 10_000, {})] * 10)
    assert labels.judge(case(), profile, H200).kernel == "copy_often"


def test_a_launch_of_compiled_code_has_the_labels_of_its_group() -> None:
    inside = {"launch": "extern_kernels.mm:1", "graph": "0/0", "nodes": ("mm",), "method": "correlation"}
    profile = profile_of(("copy", 100_000, inside))
    profile.launches = made_profiles.build([]).launches
    outcome = labels.judge(case(), profile, H200)
    assert outcome.labels and {label.scope for label in outcome.labels} == {"group"}
    assert outcome.numbers["modelled_flops"] == 24.0 and outcome.numbers["nodes"] == ["mm"]
    assert outcome.numbers["modelled_bytes"] is None


def test_a_graph_has_the_labels_of_the_whole() -> None:
    waiting = profile_of(("copy", 1_000, {}))
    waiting.wall_ns = 50_000.0
    whole = case(scope="graph", axis=Axis.LAUNCH_BOUND, expected=axes(Axis.LAUNCH_BOUND), forbidden=axes())
    outcome = labels.judge(whole, waiting, H200)
    assert outcome.right and outcome.kernel == "" and {label.scope for label in outcome.labels} == {"graph"}
    busy = profile_of(("copy", 1_000_000, {}))
    assert labels.judge(whole, busy, H200).why == "lacks launch_bound"


# --- the study ------------------------------------------------------------------------------------------------------


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str, **_: Any) -> None:
        self.lines.append(text)


def test_saved_profiles_are_labelled_again_with_other_thresholds_and_lost_ones_count_as_wrong(tmp_path: Path) -> None:
    profile_of(("copy", 100_000, {})).save(tmp_path / "copy.json")
    (tmp_path / "damaged.json").write_text("{")
    selected = (case(name="damaged"), case(name="lost"), case())
    path = tmp_path / "out" / "labels.json"

    def study(**thresholds: float) -> dict[str, Any]:
        screen = Screen()
        outcomes = labels.run(selected, None, H200, thresholds=thresholds, saved=tmp_path, path=path, screen=screen)
        document = json.loads(path.read_text())
        assert list(document["cases"]) == ["damaged", "lost", "copy"]
        assert [outcome.right for outcome in outcomes] == [c["right"] for c in document["cases"].values()]
        assert len(screen.lines) == 3 and screen.lines[1].startswith("2/3 lost: failed: ")
        return document

    document = study()
    assert [c["right"] for c in document["cases"].values()] == [False, False, True]
    assert "not JSON" in document["cases"]["damaged"]["why"]
    copy = document["cases"]["copy"]
    memory = next(label for label in copy["labels"] if label["axis"] == "memory_bound")
    assert memory["evidence"] and memory["headroom_ns"] >= 0
    assert document["environment"]["device_name"] == "NVIDIA H200" and "case_studies" in document["command"]
    assert Ceilings.from_json(document["ceilings"]) == H200
    assert document["summary"]["development"]["all"] == {"cases": 3, "right": 1, "share": 1 / 3}
    strict = study(**{"memory_bound.dram_throughput": 95.0})
    assert strict["thresholds"] == {"memory_bound.dram_throughput": 95.0}
    assert strict["cases"]["copy"]["why"] == "lacks memory_bound"


def test_measuring_keeps_the_profile_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def profile(fn: Any, **options: Any) -> Profile:
        asked.append(options | {"tf32": torch.backends.cuda.matmul.allow_tf32})
        fn()
        return profile_of(("copy", 100_000, {}))

    def broken(device: torch.device) -> Any:
        raise RuntimeError("no such kernel\nand a long log")

    monkeypatch.setattr("profiler_core.profile", profile, raising=False)
    called: list[str] = []
    selected = (
        case(name="broken", build=broken),
        case(build=lambda device: lambda: called.append(device.type), tf32=True),
    )
    device = torch.device("cpu")
    outcomes = labels.run(selected, device, H200, thresholds={}, saved=tmp_path, path=None, screen=Screen())
    assert [outcome.why for outcome in outcomes] == ["failed: RuntimeError: no such kernel", ""]
    assert called == ["cpu"] and asked[0]["counters"] == "full" and asked[0]["tf32"] is True
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert not (tmp_path / "broken.json").exists()
    again = labels.run(selected[1:], None, H200, thresholds={}, saved=tmp_path, path=None, screen=Screen())
    assert again[0].right and again[0].to_json() == outcomes[1].to_json()


def study(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "case_studies.labels", *args],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_command_labels_saved_profiles(tmp_path: Path) -> None:
    profile_of(("stream_copy", 130_000, {})).save(tmp_path / "stream_copy_cuda.json")
    (tmp_path / labels.CEILINGS).write_text(json.dumps(H200.to_json()))
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text("[memory_bound]\ndram_throughput = 70\n")
    out = tmp_path / "labels.json"
    done = study(
        "--from-profiles", str(tmp_path), "--json", str(out), "--case", "stream_copy_cuda", "--thresholds",
        str(thresholds),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    assert document["cases"]["stream_copy_cuda"]["right"] is True
    assert document["thresholds"] == {"memory_bound.dram_throughput": 70.0}
    assert "stream_copy_cuda" in done.stdout and "memory_bound" in done.stdout and "development set" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--set", "training"), "no set 'training'; there are development, holdout, all"),
        (("--case", "nothing"), "no case 'nothing' in this set; there are scale_add_compiled"),
        (("--from-profiles", "nowhere"), "nowhere/ceilings.json"),
        (("--from-profiles", "a", "--save-profiles", "b"), "exclude each other"),
        (("--set", "development"), "torch finds no GPU: use --from-profiles"),
        (("--thresholds", "nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said(args: tuple[str, ...], says: str) -> None:
    done = study(*args)
    assert done.returncode == 2 and says in " ".join(done.stderr.replace("│", " ").split()), done.stderr
