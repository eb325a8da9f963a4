"""What this machine can measure, and what it would take to measure the rest."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

OLDEST_TORCH, BEYOND_TORCH = (2, 11), (2, 15)
TESTED_TORCH = ((2, 11), (2, 13))
_PROBE = """
#include <Python.h>
#include <omp.h>
#include <vector>
extern "C" int threads() { std::vector<int> one{1}; return one[0] * omp_get_max_threads(); }
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. ``state``: "yes", "no" (with a remedy, or none is needed), or "broken", and then
    nothing can be measured.
    """

    what: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which a report needs it. Measures for a few seconds at most, changes nothing."""
    findings = list(_torch())
    if any(finding.state == "broken" for finding in findings):
        return findings
    for check in (_cpu_profile, _gpu, _clocks, _tools, _compiler, _triton, _reports, _folder):
        try:
            findings += check()
        except Exception as error:  # one thing that cannot be told hides no other
            name = check.__name__.strip("_").replace("_", " ")
            findings.append(Finding(name, "no", f"could not be told: {type(error).__name__}: {error}"))
    return findings


def _torch() -> Iterator[Finding]:
    yield Finding("Python", "yes", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        import torch
    except Exception as error:
        yield Finding("torch", "broken", f"cannot be imported: {error}", "pip install 'torch>=2.11,<2.15'")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = " and ".join(".".join(map(str, known)) for known in TESTED_TORCH)
    if version < OLDEST_TORCH or version >= BEYOND_TORCH:
        yield Finding(
            "torch", "broken", f"{torch.__version__}, which is not supported", "pip install 'torch>=2.11,<2.15'"
        )
    elif version not in TESTED_TORCH:
        yield Finding("torch", "yes", f"{torch.__version__}, allowed and not tested; {tested} are")
    else:
        yield Finding("torch", "yes", torch.__version__)


def _cpu_profile() -> Iterator[Finding]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    seen = any(event.key == "aten::mm" for event in profiler.key_averages())
    threads = f"{torch.get_num_threads()} threads on {_cpu_name()}"
    if seen:
        yield Finding("operators on the CPU", "yes", f"torch.profiler sees them; {threads}")
    else:
        yield Finding("operators on the CPU", "no", "torch.profiler saw none", "end other profilers of this process")


def _cpu_name() -> str:
    from profiler_core.environment import environment

    return str(environment("cpu")["cpu"])


def _gpu() -> Iterator[Finding]:
    import torch

    from profiler_core.collect.conflicts import active_profiler

    if not torch.cuda.is_available():
        why, remedy = _why_no_gpu()
        yield Finding("GPU", "no", why, remedy)
        return
    properties = torch.cuda.get_device_properties(0)
    from profiler_core.clocks import driver_version

    count = torch.cuda.device_count()
    more = f", the first of {count}" if count > 1 else ""
    yield Finding(
        "GPU", "yes", f"{properties.name} ({properties.major}.{properties.minor}){more}, driver {driver_version()}"
    )
    tool = active_profiler()
    if tool is not None:
        yield Finding(
            "kernels on the GPU", "no", f"this process runs under {tool}", "start it without, or load its report"
        )
        return
    yield from _gpu_kernels()


def _why_no_gpu() -> tuple[str, str]:
    import torch

    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        card = any(Path("/dev").glob("nvidia[0-9]*"))
        remedy = "install a torch built for CUDA: https://pytorch.org/get-started" if card else ""
        return (
            f"torch {torch.__version__} is built for CPUs; profiles hold CPU operators, counters are not to be had",
            remedy,
        )
    if not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded", "install the driver, or start the container with --gpus all"
    return (
        "torch sees none of the driver's GPUs",
        "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch",
    )


def _gpu_kernels() -> Iterator[Finding]:
    """A product on the GPU under the profiler, with counters: what this finds, a real profile finds."""
    import torch

    import profiler_core

    x = torch.ones(256, 256, device="cuda")
    try:
        profile = profiler_core.profile(torch.mm, x, x, iterations=1, warmup=1, counters="quick", clocks="off")
    except Exception as error:
        yield Finding("kernels on the GPU", "no", str(error), "end the other profiler, or see docs/profiling.md")
        return
    yield Finding("kernels on the GPU", "yes", f"torch.profiler sees them: {profile.window['name'].iloc[0]}")
    refused = [note for note in profile.notes if note.startswith("no hardware counters: ")]
    if refused:
        remedy = (
            "let users read them: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reboot"
        )
        limited = "permission" in refused[0].lower() or "administrator" in refused[0].lower()
        reason = refused[0].removeprefix("no hardware counters: ")
        yield Finding(
            "hardware counters", "no", reason, remedy if limited else "labels rest on times and modelled work"
        )
    else:
        yield Finding("hardware counters", "yes", "CUPTI reads them in this process")


def _clocks() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        return
    from profiler_core.clocks import clock_settings, sample

    seen = sample("cuda")
    if not any(value is not None for value in seen.values()):
        yield Finding(
            "clocks", "no", "NVML does not tell them", "pip install nvidia-ml-py; on a MIG instance there are none"
        )
        return
    told = ", ".join(f"{name} {value}" for name, value in seen.items() if isinstance(value, (int, float)))
    yield Finding("clocks", "yes", f"watched while measuring ({told})")
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        yield Finding(
            "locking clocks",
            "no",
            "takes an administrator's right",
            "sudo nvidia-smi --lock-gpu-clocks=MHZ before, --reset-gpu-clocks after",
        )
    else:
        settings = {name: value for name, value in clock_settings("cuda").items() if value is not None}
        yield Finding("locking clocks", "yes", f'with clocks="lock", asked for explicitly {settings or ""}'.rstrip())


def _tools() -> Iterator[Finding]:
    import torch

    from profiler_core.collect import ncu_command, nsys_command

    needed = torch.cuda.is_available()
    for name, module, purpose in (
        ("nsys", nsys_command, "times of a program from outside"),
        ("ncu", ncu_command, "counters of a program from outside"),
    ):
        path = module.find()
        if path is not None:
            yield Finding(name, "yes", f"{path}: {purpose}; profiler_core.record uses it")
        else:
            remedy = f"{module.MISSING}." if needed else ""
            yield Finding(name, "no", f"not found ({purpose}); files of other machines can be loaded without", remedy)
    try:
        found = metadata.version("ncu-report")
        yield Finding("ncu reports", "yes", f"ncu-report {found} reads .ncu-rep files")
    except metadata.PackageNotFoundError:
        yield Finding("ncu reports", "no", ".ncu-rep files cannot be read; ncu's CSV can", "pip install 'fxopt[ncu]'")
    params = Path("/proc/driver/nvidia/params")
    if params.exists() and "RmProfilingAdminOnly: 1" in params.read_text(errors="replace") and os.geteuid() != 0:
        yield Finding(
            "permission for ncu",
            "no",
            "the driver keeps counters for administrators",
            "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reboot; or run as root",
        )


def _compiler() -> Iterator[Finding]:
    wanted = os.environ.get("CXX") or ("clang++" if platform.system() == "Darwin" else "g++")
    program = shutil.which(wanted.split()[0])
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        version = sysconfig.get_python_version()
        yield Finding(
            "Python.h",
            "no",
            f"{include} has none, and Inductor compiles against it",
            f"apt-get install python{version}-dev",
        )
    else:
        yield Finding("Python.h", "yes", include)
    if program is None:
        yield Finding(
            "C++ compiler",
            "no",
            f"{wanted} is not on PATH: torch.compile fails on CPUs",
            "apt-get install g++, or set CXX",
        )
        return
    with tempfile.TemporaryDirectory(prefix="fxopt-doctor-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE)
        command = [
            program,
            "-std=c++17",
            "-fPIC",
            "-shared",
            "-fopenmp",
            f"-I{include}",
            str(source),
            "-o",
            f"{folder}/probe.so",
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode == 0:
        yield Finding("C++ compiler", "yes", f"{program} builds C++17 with OpenMP")
    else:
        said = (built.stderr.strip().splitlines() or ["nothing was said"])[0]
        yield Finding(
            "C++ compiler",
            "no",
            f"{program} cannot build C++17 with OpenMP and Python.h: {said}",
            "apt-get install g++ libc6-dev python3-dev",
        )


def _triton() -> Iterator[Finding]:
    import torch

    for name in ("triton", "pytorch-triton"):
        try:
            yield Finding("Triton", "yes", metadata.version(name))
            return
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.is_available()
    yield Finding(
        "Triton",
        "no",
        "not installed" + ("" if gpu else ", and needed on a GPU alone"),
        "pip install triton" if gpu else "",
    )


def _reports() -> Iterator[Finding]:
    for name, purpose, remedy in (
        ("plotly", "HTML reports", "pip install plotly"),
        ("pyarrow", "profiles as Parquet", "pip install 'fxopt[parquet]'"),
    ):
        try:
            yield Finding(purpose, "yes", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Finding(purpose, "no", f"{name} is not installed", remedy)


def _folder() -> Iterator[Finding]:
    from fxopt.options import resolve_options
    from profiler_core.files import why_no_folder

    root = resolve_options({}).plan_root
    if why := why_no_folder(root):
        yield Finding("plans", "no", f"{root} cannot be written to: {why}", "set FXOPT_PLAN_DIR to a folder of yours")
    else:
        yield Finding("plans", "yes", f"kept in {root}")


def usable(findings: list[Finding]) -> bool:
    """Whether anything can be measured at all."""
    return not any(finding.state == "broken" for finding in findings)
