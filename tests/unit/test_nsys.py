from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from profiler_core.attribute.rows import rows_of
from profiler_core.collect import nsys, nsys_command, nsys_sqlite
from profiler_core.trace import KERNEL_COLUMNS, Trace, TraceError

PID, TID = 4711, 4712
GLOBAL_PID = 1 << 48 | PID << 24
GLOBAL_TID = GLOBAL_PID | TID
Rows = Sequence[Mapping[str, Any]]
STRINGS = {
    1: "void add<float>(float*)",
    2: "add",
    3: "_Z3addIfEvPf",
    4: "cudaLaunchKernel_v7000",
    5: "cudaGraphLaunch_v10000",
    6: "registered",
}


def kernel(start: int, end: int | None, **more: Any) -> dict[str, Any]:
    names = {"demangledName": 1, "mangledName": 3, "shortName": 2}
    return {"start": start, "end": end, "correlationId": 7, "globalPid": GLOBAL_PID, **names, **more}


def call(start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "correlationId": 7, "globalTid": GLOBAL_TID, "nameId": 4, **more}


def nvtx(start: int, end: int | None, text: str | None, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "eventType": 59, "text": text, "globalTid": GLOBAL_TID, **more}


def database(path: Path, tables: Mapping[str, Rows], strings: Mapping[int, Any] = STRINGS) -> Path:
    """An SQLite file with these tables; a table has the columns of its first row."""
    everything = {"StringIds": [{"id": i, "value": value} for i, value in strings.items()], **tables}
    with sqlite3.connect(path) as connection:
        for name, rows in everything.items():
            columns = list(rows[0])
            connection.execute(f"CREATE TABLE {name} ({', '.join(map(json.dumps, columns))})")
            insert = f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})"
            connection.executemany(insert, [[row.get(column) for column in columns] for row in rows])
    connection.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run 100%.sqlite"  # what a URI would read otherwise


ONE = [kernel(100, 150)]


def read(file: Path, *, kernels: Rows = ONE, calls: Rows = (), ranges: Rows = (), **more: Rows) -> Trace:
    names = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
    tables = {name: rows for name, rows in zip(names, (kernels, calls, ranges), strict=True) if rows}
    return nsys.read(database(file, {**tables, **more}))


def test_a_kernel_has_what_its_row_says(file: Path) -> None:
    shape = {"gridX": 10, "gridY": 2, "gridZ": 3, "blockX": 128, "blockY": 4, "blockZ": 1}
    sizes = {"registersPerThread": 40, "staticSharedMemory": 16, "dynamicSharedMemory": 1024, "localMemoryPerThread": 8}
    row = kernel(100, 150, deviceId=2, streamId=13, graphNodeId=5 << 32 | 20, **shape, **sizes)
    (got,) = read(file, kernels=[row]).kernels.to_dict("records")
    assert got == {
        **{"name": STRINGS[1], "kind": "kernel", "process": PID, "device": 2, "stream": 13},
        **{"start_ns": 100, "duration_ns": 50, "correlation": 7, "external_id": 0, "graph": 5, "graph_node": 20},
        **{"grid_x": 10, "grid_y": 2, "grid_z": 3, "block_x": 128, "block_y": 4, "block_z": 1},
        **{"registers": 40, "shared_static": 16, "shared_dynamic": 1024, "local_per_thread": 8, "bytes": -1},
    }


def test_columns_that_a_schema_lacks_or_leaves_null_have_their_default(file: Path) -> None:
    trace = read(file, kernels=[{"start": 1, "end": 3, "shortName": 2, "gridX": None}])
    (got,) = trace.kernels.to_dict("records")
    known = {"name": "add", "start_ns": 1, "duration_ns": 2}
    assert got == {name: known.get(name, default) for name, (_, default) in KERNEL_COLUMNS.items()}


@pytest.mark.parametrize(
    ("ids", "name"),
    [
        ({"demangledName": 1, "mangledName": 3, "shortName": 2}, STRINGS[1]),
        ({"demangledName": None, "mangledName": 3, "shortName": 2}, STRINGS[3]),
        ({"demangledName": 99, "mangledName": None, "shortName": 2}, STRINGS[2]),
    ],
)
def test_the_demangled_name_comes_first_then_the_mangled_one(file: Path, ids: dict[str, int], name: str) -> None:
    assert list(read(file, kernels=[{**kernel(0, 1), **ids}]).kernels["name"]) == [name]


