"""The range profiler's session against stub libraries: order of calls, passes, growth, errors, and cleaning up."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from profiler_core.collect import conflicts
from profiler_core.collect.cupti import session
from profiler_core.collect.cupti.library import (
    CountersBusy,
    CountersError,
    CountersNotPermitted,
    CountersUnavailable,
    Library,
    UnknownMetric,
)
from profiler_core.collect.cupti.session import Collection, Replay, collect, repeatable
from profiler_core.counter_table import ROW_COLUMNS

# Behaves as CUPTI does as far as a session can tell: three passes; stub_launch launches kernels; metric m of range r
# has the value 100 r + m. STUB_FAIL="function:code" makes a function fail, STUB_UNSUPPORTED makes the device a virtual
# GPU without profiling.
STUB = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef size_t S; typedef void *V;
static char log_[1 << 16]; static int started, replay; static S room, limit, now, ranges, dropped, pass;
const char *stub_log(void) { return log_; }
void stub_reset(void) { log_[0] = 0; started = 0; ranges = dropped = now = pass = 0; }
void stub_launch(int n) { if (started) now += n; }
static int enter(const char *f, S size, S wanted) {
  strncat(log_, f, 100); strncat(log_, "\n", 2);
  if (size != wanted) return 10;
  const char *fail = getenv("STUB_FAIL"); S n = strlen(f);
  return fail && !strncmp(fail, f, n) && fail[n] == ':' ? atoi(fail + n + 1) : 0;
}
#define CALL(name, size, fields, body) typedef struct { S structSize; V pPriv; fields } name##_t; \
  int name(name##_t *p) { int e = enter(#name, p->structSize, size); if (e) return e; body return 0; }
CALL(cuptiProfilerInitialize, 16, , )
CALL(cuptiProfilerDeInitialize, 16, , )
CALL(cuptiDeviceGetChipName, 32, S device; const char *chip;, p->chip = "GH100";)
CALL(cuptiProfilerDeviceSupported, 52,
     int device; int all; int architecture; int sli; int vgpu; int cc; int cmp; int wsl; int api;,
     p->all = p->architecture = p->sli = p->vgpu = p->cc = p->cmp = p->wsl = 3;
     if (getenv("STUB_UNSUPPORTED")) p->all = p->vgpu = 2;)
CALL(cuptiProfilerGetCounterAvailability, 40, V ctx; S size; uint8_t *image;,
     if (p->image) memset(p->image, 7, p->size); else p->size = 64;)
CALL(cuptiProfilerHostInitialize, 48, int type; const char *chip; const uint8_t *availability; V host;,
     if (p->availability && p->availability[0] != 7) return 1; p->host = (V)0x10;)
CALL(cuptiProfilerHostDeinitialize, 24, V host;, if (p->host != (V)0x10) return 1;)
CALL(cuptiProfilerHostConfigAddMetrics, 40, V host; const char **names; S n;,
     for (S i = 0; i < p->n; i++) if (!strcmp(p->names[i], "nonsense")) return 1;)
CALL(cuptiProfilerHostGetConfigImageSize, 32, V host; S size;, p->size = 8;)
CALL(cuptiProfilerHostGetConfigImage, 40, V host; S size; uint8_t *image;, memcpy(p->image, "config\0\0", 8);)
CALL(cuptiProfilerHostGetNumOfPasses, 40, S size; uint8_t *image; S n;,
     if (p->size != 8 || memcmp(p->image, "config\0\0", 8)) return 1; p->n = 3;)
CALL(cuptiProfilerHostEvaluateToGpuValues, 72,
     V host; const uint8_t *data; S size; S range; const char **names; S n; double *values;,
     if (p->data[0] != 9) return 1; for (S m = 0; m < p->n; m++) p->values[m] = 100.0 * p->range + m;)
CALL(cuptiRangeProfilerEnable, 32, V ctx; V object;, if (p->ctx != (V)0x20) return 3; p->object = (V)0x30;)
CALL(cuptiRangeProfilerDisable, 24, V object;, if (p->object != (V)0x30) return 1; started = 0;)
CALL(cuptiRangeProfilerGetCounterDataSize, 64,
     V object; const char **names; S n; S ranges; uint32_t nodes; S size;,
     room = p->ranges; p->size = 16 * p->ranges;)
CALL(cuptiRangeProfilerCounterDataImageInitialize, 40, V object; S size; uint8_t *data;,
     ranges = dropped = 0; if (p->size != 16 * room) return 1; p->data[0] = 8;)
CALL(cuptiRangeProfilerSetConfig, 90,
     V object; S config; const uint8_t *image; S size; uint8_t *data; int range; int replay; S max;
     uint16_t levels; uint16_t least; S pass; uint16_t level;,
     char line[99]; snprintf(line, 99, "pass %zu replay %d max %zu\n", p->pass, p->replay, p->max); strcat(log_, line);
     if (started || p->config != 8 || p->data[0] != 8 || p->range != 1 || p->levels != 1 || p->least != 1) return 1;
     limit = p->max; replay = p->replay;)
CALL(cuptiRangeProfilerStart, 24, V object;, if (started) return 7; started = 1; now = 0;)
CALL(cuptiRangeProfilerStop, 41, V object; S pass; S level; uint8_t done;,
     if (!started) return 7;
     started = 0; S before = replay == 2 ? ranges : 0; /* windows of kernel replay follow each other */
     S kept = now < limit - before ? now : limit - before; dropped += now - kept; ranges = before + kept;
     pass = replay == 2 ? 3 : pass + 1; p->pass = pass; p->level = 1;
     p->done = pass == 3; if (p->done) pass = 0;
     if (getenv("STUB_NEVER_DONE")) p->done = 0;)
CALL(cuptiRangeProfilerDecodeData, 32, V object; S dropped;, p->dropped = dropped;)
CALL(cuptiRangeProfilerGetCounterDataInfo, 40, uint8_t *data; S size; S n;, p->n = ranges; p->data[0] = 9;)
int cuptiGetResultString(int code, const char **s) { *s = "CUPTI_ERROR"; return 0; }
/* the driver */
int cuCtxGetCurrent(V *ctx) { *ctx = getenv("STUB_NO_CONTEXT") ? 0 : (V)0x20; return 0; }
int cuCtxGetDevice(int *device) { *device = 5; return 0; }
int cuCtxSynchronize(void) { strcat(log_, "synchronize\n"); return getenv("STUB_CUDA_ERROR") ? 700 : 0; }
"""

