from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from profiler_core.clocks import (
    DRIFT,
    ClockMonitor,
    clock_settings,
    driver_version,
    sample,
    steady,
    throttle_reasons,
    under,
)

pynvml = pytest.importorskip("pynvml")

# A GPU whose SM clock falls with each reading (by 100 MHz unless told otherwise), and which then reports a thermal
# slowdown.
NVML = """
#include <string.h>
static int readings = 0, refuse = 0, opened = 0, step = 100, idle_after = 2;
static unsigned pids[4], processes = 0;
struct sample { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };
static struct sample samples[4];
static unsigned sampled = 0;
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
int nvmlInitWithFlags(unsigned flags) { opened++; return 0; }
int nvmlInit_v2(void) { opened++; return 0; }
int nvmlShutdown(void) { opened--; return 0; }
int stub_opened(void) { return opened; }
void stub_reset(void) { readings = 0; refuse = 0; step = 100; idle_after = 2; processes = sampled = 0; }
void stub_step(int mhz) { step = mhz; }
void stub_idle_after(int count) { idle_after = count; }
int stub_readings(void) { return readings; }
void stub_process(unsigned pid) { pids[processes++] = pid; }
void stub_sample(unsigned pid, unsigned long long time, unsigned sm) {
    samples[sampled++] = (struct sample){.pid = pid, .time = time, .sm = sm};
}
int nvmlDeviceGetProcessUtilization(void *device, struct sample *found, unsigned *count, unsigned long long since) {
    unsigned room = found ? *count : 0;
    *count = sampled;
    if (!sampled) return 6; /* NVML_ERROR_NOT_FOUND */
    if (room < sampled) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    memcpy(found, samples, sampled * sizeof *samples);
    return 0;
}
void stub_refuse(int code) { refuse = code; }
const char *nvmlErrorString(int code) { return "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "580.00", length); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 0) return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    *device = (void *)8;
    return 0;
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
    if (refuse) return refuse;
    *mhz = kind == 1 ? 1980 - step * (readings++ % 15) : 3201; /* never below zero, however many readings */
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *mask) {
    *mask = readings > idle_after ? 0x20 | 0x1 : 0x2;
    return 0;
}
int nvmlDeviceGetApplicationsClock(void *device, int kind, unsigned *mhz) {
    if (refuse) return refuse;
    if (kind != 1) return 3; /* NVML_ERROR_NOT_SUPPORTED */
    *mhz = 1830;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) { *milliwatts = 600000; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 350500 - readings; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 40 + readings; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *found) {
    unsigned room = found ? *count : 0;
    *count = processes;
    if (room < processes) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    for (unsigned i = 0; i < processes; i++) found[i] = (struct process){.pid = pids[i]};
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *mask) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, mask);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a stand-in for libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, folder / "nvml.c"], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture
def nvml(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """pynvml with the stand-in loaded; every session opened on it must be closed again."""
    library.stub_reset()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield library
    assert library.stub_opened() == 0


CUDA = torch.device("cuda", 0)


def test_clocks_and_throttle_reasons_are_sampled(nvml: ctypes.CDLL) -> None:
    with ClockMonitor(CUDA) as monitor:
        for _ in range(3):
            monitor.sample()
    summary = monitor.summary()
    assert summary["samples"] == 3
    assert (summary["sm_mhz"], summary["sm_mhz_min"], summary["sm_mhz_max"]) == (1880, 1780, 1980)
    assert summary["spread"] == pytest.approx(200 / 1980)
    assert summary["memory_mhz"] == 3201
    # neither idling nor a clock that the application asked for is throttling
    assert summary["throttled"] == ["sw_thermal_slowdown"]
    assert "unavailable" not in summary


def test_one_sample_and_the_driver_version(nvml: ctypes.CDLL) -> None:
    assert sample(CUDA) == {"sm_mhz": 1980, "memory_mhz": 3201, "throttled": []}
    assert driver_version() == "580.00"


def test_what_the_clocks_are_set_to(nvml: ctypes.CDLL) -> None:
    assert clock_settings(CUDA) == {"sm_mhz": 1830, "memory_mhz": None, "power_limit_mw": 600000}
    assert clock_settings(torch.device("cuda", 1)) == {}, "no such device"


def test_a_refused_reading_is_missing_and_not_zero(nvml: ctypes.CDLL) -> None:
    nvml.stub_refuse(3)  # NVML_ERROR_NOT_SUPPORTED
    with ClockMonitor(CUDA) as monitor:
        monitor.sample()
    summary = monitor.summary()
    assert summary["samples"] == 0 and "sm_mhz" not in summary
    assert "refused" in summary["unavailable"]
    assert sample(CUDA) == {}


def test_an_unknown_device_gives_no_samples_and_says_so(nvml: ctypes.CDLL) -> None:
    with ClockMonitor(torch.device("cuda", 5)) as monitor:
        monitor.sample()
    assert monitor.summary()["samples"] == 0
    assert "cuda:5" in monitor.summary()["unavailable"]


def test_nvml_is_closed_after_an_error(nvml: ctypes.CDLL) -> None:
    with pytest.raises(KeyError), ClockMonitor(CUDA):
        raise KeyError("in the measured function")


def test_a_cpu_has_no_clocks_and_does_not_touch_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("NVML was initialised"))
    with ClockMonitor(torch.device("cpu")) as monitor:
        monitor.sample()
    assert monitor.summary() == {"samples": 0, "unavailable": "no clocks are read on a cpu device"}


def test_without_the_library_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with ClockMonitor(CUDA) as monitor:
        monitor.sample()
    assert monitor.summary() == {"samples": 0, "unavailable": "NVML cannot be loaded"}
    assert driver_version() is None


def test_the_monitor_has_no_way_to_set_a_clock() -> None:
    text = Path(__import__("profiler_core.clocks", fromlist=["x"]).__file__).read_text()
    assert "nvmlDeviceSet" not in text and "nvmlDeviceReset" not in text


def test_reasons_are_named_after_the_bits_of_nvml() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x1 | 0x4 | 0x80) == ("gpu_idle", "sw_power_cap", "hw_power_brake_slowdown")
    assert throttle_reasons(0x4 | 1 << 40) == ("sw_power_cap", hex(1 << 40))


# -- sampling from a thread -------------------------------------------------------------------------------------------


def wait_for_readings(nvml: ctypes.CDLL, count: int) -> None:
    while nvml.stub_readings() < count:
        threading.Event().wait(0.002)


def test_a_monitor_with_an_interval_samples_by_itself_and_ends_its_thread(nvml: ctypes.CDLL) -> None:
    before = threading.active_count()
    with ClockMonitor(CUDA, interval=0.001) as monitor:
        wait_for_readings(nvml, 4)
    taken = monitor.summary()["samples"]
    assert taken >= 4 and taken == nvml.stub_readings()
    assert threading.active_count() == before


def test_a_run_shorter_than_the_interval_has_a_sample(nvml: ctypes.CDLL) -> None:
    with ClockMonitor(CUDA, interval=3600.0) as monitor:
        pass
    assert monitor.summary()["samples"] == 1


def test_power_and_temperature_come_with_the_clocks(nvml: ctypes.CDLL) -> None:
    with ClockMonitor(CUDA) as monitor:
        monitor.sample()
        monitor.sample()
    summary = monitor.summary()
    assert (summary["power_w_max"], summary["temperature_c_max"]) == (350.499, 42)


def test_a_device_may_be_named_by_a_string(nvml: ctypes.CDLL) -> None:
    with ClockMonitor("cuda:0") as monitor:
        monitor.sample()
    assert monitor.summary()["samples"] == 1
    with ClockMonitor("cuda:5") as monitor:
        pass
    assert "cuda:5" in monitor.summary()["unavailable"]


# -- drift ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mhz", "drifted"), [(0, False), (15, False), (25, True)])
def test_a_clock_that_moves_by_more_than_the_threshold_has_drifted(nvml: ctypes.CDLL, mhz: int, drifted: bool) -> None:
    nvml.stub_step(mhz)
    nvml.stub_idle_after(99)
    with ClockMonitor(CUDA) as monitor:
        for _ in range(3):
            monitor.sample()
    summary = monitor.summary()
    assert (summary["sm_mhz_first"], summary["sm_mhz_last"]) == (1980, 1980 - 2 * mhz)
    assert summary["drift"] == pytest.approx(2 * mhz / 1980)
    assert summary["drifted"] is drifted is (summary["drift"] > DRIFT)


def test_the_low_clock_of_an_idle_gpu_is_no_drift(nvml: ctypes.CDLL) -> None:
    nvml.stub_step(500)
    nvml.stub_idle_after(1)
    with ClockMonitor(CUDA) as monitor:
        monitor.sample()
        monitor.sample()
    summary = monitor.summary()
    assert summary["spread"] > 0.2 and summary["drift"] == 0.0 and not summary["drifted"]
    assert summary["sm_mhz_first"] == summary["sm_mhz_last"] == 1980


def test_a_run_that_drifted_is_repeated_once_and_then_marked(nvml: ctypes.CDLL) -> None:
    nvml.stub_idle_after(10**6)
    calls = []

    def run() -> int:
        calls.append(nvml.stub_readings())
        wait_for_readings(nvml, nvml.stub_readings() + 3)
        return len(calls)

    result, summary = steady(run, CUDA, interval=0.001)
    assert result == len(calls) == summary["runs"] == 2
    assert summary["drifted"]


def test_a_run_that_is_steady_at_the_second_try_is_not_marked(nvml: ctypes.CDLL) -> None:
    nvml.stub_idle_after(10**6)
    calls = []

    def run() -> None:
        calls.append(1)
        wait_for_readings(nvml, nvml.stub_readings() + 3)
        nvml.stub_step(0)  # the clock has settled

    _, summary = steady(run, CUDA, interval=0.001)
    assert summary["runs"] == 2 and not summary["drifted"]


def test_a_steady_run_and_a_run_on_a_cpu_run_once(nvml: ctypes.CDLL) -> None:
    nvml.stub_step(0)
    for device in (CUDA, torch.device("cpu")):
        result, summary = steady(lambda: "result", device)
        assert result == "result" and summary["runs"] == 1 and not summary.get("drifted")


# -- other processes --------------------------------------------------------------------------------------------------


def others(nvml: ctypes.CDLL) -> int:
    with ClockMonitor(CUDA) as monitor:
        pass
    return monitor.summary()["other_processes"]


def test_other_processes_on_the_gpu_are_counted(nvml: ctypes.CDLL) -> None:
    assert others(nvml) == 0
    nvml.stub_process(os.getpid())
    assert others(nvml) == 0
    nvml.stub_process(1)
    nvml.stub_process(2)
    assert others(nvml) == 2


def test_a_process_that_comes_during_the_run_is_counted(nvml: ctypes.CDLL) -> None:
    with ClockMonitor(CUDA) as monitor:
        nvml.stub_process(1)
    assert monitor.summary()["other_processes"] == 1


def test_in_a_container_that_hides_its_process_ids_one_of_them_is_this_process(
    nvml: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.stub_process(1)
    nvml.stub_process(2)
    assert others(nvml) == 2  # without a context on the GPU it is none of them
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert others(nvml) == 1


def busy(nvml: ctypes.CDLL, *samples: tuple[int, float, int]) -> int:
    """How many others worked, of samples (process, seconds after the start, share of the SMs' time in per cent)."""
    with ClockMonitor(CUDA) as monitor:
        for pid, later, share in samples:
            nvml.stub_sample(ctypes.c_uint(pid), ctypes.c_ulonglong(monitor._since + int(later * 1e6)), share)
    return monitor.summary()["busy_processes"]


def test_other_processes_at_work_on_the_gpu_are_told_from_those_that_hold_it(nvml: ctypes.CDLL) -> None:
    nvml.stub_process(1)
    assert busy(nvml) == 0
    assert busy(nvml, (os.getpid(), 0.1, 90), (1, 0.1, 0)) == 0


def test_a_process_that_works_during_the_run_is_counted_once_and_one_before_it_is_not(nvml: ctypes.CDLL) -> None:
    assert busy(nvml, (1, 0.1, 30), (1, 0.3, 40), (2, -5.0, 90)) == 1


def test_in_a_container_one_of_those_at_work_is_this_process(
    nvml: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert busy(nvml, (7, 0.1, 90)) == 0
    assert busy(nvml, (8, 0.1, 5)) == 1


# -- policies ---------------------------------------------------------------------------------------------------------


def test_the_policy_monitor_samples_and_off_does_not(nvml: ctypes.CDLL) -> None:
    with under("monitor", CUDA) as monitor:
        pass
    assert monitor.summary()["samples"] >= 1
    read = nvml.stub_readings()
    with under("off", CUDA) as monitor:
        monitor.sample()
    assert nvml.stub_readings() == read
    assert monitor.summary() == {"samples": 0, "unavailable": "clocks are not monitored (clocks='off')"}


def test_the_policy_lock_holds_the_clocks_around_the_body(nvml: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from profiler_core import clock_lock

    seen = []

    @contextmanager
    def lock(device: object) -> Iterator[None]:
        seen.append(device)
        yield
        seen.append("undone")

    monkeypatch.setattr(clock_lock, "lock", lock)
    with under("lock", CUDA) as monitor:
        seen.append("body")
    assert seen == [CUDA, "body", "undone"] and monitor.summary()["samples"] >= 1


def test_an_unknown_policy_is_refused_with_those_that_there_are(nvml: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="expected 'monitor', 'lock' or 'off'"), under("locked", CUDA):
        pass
