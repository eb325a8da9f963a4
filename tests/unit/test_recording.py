"""record(): a program under nsys and ncu, here scripts that run it and leave the files of a real recording."""

from __future__ import annotations

import gzip
import json
import os
import stat
import sys
from pathlib import Path

import pytest

import profiler_core
from profiler_core import counters
from profiler_core.collect import ncu_command, nsys_command
from profiler_core.collect.nsys_command import NsysError

NSYS = r"""#!/bin/sh
here=$(dirname "$0")
verb=$1
echo "nsys $*" >> "$here/calls"
while [ "$1" != -o ]; do shift; done
output=$2
shift 2
if [ "$verb" = export ]; then cp "$here/ready.sqlite" "$output"; exit; fi
touch "$output.nsys-rep"
"$@"
"""
NCU = r"""#!/bin/sh
here=$(dirname "$0")
echo "ncu $*" >> "$here/calls"
while [ "$1" != --log-file ]; do shift; done
output=$2
shift 2
"$@" || exit
cp "$here/ready.csv" "$output"
"""
# Notes the environment that it runs in, and leaves a log where torch would.
PROGRAM = """\
import json, os, pathlib, sys
here = pathlib.Path(sys.argv[1])
with (here / "runs").open("a") as file:
    file.write(json.dumps(dict(os.environ)) + "\\n")
log = here / "ready.log"
if "TORCH_TRACE" in os.environ and log.exists():
    folder = pathlib.Path(os.environ["TORCH_TRACE"])
    folder.mkdir(parents=True)
    (folder / "dedicated_log_torch_trace_abc.log").write_bytes(log.read_bytes())
pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
(pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "filled").touch()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


class Tools:
    """nsys, ncu and a program in one folder, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in (("nsys", NSYS), ("ncu", NCU)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        (folder / "program.py").write_text(PROGRAM)
        self.argv = [sys.executable, str(folder / "program.py"), str(folder)]

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def runs(self) -> list[dict[str, str]]:
        path = self.folder / "runs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def tools(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    made = Tools(tmp_path / "tools")
    capture = shared / "captures" / "h200_sdpa"
    (made.folder / "ready.sqlite").write_bytes((capture / "nsys.sqlite").read_bytes())
    (made.folder / "ready.csv").write_bytes((capture / "ncu_raw.csv").read_bytes())
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def logged(tools: Tools, shared: Path) -> Tools:
    """The recording of a replayed CUDA graph, whose program leaves Inductor's log."""
    capture = shared / "captures" / "h200_graph"
    (tools.folder / "ready.sqlite").write_bytes((capture / "nsys_node.sqlite").read_bytes())
    (tools.folder / "ready.log").write_bytes(gzip.decompress((capture / "torch_trace.log.gz").read_bytes()))
    return tools


def test_times_come_from_nsys_and_counters_from_ncu(tools: Tools, tmp_path: Path) -> None:
    profile = profiler_core.record(tools.argv, tmp_path / "out", counters="full")
    assert profile.environment["source"] == "nsys" and len(profile.window) == 22
    assert set(profile.window["counters"]) == {"measured"} and profile.window["dram_read_bytes"].notna().all()
    assert [call.split()[:2] for call in tools.calls] == [["nsys", "profile"], ["nsys", "export"], ["ncu", "--metrics"]]
    metrics = ",".join(counters.metric_names("GH100", counters.FULL))
    ncu = tools.calls[-1]
    assert f"--metrics {metrics} --replay-mode application" in ncu and "--profile-from-start off" in ncu
    assert "--clock-control none" in ncu and "--cache-control none" in ncu


def test_the_program_is_told_what_to_leave_and_where(tools: Tools, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    profiler_core.record(tools.argv, "out")
    under_nsys, under_ncu = tools.runs
    out = tmp_path / "out"
    for run in (under_nsys, under_ncu):
        assert run["TORCHINDUCTOR_CACHE_DIR"] == str(out / "inductor_cache")
        assert run["TORCHINDUCTOR_COMPILE_THREADS"] == "1" and run["INDUCTOR_PROVENANCE"] == "1"
    assert under_nsys["TORCH_TRACE"] == str(out / "torch_trace") and "TORCH_TRACE" not in under_ncu
    assert (under_nsys["PROFILER_CORE_RECORDING"], under_ncu["PROFILER_CORE_RECORDING"]) == ("ranges", "kernels")
    assert dict(os.environ) == before


def test_what_is_left_in_the_folder_can_be_loaded_again(logged: Tools, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    profile = profiler_core.record(logged.argv, out, counters="none")
    assert profile.attributed_share == 1.0 and set(profile.window["launch"]) > {""}
    assert len(logged.runs) == 1 and not any(call.startswith("ncu") for call in logged.calls)
    assert {path.name for path in out.iterdir()} == {"times.nsys-rep", "times.sqlite", "torch_trace", "inductor_cache"}
    again = profiler_core.load(out / "times.sqlite", out / "torch_trace")
    assert again.kernels.drop(columns="evidence").equals(profile.kernels.drop(columns="evidence"))


def test_nothing_of_an_earlier_recording_is_taken_for_this_ones(logged: Tools, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("torch_trace/dedicated_log_torch_trace_old.log", "inductor_cache/old", "counters.csv"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("of another program")
    profile = profiler_core.record(logged.argv, out, counters="none")
    assert profile.attributed_share == 1.0
    assert [path.name for path in (out / "torch_trace").iterdir()] == ["dedicated_log_torch_trace_abc.log"]
    assert [path.name for path in (out / "inductor_cache").iterdir()] == ["filled"]
    assert not (out / "counters.csv").exists()
    profiler_core.record(logged.argv, out, counters="none")  # nor of one of its own


def test_a_program_that_compiles_nothing_has_operators_and_a_note(tools: Tools, tmp_path: Path) -> None:
    record = 'V1129 16:53:29.059000 4 torch/x.py:1] {"dynamo_start": {}, "frame_id": 0}\n'
    (tools.folder / "ready.log").write_text(record)
    profile = profiler_core.record(tools.argv, tmp_path / "out", counters="none")
    assert profile.operator_share == 1.0
    assert any(note.startswith("no provenance: ") and "_abc.log" in note for note in profile.notes)


def test_what_nsys_knows_needs_no_second_run(tools: Tools, tmp_path: Path) -> None:
    profile = profiler_core.record(tools.argv, tmp_path / "out", counters=["registers"])
    assert len(tools.runs) == 1 and (profile.window["registers"] > 0).all()


def test_a_program_without_marks_is_measured_from_its_start(tools: Tools, tmp_path: Path) -> None:
    profiler_core.record(tools.argv, tmp_path / "out", marked=False, replay="kernel")
    assert "--profile-from-start on" in tools.calls[-1] and "--replay-mode kernel" in tools.calls[-1]


def test_a_failing_program_is_an_error_with_its_status(tools: Tools, tmp_path: Path) -> None:
    with pytest.raises(NsysError, match="nsys profile, or the program in it, ended with status 3"):
        profiler_core.record([*tools.argv, "3"], tmp_path / "out")
    assert len(tools.runs) == 1


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==WARNING== No kernels were profiled.", "No kernels were profiled"),
    ],
    ids=["not permitted", "nothing marked"],
)
def test_counters_that_cannot_be_had_leave_the_times_and_the_remedy(tools, tmp_path, log: str, says: str) -> None:
    (tools.folder / "ready.csv").write_text(log + "\n")
    profile = profiler_core.record(tools.argv, tmp_path / "out")
    assert len(profile.window) == 22 and "dram_throughput" not in profile.kernels
    (note,) = [note for note in profile.notes if note.startswith("no hardware counters: ")]
    assert says in note


def test_without_ncu_there_are_times(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_command, "find", lambda: None)
    profile = profiler_core.record(tools.argv, tmp_path / "out")
    assert len(profile.window) == 22
    assert any("ncu) was not found on PATH" in note for note in profile.notes)


def test_without_nsys_there_is_nothing(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_command, "find", lambda: None)
    with pytest.raises(NsysError, match="nsys\\) was not found on PATH"):
        profiler_core.record(tools.argv, tmp_path / "out")
    assert not tools.runs and not (tmp_path / "out").exists()


def test_without_nsys_an_earlier_recording_stays(
    logged: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    profiler_core.record(logged.argv, out, counters="none")
    (out / "counters.csv").write_text("earlier")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(nsys_command, "find", lambda: None)
    with pytest.raises(NsysError):
        profiler_core.record(logged.argv, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_gpu_that_is_not_named_is_asked_for(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    with sqlite3.connect(tools.folder / "ready.sqlite") as connection:
        for table in ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
    connection.close()
    profile = profiler_core.record(tools.argv, tmp_path / "out")
    assert any("which GPU this is; give chip='GH100'" in note for note in profile.notes) and len(tools.runs) == 1
    told = profiler_core.record(tools.argv, tmp_path / "out", chip="GH100")
    assert set(told.window["counters"]) == {"measured"}


@pytest.mark.parametrize(
    ("argv", "options", "says"),
    [
        ([], {}, "argv is empty"),
        (["true"], {"counters": "every"}, "expected one of none, quick, full"),
        (["true"], {"chip": "H200"}, "'H200'; known: .*GH100"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(tools: Tools, tmp_path: Path, argv, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        profiler_core.record(argv, tmp_path / "out", **options)
    assert not (tools.folder / "calls").exists()
