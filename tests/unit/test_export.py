from __future__ import annotations

import gzip
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from made_profiles import HOSTILE, T, build, kernel, node, two_calls

from profiler_core.collect import chrome_trace
from profiler_core.export import UNATTRIBUTED, to_chrome_trace, to_folded
from profiler_core.profiles import KERNEL_COLUMNS, Profile, frame


@pytest.fixture
def profile() -> Profile:
    return two_calls()


def events(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text.decode("utf-8"), parse_constant=refuse)["traceEvents"]


def kernels_in(path: Path) -> list[dict[str, Any]]:
    return [e for e in events(path) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_our_reader_finds_the_same_kernels_in_a_trace(profile: Profile, tmp_path: Path, name: str) -> None:
    to_chrome_trace(profile, tmp_path / name)
    back = chrome_trace.read(tmp_path / name)
    ours = profile.kernels
    for column in ("name", "kind", "start_ns", "duration_ns"):
        assert back.kernels[column].tolist() == ours[column].tolist()
    assert back.kernels["device"].tolist() == [0] * 5
    assert back.kernels["stream"].tolist() == [7, 7, 9, 7, 7]
    assert back.kernels["correlation"].tolist() == ours["correlation"].fillna(0).tolist()
    assert back.kernels["registers"].tolist() == [32, 32, -1, 32, 32]
    assert back.kernels["grid_x"].tolist() == [2, 2, 0, 2, 2]
    assert set(back.kernels["process"]) == {4242}
    assert back.calls["start_ns"].tolist() == ours["launch_ns"].dropna().tolist()
    assert (back.iterations, back.partial, back.device_type) == (2, (), "cuda")


def test_a_kernel_in_a_trace_says_where_it_comes_from(profile: Profile, tmp_path: Path) -> None:
    to_chrome_trace(profile, tmp_path / "t.json", columns=["labels"])
    _, gemm, fused, _, copy = kernels_in(tmp_path / "t.json")
    expected = {
        "operator": "aten::mm", "nodes": ["mm"], "module": "h.0.attn", "source": "~/net/model.py:12",
        "launch": "extern_kernels.mm:1", "method": "correlation", "confidence": "high", "dram_read_bytes": 1.5e6,
        "labels": ["memory_bound", "l2_bound"], "precision": "fp32", "stream": 7,
    }  # fmt: skip
    assert {key: gemm["args"].get(key) for key in expected} == expected
    assert fused["args"]["nodes"] == ["mm", "add"]
    assert "dram_read_bytes" not in fused["args"]  # not measured: absent, not zero
    assert copy["args"]["reason"] == "no launch in the trace"
    assert "cname" in copy and "cname" not in gemm


def test_a_profile_writes_its_own_trace_and_stacks(profile: Profile, tmp_path: Path) -> None:
    profile.kernels["speed"] = [f"{rate:.0f} GB/s" for rate in range(5)]
    profile.to_chrome_trace(tmp_path / "t.json", columns=["labels", "speed"])
    profile.to_folded(tmp_path / "f.txt")
    assert [k["args"].get("speed") for k in kernels_in(tmp_path / "t.json")] == [f"{i} GB/s" for i in range(5)]
    assert kernels_in(tmp_path / "t.json")[1]["args"]["labels"] == ["memory_bound", "l2_bound"]
    assert sum(stacks(tmp_path / "f.txt").values()) == profile.total_ns


def test_times_in_a_trace_keep_their_nanoseconds(profile: Profile, tmp_path: Path) -> None:
    to_chrome_trace(profile, tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    assert '"ts": 1700000000123456.789, "dur": 1.001' in text


def test_an_arrow_leads_from_each_known_launch_to_its_kernel(profile: Profile, tmp_path: Path) -> None:
    to_chrome_trace(profile, tmp_path / "t.json")
    found = events(tmp_path / "t.json")
    starts = {e["id"]: e for e in found if e["ph"] == "s"}
    ends = {e["id"]: e for e in found if e["ph"] == "f"}
    assert len(starts) == 4 and set(starts) == set(ends)
    assert all((e["pid"], e["tid"]) == (4242, 77) for e in starts.values())
    assert {(e["pid"], e["tid"]) for e in ends.values()} == {(0, 7), (0, 9)}
    assert all(starts[key]["ts"] < ends[key]["ts"] for key in starts)


def test_one_launch_of_many_kernels_is_one_event(tmp_path: Path) -> None:
    replay = {"launch_ns": T, "correlation": 5}
    made = build([kernel("k", T + 1000 * i, 10, **replay) for i in range(1, 40)])
    to_chrome_trace(made, tmp_path / "t.json")
    found = events(tmp_path / "t.json")
    assert sum(e.get("cat") == "cuda_runtime" for e in found) == 1
    assert sum(e["ph"] == "f" for e in found) == 39


def test_calls_are_ranges_that_hold_their_launches_and_do_not_overlap(tmp_path: Path) -> None:
    ahead = {"iteration": 1, "launch_ns": T - 3_000}  # launched while the first call still runs
    made = build([kernel("a", T, 900, launch_ns=T - 9_000), kernel("b", T + 500, 900, stream=8, **ahead)])
    to_chrome_trace(made, tmp_path / "t.json")
    found = [e for e in events(tmp_path / "t.json") if "iteration#" in e["name"]]
    by_track: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found:
        by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(by_track) == 2
    for track in by_track.values():
        first, second = sorted(track, key=lambda e: e["ts"])
        assert first["ts"] + first["dur"] <= second["ts"]


def test_tracks_have_names(profile: Profile, tmp_path: Path) -> None:
    to_chrome_trace(profile, tmp_path / "t.json")
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events(tmp_path / "t.json") if e["ph"] == "M"}
    assert named["process_name", 0, 0] == "cuda:0"
    assert named["thread_name", 0, 9] == "stream 9"
    assert named["process_name", 4242, 0] == "process 4242"
    assert named["thread_name", 4242, 77] == "thread 77"


def test_kernels_of_a_cpu_are_on_their_thread(tmp_path: Path) -> None:
    where = {"device": "cpu", "stream": None, "launch_ns": None, "correlation": None}
    made = build([kernel("cpp_fused_add_0", T + i * 100, 50, iteration=i, **where) for i in range(2)])
    to_chrome_trace(made, tmp_path / "t.json")
    back = chrome_trace.read(tmp_path / "t.json")
    work = back.ranges[back.ranges["name"] == "cpp_fused_add_0"]
    assert work["start_ns"].tolist() == [T, T + 100]
    assert work["thread"].tolist() == [77, 77]
    assert (back.device_type, back.iterations) == ("cpu", 2)


def test_columns_that_the_profile_lacks_are_refused(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'label' in profile\.kernels; it has name, "):
        to_chrome_trace(profile, tmp_path / "t.json", columns=["label"])
    with pytest.raises(ValueError, match="no numeric column 'name'"):
        to_folded(profile, tmp_path / "f.txt", value="name")
    assert list(tmp_path.iterdir()) == []


def test_a_column_whose_name_an_argument_has_is_refused(profile: Profile, tmp_path: Path) -> None:
    profile.kernels["module"] = "mine"
    with pytest.raises(ValueError, match=r"'device', 'module': .*rename"):
        to_chrome_trace(profile, tmp_path / "t.json", columns=["device", "labels", "module"])
    assert list(tmp_path.iterdir()) == []


def test_one_column_may_be_given_by_its_name_and_no_argument_comes_twice(profile: Profile, tmp_path: Path) -> None:
    profile.kernels["tier"] = [f"tier {i}" for i in range(5)]
    to_chrome_trace(profile, tmp_path / "t.json", columns="tier")
    assert [k["args"]["tier"] for k in kernels_in(tmp_path / "t.json")] == profile.kernels["tier"].tolist()
    to_chrome_trace(profile, tmp_path / "t.json", columns=["tier", "tier", "family", "registers", "name"])

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    json.loads((tmp_path / "t.json").read_text(), object_pairs_hook=once)


def stacks(path: Path) -> dict[tuple[str, ...], int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    parts = [line.rpartition(" ") for line in lines]
    return {tuple(stack.split(";")): int(value) for stack, _, value in parts}


def test_folded_stacks_go_from_module_to_kernel(profile: Profile, tmp_path: Path) -> None:
    to_folded(profile, tmp_path / "f.txt")
    assert stacks(tmp_path / "f.txt") == {
        ("h", "0", "attn", "~/net/model.py:12", "aten::mm", "mm", "gemm"): 2_008,
        ("h", "0", "attn", "~/net/model.py:12", "mm+add", "fused"): 2_003,
        (UNATTRIBUTED, "no launch in the trace", "Memcpy HtoD"): 5,
    }


def test_folded_stacks_sum_to_the_total(tmp_path: Path) -> None:
    made = build([kernel(f"k{i % 7};", T + i, 2**53 + i, iteration=i % 2) for i in range(100)])  # no float holds these
    to_folded(made, tmp_path / "f.txt")
    assert sum(stacks(tmp_path / "f.txt").values()) == made.total_ns


def test_folded_stacks_of_a_counter_leave_out_what_was_not_measured(profile: Profile, tmp_path: Path) -> None:
    profile.kernels["dram_read_bytes"] = [9.0, 4.0, math.nan, 3.0, math.nan]
    to_folded(profile, tmp_path / "f.txt", value="dram_read_bytes")
    assert (tmp_path / "f.txt").read_text() == "h;0;attn;~/net/model.py:12;aten::mm;mm;gemm 7.0\n"


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_stay_valid(tmp_path: Path, name: str) -> None:
    rows = [kernel(name, T, 10, nodes=(name,), operator=name, graph=name), kernel("plain", T + 50, 11)]
    rows.append(kernel(name, T + 100, 12, nodes=(), method="none", reason=name, operator=name))
    made = build(rows, [node(name, graph=name, module_path=name, file=name, source=name), node("mm")])
    made.kernels["labels"] = [(name,), None, {name}]
    shown = name.replace("\ud800", "\ufffd")

    to_chrome_trace(made, tmp_path / "t.json", columns=["labels"])
    first = kernels_in(tmp_path / "t.json")[0]
    assert first["name"] == shown
    assert (first["args"]["nodes"], first["args"]["labels"]) == ([shown], [shown])
    assert chrome_trace.read(tmp_path / "t.json").kernels["name"].tolist() == [shown, "plain", shown]

    to_folded(made, tmp_path / "f.txt")
    found = stacks(tmp_path / "f.txt")
    assert sorted(found.values()) == [10, 11, 12]
    assert {stack[0] == UNATTRIBUTED for stack in found} == {True, False}


def test_nothing_is_left_behind_where_writing_fails(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_chrome_trace(profile, tmp_path / "t.json")
    before = (tmp_path / "t.json").read_bytes()
    monkeypatch.setattr("profiler_core.export._iteration_events", lambda profile: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_chrome_trace(profile, tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_no_output_names_user_host_or_environment(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/mnt/people/bob")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    profile.nodes.loc[1, "file"] = "/mnt/people/bob/m.py"
    to_chrome_trace(profile, tmp_path / "t.json")
    to_folded(profile, tmp_path / "f.txt")
    import platform

    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        for secret in ("alice", "bob", "hunter2", "SECRET_TOKEN", platform.node()):
            assert secret not in text


def test_memory_of_a_trace_does_not_grow_with_its_kernels(tmp_path: Path) -> None:
    import pandas as pd

    def peak(count: int) -> int:
        rows = frame([kernel("k" * 200, T + i, 1, launch_ns=T) for i in range(100)], KERNEL_COLUMNS)
        made = build([])
        made.kernels = pd.concat([rows] * (count // 100), ignore_index=True)
        tracemalloc.start()
        try:
            to_chrome_trace(made, tmp_path / "t.json")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # 20 times the batch of rows held at a time would be as many times the memory, were they all held.
    import profiler_core.export as export

    export._BATCH, kept = 500, export._BATCH
    try:
        assert peak(10_000) < 4 * peak(1_000)
    finally:
        export._BATCH = kept