def test_a_kernel_whose_name_is_gone_is_kept_and_reported(file: Path) -> None:
    trace = read(file, kernels=[kernel(0, 1, demangledName=99, mangledName=99, shortName=99), kernel(2, 3)])
    assert list(trace.kernels["name"]) == ["", STRINGS[1]]
    assert "1 kernels have no name" in trace.partial[0]


def test_names_of_five_thousand_characters_arrive_whole(file: Path) -> None:
    name = "void f<" + "a, " * 2000 + ">"
    trace = nsys.read(database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(0, 1)]}, {1: name}))
    assert list(trace.kernels["name"]) == [name]


def test_kernels_come_in_order_of_start_whatever_the_order_of_rows(file: Path) -> None:
    trace = read(file, kernels=[kernel(30, 31), kernel(10, 11), kernel(20, 21)])
    assert list(trace.kernels["start_ns"]) == [10, 20, 30]


def test_kernels_without_an_end_count_as_zero_and_mark_the_trace_partial(file: Path) -> None:
    trace = read(file, kernels=[kernel(10, None), kernel(20, 5), kernel(30, 40)])
    assert list(trace.kernels["duration_ns"]) == [0, 0, 10]
    assert "2 rows have no end" in trace.partial[0]


def test_more_rows_than_one_fetch_all_arrive(file: Path) -> None:
    rows = [kernel(i, i + 1, correlationId=i, registersPerThread=i % 255) for i in range(2 * nsys_sqlite.ROWS + 1)]
    trace = read(file, kernels=rows)
    assert list(trace.kernels["correlation"]) == list(range(len(rows)))
    assert list(trace.kernels["registers"]) == [i % 255 for i in range(len(rows))]


def test_copies_and_sets_are_device_work_beside_the_kernels(file: Path) -> None:
    common = {"globalPid": GLOBAL_PID, "correlationId": 9, "deviceId": 0, "streamId": 7}
    kinds = enumerate((1, 8, 11, 99))
    copies = [{"start": i, "end": i + 1, "bytes": 64, "copyKind": kind, **common} for i, kind in kinds]
    sets = [{"start": 50, "end": 52, "bytes": 4, **common}]
    trace = read(file, CUPTI_ACTIVITY_KIND_MEMCPY=copies, CUPTI_ACTIVITY_KIND_MEMSET=sets)
    got = trace.kernels[["name", "kind", "bytes", "process"]].to_numpy().tolist()
    assert got == [
        ["Memcpy HtoD", "memcpy", 64, PID],
        ["Memcpy DtoD", "memcpy", 64, PID],
        ["Memcpy HtoD (unified)", "memcpy", 64, PID],
        ["Memcpy Unknown", "memcpy", 64, PID],
        ["Memset", "memset", 4, PID],
        [STRINGS[1], "kernel", -1, PID],
    ]


def test_a_call_is_on_the_process_and_thread_that_its_id_packs(file: Path) -> None:
    (got,) = read(file, calls=[call(80, 90)]).calls.to_dict("records")
    assert got == {
        **{"name": "cudaLaunchKernel_v7000", "process": PID, "thread": TID},
        **{"start_ns": 80, "end_ns": 90, "correlation": 7, "external_id": 0},
    }


def test_processes_are_kept_apart_though_their_correlation_ids_are_equal(file: Path) -> None:
    other = 1 << 48 | 99 << 24
    trace = read(
        file,
        kernels=[kernel(100, 150), kernel(110, 150, globalPid=other)],
        calls=[call(80, 90), call(81, 91, globalTid=other | 99)],
    )
    joined = trace.kernels.merge(trace.calls, on=["process", "correlation"], suffixes=("", "_call"))
    assert joined[["process", "start_ns", "start_ns_call"]].to_numpy().tolist() == [[PID, 100, 80], [99, 110, 81]]
    assert "2 processes" in trace.notes[0]


def test_kernels_without_a_process_belong_to_the_only_one_that_makes_calls(file: Path) -> None:
    trace = read(file, kernels=[{"start": 0, "end": 1, "shortName": 2, "correlationId": 7}], calls=[call(0, 1)])
    assert list(trace.kernels["process"]) == [PID]


