"""load(): files of other people's runs, in any order, under any name, whole or not."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import profiler_core
from profiler_core import loading
from profiler_core.collect.provenance import ProvenanceFormatError
from profiler_core.counter_table import CounterError
from profiler_core.profiles import Profile, ProfileFormatError
from profiler_core.trace import TraceError

SECRET = "hunter2-token"
PID = 77


# --- small files of every kind ---------------------------------------------------------------------------------------


def chrome(
    path: Path,
    names: Sequence[str] = ("add_kernel", "mul_kernel"),
    operators: Sequence[str] = (),
    pid: int = PID,
    **more: Any,
) -> Path:
    """A trace of torch.profiler: an operator and its kernel for each name, on an H200."""
    events: list[dict[str, Any]] = []
    operators = operators or [f"aten::op{i}" for i in range(len(names))]
    for i, (name, operator) in enumerate(zip(names, operators, strict=True)):
        t, gpu = 100.0 * i, {"device": 0, "stream": 7, "correlation": i + 1, "External id": i + 50}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": operator, "pid": pid, "tid": 1, "ts": t, "dur": 50},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": pid,
                "tid": 1,
                "ts": t + 10,
                "dur": 5,
            },
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": t + 20, "dur": 10 + i, "args": gpu},
        ]
        events[-3]["args"] = {"External id": i + 50}
        events[-2]["args"] = {"External id": i + 50, "correlation": i + 1}
    device = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}
    text = json.dumps({"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events, **more})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def nsys(
    path: Path, names: Sequence[str] = ("add_kernel", "mul_kernel"), **tables: Sequence[Mapping[str, Any]]
) -> Path:
    pid = PID << 24
    kernels = [
        {"start": 100 * i + 50, "end": 100 * i + 60, "correlationId": i, "globalPid": pid, "demangledName": i}
        for i in range(len(names))
    ]
    everything: dict[str, Sequence[Mapping[str, Any]]] = {
        "StringIds": [{"id": i, "value": name} for i, name in enumerate((*names, "cudaLaunchKernel"))],
        "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            {"start": 100 * i, "end": 100 * i + 9, "correlationId": i, "globalTid": pid | 1, "nameId": len(names)}
            for i in range(len(names))
        ],
        **tables,
    }
    with sqlite3.connect(path) as connection:
        for table, rows in everything.items():
            if rows:
                columns = list(rows[0])
                connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})"
                connection.executemany(insert, [list(row.values()) for row in rows])
    connection.close()
    return path


def ncu(
    path: Path,
    names: Sequence[str] = ("add_kernel", "mul_kernel"),
    values: Sequence[str] = ("10", "20"),
    pid: int = PID,
) -> Path:
    rows = [f'"{i}","{pid}","{name}","{value}"' for i, (name, value) in enumerate(zip(names, values, strict=True))]
    head = ['"ID","Process ID","Kernel Name","sm__inst_executed.sum"', '"","","","inst"']
    path.write_text("\n".join(["==PROF== Connected to process", *head, *rows]) + "\n")
    return path


MAPPING = {
    "version": 2.0,
    "preToPost": {},
    "postToPre": {},
    "cppCodeToPost": {"triton_poi_fused_add_0:1": ["add"], "triton_poi_fused_mul_1:2": ["mul"]},
    "postToCppCode": {},
}
GENERATED = ("triton_poi_fused_add_0", "triton_poi_fused_mul_1")
CODE = """\
def call(args):
    # [Provenance debug handles] triton_poi_fused_add_0:1
    triton_poi_fused_add_0.run(a, stream=s)
    # [Provenance debug handles] triton_poi_fused_mul_1:2
    triton_poi_fused_mul_1.run(a, stream=s)
