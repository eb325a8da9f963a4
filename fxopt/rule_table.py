"""The rules. Thresholds can be overridden by the option ``thresholds``; `fxopt rules` prints this table.

The counters' shares are of what the hardware can do at most, as in Nsight Compute's "GPU Speed Of Light": a unit above
60 % limits a kernel, and where all are below, latency does (Nsight Compute's Kernel Profiling Guide, and its rule
"SOLBottleneck"). Without counters, modelled bytes and FLOPs are held against ceilings measured on the device: the
roofline of Williams, Waterman and Patterson (CACM 52(4), 2009).
"""

from __future__ import annotations

from fxopt.labels import Axis
from fxopt.rule import Rule, Test

_ROOFLINE = "Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009"
_SOL = "Nsight Compute, GPU Speed Of Light: a unit above 60 % of its peak limits"
_OWN = "this project's choice"
_GPU = ("cuda",)

RULES: tuple[Rule, ...] = (
    Rule(
        name="launch_bound",
        axis=Axis.LAUNCH_BOUND,
        scope="graph",
        tests=(Test("launch_gap", ">", 0.15),),
        headroom="save_launch_ns",
        evidence=("wall_ns", "kernel_ns"),
        high=(Test("launch_gap", ">", 0.3),),
        why="Kernels run for {kernel_ns} of the {wall_ns} that a call takes: the other "
        "{launch_gap:.0%} {gap_is}.",
        reference=f"{_OWN}: well above what a launch queue kept full leaves between kernels",
    ),
    # -- memory
    Rule(
        name="memory_bound",
        axis=Axis.MEMORY_BOUND,
        scope="group",
        tests=(
            Test("dram_throughput", ">=", 60.0),
            Test("dram_throughput", ">=", "arithmetic"),
            Test("dram_throughput", ">=", "l2_throughput"),
        ),
        headroom="save_memory_ns",
        evidence=("dram_bytes", "bytes", "arithmetic", "l2_throughput", "time_ns"),
        high=(Test("dram_throughput", ">=", 75.0),),
        devices=_GPU,
        why="Device memory works at {dram_throughput:.0f} % of its peak, and nothing else is as busy.",
        reference=_SOL,
    ),
    Rule(
        name="memory_bound_modelled",
        axis=Axis.MEMORY_BOUND,
        scope="group",
        tests=(Test("intensity", "<", "ridge"), Test("bandwidth_fraction", ">=", 0.6)),
        headroom="save_memory_modelled_ns",
        evidence=("bandwidth", "copy_ceiling", "bytes", "last_level_cache_bytes", "time_ns"),
        high=(Test("bandwidth_fraction", ">=", 0.8),),
        low=(Test("bytes", "<=", "last_level_cache_bytes"), Test("bandwidth_fraction", ">", 1.0)),
        stands_in="memory_bound",
        why="It moves {bytes} (modelled) at {bandwidth_fraction:.0%} of the device's copy rate, and "
        "its {intensity:.3g} FLOP/byte lie below the ridge of {ridge:.3g}{cached}.",
        reference=f"{_ROOFLINE}; 0.6 of a measured copy is {_OWN}",
    ),
    Rule(
        name="l2_bound",
        axis=Axis.L2_BOUND,
        scope="group",
        tests=(
            Test("l2_throughput", ">=", 50.0),
            Test("l2_throughput", ">", "dram_throughput"),
            Test("l2_throughput", ">=", "arithmetic"),
        ),
        headroom="save_l2_ns",
        evidence=("l2_hit_rate", "dram_throughput", "arithmetic", "time_ns"),
        high=(Test("l2_throughput", ">=", 70.0),),
        devices=_GPU,
        why="L2 works at {l2_throughput:.0f} % of its peak, device memory at {dram_throughput:.0f} %.",
        reference=_SOL,
    ),
    Rule(
        name="excess_traffic",
        axis=Axis.EXCESS_TRAFFIC,
        scope="group",
        tests=(Test("traffic_ratio", ">=", 1.5), Test("excess_bytes", ">=", 1e6), Test("excess_share", ">=", 0.1)),
        headroom="save_excess_ns",
        evidence=("dram_bytes", "bytes", "dram_throughput", "l2_hit_rate", "time_ns"),
        high=(Test("traffic_ratio", ">=", 3.0),),
        devices=_GPU,
        why="It moves {dram_bytes} to and from device memory where its operators have to move {bytes}: "
        "{traffic_ratio:.1f} times as many.",
        reference=f"{_OWN}: a sector is 32 bytes, so that strided access shows up as a factor of up to 8 in float32",
    ),
    # -- arithmetic
    Rule(
        name="compute_bound",
        axis=Axis.COMPUTE_BOUND,
        scope="group",
        tests=(Test("arithmetic", ">=", 60.0), Test("arithmetic", ">", "dram_throughput")),
        headroom="save_compute_ns",
        evidence=("sm_throughput", "tensor_active", "dram_throughput", "flop_rate", "flop_ceiling", "time_ns"),
        high=(Test("arithmetic", ">=", 75.0),),
        devices=_GPU,
        why="The busiest arithmetic unit or issue slot works at {arithmetic:.0f} % of its peak, and device memory at "
        "{dram_throughput:.0f} %.",
        reference=_SOL,
    ),
    Rule(
        name="compute_bound_modelled",
        axis=Axis.COMPUTE_BOUND,
        scope="group",
        tests=(Test("intensity", ">=", "ridge"), Test("flop_fraction", ">=", 0.4)),
        headroom="save_compute_modelled_ns",
        evidence=("flop_rate", "flop_ceiling", "flops", "time_ns"),
        high=(Test("flop_fraction", ">=", 0.7),),
        # A rate above the ceiling shows that the ceiling was measured on a busier device.
        low=(Test("flop_fraction", ">", 1.0),),
        stands_in="compute_bound",
        why="It runs at {flop_fraction:.0%} of the {compute_dtype} matrix-product rate of this device, "
        "and its {intensity:.3g} FLOP/byte lie above the ridge of {ridge:.3g}.",
        reference=f"{_ROOFLINE}; 0.4 is {_OWN}: few shapes fill a device like a large square product",
    ),
    Rule(
        name="tensor_core_idle",
        axis=Axis.TENSOR_CORE_IDLE,
        scope="group",
        tests=(Test("tensor_active", "<=", 30.0), Test("rate_ratio", ">", 1.1), Test("time_over_floor", ">", 1.0)),
        headroom="save_narrow_ns",
        evidence=("sm_throughput", "dtype_bits", "flops", "flop_rate", "flop_ceiling", "narrow_ceiling", "time_ns"),
        high=(Test("time_over_floor", ">=", 2.0),),
        devices=_GPU,
        facts=("product", "narrow_units"),
        nodes="float32_products",
        excuse="tf32_on",
        why="A {compute_dtype} matrix product ({flops}) takes {time_over_floor:.1f} times what the "
        "device's bfloat16 units need for the same work, and its tensor cores are {tensor_active:.0f} % busy.",
        reference=f"{_ROOFLINE}; 30 %: {_OWN}. Fused attention in float32 forms its products from three of TF32, and "
        "keeps tensor cores 9 % busy where bfloat16 would be far faster",
    ),
    Rule(
        name="tensor_core_idle_modelled",
        axis=Axis.TENSOR_CORE_IDLE,
        scope="group",
        tests=(Test("rate_ratio", ">", 1.1), Test("time_over_floor", ">", 1.0)),
        headroom="save_narrow_ns",
        evidence=("dtype_bits", "flops", "flop_rate", "flop_ceiling", "narrow_ceiling", "time_ns"),
        high=(Test("time_over_floor", ">=", 2.0),),
        facts=("product", "narrow_units"),
        nodes="float32_products",
        excuse="tf32_on",
        stands_in="tensor_core_idle",
        why="A {compute_dtype} matrix product ({flops}) takes {time_over_floor:.1f} times what the "
        "device's bfloat16 units need for the same work.",
        reference=f"{_ROOFLINE}; the ratio of 1.1 keeps the noise of two measured ceilings from counting as hardware",
    ),
    Rule(
        name="tensor_core_idle_by_name",
        axis=Axis.TENSOR_CORE_IDLE,
        scope="group",
        tests=(Test("tensor_active", "<=", 5.0), Test("sm_throughput", ">=", 30.0), Test("rate_ratio", ">", 1.1)),
        headroom="save_narrow_unmodelled_ns",
        evidence=("flop_ceiling", "narrow_ceiling", "time_ns"),
        devices=_GPU,
        facts=("product", "narrow_units"),
        nodes="float32_products",
        excuse="tf32_on",
        stands_in="tensor_core_idle_modelled",
        why="A kernel of a matrix product keeps the SMs' other units {sm_throughput:.0f} % busy and the tensor cores "
        "{tensor_active:.0f} %, which are {rate_ratio:.0f} times as fast.",
        reference=f"{_OWN}: its work is not modelled, so that the busy arithmetic units have to tell a product that "
        "is large enough",
    ),
    # -- latency and the launch
    Rule(
        name="latency_bound",
        axis=Axis.LATENCY_BOUND,
        scope="group",
        tests=(Test("busiest", "<", 40.0), Test("eligible_warps", "<", 1.0), Test("grid_efficiency", ">", 0.6)),
        headroom="save_latency_ns",
        evidence=("warp_latency", "issue_active", "achieved_occupancy", "time_ns"),
        high=(Test("busiest", "<", 25.0), Test("eligible_warps", "<", 0.5)),
        devices=_GPU,
        why="No unit is more than {busiest:.0f} % busy, and a scheduler has {eligible_warps:.2f} warps that could "
        "issue: they wait for something.",
        reference=f"{_SOL}, and below 40 % on all units latency does; below one eligible warp it is not hidden",
    ),
    Rule(
        name="latency_bound_modelled",
        axis=Axis.LATENCY_BOUND,
        scope="group",
        tests=(Test("roofline_fraction", "<", 0.2),),
        headroom="save_latency_modelled_ns",
        evidence=("roofline_ns", "bytes", "flops", "time_ns"),
        low=(Test("time_ns", ">", 0.0),),
        stands_in="latency_bound",
        why="It takes {time_ns} where its modelled bytes and FLOPs need {roofline_ns} at the device's "
        "rates: neither memory nor matrix products explain it.",
        reference=f"{_ROOFLINE}; 0.2 is {_OWN}. What it waits for, or computes beyond the model, is not measured",
    ),
    Rule(
        name="occupancy_limited",
        axis=Axis.OCCUPANCY_LIMITED,
        scope="group",
        tests=(
            Test("theoretical_occupancy", "<=", 50.0),
            Test("occupancy_reached", ">=", 0.6),
            Test("busiest", "<", 60.0),
            Test("tensor_active", "<", 10.0),
            Test("eligible_warps", "<", 1.5),
        ),
        headroom="save_occupancy_ns",
        evidence=("achieved_occupancy", "registers", "shared_memory", "threads_per_block", "time_ns"),
        high=(Test("theoretical_occupancy", "<=", 30.0), Test("busiest", "<", 40.0)),
        devices=_GPU,
        why="For want of {limiter} only {theoretical_occupancy:.0f} % of an SM's warps fit on it, and with "
        "{eligible_warps:.2f} eligible ones a scheduler no unit is more than {busiest:.0f} % busy.",
        reference="Nsight Compute, Occupancy; that no unit may be busy, nor tensor cores fed by few warps, is "
        f"{_OWN}",
    ),
    Rule(
        name="occupancy_limited_modelled",
        axis=Axis.OCCUPANCY_LIMITED,
        scope="group",
        tests=(
            Test("theoretical_occupancy", "<=", 25.0),
            Test("roofline_fraction", "<", 0.4),
            Test("waves_per_sm", ">=", 1.0),
        ),
        headroom="save_occupancy_modelled_ns",
        evidence=("registers", "shared_memory", "threads_per_block", "time_ns"),
        low=(Test("time_ns", ">", 0.0),),
        devices=_GPU,
        stands_in="occupancy_limited",
        why="For want of {limiter} only {theoretical_occupancy:.0f} % of an SM's warps fit on it, and it takes "
        "{time_ns} where its work needs {roofline_ns} at the device's rates.",
        reference=f"CUDA occupancy calculator; the thresholds are {_OWN}",
    ),
    Rule(
        name="wave_starved",
        axis=Axis.WAVE_STARVED,
        scope="group",
        tests=(Test("sm_active", "<=", 0.75), Test("grid_efficiency", "<=", 0.75)),
        headroom="save_idle_sms_ns",
        evidence=("blocks", "sm_count", "waves_per_sm", "achieved_occupancy", "issue_active", "time_ns"),
        high=(Test("sm_active", "<=", 0.5),),
        devices=_GPU,
        why="Its {blocks:.0f} blocks make {waves_per_sm:.2f} waves on {sm_count:.0f} SMs, and on average "
        "{sm_active:.0%} of these are at work.",
        reference=f"Nsight Compute, Launch Statistics (tail effect, small grid); both 0.75 are {_OWN}",
    ),
    Rule(
        name="wave_starved_modelled",
        axis=Axis.WAVE_STARVED,
        scope="group",
        tests=(Test("grid_efficiency", "<=", 0.65), Test("roofline_fraction", "<", 0.5)),
        headroom="save_waves_ns",
        evidence=("blocks", "sm_count", "waves_per_sm", "time_ns"),
        devices=_GPU,
        stands_in="wave_starved",
        why="Its {blocks:.0f} blocks make {waves_per_sm:.2f} waves on {sm_count:.0f} SMs, which keeps "
        "{grid_efficiency:.0%} of the device at work.",
        reference=f"Nsight Compute, Launch Statistics (tail effect, small grid); the thresholds are {_OWN}",
    ),
    # -- what the instructions are spent on
    Rule(
        name="register_spill",
        axis=Axis.REGISTER_SPILL,
        scope="group",
        tests=(Test("spill_share", ">=", 0.02),),
        headroom="save_spill_ns",
        evidence=("local_load_bytes", "instructions", "registers", "l1_hit_rate", "time_ns"),
        high=(Test("spill_share", ">=", 0.05),),
        devices=_GPU,
        why="{spill_share:.1%} of its instructions load from local memory, where registers go that do not fit (or "
        "arrays that are indexed at run time).",
        reference="CUDA C++ Best Practices Guide, Register Pressure; 2 % of the instructions is " + _OWN,
    ),
    Rule(
        name="divergent",
        axis=Axis.DIVERGENT,
        scope="group",
        tests=(Test("threads_per_instruction", "<=", 24.0),),
        headroom="save_divergence_ns",
        evidence=("instructions", "issue_active", "time_ns"),
        high=(Test("threads_per_instruction", "<=", 20.0),),
        devices=_GPU,
        why="On average {threads_per_instruction:.1f} of a warp's 32 threads take part in an instruction.",
        reference="Nsight Compute, Warp State: thread divergence; 24 of 32 is " + _OWN,
    ),
    # -- what could be left out
    Rule(
        name="layout_conversion",
        axis=Axis.LAYOUT_CONVERSION,
        scope="group",
        tests=(Test("layout_share", ">=", 0.5),),
        headroom="time_ns",
        evidence=("bytes", "bandwidth_fraction", "time_ns"),
        high=(Test("layout_share", ">=", 0.9),),
        why="{layout_share:.0%} of its time goes into putting data in another order.",
        reference=f"{_OWN}: a layout that producer and consumer agree on needs no conversion",
    ),
    Rule(
        name="cast_traffic",
        axis=Axis.CAST_TRAFFIC,
        scope="group",
        tests=(Test("cast_share", ">=", 0.5),),
        headroom="time_ns",
        evidence=("bytes", "bandwidth_fraction", "time_ns"),
        high=(Test("cast_share", ">=", 1.0),),
        why="All it does is give data another type.",
        reference=f"{_OWN}: a cast that its producer or consumer does costs no traffic of its own",
    ),
    Rule(
        name="opaque_library",
        axis=Axis.OPAQUE_LIBRARY,
        scope="group",
        tests=(Test("opaque_share", ">=", 0.5),),
        headroom="time_ns",
        evidence=("time_ns",),
        low=(Test("time_ns", ">", 0.0),),
        facts=("black_box",),
        why="It is a library's kernel ({library}) whose work the graph does not show: no pass can look inside.",
        reference="arXiv 2609.11938: kernels behind one opaque operator are surfaced, never dropped",
    ),
)