@pytest.mark.parametrize(
    ("text", "name", "category", "sequence"),
    [
        ("aten::mm, op_id = 7", "aten::mm", "op", -1),
        ("aten::x, seq = 0", "aten::x", "op", 0),
        ("aten::x, seq = 46174, op_id = 993404", "aten::x", "op", 46174),
        ("aten::x, seq = 3, op_id = 4, sizes = [[2, 3], []], input_op_ids = [(1,0)]", "aten::x", "op", 3),
        ("aten::x, sizes = [[2, 3]]", "aten::x", "op", -1),
        ("aten::mm", "aten::mm", "op", -1),
        ("triton_poi_fused_add_0, op_id = 6", "triton_poi_fused_add_0", "op", -1),
        ("## Call CompiledFxGraph fabc ##, op_id = 11", "## Call CompiledFxGraph fabc ##", "annotation", -1),
        ("fxopt::iteration#0, op_id = 1", "fxopt::iteration#0", "annotation", -1),
        ("fxopt::extern_kernels.mm:4@0/1", "fxopt::extern_kernels.mm:4@0/1", "annotation", -1),
        ("forward", "forward", "annotation", -1),
        ("step, seq = last", "step, seq = last", "annotation", -1),
        ("", "", "annotation", -1),
    ],
)
def test_what_emit_nvtx_appends_to_a_name_is_taken_off(
    file: Path, text: str, name: str, category: str, sequence: int
) -> None:
    (got,) = read(file, ranges=[nvtx(10, 20, text)]).ranges.to_dict("records")
    assert got == {
        **{"name": name, "category": category, "sequence": sequence, "external_id": 0},
        **{"process": PID, "thread": TID, "start_ns": 10, "end_ns": 20, "device": -1, "stream": -1, "inputs": -1},
    }


def test_a_range_is_named_by_its_text_or_by_the_registered_string(file: Path) -> None:
    rows = [nvtx(10, 20, None, textId=6, domainId=1), nvtx(11, 19, "plain", textId=None, domainId=0)]
    assert list(read(file, ranges=rows).ranges["name"]) == ["registered", "plain"]


def test_a_text_that_is_not_utf8_does_not_stop_the_reading(file: Path) -> None:
    text = b"caf\xe9"
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(0, 1)], "NVTX_EVENTS": [nvtx(1, 2, None)]})
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = CAST(? AS TEXT)", [text])
    assert list(nsys.read(file).ranges["name"]) == ["caf\N{REPLACEMENT CHARACTER}"]


def test_start_end_ranges_are_spans_and_marks_and_domains_are_no_ranges(file: Path) -> None:
    rows = [
        nvtx(10, 20, "span", eventType=60, endGlobalTid=GLOBAL_TID + 1),
        nvtx(12, None, "mark", eventType=34),
        nvtx(0, None, "NCCL", eventType=75),
    ]
    ranges = read(file, ranges=rows).ranges
    assert ranges[["name", "category", "thread"]].to_numpy().tolist() == [["span", "span", TID]]


def test_a_range_still_open_lasts_to_the_end_of_the_trace_with_a_note(file: Path) -> None:
    trace = read(file, kernels=[kernel(100, 150)], ranges=[nvtx(10, None, "open"), nvtx(11, 12, "closed")])
    assert list(trace.ranges["end_ns"]) == [150, 12]
    assert "1 NVTX ranges have no end" in trace.notes[0]


def test_iterations_are_counted_from_their_ranges(file: Path) -> None:
    texts = ("fxopt::iteration#0, op_id = 1", "fxopt::iteration#1, op_id = 9", "fxopt::iteration#1", "other")
    assert read(file, ranges=[nvtx(i, i + 1, text) for i, text in enumerate(texts)]).iterations == 2