"""


def debug_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "output_code.py").write_text(CODE)
    (path / "inductor_provenance_tracking_node_mappings.json").write_text(json.dumps(MAPPING))
    return path


def torch_trace(path: Path) -> Path:
    """A log of TORCH_TRACE with one compile."""

    def record(payload: str, **header: Any) -> str:
        header |= {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}
        header["has_payload"] = hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
        body = "".join(f"\n\t{line}" for line in payload.split("\n"))
        return f"V1129 16:53:29.059000 446 torch/x.py:1] {json.dumps(header)}{body}\n"

    mapping = {"name": "inductor_provenance_tracking_node_mappings", "encoding": "json"}
    text = record(CODE.rstrip("\n"), inductor_output_code={"filename": "/tmp/c.py"})
    text += record(json.dumps(MAPPING), artifact=mapping)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def saved(path: Path) -> Path:
    profiler_core.load(chrome(path.parent / "saved from.json")).save(path)
    return path


def squeezed(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def made(path: Path) -> Path:
        make(path)
        path.write_bytes(gzip.compress(path.read_bytes()))
        return path

    return made


# --- what a file is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["as it should be", "x.txt", "x.csv", "x.json", "x.sqlite", "x.nsys-rep", "no_suffix"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (chrome, "kineto"),
        (squeezed(chrome), "kineto"),
        (nsys, "nsys"),
        (ncu, "counters"),
        (torch_trace, "provenance"),
        (squeezed(torch_trace), "provenance"),
        (saved, "profile"),
        (squeezed(saved), "profile"),
    ],
    ids=["chrome", "chrome.gz", "nsys", "ncu", "log", "log.gz", "saved", "saved.gz"],
)
def test_the_contents_say_what_a_file_is_whatever_its_name(tmp_path: Path, make, kind: str, name: str) -> None:
    assert loading.sort_of(make(tmp_path / name)) == kind


def test_further_spellings_of_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text, kind in [
        ('\ufeff"ID","Process ID"', "counters"),
        ("==ERROR== ERR_NVGPUCTRPERM", "counters"),
        ('\n\n  [{"ph": "X"}]', "kineto"),
        ('{"schema_version": 2, "kernels": {}}', "profile"),
        ('{"traceEvents": [], "schema_version": 2}', "kineto"),
        ("I0101 00:00:00.000 1 torch/x.py:1] {}", "provenance"),
    ]:
        path.write_text(text, encoding="utf-8")
        assert loading.sort_of(path) == kind, text
    assert loading.sort_of(tmp_path) == "provenance"
    output_before = tmp_path / "printed.csv"
    output_before.write_text("loss 0.1\n" + ncu(tmp_path / "table").read_text())
    assert loading.sort_of(output_before) == "counters"
    report = tmp_path / "x.ncu-rep"
    report.write_bytes(b"NVR\0\1\2")
    assert loading.sort_of(report) == "counters"


@pytest.mark.parametrize("contents", [b"\x00\x01\xff\xfe" * 99, b"\x7fELF", b"some text", b"\x80\x04pickle"])
def test_what_is_none_of_them_is_refused_with_its_name_and_what_there_might_be(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "thing.bin"
    path.write_bytes(contents)
    with pytest.raises(TraceError, match=r"thing\.bin: not a file that is known here .*Chrome trace"):
        profiler_core.load(path)


def test_a_missing_an_empty_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.json: there is no such file"):
        profiler_core.load(tmp_path / "absent.json")
    for name in ("empty.json", "empty.sqlite", "empty.csv"):
        (tmp_path / name).touch()
        with pytest.raises(TraceError, match=rf"{name}: the file is empty; record it again"):
            profiler_core.load(tmp_path / name)
    with pytest.raises(TraceError, match="no files were given"):
        profiler_core.load()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ProvenanceFormatError, match=r"folder: no output_code\.py .*TORCH_COMPILE_DEBUG=1"):
        profiler_core.load(tmp_path / "folder")


def test_paths_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="an empty path was given"):
        profiler_core.load("")
    with pytest.raises(TraceError, match=r"xxx: cannot be read \(.*too long.*\): check the path"):
        profiler_core.load(tmp_path / ("x" * 5000))


def test_a_folder_that_cannot_be_listed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Path, pattern: str) -> Any:
        raise PermissionError(13, "Permission denied", str(self / "inner"))

    monkeypatch.setattr(Path, "rglob", gone)
    with pytest.raises(TraceError, match=r"inner: cannot be read \(Permission denied\): check the path"):
        profiler_core.load(tmp_path)


def test_a_gzipped_profile_is_read(tmp_path: Path) -> None:
    assert profiler_core.load(squeezed(saved)(tmp_path / "p.json.gz")).total_ns == 21_000


def test_a_chip_that_is_not_known_is_refused_also_without_counters(tmp_path: Path) -> None:
    for files in ([chrome(tmp_path / "t.json")], [tmp_path / "t.json", ncu(tmp_path / "c.csv")]):
        for chip in ("ZZ", ""):
            with pytest.raises(TraceError, match=rf"chip='{chip}': .*known: GA100, .*GH100"):
                profiler_core.load(*files, chip=chip)


def test_names_may_be_texts(tmp_path: Path) -> None:
    assert profiler_core.load(str(chrome(tmp_path / "t.json"))).total_ns == 21_000


# --- joined ----------------------------------------------------------------------------------------------------------


def essence(profile: Profile) -> list[Any]:
    """What must not depend on the order of the files."""
    rows = profile.window
    return [
        profile.total_ns,
        rows[["name", "duration_ns", "graph", "launch", "nodes", "method"]].to_numpy().tolist(),
        rows["instructions"].tolist() if "instructions" in rows else None,
        profile.iterations,
        sorted(profile.notes),
    ]


@pytest.mark.parametrize("provenance", [torch_trace, debug_folder])
def test_trace_counters_and_provenance_join_in_any_order(tmp_path: Path, provenance) -> None:
    files = [chrome(tmp_path / "t.json.gz", GENERATED, GENERATED), ncu(tmp_path / "c.csv", GENERATED)]
    files.append(provenance(tmp_path / "compile"))
    found = [profiler_core.load(*order) for order in permutations(files)]
    assert all(essence(profile) == essence(found[0]) for profile in found[1:])
    rows = found[0].window
    assert rows["instructions"].tolist() == [10.0, 20.0]
    assert rows["nodes"].tolist() == [("add",), ("mul",)] and set(rows["method"]) == {"fusion_map"}


def test_the_captures_join_in_any_order(shared: Path) -> None:
    folder = shared / "captures" / "h200_sdpa"
    kineto, nsys_file, csv = (folder / name for name in ("kineto.trace.json.gz", "nsys.sqlite", "ncu_raw.csv"))
    for order in permutations((kineto, nsys_file, csv)):
        profile = profiler_core.load(*order)
        first = next(path for path in order if path != csv)
        assert profile.environment["source"] == ("kineto" if first == kineto else "nsys")
        assert (len(profile.window), profile.environment["device_name"]) == (22, "NVIDIA H200")
        assert set(profile.window["counters"]) == {"measured"} and profile.window["gpu_time"].notna().all()
        other = next(path for path in order if path not in (csv, first))
        said = f"{other.name}: 22 of 22 kernels found in the same order, 22 of them with the same operator"
        assert said in profile.notes


def test_two_tools_agree_on_the_nodes_of_a_replayed_graph(shared: Path) -> None:
    folder = shared / "captures" / "h200_graph"
    profile = profiler_core.load(
        folder / "nsys_node.sqlite", folder / "torch_trace.log.gz", folder / "kineto.trace.json.gz"
    )
    assert profile.attributed_share == 1.0
    (said,) = [note for note in profile.notes if "same order" in note]
    assert "44 of 44 kernels found" in said and said.endswith("42 of 42 with the same nodes")


def test_a_folder_of_torch_trace_logs_is_the_logs(shared: Path, tmp_path: Path) -> None:
    capture = shared / "captures" / "h200_dynamic"
    folder = tmp_path / "torch_trace"
    folder.mkdir()
    log = folder / "dedicated_log_torch_trace_abc.log"
    log.write_bytes(gzip.decompress((capture / "torch_trace.log.gz").read_bytes()))
    found = profiler_core.load(capture / "kineto.trace.json.gz", folder)
    assert found.attributed_share == 1.0 and set(found.window["graph"]) == {"0/0", "0/1"}
    assert essence(found) == essence(profiler_core.load(log, capture / "kineto.trace.json.gz"))


def test_a_saved_profile_takes_counters(tmp_path: Path) -> None:
    profile = profiler_core.load(ncu(tmp_path / "c.csv"), saved(tmp_path / "p.json"))
    assert profile.window["instructions"].tolist() == [10.0, 20.0]
    profile.save(tmp_path / "again.json")
    pd.testing.assert_frame_equal(profiler_core.load(tmp_path / "again.json").kernels, profile.kernels)


def test_several_tables_complete_each_other(tmp_path: Path) -> None:
    first = ncu(tmp_path / "a.csv")
    second = ncu(tmp_path / "b.csv", values=("0.5", "0.25"))
    second.write_text(second.read_text().replace("sm__inst_executed.sum", "smsp__issue_active.avg.pct_of_peak"))
    text = second.read_text().replace("pct_of_peak", "pct_of_peak_sustained_active").replace('"inst"', '"%"')
    second.write_text(text)
    rows = profiler_core.load(chrome(tmp_path / "t.json"), first, second).window
    assert rows["instructions"].tolist() == [10.0, 20.0] and rows["issue_active"].tolist() == [0.5, 0.25]


def test_kernels_are_compared_by_name_in_order(tmp_path: Path) -> None:
    one = profiler_core.load(chrome(tmp_path / "a.json", ("a", "b", "c")))
    other = profiler_core.load(chrome(tmp_path / "b.json", ("a", "c")))
    both = loading.compare(one, other)
    assert both["name"].tolist() == ["a", "b", "c"]
    assert both["name_other"].isna().tolist() == [False, True, False]
    assert both["duration_ns_other"].dropna().tolist() == [10_000, 11_000]
    assert both["operator_other"].dropna().tolist() == ["aten::op0", "aten::op1"]
    joined = profiler_core.load(tmp_path / "a.json", tmp_path / "b.json")
    assert "b.json: 2 of 3 kernels found in the same order, 1 of them with the same operator" in "\n".join(joined.notes)


def test_traces_of_the_same_name_are_both_read(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    chrome(tmp_path / "t.json"), chrome(tmp_path / "other" / "t.json")
    profile = profiler_core.load(tmp_path / "t.json", tmp_path / "other" / "t.json")
    assert any(note.startswith("t.json: 2 of 2 kernels") for note in profile.notes) and profile.total_ns == 21_000


# --- what does not go together ---------------------------------------------------------------------------------------


def test_counters_and_provenance_alone_have_no_times(tmp_path: Path) -> None:
    files = [ncu(tmp_path / "c.csv"), debug_folder(tmp_path / "d")]
    with pytest.raises(TraceError, match=r"none of .*c\.csv, .*d holds kernels with times: add the trace"):
        profiler_core.load(*files)


def test_a_saved_profile_stands_alone(tmp_path: Path) -> None:
    profile, trace = saved(tmp_path / "p.json"), chrome(tmp_path / "t.json")
    for files in ((profile, trace), (trace, profile), (profile, profile)):
        with pytest.raises(TraceError, match="a saved profile has kernels of its own: load it alone"):
            profiler_core.load(*files)


def test_counters_need_a_known_gpu(tmp_path: Path) -> None:
    csv = ncu(tmp_path / "c.csv")
    nameless = chrome(tmp_path / "t.json", deviceProperties=[])
    with pytest.raises(TraceError, match=r"c\.csv: the trace does not say which GPU this is: give chip="):
        profiler_core.load(nameless, csv)
    assert profiler_core.load(nameless, csv, chip="GH100").window["instructions"].tolist() == [10.0, 20.0]
    old = chrome(
        tmp_path / "old.json", deviceProperties=[{"id": 0, "name": "P100", "computeMajor": 6, "computeMinor": 0}]
    )
    with pytest.raises(TraceError, match=r"c\.csv: .*compute capability 6\.0: .*give chip="):
        profiler_core.load(old, csv)
    with pytest.raises(ValueError, match=r"'H200'; known: GA100.*GH100"):
        profiler_core.load(nameless, csv, chip="H200")


def test_counters_of_other_kernels_are_not_taken(tmp_path: Path) -> None:
    profile = profiler_core.load(chrome(tmp_path / "t.json"), ncu(tmp_path / "c.csv", ("x", "y")))
    assert set(profile.window["counters"]) == {""} and profile.window["instructions"].isna().all()
    assert any("ncu counters" in note and "2" in note for note in profile.notes)


# --- bad input: an error with the file and a remedy, or a result marked partial ---------------------------------------


def partial_notes(profile: Profile) -> list[str]:
    return [note for note in profile.notes if note.startswith("partial: ")]


def test_a_truncated_archive_is_partial_or_refused_by_name(tmp_path: Path) -> None:
    whole = chrome(tmp_path / "whole.json.gz", [f"kernel_{i}_{'x' * (i % 7)}" for i in range(300)]).read_bytes()
    cut = tmp_path / "cut.json.gz"
    outcomes = set()
    for share in (0.0005, 0.01, 0.3, 0.7, 0.99):
        cut.write_bytes(whole[: max(int(len(whole) * share), 3)])
        try:
            profile = profiler_core.load(cut)
        except TraceError as error:
            assert "cut.json.gz" in str(error)
            outcomes.add("refused")
        else:
            assert 0 < len(profile.kernels) < 300 and partial_notes(profile), profile.notes
            outcomes.add("partial")
    assert outcomes == {"refused", "partial"}


@pytest.mark.parametrize("make", [torch_trace, ncu], ids=["log", "ncu"])
def test_another_truncated_archive_is_not_taken_for_something_else_silently(tmp_path: Path, make) -> None:
    path = squeezed(make)(tmp_path / "cut.gz")
    path.write_bytes(path.read_bytes()[:-20])
    try:
        profile = profiler_core.load(chrome(tmp_path / "t.json"), path)
    except (TraceError, ProvenanceFormatError, CounterError) as error:
        assert "cut.gz" in str(error)
    else:
        assert any("cut.gz" in note for note in profile.notes)


def test_half_a_json_is_partial(tmp_path: Path) -> None:
    path = chrome(tmp_path / "t.json", [f"k{i}" for i in range(20)])
    path.write_text(path.read_text()[:-400])
    profile = profiler_core.load(path)
    assert 0 < len(profile.kernels) < 20 and partial_notes(profile)


def test_a_second_trace_that_is_partial_says_so_too(tmp_path: Path) -> None:
    path = chrome(tmp_path / "cut.json", [f"k{i}" for i in range(20)])
    path.write_text(path.read_text()[:-400])
    profile = profiler_core.load(chrome(tmp_path / "t.json", [f"k{i}" for i in range(20)]), path)
    assert any(note.startswith("cut.json: partial: ") for note in profile.notes)


def test_times_that_are_no_numbers_cost_their_events_and_say_so(tmp_path: Path) -> None:
    path = chrome(tmp_path / "t.json", ("a", "b", "c"))
    path.write_text(path.read_text().replace('"dur": 11', '"dur": NaN'))
    profile = profiler_core.load(path)
    assert profile.window["name"].tolist() == ["a", "c"] and partial_notes(profile)


def test_half_a_saved_profile_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json")
    path.write_text(path.read_text()[:-50])
    with pytest.raises(ProfileFormatError, match=r"p\.json: not JSON.*profile again"):
        profiler_core.load(path)


def test_an_export_without_the_kernel_table_says_what_to_record(tmp_path: Path) -> None:
    path = nsys(tmp_path / "x.sqlite", CUPTI_ACTIVITY_KIND_KERNEL=[])
    with pytest.raises(TraceError, match=r"x\.sqlite.*CUPTI_ACTIVITY_KIND_KERNEL.*nsys profile"):
        profiler_core.load(path)


def test_another_database_and_a_cut_one_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "o.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE secrets (value)")
    connection.close()
    with pytest.raises(TraceError, match=r"o\.sqlite: an SQLite file, but not an export of nsys"):
        profiler_core.load(other)
    cut = nsys(tmp_path / "cut.sqlite")
    cut.write_bytes(cut.read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"cut\.sqlite: truncated"):
        profiler_core.load(cut)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("failed_ERR_NVGPUCTRPERM.csv", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("failed_driver_resource.csv", "dcgmi profile --pause"),
    ],
)
def test_counters_of_a_failed_run_are_refused_with_the_remedy(shared: Path, tmp_path: Path, name, remedy) -> None:
    with pytest.raises(CounterError) as error:
        profiler_core.load(chrome(tmp_path / "t.json"), shared / "corpus" / "ncu" / name)
    assert name in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize("values", [("1,234.5", "2,000"), ("1.234,5", "2.000")], ids=["English", "European"])
def test_numbers_of_either_locale_are_the_same_numbers(tmp_path: Path, values: tuple[str, str]) -> None:
    profile = profiler_core.load(chrome(tmp_path / "t.json"), ncu(tmp_path / "c.csv", values=values))
    assert profile.window["instructions"].tolist() == [1234.5, 2000.0]


def test_a_file_of_both_locales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CounterError, match=r"c\.csv"):
        profiler_core.load(chrome(tmp_path / "t.json"), ncu(tmp_path / "c.csv", values=("1,234.5", "1.234,5")))


def test_a_counter_that_is_not_available_is_missing_and_not_zero(tmp_path: Path) -> None:
    rows = profiler_core.load(chrome(tmp_path / "t.json"), ncu(tmp_path / "c.csv", values=("n/a", "7"))).window
    assert math.isnan(rows["instructions"].iloc[0]) and rows["instructions"].iloc[1] == 7
    assert rows["counters"].tolist() == ["", "measured"]


def test_processes_that_are_mixed_are_kept_apart(tmp_path: Path) -> None:
    """Two processes launched kernels of the same names with the same correlation ids."""
    one, two = (json.loads(chrome(tmp_path / f"{pid}.json", pid=pid).read_text()) for pid in (1, 2))
    for event in two["traceEvents"]:
        event["ts"] += 1000
        if event["cat"] == "kernel":
            event["pid"] = event["args"]["device"] = 1
    merged = tmp_path / "merged.json"
    merged.write_text(json.dumps({**one, "traceEvents": one["traceEvents"] + two["traceEvents"]}))
    rows = profiler_core.load(merged).kernels
    assert len(rows) == 4 and rows["device"].nunique() == 2
    assert set(rows["operator"]) <= {"aten::op0", "aten::op1", ""}


def test_counters_of_two_processes_fit_the_one_that_was_traced(tmp_path: Path) -> None:
    csv = ncu(tmp_path / "c.csv", ("compile_worker", "add_kernel", "mul_kernel"), ("1", "10", "20"))
    csv.write_text(csv.read_text().replace(f'"0","{PID}"', '"0","5"'))
    rows = profiler_core.load(chrome(tmp_path / "t.json"), csv).window
    assert rows["instructions"].tolist() == [10.0, 20.0]


def test_a_trace_without_kernels_is_empty_and_says_so(tmp_path: Path) -> None:
    profile = profiler_core.load(no_kernels(tmp_path / "t.json"))
    assert profile.total_ns == 0 and math.isnan(profile.attributed_share)
    assert any("no kernel" in note or "no GPU" in note or "CPU" in note for note in profile.notes), profile.notes


def no_kernels(path: Path) -> Path:
    data = json.loads(chrome(path).read_text())
    data["traceEvents"] = [event for event in data["traceEvents"] if event["cat"] == "cuda_runtime"]
    path.write_text(json.dumps(data))
    return path


def test_a_trace_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.json"):
        profiler_core.load(chrome(tmp_path / "t.json", ()))


@pytest.mark.parametrize("make", [chrome, nsys], ids=["chrome", "nsys"])
def test_names_of_five_thousand_characters_are_kept_and_matched(tmp_path: Path, make) -> None:
    names = ["void f<" + "a, " * 1700 + f"{i}>()" for i in range(2)]
    csv = ncu(tmp_path / "c.csv", names)
    profile = profiler_core.load(make(tmp_path / "t", names), csv, chip="GH100")
    assert profile.window["name"].str.len().tolist() == [len(name) for name in names]
    assert profile.window["instructions"].tolist() == [10.0, 20.0]
    profile.save(tmp_path / "p.json")
    assert profiler_core.load(tmp_path / "p.json").window["name"].tolist() == profile.window["name"].tolist()


def test_a_damaged_log_says_what_is_lost(tmp_path: Path) -> None:
    log = torch_trace(tmp_path / "torch.log")
    log.write_text(log.read_text()[:-60])
    try:
        profile = profiler_core.load(chrome(tmp_path / "t.json"), log)
    except ProvenanceFormatError as error:
        assert "torch.log" in str(error)
    else:
        assert any(note.startswith("torch.log: ") for note in profile.notes)


# --- secrets ---------------------------------------------------------------------------------------------------------


def everything_said(profile: Profile, path: Path) -> str:
    profile.save(path)
    with pd.option_context("display.max_columns", None, "display.max_colwidth", None, "display.max_rows", None):
        shown = f"{profile!r} {profile.kernels.to_string()} {profile.nodes.to_string()}"
    return f"{shown} {profile.environment} {profile.notes} {profile.launches} {path.read_text()}"


def test_the_environment_of_the_profiled_machine_reaches_nothing(tmp_path: Path) -> None:
    variable = [{"name": "HF_TOKEN", "value": SECRET}]
    export = nsys(
        tmp_path / "x.sqlite",
        META_DATA_CAPTURE=variable,
        TARGET_INFO_SYSTEM_ENV=[{"devStateName": "environ", "name": "HF_TOKEN", "value": SECRET}],
        PROCESSES=[{"globalPid": PID << 24, "pid": PID, "name": f"/home/{SECRET}/train"}],
        PROCESS_STREAMS=[{"globalPid": PID << 24, "filenameId": 1, "contentId": 2}],
    )
    with sqlite3.connect(export) as connection:
        connection.execute("INSERT INTO StringIds VALUES (99, ?)", (f"HF_TOKEN={SECRET}",))
    connection.close()
    trace = chrome(
        tmp_path / "t.json", env={"HF_TOKEN": SECRET}, hostname=SECRET, user=SECRET, distributedInfo={"token": SECRET}
    )
    data = json.loads(trace.read_text())
    data["traceEvents"] += [
        {"ph": "M", "name": "process_labels", "pid": PID, "tid": 0, "args": {"labels": SECRET}},
        {"ph": "i", "name": SECRET, "pid": PID, "tid": 0, "ts": 1, "s": "t"},
    ]
    trace.write_text(json.dumps(data))
    for files in ((export,), (trace,), (export, trace), (trace, export)):
        assert SECRET not in everything_said(profiler_core.load(*files), tmp_path / "p.json")


def test_errors_show_no_value_of_a_database(tmp_path: Path) -> None:
    export = nsys(
        tmp_path / "x.sqlite",
        CUPTI_ACTIVITY_KIND_KERNEL=[],
        TARGET_INFO_SYSTEM_ENV=[{"name": "HF_TOKEN", "value": SECRET}],
    )
    with pytest.raises(TraceError) as error:
        profiler_core.load(export)
    assert SECRET not in str(error.value)


def test_loading_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    files = [chrome(tmp_path / "t.json.gz"), nsys(tmp_path / "x.sqlite"), ncu(tmp_path / "c.csv")]
    before = {path.name: path.read_bytes() for path in files}
    profiler_core.load(*files)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_trace_that_marks_no_calls_is_cut_into_equal_ones_on_request(shared: Path) -> None:
    path = shared / "captures" / "h200_sdpa" / "kineto.trace.json.gz"
    whole, cut = profiler_core.load(path), profiler_core.load(path, calls=2)
    assert any("does not mark its calls" in note for note in whole.notes)
    assert not any("does not mark its calls" in note for note in cut.notes)
    assert (whole.iterations, cut.iterations) == (1, 2) and list(cut.kernels["iteration"]) == [0] * 11 + [1] * 11
    assert cut.total_ns == whole.total_ns and cut.by("operator")["time_ns"].sum() == whole.total_ns / 2
    with pytest.raises(TraceError, match=r"gz: calls=3: the 22 kernels of the window are not 3 times"):
        profiler_core.load(path, calls=3)


def test_a_profile_prints_what_it_found(shared: Path) -> None:
    text = repr(profiler_core.load(shared / "captures" / "h200_sdpa" / "kineto.trace.json.gz", calls=2))
    assert text.startswith("Profile: 22 kernels in 2 calls; 385 us of kernel time a call\n")
    assert "attributed 100.0%: to FX nodes 0.0%, to operators 100.0%; opaque 97.3%" in text
    assert "  note: " in text and "aten::mm" in text


def test_files_in_a_list_are_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"load\(\*files\)"):
        profiler_core.load([tmp_path / "a.json"])  # type: ignore[arg-type]


def test_the_folder_of_a_recording_stands_for_its_files(shared: Path, tmp_path: Path) -> None:
    folder = shared / "captures" / "h200_sdpa"
    (tmp_path / "times.sqlite").write_bytes((folder / "nsys.sqlite").read_bytes())
    (tmp_path / "counters.csv").write_bytes((folder / "ncu_raw.csv").read_bytes())
    profile = profiler_core.load(tmp_path)
    assert set(profile.window["counters"]) == {"measured"} and profile.environment["source"] == "nsys"
