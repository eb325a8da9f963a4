"""What Nsight Compute's printed output means: numbers in two locales, units, display names, and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

# Metrics that describe the device and the launch in words, in every report: nobody asked for them.
DESCRIPTIONS = ("device__", "launch__", "profiler__")
MISSING = frozenset({"", "n/a", "no data"})
_ENGLISH = re.compile(r"-?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?([eE][+-]?\d+)?")
_EUROPEAN = re.compile(r"-?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?")


def locale_of(text: str) -> str:
    """ "english" or "european" where the printed number ``text`` is well formed in that locale only, "either" where
    its separator has a meaning in both, "" where it has none or is no number.
    """
    english, european = _ENGLISH.fullmatch(text), _EUROPEAN.fullmatch(text)
    if english and european:
        return "either" if "." in text or "," in text else ""
    return "english" if english else "european" if european else ""


def number(text: str, european: bool) -> float | None:
    """The value of a printed number; None where ``text`` is none (also not in this locale)."""
    if not (_EUROPEAN if european else _ENGLISH).fullmatch(text):
        return None
    if european:
        return float(text.replace(".", "").replace(",", "."))
    return float(text.replace(",", ""))


_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"n": 1.0, "u": 1e3, "m": 1e6, "": 1e9}  # in ns
_SECOND = re.compile(r"([num]?)(?:s|sec|second)")
_SCALED = re.compile(r"([KMGTPkmgtp]?)(byte|[Hh]z)")


@lru_cache(maxsize=1024)
def base_unit(unit: str) -> tuple[str, float]:
    """Base unit of ``unit`` and what a value is multiplied with to get there: time in ns, sizes in byte (ncu's
    prefixes are decimal), frequencies in hz, rates per s. Units that ncu does not scale stay as they are.

    Cycles per time, as older versions print clock rates, are hz.
    """
    time = _SECOND.fullmatch(unit)
    if time:
        return "ns", _SECONDS[time[1]]
    above, slash, below = unit.partition("/")
    scaled = _SCALED.fullmatch(above)
    factor = 1.0
    if scaled:
        above, factor = scaled[2].lower(), _PREFIXES[scaled[1].lower()]
    per = _SECOND.fullmatch(below) if slash else None
    if per:
        factor *= 1e9 / _SECONDS[per[1]]
        return ("hz" if above == "cycle" else f"{above}/s"), factor
    return f"{above}{slash}{below}", factor


# The labels that ncu's section files give to metrics, as the details page prints them. Only labels that have meant
# the same metric since the sections got these names (2021.1) on the architectures from sm_80 on. A label means
# different metrics in different sections, so both are the key.
_LABELS: dict[str, dict[str, str]] = {
    "GPU Speed Of Light Throughput": {
        "Duration": "gpu__time_duration.sum",
        "Elapsed Cycles": "gpc__cycles_elapsed.max",
        "SM Active Cycles": "sm__cycles_active.avg",
        "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "Memory Throughput": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM Throughput": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "L1/TEX Cache Throughput": "l1tex__throughput.avg.pct_of_peak_sustained_active",
        "L2 Cache Throughput": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    },
    "Memory Workload Analysis": {
        "Memory Throughput": "dram__bytes.sum.per_second",
        "L1/TEX Hit Rate": "l1tex__t_sector_hit_rate.pct",
        "L2 Hit Rate": "lts__t_sector_hit_rate.pct",
    },
    "Scheduler Statistics": {
        "One or More Eligible": "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "Issued Warp Per Scheduler": "smsp__issue_active.avg.per_cycle_active",
        "Active Warps Per Scheduler": "smsp__warps_active.avg.per_cycle_active",
        "Eligible Warps Per Scheduler": "smsp__warps_eligible.avg.per_cycle_active",
    },
    "Warp State Statistics": {
        "Warp Cycles Per Issued Instruction": "smsp__average_warp_latency_per_inst_issued.ratio",
        "Avg. Active Threads Per Warp": "smsp__thread_inst_executed_per_inst_executed.ratio",
        "Avg. Not Predicated Off Threads Per Warp": "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio",
    },
    "Instruction Statistics": {"Executed Instructions": "smsp__inst_executed.sum"},
    "Compute Workload Analysis": {"Executed Ipc Active": "sm__inst_executed.avg.per_cycle_active"},
    "Occupancy": {
        "Theoretical Occupancy": "sm__maximum_warps_per_active_cycle_pct",
        "Theoretical Active Warps per SM": "sm__maximum_warps_avg_per_active_cycle",
        "Achieved Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
        "Achieved Active Warps Per SM": "sm__warps_active.avg.per_cycle_active",
        "Block Limit SM": "launch__occupancy_limit_blocks",
        "Block Limit Registers": "launch__occupancy_limit_registers",
        "Block Limit Shared Mem": "launch__occupancy_limit_shared_mem",
        "Block Limit Warps": "launch__occupancy_limit_warps",
    },
    "Launch Statistics": {
        "Registers Per Thread": "launch__registers_per_thread",
        "Static Shared Memory Per Block": "launch__shared_mem_per_block_static",
        "Dynamic Shared Memory Per Block": "launch__shared_mem_per_block_dynamic",
        "Driver Shared Memory Per Block": "launch__shared_mem_per_block_driver",
        "Waves Per SM": "launch__waves_per_multiprocessor",
        "Threads": "launch__thread_count",
    },
}


def metric_name(section: str, metric: str, label: str = "") -> str:
    """PerfWorks name of a row of the details page, or "section: label: metric" where the name is not known.
    ``label`` is the row's Body Item Label.
    """
    if "__" in metric or ("." in metric and " " not in metric):
        return metric
    known = None if label else _LABELS.get(section, {}).get(metric)
    return known or ": ".join(part for part in (section, label, metric) if part)


_REMEDIES = (
    (
        "ERR_NVGPUCTRPERM",
        "GPU performance counters are reserved for administrators. An administrator lifts that for everybody with\n"
        "  echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee "
        "/etc/modprobe.d/nvidia-profiling.conf\n"
        "and a reboot (or by reloading the nvidia modules); for one run, run ncu as root, or the container with "
        "--cap-add=SYS_ADMIN.",
    ),
    (
        "driver resource was unavailable",
        "Another profiler holds the GPU's counters. If it is DCGM: `dcgmi profile --pause`, profile, then "
        "`dcgmi profile --resume`; otherwise end the other nsys, ncu or CUPTI session.",
    ),
    (
        "Cuda driver is not compatible",
        "Use an ncu of the driver's own CUDA version (`nvidia-smi` shows it).",
    ),
    (
        "No kernels were profiled",
        "The program launched no kernel that ncu was to profile: check --profile-from-start (off needs "
        "cudaProfilerStart in the program), --nvtx-include and --kernel-name, and --target-processes all for child "
        "processes.",
    ),
)


def remedy(lines: Iterable[str]) -> str:
    """What to do about the errors in ncu's log; "" where that is not known."""
    log = "\n".join(lines)
    return next((text for sign, text in _REMEDIES if sign in log), "")
