"""Tells which other profiler holds the GPU's profiling interface (CUPTI serves one at a time) and refuses by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class ProfilerError(RuntimeError):
    """A profiler gave nothing usable; the message says why and what to do."""


class ProfilerConflict(ProfilerError):
    """Another profiler holds CUPTI; the message names it and says what to do."""


@dataclass(frozen=True)
class _Tool:
    """How a tool shows in the process that it has injected itself into: variables that it sets (names, or the
    beginnings of names) and libraries that it has loaded or asks CUDA to load.
    """

    name: str
    variables: tuple[str, ...]
    libraries: re.Pattern[str]
    instead: str


# NSYS_PROFILING_SESSION_ID is in the user guide of Nsight Systems, CUDA_INJECTION64_PATH in CUPTI's. The other names
# are the tools' own business, known from processes run under them and not promised: several for each tool, any of which
# is enough. The sanitizer comes first: it shares its launcher with ncu.
_TOOLS = (
    _Tool(
        "compute-sanitizer",
        ("NV_SANITIZER_INJECTION_",),
        re.compile(r"libsanitizer-(?:collection|public)\.so|libInterceptorInjectionSanitizer"),
        "start the program without it to measure: its checks slow kernels many times over",
    ),
    _Tool(
        "nsys",
        ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY"),
        re.compile(r"libToolsInjection(?:Proxy)?(?:64|32)?\.so"),
        "start the program without it, or read the report that it writes: profiler_core.load('report.nsys-rep')",
    ),
    _Tool(
        "ncu",
        ("NV_NSIGHT_INJECTION_", "NV_COMPUTE_PROFILER_PERFWORKS_DIR"),
        re.compile(r"libcuda-injection\.so|libTreeLauncher\w*\.so|libInterceptorInjection\w*\.so"),
        "start the program without it, or read the report that it writes: profiler_core.load('report.ncu-rep')",
    ),
)
# Both hold what a tool has had loaded, or is about to, into this process.
_INJECTED = ("CUDA_INJECTION64_PATH", "LD_PRELOAD")


def active_profiler() -> str | None:
    """The tool under which this process runs ("nsys", "ncu", "compute-sanitizer"), None where no sign of one is seen.

    A tool that leaves no sign in the process is not seen (DCGM's profiling fields, a CUPTI client linked into the
    program): then torch.profiler sees no kernels, which :func:`profiler_core.collect.kineto.measure` reports.
    """
    return _found(os.environ, _loaded_libraries())


def refuse(tool_wanted: str) -> None:
    """Raise ProfilerConflict where another profiler holds CUPTI, so that ``tool_wanted`` would see nothing or fail
    (CUPTI_ERROR_MULTIPLE_SUBSCRIBERS).
    """
    active = active_profiler()
    if active is None:
        return
    instead = next(tool.instead for tool in _TOOLS if tool.name == active)
    raise ProfilerConflict(
        f"{tool_wanted} cannot measure the GPU in this process, which runs under {active}: both need CUPTI, which "
        f"serves one profiler at a time (CUPTI_ERROR_MULTIPLE_SUBSCRIBERS). Either {instead}"
    )


def _found(environment: Mapping[str, str], loaded: Iterable[str]) -> str | None:
    injected = [part for name in _INJECTED for part in re.split(r"[: ]", environment.get(name, "")) if part]
    libraries = [os.path.basename(path) for path in (*injected, *loaded)]
    for tool in _TOOLS:
        if any(name.startswith(tool.variables) and value for name, value in environment.items()):
            return tool.name
        if any(tool.libraries.match(library) for library in libraries):
            return tool.name
    return None


def _loaded_libraries() -> set[str]:
    """Paths of the files mapped into this process; empty where the system does not say."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return {line.split(maxsplit=5)[5].strip() for line in file if "/" in line}
    except OSError:
        return set()
