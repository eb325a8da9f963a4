"""One profiler at a time: whoever holds CUPTI is named, and only a measurement on the GPU is refused."""

from __future__ import annotations

import os

import pytest
import torch

from profiler_core.collect import conflicts, kineto
from profiler_core.collect.conflicts import ProfilerConflict, ProfilerError

NSYS = {
    "NSYS_PROFILING_SESSION_ID": "1234",
    "QUADD_INJECTION_PROXY": "OSRT",
    "CUDA_INJECTION64_PATH": "/opt/nvidia/nsight-systems/2025.3.1/target-linux-x64/libToolsInjection64.so",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so:/opt/nvidia/nsight-systems/libToolsInjectionProxy64.so",
}
NCU = {
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "1",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt/nvidia/nsight-compute/2025.3.1/target/linux",
    "CUDA_INJECTION64_PATH": "/opt/nvidia/nsight-compute/2025.3.1/target/libcuda-injection.so",
    "LD_PRELOAD": "/opt/nvidia/nsight-compute/libTreeLauncherTargetInjection.so",
}
SANITIZER = {
    "NV_SANITIZER_INJECTION_PORT_BASE": "49152",
    "LD_PRELOAD": "libTreeLauncherTargetInjection.so libsanitizer-collection.so",
}
SIGNS = [
    (tool, *sign)
    for tool, signs in (("nsys", NSYS), ("ncu", NCU), ("compute-sanitizer", SANITIZER))
    for sign in signs.items()
]


@pytest.fixture(autouse=True)
def no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these tests themselves ran under none."""
    for name in (*NSYS, *NCU, *SANITIZER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(conflicts, "_loaded_libraries", set)


def test_a_process_of_its_own_has_no_active_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conflicts.active_profiler() is None
    conflicts.refuse("torch.profiler")
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/site/libsome-tool.so")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "")
    assert conflicts.active_profiler() is None, "another library, or an empty variable, says nothing about CUPTI"


@pytest.mark.parametrize(("tool", "variable", "value"), SIGNS)
def test_each_sign_in_the_environment_names_its_tool(
    tool: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert conflicts.active_profiler() == tool


@pytest.mark.parametrize(
    ("tool", "library"),
    [
        ("nsys", "/opt/nvidia/nsight-systems/libToolsInjection64.so"),
        ("ncu", "/opt/nvidia/nsight-compute/libcuda-injection.so"),
        ("ncu", "/opt/nvidia/nsight-compute/libTreeLauncherPlaceholder.so"),
        ("compute-sanitizer", "/usr/local/cuda/compute-sanitizer/libsanitizer-public.so"),
    ],
)
def test_a_loaded_library_names_its_tool(tool: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "_loaded_libraries", lambda: {"/usr/lib/libc.so.6", library})
    assert conflicts.active_profiler() == tool


def test_the_loaded_libraries_are_read_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not os.path.exists("/proc/self/maps"):
        assert conflicts._loaded_libraries() == set()
        return
    names = {os.path.basename(path) for path in conflicts._loaded_libraries()}
    assert any(name.startswith("libtorch") for name in names)


def test_a_refusal_names_both_tools_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1234")
    with pytest.raises(ProfilerConflict, match=r"torch\.profiler cannot .* under nsys.*MULTIPLE_SUBSCRIBERS.*nsys-rep"):
        conflicts.refuse("torch.profiler")
    assert issubclass(ProfilerConflict, ProfilerError)


@pytest.mark.parametrize("variable", ["NSYS_PROFILING_SESSION_ID", "NV_COMPUTE_PROFILER_PERFWORKS_DIR"])
def test_under_another_profiler_only_the_gpu_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    calls: list[int] = []
    with pytest.raises(ProfilerConflict, match=r"nsys|ncu"):
        kineto.measure(lambda: calls.append(1), iterations=1, warmup=3, device=torch.device("cuda"))
    assert calls == [], "refused before anything has run"
    x = torch.ones(4, 4)
    trace = kineto.measure(lambda: x @ x, iterations=2, warmup=0, device=torch.device("cpu"))
    assert trace.ranges["name"].tolist().count("aten::mm") == 2