OPENED = [
    "cuptiProfilerInitialize",
    "cuptiProfilerDeviceSupported",
    "cuptiDeviceGetChipName",
    "cuptiProfilerGetCounterAvailability",
    "cuptiProfilerGetCounterAvailability",
    "cuptiProfilerHostInitialize",
    "cuptiProfilerHostConfigAddMetrics",
    "cuptiProfilerHostGetConfigImageSize",
    "cuptiProfilerHostGetConfigImage",
    "cuptiProfilerHostGetNumOfPasses",
    "cuptiRangeProfilerEnable",
    "cuptiRangeProfilerGetCounterDataSize",
    "cuptiRangeProfilerCounterDataImageInitialize",
]
CLOSED = ["cuptiRangeProfilerDisable", "cuptiProfilerHostDeinitialize", "cuptiProfilerDeInitialize"]
METRICS = ["a.sum", "b.ratio"]


class Stub:
    def __init__(self, path: Path) -> None:
        self.path, self.dll = str(path), ctypes.CDLL(str(path))
        self.dll.stub_log.restype = ctypes.c_char_p

    def log(self) -> list[str]:
        return self.dll.stub_log().decode().splitlines()

    def launch(self, kernels: int) -> None:
        self.dll.stub_launch(kernels)

    def collect(
        self, fn: Callable[[], object], metrics: Sequence[str] = METRICS, replay: Replay = "application", **options
    ) -> Collection:
        return collect(fn, metrics, replay=replay, library=Library(self.path), driver=self.path, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path_factory.mktemp("stub") / "stub.c"
    source.write_text(STUB)
    path = source.with_name("libstub.so")
    subprocess.run([compiler, "-w", "-shared", "-fPIC", source, "-o", path], check=True)
    return Stub(path)


@pytest.fixture
def stub(built: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    built.dll.stub_reset()
    monkeypatch.setattr(conflicts, "active_profiler", lambda: None)
    return built


# --- passes ------------------------------------------------------------------------------------------------


def test_application_replay_calls_the_function_once_a_pass_and_gives_a_row_a_kernel(stub: Stub) -> None:
    calls = []
    result = stub.collect(lambda: (calls.append(1), stub.launch(4)), warmup=2)
    assert len(calls) == 2 + 3 and result.passes == len(result.pass_seconds) == 3
    assert all(inside <= whole for inside, whole in zip(result.call_seconds, result.pass_seconds, strict=True))
    rows = result.table.rows
    assert list(rows.columns) == [*ROW_COLUMNS, *METRICS]
    assert rows["a.sum"].tolist() == [0, 100, 200, 300] and rows["b.ratio"].tolist() == [1, 101, 201, 301]
    assert rows["id"].tolist() == [0, 1, 2, 3] and set(rows["device"]) == {5} and set(rows["process"]) == {os.getpid()}
    assert {n: str(t) for n, t in rows.dtypes.items()} == {
        **{name: dtype for name, (dtype, _) in ROW_COLUMNS.items()}, **dict.fromkeys(METRICS, "float64"),
    }  # fmt: skip
    table = result.table
    assert (table.source, table.replay, table.passes, table.partial) == ("cupti", "application", 3, ())
    assert table.metrics == METRICS
    assert "4 kernels, 2 metrics, 3 passes by application replay" in result.cost()


def test_calls_go_to_cupti_in_the_order_that_it_wants(stub: Stub) -> None:
    stub.collect(lambda: stub.launch(1), kernels=7)
    one_pass = ["cuptiRangeProfilerSetConfig", None, "cuptiRangeProfilerStart", "synchronize", "cuptiRangeProfilerStop"]
    passes = [name or f"pass {i} replay 1 max 8" for i in range(3) for name in one_pass]
    decoded = ["cuptiRangeProfilerDecodeData", "cuptiRangeProfilerGetCounterDataInfo"]
    evaluated = ["cuptiProfilerHostEvaluateToGpuValues"]
    assert stub.log() == [*OPENED, "synchronize", *passes, *decoded, *evaluated, *CLOSED]


def test_kernel_replay_calls_the_function_once(stub: Stub) -> None:
    calls = []
    result = stub.collect(lambda: (calls.append(1), stub.launch(2)), replay="kernel", warmup=0)
    assert len(calls) == 1 and result.passes == 3 and len(result.pass_seconds) == 1
    assert "pass 0 replay 2 max 4096" in stub.log() and len(result.table.rows) == 2


def test_a_function_without_kernels_gives_an_empty_table(stub: Stub) -> None:
    result = stub.collect(lambda: None)
    assert result.table.rows.empty and result.table.metrics == METRICS


def test_a_metric_asked_for_twice_is_one_column(stub: Stub) -> None:
    assert stub.collect(lambda: stub.launch(1), ["a.sum", "a.sum"]).table.metrics == ["a.sum"]


def test_more_kernels_than_provided_for_are_collected_in_a_second_try(stub: Stub) -> None:
    calls = []
    result = stub.collect(lambda: (calls.append(1), stub.launch(600)), warmup=0)
    assert len(result.table.rows) == 600 and not result.table.partial and len(calls) == 6
    assert [line for line in stub.log() if line.startswith("pass 0")] == [
        "pass 0 replay 1 max 512",
        "pass 0 replay 1 max 1024",
    ]
    assert stub.log().count("cuptiRangeProfilerDisable") == 2


def test_under_kernel_replay_kernels_without_room_are_reported_not_collected_again(stub: Stub) -> None:
    calls = []
    result = stub.collect(lambda: (calls.append(1), stub.launch(5)), replay="kernel", kernels=3, warmup=0)
    assert len(calls) == 1 and len(result.table.rows) == 4
    assert "room for 4 ranges, and 1 kernels or more have none" in result.table.partial[0]


def test_primed_the_second_call_of_a_pass_counts_unless_the_two_differ(stub: Stub) -> None:
    same = stub.collect(lambda: stub.launch(2), warmup=0, primed=True)
    assert same.table.rows["a.sum"].tolist() == [200, 300]  # of the second call
    launched = iter(3 * [1, 2] + 20 * [2])  # the first call of a pass launches less
    result = stub.collect(lambda: stub.launch(next(launched)), warmup=0, primed=True)
    assert len(result.table.rows) == 2 and result.table.rows["a.sum"].tolist() == [0, 100]


def test_a_gate_lets_counters_see_only_what_is_launched_inside_it(stub: Stub) -> None:
    gate = session.Gate(lambda name: name != "twin")
    calls = []

    def fn() -> None:
        calls.append(1)
        stub.launch(4)
        for name, kernels in (("first", 2), ("twin", 5), ("last", 3)):
            with gate.range(name):
                stub.launch(kernels)

    result = stub.collect(fn, kernels=5, warmup=0, gate=gate)
    assert len(calls) == 1 and gate.opened == 2 and len(result.table.rows) == 5
    assert result.replay == "kernel" and not result.table.partial and len(result.table.notes) == 1
    with gate.range("first"):  # outside of a collection it is no more than the body
        stub.launch(1)
    assert gate.opened == 2


def test_a_function_that_fails_inside_the_gate_leaves_it_closed(stub: Stub) -> None:
    gate = session.Gate(lambda name: True)

    def fn() -> None:
        with gate.range("first"):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        stub.collect(fn, warmup=0, gate=gate)
    assert stub.log()[-len(CLOSED) - 1 :] == ["cuptiRangeProfilerStop", *CLOSED]


def test_another_number_of_ranges_than_kernels_is_noted(stub: Stub) -> None:
    assert "1 ranges for 21 kernels" in stub.collect(lambda: stub.launch(1), kernels=21).table.notes[-1]
    assert len(stub.collect(lambda: stub.launch(21), kernels=21).table.notes) == 1


def test_a_profiler_that_never_has_enough_is_stopped(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_NEVER_DONE", "1")
    with pytest.raises(CountersError, match="more than the 3 passes"):
        stub.collect(lambda: stub.launch(1))
    assert stub.log()[-3:] == CLOSED


# --- errors, and cleaning up -------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", ["application", "kernel"])
def test_what_the_function_raises_passes_through_and_profiling_is_off_again(stub: Stub, replay: Replay) -> None:
    def fails() -> None:
        raise KeyError("in the model")

    with pytest.raises(KeyError, match="in the model"):
        stub.collect(fails, replay=replay, warmup=0)
    assert stub.log()[-5:] == ["cuptiRangeProfilerStart", "cuptiRangeProfilerStop", *CLOSED]
    assert len(stub.collect(lambda: stub.launch(1), replay=replay).table.rows) == 1, "the next one works"


def test_an_error_on_the_gpu_ends_profiling_too(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        monkeypatch.setenv("STUB_CUDA_ERROR", "1")

    with pytest.raises(CountersError, match="cuCtxSynchronize failed with CUresult 700"):
        stub.collect(breaks, warmup=0)
    assert stub.log()[-4:] == ["cuptiRangeProfilerStop", *CLOSED]


@pytest.mark.parametrize(
    ("function", "code", "kind"),
    [
        ("cuptiRangeProfilerEnable", 35, CountersNotPermitted),
        ("cuptiProfilerGetCounterAvailability", 35, CountersNotPermitted),
        ("cuptiRangeProfilerEnable", 39, CountersBusy),
        ("cuptiRangeProfilerSetConfig", 26, CountersBusy),
        ("cuptiRangeProfilerStart", 43, CountersUnavailable),
        ("cuptiRangeProfilerStop", 999, CountersError),
        ("cuptiRangeProfilerDecodeData", 999, CountersError),
        ("cuptiProfilerHostEvaluateToGpuValues", 999, CountersError),
        ("cuptiRangeProfilerGetCounterDataSize", 1, CountersError),
        ("cuptiRangeProfilerCounterDataImageInitialize", 8, CountersError),
        ("cuptiProfilerHostGetNumOfPasses", 1, CountersError),
        ("cuptiDeviceGetChipName", 2, CountersError),
        ("cuptiProfilerInitialize", 999, CountersError),
    ],
)
def test_whatever_fails_everything_opened_before_is_closed(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, function: str, code: int, kind: type[CountersError]
) -> None:
    monkeypatch.setenv("STUB_FAIL", f"{function}:{code}")
    with pytest.raises(kind, match=rf"{function}.*\b{code}\b"):
        stub.collect(lambda: stub.launch(1))
    log = stub.log()
    for opens, closes in (
        ("cuptiProfilerInitialize", "cuptiProfilerDeInitialize"),
        ("cuptiProfilerHostInitialize", "cuptiProfilerHostDeinitialize"),
        ("cuptiRangeProfilerEnable", "cuptiRangeProfilerDisable"),
    ):
        opened = log.count(opens) - (opens == function)
        assert log.count(closes) == opened, closes


def test_an_error_while_cleaning_up_is_told_only_if_nothing_went_wrong_before(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "cuptiRangeProfilerDisable:999")
    with pytest.raises(CountersError, match="cuptiRangeProfilerDisable"):
        stub.collect(lambda: stub.launch(1))
    assert stub.log()[-3:] == CLOSED, "the rest is cleaned up all the same"
    with pytest.raises(ZeroDivisionError):
        stub.collect(lambda: 1 // 0, warmup=0)


def test_a_device_without_support_says_why(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_UNSUPPORTED", "1")
    with pytest.raises(CountersUnavailable, match=r"device 5 .* virtual GPU without profiling"):
        stub.collect(lambda: None)
    assert stub.log()[-1] == "cuptiProfilerDeInitialize"


def test_without_context_or_driver_there_are_no_counters(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_NO_CONTEXT", "1")
    with pytest.raises(CountersUnavailable, match="no CUDA context"):
        stub.collect(lambda: None)
    with pytest.raises(CountersUnavailable, match=r"no NVIDIA driver.*libno-such-driver"):
        collect(lambda: None, METRICS, replay="kernel", library=Library(stub.path), driver="libno-such-driver.so")


def test_a_bad_metric_is_named(stub: Stub) -> None:
    with pytest.raises(UnknownMetric, match="GH100 has no metric 'nonsense'"):
        stub.collect(lambda: None, ["a.sum", "nonsense"])
    assert stub.log().count("cuptiProfilerHostInitialize") == stub.log().count("cuptiProfilerHostDeinitialize") == 3


def test_another_profiler_is_refused_before_anything_runs(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("called")

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(CountersBusy, match=r"torch\.profiler is active"),
    ):
        stub.collect(never)
    monkeypatch.setattr(conflicts, "active_profiler", lambda: "nsys")
    with pytest.raises(conflicts.ProfilerConflict, match="nsys"):
        stub.collect(never)
    assert stub.log() == []


# --- which replay ------------------------------------------------------------------------------------------


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def test_inference_is_repeatable() -> None:
    model, x = linear().eval(), torch.ones(2, 4)
    with torch.no_grad():
        assert repeatable(lambda: model(x), [*model.parameters(), x])[0]
    assert repeatable(lambda: model(x), [*model.parameters(), x])[0], "with gradients on, but no backward"


def test_random_numbers_are_not_repeatable() -> None:
    same, reason = repeatable(lambda: torch.rand(3))
    assert not same and "random" in reason


def test_an_in_place_change_is_not_repeatable_and_the_tensor_is_described() -> None:
    state = torch.zeros(7, 3)
    same, reason = repeatable(lambda: state.add_(1), [torch.zeros(2), state])
    assert not same and "(7, 3) in place" in reason
    with torch.inference_mode():
        cache = torch.zeros(5)  # has no version to look at
    same, reason = repeatable(lambda: inference(cache), [cache])
    assert not same and "(5,) in place" in reason
    assert repeatable(lambda: cache.sum(), [cache])[0]


def inference(cache: torch.Tensor) -> None:
    with torch.inference_mode():
        cache.add_(1)


def test_training_is_not_repeatable_at_the_first_step_and_at_later_ones() -> None:
    model, x = linear(), torch.ones(2, 4)
    for _ in range(2):
        same, reason = repeatable(lambda: model(x).sum().backward(), list(model.parameters()))
        assert not same and "gradient" in reason
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same, reason = repeatable(optimizer.step, list(model.parameters()))
    assert not same and "in place" in reason


def test_batch_norm_in_training_changes_its_statistics() -> None:
    norm = torch.nn.BatchNorm1d(4)
    assert not repeatable(lambda: norm(torch.ones(8, 4)), [*norm.parameters(), *norm.buffers()])[0]
    assert repeatable(lambda: norm.eval()(torch.ones(8, 4)), [*norm.parameters(), *norm.buffers()])[0]


def test_the_replay_is_chosen_by_what_one_call_did(stub: Stub) -> None:
    calls = []
    same = stub.collect(lambda: (calls.append(1), stub.launch(1)), replay="auto", warmup=1)
    assert same.replay == "application" and len(calls) == 1 + 1 + 3
    state = torch.zeros(3)
    other = stub.collect(lambda: (state.add_(1), stub.launch(1)), replay="auto", state=[state], warmup=1)
    assert other.replay == other.table.replay == "kernel" and state[0] == 1 + 1 + 1
    assert other.table.notes == (f"kernel replay: {other.reason}",) and "in place" in other.reason
    assert math.isfinite(other.setup_seconds + other.decode_seconds + other.evaluate_seconds)
