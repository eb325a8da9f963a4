from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from profiler_core.clocks import ClockMonitor, driver_version, sample, throttle_reasons

pynvml = pytest.importorskip("pynvml")

# A GPU whose SM clock falls by 100 MHz with each reading, and which then reports a thermal slowdown.
NVML = """
#include <string.h>
static int readings = 0, refuse = 0, opened = 0;
int nvmlInitWithFlags(unsigned flags) { opened++; return 0; }
int nvmlInit_v2(void) { opened++; return 0; }
int nvmlShutdown(void) { opened--; return 0; }
int stub_opened(void) { return opened; }
void stub_reset(void) { readings = 0; refuse = 0; }
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
    *mhz = kind == 1 ? 1980 - 100 * readings++ : 3201;
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *mask) {
    *mask = readings > 2 ? 0x20 | 0x1 : 0x2;
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
