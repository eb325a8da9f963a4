"""The twenty counters of a kernel: what each means, what it is called on each chip, and how it aggregates.

Seventeen are measured, three come from the launch record. Names and numbers of passes are checked against CUPTI's own
evaluator for every chip in :data:`CHIPS`. The measured ones together take three passes. With ``sm__throughput`` and
``lts__throughput`` they would take seven to nine: those two are the largest of many parts, and here only the parts that
limit kernels of neural networks are asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.counter_table import CounterTable

Aggregation = Literal["sum", "weighted", "max"]

# Chip, as CUPTI names it -> compute capability.
CHIPS: dict[str, int] = {"GA100": 80, "GA102": 86, "AD102": 89, "GH100": 90, "GB100": 100, "GB202": 120}
# Chips that differ in size only have the same counters. The first prefix that fits counts.
_FAMILIES = {"GA100": "GA100", "GA1": "GA102", "AD1": "AD102", "GH1": "GH100", "GB1": "GB100", "GB2": "GB202"}

COVERAGE = "counter_coverage"


class UnknownChip(ValueError):
    """No counter names are known for this chip."""


@dataclass(frozen=True)
class Counter:
    """One counter.

    Args:
        key: its column in a profile.
        axis: the question that it answers.
        unit: of its values: "ns", "byte", "%", or what is counted.
        aggregation: "sum", "weighted" (by the kernels' durations) or "max".
        meaning: one sentence.
        names: chip -> PerfWorks metrics to collect, of which the largest is the value; a chip that lacks the counter
            is absent.
        launch: it is taken from the launch record (registers, shared memory, grid), not from hardware.
        aliases: metrics of the same meaning that a report made by another set may hold; they go before ``names``.
        passes: what it costs alone, on the chip where that is most.
    """

    key: str
    axis: str
    unit: str
    aggregation: Aggregation
    meaning: str
    names: Mapping[str, tuple[str, ...]]
    launch: bool = False
    aliases: tuple[str, ...] = ()
    passes: int = 1


def _everywhere(*metrics: str, **other: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {chip: other.get(chip, metrics) for chip in CHIPS}


_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
_ACTIVE = ".avg.pct_of_peak_sustained_active"


def _elapsed(*names: str) -> tuple[str, ...]:
    return tuple(name + _ELAPSED for name in names)


COUNTERS: tuple[Counter, ...] = (
    Counter(
        "gpu_time",
        "latency",
        "ns",
        "sum",
        "Time from the kernel's start to its end on the GPU while counters were read.",
        _everywhere("gpu__time_duration.sum"),
    ),
    Counter(
        "dram_read_bytes",
        "memory bandwidth",
        "byte",
        "sum",
        "Bytes read from device memory.",
        _everywhere("dram__bytes_read.sum", GB202=("dram__bytes_op_read.sum",)),
    ),
    Counter(
        "dram_write_bytes",
        "memory bandwidth",
        "byte",
        "sum",
        "Bytes written to device memory while the kernel ran; what stays in L2 is written later and not seen.",
        _everywhere("dram__bytes_write.sum", GB202=("dram__bytes_op_write.sum",)),
    ),
    Counter(
        "dram_throughput",
        "memory bandwidth",
        "%",
        "weighted",
        "Device memory's busiest part against its peak.",
        _everywhere("dram__throughput" + _ELAPSED),
        aliases=_elapsed("gpu__dram_throughput"),
    ),
    Counter(
        "l2_throughput",
        "L2",
        "%",
        "weighted",
        "L2's busiest stage (tag lookups, sectors, data) against its peak.",
        # GA100 cannot count data and lookups in one pass.
        _everywhere(
            *_elapsed("lts__t_sectors", "lts__t_tag_requests", "lts__d_sectors"),
            GA100=_elapsed("lts__t_sectors", "lts__t_tag_requests"),
        ),
        aliases=_elapsed("lts__throughput"),
    ),
    Counter(
        "l2_hit_rate",
        "L2",
        "%",
        "weighted",
        "Sectors found in L2, of those looked up.",
        _everywhere("lts__t_sector_hit_rate.pct"),
        passes=2,
    ),
    Counter(
        "l1_hit_rate",
        "L1",
        "%",
        "weighted",
        "Sectors found in L1, of those looked up.",
        _everywhere("l1tex__t_sector_hit_rate.pct"),
    ),
    Counter(
        "sm_throughput",
        "compute",
        "%",
        "weighted",
        "The busiest of the SM's issue slots and arithmetic pipes (ALU, FMA, FP64, XU) against its peak; tensor cores "
        "are `tensor_active`.",
        # GA100 needs a pass fewer for active cycles than for instructions.
        _everywhere(
            *_elapsed(
                "sm__inst_executed", *(f"sm__inst_executed_pipe_{pipe}" for pipe in ("alu", "fma", "fp64", "xu"))
            ),
            GA100=_elapsed(
                "sm__inst_executed",
                *(f"sm__pipe_{pipe}_cycles_active" for pipe in ("alu", "fma", "fp64")),
                "sm__inst_executed_pipe_xu",
            ),
        ),
        aliases=_elapsed("sm__throughput"),
        passes=2,
    ),
    Counter(
        "tensor_active",
        "tensor cores",
        "%",
        "weighted",
        "Cycles in which the tensor pipe worked, of all that elapsed. A kernel without tensor-core work may show a "
        "little: the pipe also runs HFMA2, with which compilers load constants.",
        _everywhere("sm__pipe_tensor_cycles_active" + _ELAPSED),
    ),
    Counter(
        "achieved_occupancy",
        "occupancy",
        "%",
        "weighted",
        "Warps resident on an SM on average while it worked, of the most that it can hold.",
        _everywhere("sm__warps_active" + _ACTIVE),
    ),
    Counter(
        "warp_latency",
        "latency",
        "cycle",
        "weighted",
        "Cycles that a warp spends per instruction that it issues: high where warps wait.",
        _everywhere("smsp__average_warp_latency_per_inst_issued.ratio"),
    ),
    Counter(
        "issue_active",
        "issue efficiency",
        "%",
        "weighted",
        "Cycles in which a scheduler issued an instruction, of those in which it had warps; times the four schedulers "
        "of an SM, instructions per cycle.",
        _everywhere("smsp__issue_active" + _ACTIVE),
    ),
    Counter(
        "eligible_warps",
        "issue efficiency",
        "warp",
        "weighted",
        "Warps per scheduler that could have issued, on average: below one, latency is not hidden.",
        _everywhere("smsp__warps_eligible.avg.per_cycle_active"),
    ),
    Counter(
        "instructions",
        "compute",
        "inst",
        "sum",
        "Instructions executed, one for the threads of a warp together.",
        _everywhere("smsp__inst_executed.sum"),
        aliases=("sm__inst_executed.sum",),
    ),
    Counter(
        "threads_per_instruction",
        "divergence",
        "thread",
        "weighted",
        "Threads that took part in an instruction, of 32.",
        _everywhere("smsp__thread_inst_executed_per_inst_executed.ratio"),
        aliases=("smsp__average_thread_inst_executed_per_inst_executed.ratio",),
    ),
    Counter(
        "local_load_bytes",
        "spills",
        "byte",
        "sum",
        "Bytes loaded from local memory: registers that were spilled, or arrays indexed at run time.",
        _everywhere("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum"),
    ),
    Counter(
        "shared_bank_conflicts",
        "shared memory",
        "conflict",
        "sum",
        "Extra cycles of the shared memory because threads of a warp met in one bank.",
        _everywhere("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"),
    ),
    Counter(
        "registers",
        "register pressure",
        "register",
        "max",
        "Registers per thread.",
        {},
        launch=True,
        aliases=("launch__registers_per_thread",),
        passes=0,
    ),
    Counter(
        "shared_memory",
        "shared memory",
        "byte",
        "max",
        "Static and dynamic shared memory of a block, without what the driver reserves.",
        {},
        launch=True,
        passes=0,
    ),
    Counter(
        "waves_per_sm",
        "occupancy",
        "wave",
        "max",
        "Blocks launched, of those that fit on the GPU at once: just above a whole number, SMs idle at the end.",
        {},
        launch=True,
        aliases=("launch__waves_per_multiprocessor",),
        passes=0,
    ),
)
FULL: tuple[str, ...] = tuple(counter.key for counter in COUNTERS)
# What fits into two passes on every chip: all but the SM's pipes and, for GA100's sake, the bank conflicts.
QUICK: tuple[str, ...] = tuple(key for key in FULL if key not in ("sm_throughput", "shared_bank_conflicts"))
# Passes of the quick and of the full set, the same on every chip of CHIPS.
QUICK_PASSES, FULL_PASSES = 2, 3

_SHARED_PARTS = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")


def family(chip: str) -> str:
    """The chip of :data:`CHIPS` whose counters ``chip`` ("AD104") has. Raises :class:`UnknownChip`."""
    for prefix, known in _FAMILIES.items():
        if chip.startswith(prefix):
            return known
    raise UnknownChip(f"no counter names are known for chip {chip!r}; known: {', '.join(CHIPS)} and their relatives")


def chip_of(capability: tuple[int, int]) -> str:
    """The chip of :data:`CHIPS` for a compute capability; a minor one that is not listed has the counters of the one
    below it. Raises :class:`UnknownChip`.
    """
    wanted = capability[0] * 10 + capability[1]
    fitting = [chip for chip, known in CHIPS.items() if known // 10 == capability[0] and known <= wanted]
    if not fitting:
        raise UnknownChip(f"no counter names are known for compute capability {capability[0]}.{capability[1]}")
    return fitting[-1]


def _chosen(keys: Iterable[str]) -> list[Counter]:
    wanted = list(keys)
    unknown = [key for key in wanted if key not in FULL]
    if unknown:
        raise ValueError(f"no counter {', '.join(map(repr, unknown))}; the counters are {', '.join(FULL)}")
    return [counter for counter in COUNTERS if counter.key in wanted]


def metrics(chip: str, keys: Iterable[str] = FULL) -> dict[str, tuple[str, ...]]:
    """The PerfWorks metrics behind each measured counter of ``keys`` that ``chip`` has. Of several metrics the
    largest is the counter's value; :func:`from_metrics` takes it.
    """
    known = family(chip)
    return {c.key: c.names[known] for c in _chosen(keys) if known in c.names}


def metric_names(chip: str, keys: Iterable[str] = FULL) -> list[str]:
    """What to ask a profiler for: the metrics of :func:`metrics`, each once."""
    return list(dict.fromkeys(name for names in metrics(chip, keys).values() for name in names))


def from_metrics(table: CounterTable, chip: str) -> pd.DataFrame:
    """float64 columns, one per counter, and the rows of ``table``; NaN where not measured. A counter of several parts
    is missing where one of them is: the largest of the rest could be far below it.
    """
    import numpy as np
    import pandas as pd

    known = family(chip)
    rows = table.rows

    def column(names: Sequence[str]) -> np.ndarray | None:
        present = [rows[name].to_numpy(dtype="float64") for name in names if name in rows]
        return np.maximum.reduce(present) if names and len(present) == len(names) else None  # NaN stays NaN

    values = {}
    for counter in COUNTERS:
        filled = np.full(len(rows), np.nan)
        for names in (*((alias,) for alias in counter.aliases), counter.names.get(known, ())):
            found = column(names)
            if found is not None:
                filled = np.where(np.isnan(filled), found, filled)
        values[counter.key] = filled
    if all(part in rows for part in _SHARED_PARTS):
        values["shared_memory"] = rows[[*_SHARED_PARTS]].to_numpy(dtype="float64").sum(axis=1)
    return pd.DataFrame(values, index=rows.index)


def aggregate(
    values: pd.DataFrame, duration_ns: Sequence[int] | np.ndarray, groups: Iterable[Hashable]
) -> pd.DataFrame:
    """Counters of groups of kernels (an operator, a node, a line, a layer class): a row per group, in order of first
    appearance, the columns of ``values`` and :data:`COVERAGE`.

    - A sum is missing if one kernel of the group lacks it: the sum of the rest would be a number that is too small.
    - A rate is the mean over the kernels that have it, weighted by their durations, as in the method this follows. The
      exact mean of a hit rate would be weighted by the lookups, which nobody counted; the two differ where kernels
      that look up little run long.
    - Of constants of a launch the largest counts.
    - COVERAGE is the share of the group's time, 0 to 1, in kernels with at least one measured counter; where no time
      passed, of its kernels. A rate stands for that share, or for less where it is undefined (a hit rate without
      lookups).
    """
    import numpy as np
    import pandas as pd

    codes_of: dict[Hashable, int] = {}
    codes = np.fromiter((codes_of.setdefault(group, len(codes_of)) for group in groups), dtype=np.int64)
    time = np.asarray(duration_ns, dtype="float64")
    if not len(codes) == len(time) == len(values):
        raise ValueError(f"{len(values)} rows of counters, {len(time)} durations and {len(codes)} groups")
    n = len(codes_of)

    def total(of: np.ndarray, where: np.ndarray | slice = slice(None)) -> np.ndarray:
        return np.bincount(codes[where], weights=of[where], minlength=n)

    result = {}
    measured = np.zeros(len(codes), dtype=bool)
    for counter in COUNTERS:
        if counter.key not in values:
            continue
        column = values[counter.key].to_numpy(dtype="float64")
        present = ~np.isnan(column)
        if not counter.launch:
            measured |= present
        if counter.aggregation == "sum":
            result[counter.key] = total(column)  # NaN carries over
        elif counter.aggregation == "weighted":
            with np.errstate(invalid="ignore"):
                result[counter.key] = total(column * time, present) / total(time, present)
        else:
            largest = np.full(n, np.nan)
            np.fmax.at(largest, codes, column)
            result[counter.key] = largest
    span, count = total(time), np.bincount(codes, minlength=n)
    with np.errstate(invalid="ignore"):
        by_time = total(time, measured) / span
    result[COVERAGE] = np.where(span > 0, by_time, np.bincount(codes[measured], minlength=n) / np.maximum(count, 1))
    return pd.DataFrame(result, index=pd.Index(list(codes_of), tupleize_cols=False))