def test_a_node_of_a_cloned_graph_is_one_capture_that_names_its_original(file: Path) -> None:
    def event(time: int, graph: int, node: int, original: int | None = None) -> dict[str, Any]:
        ids = {"graphNodeId": graph << 32 | node, "originalGraphNodeId": original}
        return {"start": time, "end": time, "globalTid": GLOBAL_TID, **ids}

    events = [event(10, 4, 0), event(11, 4, 1), event(20, 5, 0), event(21, 5, 0, 4 << 32), event(22, 5, 2)]
    captures = read(file, CUDA_GRAPH_NODE_EVENTS=events).captures
    columns = ["time_ns", "graph", "graph_node", "original_graph", "original_node"]
    assert captures[columns].to_numpy().tolist() == [
        [10, 4, 0, 0, 0],
        [11, 4, 1, 0, 0],
        [21, 5, 0, 4, 0],
        [22, 5, 2, 0, 0],
    ]
    assert set(captures["process"]) == {PID}
    assert set(captures["thread"]) == {TID}


def test_replays_recorded_as_a_whole_ask_for_node_level_tracing(file: Path) -> None:
    replays = [{"start": i, "end": i + 30, "correlationId": i, "globalPid": GLOBAL_PID} for i in (200, 300)]
    launches = [call(i - 9, i - 5, correlationId=i, nameId=5) for i in (200, 300)]
    trace = read(file, calls=launches, CUPTI_ACTIVITY_KIND_GRAPH_TRACE=replays)
    assert len(trace.kernels) == 1
    (lost,) = trace.partial
    assert "2 replays" in lost
    assert "60 ns" in lost
    assert "--cuda-graph-trace=node" in lost


def test_a_graph_launch_that_shows_no_kernels_is_reported_and_one_that_does_is_not(file: Path) -> None:
    launches = [call(0, 1, correlationId=7, nameId=5), call(2, 3, correlationId=8, nameId=5)]
    (lost,) = read(file, kernels=[kernel(100, 150, correlationId=7)], calls=launches).partial
    assert "1 launches of CUDA graphs show nothing" in lost


def test_graphs_without_a_single_kernel_are_a_partial_trace_not_an_error(file: Path) -> None:
    replay = {"start": 0, "end": 30, "correlationId": 7, "globalPid": GLOBAL_PID}
    trace = read(file, kernels=(), CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[replay])
    assert trace.kernels.empty
    assert "--cuda-graph-trace=node" in trace.partial[0]


@pytest.mark.parametrize("table", ["META_DATA_EXPORT", "EXPORT_META_DATA"])
def test_versions_are_read_from_either_table_and_nothing_else_is(file: Path, table: str) -> None:
    rows = {"EXPORT_PRODUCT_VERSION": "2021.5", "EXPORT_SCHEMA_VERSION": "2.7.1", "EXPORT_USER": "alice"}
    trace = read(file, **{table: [{"name": name, "value": value} for name, value in rows.items()]})
    assert trace.meta == {"source": "nsys", "path": str(file), "tool": "nsys 2021.5", "schema": "2.7.1", "devices": {}}


def test_devices_have_the_index_that_the_program_gives_them(file: Path) -> None:
    gpus = [
        {"id": 0, "name": "NVIDIA A", "chipName": "GA100", "smCount": 108, "computeMajor": 8, "computeMinor": 0},
        {"id": 3, "name": "NVIDIA B", "smCount": 132, "computeMajor": 9, "computeMinor": 0},
    ]
    gpus = [{**gpu, "maxWarpsPerSm": 64, "threadsPerWarp": 32, "maxShmemPerSm": 0} for gpu in gpus]
    named = {"name": "NVIDIA B", "sm_count": 132, "capability": (9, 0), "warp_size": 32, "max_threads_per_sm": 2048}
    visible = [{"gpuId": 3, "cudaId": 0, "pid": PID}]
    trace = read(file, TARGET_INFO_GPU=gpus, TARGET_INFO_CUDA_DEVICE=visible)
    assert trace.meta["devices"] == {0: named}


