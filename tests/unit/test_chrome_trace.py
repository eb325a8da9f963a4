"""Reading Chrome traces: every spelling, exact times, and bad files that say what is wrong with them."""

from __future__ import annotations

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from profiler_core.attribute import windows
from profiler_core.collect import chrome_trace
from profiler_core.trace import Trace, TraceError


def event(category: str, name: str, ts: object, dur: object, **rest: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 42, "tid": 7, "ts": ts, "dur": dur, **rest}


def kernel(name: str = "k", ts: object = 20, dur: object = 5, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, pid=0, args={"device": 0, "stream": 7, "correlation": 3, **args})


OP = event("cpu_op", "aten::mm", 10, 9, args={"External id": 5, "Sequence number": 8})
CALL = event("cuda_runtime", "cudaLaunchKernel", 12, 2, args={"External id": 5, "correlation": 3})


def parse(*events: Any, **header: Any) -> Trace:
    return chrome_trace.parse(json.dumps({"schemaVersion": 1, **header, "traceEvents": list(events)}))


def row(frame: pd.DataFrame, index: int = 0) -> dict[str, Any]:
    return dict(frame.iloc[index])


def test_an_operator_its_launch_and_its_kernel() -> None:
    shape: dict[str, Any] = {"grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 1024}
    graph: dict[str, Any] = {"graph id": 11, "graph node id": 12, "External id": 5}
    trace = parse(OP, CALL, kernel(**shape, **graph))
    op, call, k = row(trace.ranges), row(trace.calls), row(trace.kernels)
    assert (op["name"], op["category"], op["start_ns"], op["end_ns"]) == ("aten::mm", "op", 10_000, 19_000)
    assert (op["process"], op["thread"], op["external_id"], op["sequence"]) == (42, 7, 5, 8)
    assert (call["name"], call["correlation"], call["external_id"], call["end_ns"]) == (
        "cudaLaunchKernel",
        3,
        5,
        14_000,
    )
    assert (k["kind"], k["device"], k["stream"], k["start_ns"], k["duration_ns"]) == ("kernel", 0, 7, 20_000, 5_000)
    assert (k["correlation"], k["external_id"], k["graph"], k["graph_node"]) == (3, 5, 11, 12)
    assert [k[f"grid_{axis}"] for axis in "xyz"] == [4, 2, 1]
    assert [k[f"block_{axis}"] for axis in "xyz"] == [128, 1, 1]
    assert (k["registers"], k["shared_dynamic"], k["shared_static"]) == (32, 1024, -1)
    assert k["process"] == 42, "a kernel is of the process that launched it; the file has the device there"
    assert (trace.device_type, trace.partial, trace.notes) == ("cuda", (), ())


def test_the_spellings_of_2021() -> None:
    trace = parse(
        event("Operator", "aten::mm", "10", "9", tid="77", args={"external id": 5}),
        event("Runtime", "cudaLaunchKernel", 12, 2, tid="77", args={"external id": "5", "correlation": "3"}),
        event("Kernel", "k", "20.5", 5, pid=0, args={"device": "0", "stream": "7", "correlation": 3, "external id": 5}),
        event("Memcpy", "Memcpy HtoD", 30, 1, pid=0, args={"bytes": 4096}),
        event("Memset", "Memset", 32, 1, pid=0, args={"bytes": 64}),
    )
    assert row(trace.ranges)["thread"] == row(trace.calls)["thread"] == 77
    assert row(trace.calls)["correlation"] == 3 and row(trace.calls)["external_id"] == 5
    assert trace.kernels["kind"].tolist() == ["kernel", "memcpy", "memset"]
    assert trace.kernels["bytes"].tolist() == [-1, 4096, 64]
    k = row(trace.kernels)
    assert (k["start_ns"], k["device"], k["stream"], k["external_id"]) == (20_500, 0, 7, 5)
    assert trace.partial == ()


def test_a_thread_with_a_name_has_one_number_in_every_file() -> None:
    first = parse(event("cpu_op", "a", 1, 1, tid="autograd"), event("cpu_op", "b", 2, 1, tid="main"), OP)
    second = parse(event("cpu_op", "b", 1, 1, tid="main"), event("cpu_op", "a", 2, 1, tid="autograd"))
    threads = {name: thread for name, thread in zip(first.ranges["name"], first.ranges["thread"], strict=True)}
    assert len(set(threads.values())) == 3
    assert dict(zip(second.ranges["name"], second.ranges["thread"], strict=True)).items() <= threads.items()
    assert first.meta["threads"][threads["a"]] == "autograd"


def test_begin_and_end_pairs_nest_per_thread() -> None:
    def mark(ph: str, ts: object, name: str = "", tid: int = 7, **rest: Any) -> dict[str, Any]:
        return {"ph": ph, "ts": ts, "pid": 42, "tid": tid, **({"name": name, "cat": "cpu_op"} if name else {}), **rest}

    trace = parse(
        mark("B", 10, "outer", args={"External id": 1}),
        mark("B", "11.25", "inner"),
        mark("B", 11, "elsewhere", tid=8),
        mark("E", "12.750"),
        mark("E", 15),
        mark("E", 20, tid=8),
        mark("E", 21, tid=8),
        mark("B", 30, "cut off"),
    )
    found = {r["name"]: (r["start_ns"], r["end_ns"], r["thread"]) for _, r in trace.ranges.iterrows()}
    assert found == {"outer": (10000, 15000, 7), "inner": (11250, 12750, 7), "elsewhere": (11000, 20000, 8)}
    assert trace.ranges["external_id"][trace.ranges["name"] == "outer"].item() == 1
    assert "2 events dropped: event 6 (''): it ends what never began; event 7 ('cut off')" in trace.partial[0]


def test_a_bare_list_and_autograds_own_export() -> None:
    assert len(chrome_trace.parse(json.dumps([OP, CALL, kernel()])).kernels) == 1
    on_cpu = {"name": "aten::mm", "ph": "X", "ts": 10.5, "dur": 3, "tid": 1, "pid": "CPU functions", "args": {}}
    on_gpu = {"name": "gemm", "ph": "X", "ts": 12, "dur": 1, "tid": 2, "pid": "CUDA functions", "args": {}}
    arrow = {"name": "aten::mm", "ph": "s", "ts": 10, "tid": 1, "pid": "CPU functions", "cat": "cpu_to_cuda", "id": 0}
    trace = chrome_trace.parse(json.dumps([on_cpu, arrow, on_gpu]))
    assert row(trace.ranges)["category"] == "op" and row(trace.ranges)["start_ns"] == 10_500
    assert row(trace.kernels)["name"] == "gemm" and row(trace.kernels)["device"] == 2


def test_what_torchs_own_profilers_export_today(tmp_path: Path) -> None:
    import torch

    with torch.autograd.profiler.profile() as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert profiler.function_events is not None
    profiler.function_events.export_chrome_trace(str(tmp_path / "legacy.json"))
    profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
    for name in ("legacy.json", "kineto.json"):
        assert "aten::mm" in chrome_trace.read(tmp_path / name).ranges["name"].tolist()


def test_annotations_on_the_device_are_ranges_of_a_stream_not_kernels() -> None:
    step, on_device = "ProfilerStep#3", {"pid": 1, "tid": 20}
    annotations = [event("user_annotation", step, 1, 90), event("gpu_user_annotation", step, 5, 80, **on_device)]
    trace = parse(*annotations, event("user_annotation", "ProfilerStep#4", 100, 90), OP, CALL, kernel())
    device = row(trace.ranges[trace.ranges["category"] == "device"])
    assert (device["thread"], device["device"], device["stream"]) == (-1, 1, 20)
    assert len(trace.kernels) == 1
    assert trace.iterations == 2


def test_our_own_iterations_go_before_the_profilers_steps() -> None:
    steps = [event("user_annotation", f"ProfilerStep#{i}", 10 * i, 9) for i in range(3)]
    assert parse(*steps).iterations == 3
    ours = [event("cpu_op", f"fxopt::iteration#{i}", 10 * i, 9) for i in range(2)]
    assert parse(*steps, *ours).iterations == 2
    assert parse(OP).iterations == 0


@pytest.mark.parametrize("base", [0, 5_114_187_931_619, 1_700_000_000_000_000])
def test_times_are_exact_to_the_nanosecond(base: int) -> None:
    """A float of 1.7e15 us is good to 0.25 us only."""
    numbers = random.Random(base)
    times = sorted(base * 1000 + numbers.randrange(10**9) for _ in range(200))
    spelled = [f"{ns // 1000}.{ns % 1000:03d}" for ns in times]
    events = ",".join(json.dumps(event("cpu_op", "x", "TS", 1)).replace('"TS"', s) for s in spelled)
    assert chrome_trace.parse(f"[{events}]").ranges["start_ns"].tolist() == times
    shorter = [str(Decimal(s).normalize()) for s in spelled]  # as other writers do: 12.25, 1E+3
    assert parse(*(event("cpu_op", "x", s, 1) for s in shorter)).ranges["start_ns"].tolist() == times


def test_negative_times_and_further_decimals() -> None:
    trace = parse(event("cpu_op", "a", "-0.5", 1), event("cpu_op", "b", "1.00049", "0.0006"))
    assert trace.ranges["start_ns"].tolist() == [-500, 1000]
    assert row(trace.ranges, 1)["end_ns"] == 1001


def test_text_bytes_gzip_and_parsed_json_read_alike(tmp_path: Path) -> None:
    document = {"traceEvents": [OP, CALL, kernel('naïve<int>, "λ"'), kernel(ts=30.125)]}
    text = json.dumps(document, ensure_ascii=False)
    (tmp_path / "gzipped.json").write_bytes(gzip.compress(text.encode()))  # named as if it were plain
    (tmp_path / "plain.gz").write_bytes(text.encode("utf-8-sig"))
    members = gzip.compress(text[:90].encode()) + gzip.compress(text[90:].encode()) + b"\0" * 16
    expected = chrome_trace.parse(text)
    for trace in (
        chrome_trace.parse(document),
        chrome_trace.parse(text.encode()),
        chrome_trace.parse(members),
        chrome_trace.read(tmp_path / "gzipped.json"),
        chrome_trace.read(tmp_path / "plain.gz"),
    ):
        pd.testing.assert_frame_equal(trace.kernels, expected.kernels)
        pd.testing.assert_frame_equal(trace.calls, expected.calls)
        pd.testing.assert_frame_equal(trace.ranges, expected.ranges)
        assert trace.partial == ()


def test_long_names_with_commas_and_quotes_are_kept_whole() -> None:
    name = 'void kernel<int, "x", λ>(\\)\n,' * 200
    assert len(name) > 5000
    trace = parse(OP, CALL, kernel(name), kernel(name, ts=40))
    assert trace.kernels["name"].tolist() == [name, name]
    assert trace.kernels["name"][0] is trace.kernels["name"][1], "a million kernels share their few names"


def test_events_without_a_usable_time_are_dropped_and_counted() -> None:
    trace = parse(
        OP,
        kernel("nan", dur=float("nan")),
        kernel("infinite", ts=float("inf")),
        kernel("negative", dur=-1),
        {"ph": "X", "cat": "kernel", "name": "no ts", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "no dur", "ts": 1},
        kernel("text", ts="soon"),
        kernel("far", ts=10**30),
        kernel("farther", ts="1e999999999"),
        "not an event",
        kernel("sound"),
    )
    assert trace.kernels["name"].tolist() == ["sound"]
    (message,) = trace.partial
    assert message.startswith("9 events dropped: event 1 ('nan'): its time 'NaN' is no number; event 2 ('infinite')")
    assert "and 6 more" in message


def test_values_beyond_64_bits_become_unknown() -> None:
    huge = 10_159_970_886_766_084_423
    trace = parse(
        OP, CALL, kernel(correlation=huge, grid=[2**40, 1, 1], stream=float("nan")), kernel(queued=huge, ts=30)
    )
    assert trace.kernels["correlation"].tolist() == [0, 3]
    assert trace.kernels["grid_x"].tolist() == [0, 0]
    assert trace.kernels["stream"].tolist() == [-1, 7]
    (message,) = trace.partial
    assert message.startswith("3 values that do not fit their column are set to unknown: stream of event 2 ('NaN'), ")


@pytest.mark.parametrize("bad", [None, 7, "x", [1, 2], {"a": 1}, [[1], [2], [3]]])
def test_arguments_of_any_type_crash_nothing(bad: Any) -> None:
    args = dict.fromkeys(("grid", "block", "correlation", "device", "stream", "External id", "bytes"), bad)
    weird = event("kernel", bad, 1, 1, args=args)
    trace = parse(OP, weird, kernel(), event("kernel", "n", 2, 1, args=bad), event(bad, "n", 2, 1), {**OP, "tid": bad})
    assert len(trace.kernels) == 3
    assert len(trace.ranges) == 2


def test_every_prefix_of_a_file_yields_its_whole_events_or_an_error() -> None:
    events = [OP, CALL, *(kernel(f"kernel λ {i}", ts=20 + i, dur="1.500") for i in range(5))]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, ensure_ascii=False)
    complete = [text.index(json.dumps(e, ensure_ascii=False)) + len(json.dumps(e, ensure_ascii=False)) for e in events]
    for end in range(len(text)):
        whole = sum(end >= position for position in complete)
        data = text[:end].encode()
        if not whole:
            with pytest.raises(TraceError, match=r"byte \d+|it is empty"):
                chrome_trace.parse(data)
            continue
        trace = chrome_trace.parse(data)
        assert len(trace.ranges) + len(trace.calls) + len(trace.kernels) == whole
        assert f"of {len(data)}, after {whole} whole events" in trace.partial[0]
        assert "export the trace again" in trace.partial[0]