def test_devices_are_known_by_name_alone_where_the_table_has_no_more(file: Path) -> None:
    trace = read(file, TARGET_INFO_GPU=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    assert trace.meta["devices"] == {0: {"name": "NVIDIA H100 80GB HBM3"}}


def everything_in(trace: Trace) -> str:
    frames = (trace.kernels, trace.calls, trace.ranges, trace.captures)
    return repr([frame.to_dict("records") for frame in frames]) + repr(trace)


def test_no_table_of_the_machine_or_its_environment_reaches_the_trace(shared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    shutil.copyfile(shared / "captures" / "h200_graph" / "nsys_node.sqlite", copy)
    copy.chmod(0o600)
    read_for_names = {"NVTX_EVENTS", "TARGET_INFO_GPU"}  # texts that are names of ranges and GPUs
    with sqlite3.connect(copy) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        planted = 0
        for table in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[2] == "TEXT"]
            if table in read_for_names or not columns:
                continue
            keep = " WHERE name NOT LIKE 'EXPORT\\_%\\_VERSION' ESCAPE '\\'" if table == "META_DATA_EXPORT" else ""
            if table == "StringIds":  # those that no kernel, call or range refers to
                connection.execute("INSERT INTO StringIds VALUES (1000000, 'SECRET token')")
                planted += 1
                continue
            for column in columns:
                if (table, column) != ("META_DATA_EXPORT", "name"):
                    planted += connection.execute(f"UPDATE {table} SET {column} = 'SECRET token'{keep}").rowcount
    assert planted > 100
    text = everything_in(nsys.read(copy))
    assert "triton_per_fused_native_layer_norm_0" in text
    assert "SECRET" not in text


def test_no_value_of_the_file_is_shown_by_an_error(file: Path) -> None:
    with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_KERNEL, rows 0 to 1, device: not a number") as caught:
        read(file, kernels=[kernel(0, 1, deviceId=0), kernel(0, 1, deviceId="SECRET")])
    assert "SECRET" not in str(caught.value)


def test_a_kernel_table_without_rows_is_a_trace_with_a_note(file: Path) -> None:
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(0, 1)]})
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    trace = nsys.read(file)
    assert trace.kernels.empty
    assert "holds no kernels" in trace.notes[0]


def test_without_the_kernel_table_the_error_says_what_there_is_and_what_to_record(file: Path) -> None:
    with pytest.raises(TraceError, match=r"only CUDA API calls, NVTX ranges.*-t cuda,nvtx") as caught:
        read(file, kernels=(), calls=[call(0, 1)], ranges=[nvtx(0, 1, "x")])
    assert str(file) in str(caught.value)


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    with pytest.raises(TraceError, match=r"other\.sqlite: an SQLite file, but not an export of nsys"):
        nsys.read(other)


def test_a_table_without_its_main_column_is_refused(file: Path) -> None:
    with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_KERNEL has no column 'end'"):
        read(file, kernels=[{"start": 0, "shortName": 2}])


def test_a_missing_file_an_empty_one_and_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.sqlite: cannot be read: No such file"):
        nsys.read(tmp_path / "absent.sqlite")
    with pytest.raises(TraceError, match=r"absent\.nsys-rep: there is no such file"):
        nsys.read(tmp_path / "absent.nsys-rep")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(TraceError, match=r"empty\.sqlite: the file is empty.*nsys export"):
        nsys.read(tmp_path / "empty.sqlite")
    (tmp_path / "text.sqlite").write_text("Generating report\n")
    with pytest.raises(TraceError, match=r"text\.sqlite: not an SQLite file \(offset 0\)"):
        nsys.read(tmp_path / "text.sqlite")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_a_truncated_file_is_refused_with_the_offset(file: Path, share: float) -> None:
    rows = [kernel(i, i + 1) for i in range(2000)]
    whole = database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": rows}).read_bytes()
    size = int(len(whole) * share)
    file.write_bytes(whole[:size])
    with pytest.raises(TraceError, match=rf"truncated at offset {size} of \d+. Export it again"):
        nsys.read(file)


def test_a_damaged_file_is_refused_with_the_table(file: Path) -> None:
    rows = [kernel(i, i + 1) for i in range(20000)]
    content = bytearray(database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": rows}).read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    file.write_bytes(content)
    with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_KERNEL: database disk image is malformed. Export it"):
        nsys.read(file)


def test_a_file_that_is_being_written_is_refused(file: Path) -> None:
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(0, 1)]})
    writer = sqlite3.connect(file, isolation_level=None)
    try:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TraceError, match=r"locked: another process is writing it. Wait"):
            nsys.read(file)
    finally:
        writer.close()