def test_every_prefix_of_a_gzipped_file_likewise() -> None:
    numbers = random.Random(0)  # incompressible, so that the prefixes differ
    kernels = [kernel(f"k{numbers.random()}", ts=20 + i) for i in range(40)]
    data = gzip.compress(json.dumps({"traceEvents": [OP, CALL, *kernels]}).encode())
    found: list[int] = []
    for end in range(2, len(data), 7):
        try:
            trace = chrome_trace.parse(data[:end])
        except TraceError as error:
            assert "gzip stream ends early" in str(error) and not found
            continue
        assert f"ends early, after {end} bytes" in trace.partial[0] and "decompressed text" in trace.partial[0]
        found.append(len(trace.kernels))
    assert found == sorted(found) and found[-1] >= 39
    assert chrome_trace.parse(data).partial == ()


def test_a_gzip_stream_damaged_inside_yields_what_lies_before() -> None:
    kernels = [kernel(f"k{random.Random(i).random()}", ts=20 + i) for i in range(20_000)]
    data = bytearray(gzip.compress(json.dumps({"traceEvents": [OP, *kernels]}).encode()))
    assert len(data) > 1 << 18
    middle = len(data) // 2
    before = len(chrome_trace.parse(bytes(data[: middle - (1 << 14)])).kernels)
    data[middle : middle + 64] = b"\xff" * 64
    trace = chrome_trace.parse(bytes(data))
    assert "gzip stream is damaged" in trace.partial[0]
    assert f"after {len(trace.kernels) + 1} whole events" in trace.partial[1]
    assert 5_000 < before <= len(trace.kernels) < 20_000