def test_a_report_is_exported_first_and_the_trace_names_the_report(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(100, 150)]})
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    exported: list[Path] = []

    def export(source: Path, sqlite: Path) -> Path:
        assert source == report
        exported.append(sqlite)
        return Path(shutil.copyfile(file, sqlite))

    monkeypatch.setattr(nsys_command, "export", export)
    trace = nsys.read(report)
    assert len(trace.kernels) == 1
    assert trace.meta["path"] == str(report)
    assert not exported[0].exists()


def test_a_report_without_nsys_says_how_to_export_it_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    monkeypatch.setattr(nsys_command, "find", lambda: None)
    with pytest.raises(
        TraceError, match=r"(?s)run\.nsys-rep: .*was not found.*nsys export --type sqlite -o run\.sqlite"
    ):
        nsys.read(report)


def test_reading_leaves_the_file_and_its_folder_as_they_were(file: Path) -> None:
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": [kernel(0, 1)]})
    before = file.read_bytes()
    nsys.read(file)
    assert file.read_bytes() == before
    assert list(file.parent.glob("*.sqlite*")) == [file]


@pytest.mark.parametrize(("value", "name"), [(None, ""), (b"cuda\xff", "cuda\ufffd"), (5, "5")])
def test_the_name_of_a_call_that_is_no_text_costs_no_kernel(file: Path, value: Any, name: str) -> None:
    tables = {"CUPTI_ACTIVITY_KIND_KERNEL": ONE, "CUPTI_ACTIVITY_KIND_RUNTIME": [call(90, 95)]}
    trace = nsys.read(database(file, tables, {**STRINGS, 4: value}))
    assert trace.calls["name"].tolist() == [name]
    assert rows_of(trace).replay.tolist() == [False]


def test_a_call_without_a_name_is_no_launch_of_a_graph() -> None:
    trace = Trace.build(
        kernels={"name": ["k"], "start_ns": [5], "duration_ns": [1], "correlation": [3]},
        calls={"name": [None], "start_ns": [1], "end_ns": [2], "correlation": [3]},
    )
    rows = rows_of(trace)
    assert (rows.call.tolist(), rows.replay.tolist()) == ([0], [False])


@pytest.mark.parametrize("value", [b"step\xff", 7])
def test_a_range_whose_text_is_no_text_is_kept(file: Path, value: Any) -> None:
    tables = {"CUPTI_ACTIVITY_KIND_KERNEL": ONE, "NVTX_EVENTS": [nvtx(0, 9, value)]}
    (name,) = nsys.read(database(file, tables)).ranges["name"]
    assert name in ("step\ufffd", "7")


def test_a_schema_that_is_not_utf8_is_refused(file: Path) -> None:
    database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": ONE})
    data = file.read_bytes()
    file.write_bytes(data.replace(b"CREATE TABLE CUPTI", b"CREATE T\xffBLE CUPTI"))
    with pytest.raises(TraceError, match=r"run 100%\.sqlite: .*Export it again"):
        nsys.read(file)


def test_what_lasts_longer_than_104_days_is_dropped_and_said(file: Path) -> None:
    end = 2**53 + 2000
    tables = {
        "CUPTI_ACTIVITY_KIND_KERNEL": [*ONE, kernel(100, end)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [call(90, 95), call(91, end)],
        "NVTX_EVENTS": [nvtx(0, 9, "a"), nvtx(0, end, "b")],
    }
    trace = nsys.read(database(file, tables))
    assert trace.kernels["duration_ns"].tolist() == [50]
    assert (trace.calls["start_ns"].tolist(), trace.ranges["name"].tolist()) == ([90], ["a"])
    assert len(trace.partial) == 3 and all("1 rows last over 2**53 ns (104 days)" in said for said in trace.partial)


def test_a_limit_of_a_gpu_that_is_no_number_is_not_known(file: Path) -> None:
    gpu = {
        "id": 0,
        "name": "H200",
        "computeMajor": "x",
        "maxWarpsPerSm": "many",
        "threadsPerWarp": b"2",
        "smCount": 132,
    }
    trace = nsys.read(database(file, {"CUPTI_ACTIVITY_KIND_KERNEL": ONE, "TARGET_INFO_GPU": [gpu]}))
    assert trace.meta["devices"] == {0: {"name": "H200", "sm_count": 132}}