def test_a_damaged_event_costs_only_itself() -> None:
    good = [json.dumps(kernel(f"k{i}", ts=20 + i)) for i in range(6)]
    good[2] = good[2].replace('"dur": 5', '"dur": ?')
    good[4] = good[4].replace('"name": "k4"', '"name": "k"4"')  # a quote that its writer did not escape
    trace = chrome_trace.parse('{"deviceProperties": [{"id": 0 "x"}], "traceEvents": [' + ",".join(good) + "]}")
    assert trace.kernels["name"].tolist() == ["k0", "k1", "k3", "k5"]
    assert trace.partial[0].startswith("3 damaged stretches of the file were skipped, at byte 1, ")


def test_a_bandwidth_that_was_printed_as_inf_costs_no_kernel() -> None:
    text = json.dumps({"traceEvents": [OP, kernel(bandwidth="A"), kernel("b", ts=30, x="B"), kernel("c", dur="C")]})
    text = text.replace('"A"', "inf").replace('"B"', "-nan").replace('"C"', "nan")
    trace = chrome_trace.parse(text)
    assert trace.kernels["name"].tolist() == ["k", "b"]
    assert "event 3 ('c'): its time 'NaN' is no number" in trace.partial[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("SQLite format 3\0", "SQLite database"),
        ("<html>", "it is not JSON"),
        ("[]", "holds no events"),
        ('{"traceEvents": []}', "holds no events"),
        ('{"schema": "1.0", "nodes": []}', "execution trace"),
        ('{"segments": [], "device_traces": []}', "snapshot of CUDA memory"),
        ('{"preToPost": {}, "postToPre": {}}', "provenance mapping"),
        ('{"results": 1}', r"no list 'traceEvents' \(its keys: results\)"),
        ('{"traceEvents": [{"ph": "X", "cat": "devtools", "ts": 1, "dur": 1}]}', "something else .*devtools"),
        ('[{"ph": "X", "cat": "kernel", "ts": null, "dur": 1}]', "1 events dropped: event 0"),
        ("[" * 100_000, "breaks off"),
        ("{" * 100_000, "breaks off"),
    ],
)
def test_what_is_no_trace_says_why(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(TraceError, match=rf"run\.json.*{why}"):
        chrome_trace.read(tmp_path / "run.json")


def test_a_trace_without_kernels_says_so() -> None:
    trace = parse(OP)
    assert trace.device_type == "cpu"
    assert trace.notes[0] == "no activity of a GPU: the operators on the CPU count as kernels"
    cut = chrome_trace.parse(json.dumps([OP, OP])[:-10])
    assert cut.partial and cut.notes[0].startswith("no activity of a GPU in what is left of the file: the operators")
    trace = parse(OP, CALL)
    assert trace.device_type == "cpu" and "no kernels, though 1 calls of the GPU's API" in trace.notes[0]


def test_categories_that_are_not_read_are_counted() -> None:
    trace = parse(OP, CALL, kernel(), event("python_function", "f", 1, 1), event("cuda_sync", "s", 1, 1))
    assert trace.notes == ("events that are not read: 1 python_function, 1 cuda_sync",)


def test_a_merged_file_keeps_its_processes_apart() -> None:
    def launch(process: int, correlation: int, ts: int) -> dict[str, Any]:
        return event("cuda_runtime", "cudaLaunchKernel", ts, 1, pid=process, args={"correlation": correlation})

    kernels = [
        kernel("of 1", correlation=5),
        kernel("of 2", ts=21, correlation=6),
        kernel("either", ts=22, correlation=9),
    ]
    trace = parse(launch(1, 5, 1), launch(2, 6, 2), launch(1, 9, 3), launch(2, 9, 4), *kernels)
    assert trace.kernels["process"].tolist() == [1, 2, 0]


def test_what_is_known_of_the_run() -> None:
    gpu = {
        "id": 3,
        "name": "NVIDIA H200",
        "computeMajor": 9,
        "computeMinor": 0,
        "numSms": 132,
        "regsPerMultiprocessor": 65536,
    }
    run = {"backend": "nccl", "rank": 1, "world_size": 8}
    trace = parse(
        *(OP, CALL, kernel()),
        deviceProperties=[gpu],
        distributedInfo=run,
        baseTimeNanoseconds=1_719_853_884_000_000_000,
        with_stack=1,
        cupti_version=28,
        some_job_token="secret",
    )
    assert trace.meta["devices"] == {
        3: {"name": "NVIDIA H200", "capability": (9, 0), "sm_count": 132, "regs_per_sm": 65536}
    }
    assert trace.meta["base_ns"] == 1_719_853_884_000_000_000
    assert trace.kernels["start_ns"][0] == 20_000, "on the file's own clock"
    assert (trace.meta["rank"], trace.meta["world_size"], trace.meta["with_stack"]) == (1, 8, True)
    assert trace.meta["versions"] == {"cupti_version": 28}
    assert "secret" not in str(trace.meta)


@pytest.mark.parametrize(
    ("wrong", "left"),
    [
        ({"computeMajor": None}, {0: {"sm_count": 132}}),
        ({"computeMajor": "x", "name": 5}, {0: {"sm_count": 132}}),
        ({"computeMinor": 1.5}, {0: {"sm_count": 132}}),
        ({"numSms": 10**20}, {0: {"capability": (9, 0)}}),
        ({"id": [1]}, {}),
    ],
)
def test_a_damaged_property_of_a_device_is_left_out_and_said(wrong: dict[str, Any], left: dict[int, Any]) -> None:
    trace = parse(OP, CALL, kernel(), deviceProperties=[{"id": 0, "computeMajor": 9, "numSms": 132, **wrong}])
    assert trace.meta["devices"] == left
    assert trace.notes[0].startswith(f"deviceProperties, entry 0: no usable {next(iter(wrong))}")


@pytest.mark.parametrize("digits", [11, 20, 5000])
@pytest.mark.parametrize("prefix", ["fxopt::iteration#", "ProfilerStep#"])
def test_a_number_beyond_any_iteration_is_none(prefix: str, digits: int) -> None:
    trace = parse(OP, CALL, kernel(), event("user_annotation", prefix + "9" * digits, 1, 50))
    assert trace.iterations == 0
    assert len(windows.find(trace).number) == 0


@pytest.mark.parametrize("rest", [[CALL], [event("user_annotation", "step", 1, 50)]])
def test_a_damaged_trace_without_kernels_and_operators_is_an_error(rest: list[dict[str, Any]]) -> None:
    whole = json.dumps({"traceEvents": [*rest, kernel()]})
    with pytest.raises(TraceError, match=r"neither a kernel nor an operator is left.*breaks off at byte"):
        chrome_trace.parse(whole[:-40])
    with pytest.raises(TraceError, match=r"neither a kernel nor an operator is left.*1 events dropped"):
        parse(*rest, kernel(dur=-1))
    assert parse(*rest, OP, kernel(dur=-1)).partial, "operators alone are a partial trace of the CPU"


def test_what_lasts_longer_than_104_days_is_dropped_and_said() -> None:
    trace = parse(OP, CALL, kernel(), kernel("long", dur=2**53 // 1000 + 1))
    assert trace.kernels["name"].tolist() == ["k"]
    assert "event 3 ('long'): its duration is over 2**53 ns (104 days)" in trace.partial[0]
