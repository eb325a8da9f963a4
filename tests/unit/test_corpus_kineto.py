"""Every public trace of torch.profiler in the corpus, against numbers that were computed from it independently."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from profiler_core.attribute.correlation import link
from profiler_core.attribute.enclosure import enclosing
from profiler_core.collect import chrome_trace
from profiler_core.trace import Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Expected:
    """``events``: operators, API calls, annotations, device annotations, kernels, and memcpys with memsets; everything
    else is of the kernels alone.
    """

    events: tuple[int, int, int, int, int, int]
    total_ns: int = 0
    names: int = 0
    longest_name: int = 0
    devices: set[int] = field(default_factory=set)
    streams: set[int] = field(default_factory=set)
    external_ids: tuple[int, int, int] = (0, 0, 0)  # present, zero, also the id of an operator
    correlated: int = 0
    launched: int = 0  # a call with their correlation id is in the trace
    shared: tuple[int, int] = (0, 1)  # correlation ids of several kernels, the most kernels of one
    first: tuple[int, int, int, int] | None = None  # ns, stream, correlation id, External id
    first_launch: tuple[str, str] = ("", "")  # call, innermost operator
    without_operator: int | None = None  # by nesting the launch in the operators of its thread; None: not counted
    disagree: int = 0  # operators' External ids that name another one
    operators: dict[str, int] = field(default_factory=dict)  # the most frequent ones


CORPUS = {
    "hta_a100_alexnet_extid_is_correlation.json.gz": Expected(
        events=(359, 361, 8, 0, 79, 19),
        total_ns=10692000,
        names=16,
        longest_name=5123,
        devices={0},
        streams={20, 7},
        external_ids=(79, 0, 1),
        correlated=79,
        launched=79,
        first_launch=("cudaLaunchKernel", "aten::uniform_"),
        without_operator=0,
        disagree=1,
        operators={
            "aten::cudnn_convolution": 30,
            "aten::clamp_min_": 14,
            "aten::addmm": 12,
            "aten::add_": 10,
            "aten::max_pool2d_with_indices": 6,
            "aten::native_dropout": 4,
        },
    ),
    "hta_a100_cupti_range_profiler_no_kernel_cat.json.gz": Expected(events=(375, 1862, 8, 0, 0, 0)),
    "hta_a100_multi_stream_events.json.gz": Expected(
        events=(6, 39, 0, 0, 3, 3),
        total_ns=369000,
        names=1,
        longest_name=22,
        devices={0},
        streams={24, 20, 28},
        external_ids=(3, 0, 3),
        correlated=3,
        launched=3,
        first=(123000, 20, 27, 2),
        first_launch=("cudaLaunchKernel", "aten::mm"),
        without_operator=0,
        disagree=0,
        operators={"aten::mm": 3},
    ),
    "hta_a100_simple_add_2023.json.gz": Expected(
        events=(28, 15, 8, 0, 4, 0),
        total_ns=16000,
        names=2,
        longest_name=5123,
        devices={0},
        streams={7},
        external_ids=(4, 0, 1),
        correlated=4,
        launched=4,
        first_launch=("cudaLaunchKernel", "aten::uniform_"),
        without_operator=0,
        disagree=1,
        operators={"aten::uniform_": 2, "aten::add": 2},
    ),
    "hta_a100_triton_example.json.gz": Expected(
        events=(3, 2, 1, 0, 1, 0),
        total_ns=1760,
        names=1,
        longest_name=30,
        devices={0},
        streams={7},
        external_ids=(1, 0, 1),
        correlated=1,
        launched=1,
        first=(1760, 7, 35, 3),
        first_launch=("cuLaunchKernel", "triton_poi_fused_add_cos_sin_0"),
        without_operator=0,
        disagree=0,
        operators={"triton_poi_fused_add_cos_sin_0": 1},
    ),
    "hta_cpu_only_gloo_rank34.json.gz": Expected(events=(7379, 0, 100, 0, 0, 0)),
    "hta_gp100_gpu_user_annotation.json.gz": Expected(
        events=(643, 180, 10, 10, 130, 10),
        total_ns=290000,
        names=10,
        longest_name=473,
        devices={0},
        streams={7},
        external_ids=(130, 0, 0),
        correlated=130,
        launched=130,
        first=(2000, 7, 225013, 225013),
        first_launch=("cudaLaunchKernel", "aten::fill_"),
        without_operator=0,
        disagree=0,
        operators={
            "aten::add_": 50,
            "aten::fill_": 30,
            "aten::mm": 25,
            "aten::sigmoid": 5,
            "aten::mse_loss": 5,
            "aten::mean": 5,
        },
    ),
    "hta_hand_trimmed_missing_launches.json.gz": Expected(
        events=(6, 5, 4, 0, 6, 12),
        total_ns=432000,
        names=3,
        longest_name=185,
        devices={1},
        streams={7},
        external_ids=(6, 0, 0),
        correlated=6,
        launched=2,
        first=(5000, 7, 1930734, 1930734),
        first_launch=("", ""),
        without_operator=6,
        disagree=0,
        operators={},
    ),
    "hta_large_integer_fields.json.gz": Expected(
        events=(1, 0, 0, 0, 1, 0),
        total_ns=50000,
        names=1,
        longest_name=20,
        devices={-1},
        streams={-1},
        external_ids=(0, 0, 0),
        correlated=0,
        launched=0,
        first=(50000, -1, 0, 0),
        first_launch=("", ""),
        without_operator=1,
        disagree=0,
        operators={},
    ),
    "hta_rank1_no_cpu_ops_extid0.json.gz": Expected(
        events=(0, 8, 0, 0, 4, 0),
        total_ns=30000,
        names=4,
        longest_name=912,
        devices={0},
        streams={7},
        external_ids=(3, 1, 0),
        correlated=4,
        launched=4,
        first_launch=("cudaLaunchKernel", ""),
        without_operator=4,
        disagree=0,
        operators={},
    ),
    "hta_rank_non_gpu.json.gz": Expected(events=(2424, 0, 43, 0, 0, 0)),
    "hta_v100_19370_kernels_54MB.json.gz": Expected(
        events=(56680, 42373, 2035, 0, 19370, 2920),
        total_ns=977859000,
        names=49,
        longest_name=836,
        devices={1},
        streams={14, 7},
        external_ids=(19370, 0, 0),
        correlated=19370,
        launched=19370,
        first=(3000, 7, 73689, 73689),
        first_launch=("cudaLaunchKernel", "aten::fill_"),
    ),
    "kineto_docs_h100_no_extid.json": Expected(
        events=(4, 1, 0, 0, 1, 0),
        total_ns=20,
        names=1,
        longest_name=6,
        devices={0},
        streams={1},
        external_ids=(0, 0, 0),
        correlated=1,
        launched=1,
        first=(20, 1, 1, 0),
        first_launch=("cudaLaunchKernel", "op1"),
        without_operator=0,
        disagree=0,
        operators={"op1": 1},
    ),
    "tl_b300_moe.json.gz": Expected(
        events=(141, 79, 6, 6, 36, 0),
        total_ns=231454,
        names=11,
        longest_name=850,
        devices={0},
        streams={7},
        external_ids=(36, 0, 36),
        correlated=36,
        launched=36,
        first=(3488, 7, 14, 7),
        first_launch=("cuLaunchKernelEx", "aten::mm"),
        without_operator=0,
        disagree=0,
        operators={
            "aten::topk": 6,
            "aten::index": 6,
            "aten::bmm": 6,
            "aten::mm": 3,
            "aten::_softmax": 3,
            "aten::copy_": 3,
        },
    ),
    "tl_h100_bert.json.gz": Expected(
        events=(479, 132, 1, 1, 60, 1),
        total_ns=307197,
        names=11,
        longest_name=495,
        devices={0},
        streams={7},
        external_ids=(60, 0, 60),
        correlated=60,
        launched=60,
        first=(3136, 7, 8218, 9),
        first_launch=("cudaLaunchKernel", "aten::index_select"),
        without_operator=0,
        disagree=0,
        operators={
            "aten::addmm": 26,
            "aten::native_layer_norm": 10,
            "aten::add": 9,
            "aten::gelu": 5,
            "aten::_flash_attention_forward": 4,
            "aten::index_select": 3,
        },
    ),
    "tl_h100_qwen_kernels_without_launch.json.gz": Expected(
        events=(4186, 1922, 1, 1, 1465, 242),
        total_ns=45432698,
        names=26,
        longest_name=850,
        devices={0},
        streams={7},
        external_ids=(1029, 0, 1029),
        correlated=1465,
        launched=1029,
        first=(18112, 7, 675771, 0),
        first_launch=("", ""),
        without_operator=436,
        disagree=0,
        operators={
            "aten::mul": 220,
            "aten::copy_": 197,
            "aten::add": 145,
            "aten::mm": 96,
            "aten::addmm": 72,
            "aten::cat": 49,
        },
    ),
    "tl_mi300_sglang_hipgraph.json.gz": Expected(
        events=(61, 29, 2, 0, 555, 3),
        total_ns=9765437,
        names=27,
        longest_name=1350,
        devices={9},
        streams={2, 3},
        external_ids=(8, 0, 8),
        correlated=555,
        launched=555,
        shared=(1, 544),
        first_launch=("hipLaunchKernel", "aten::arange"),
        without_operator=547,
        disagree=0,
        operators={
            "aten::_foreach_copy_": 2,
            "aten::copy_": 2,
            "aten::cumsum": 1,
            "aten::argmax": 1,
            "aten::neg": 1,
            "aten::arange": 1,
        },
    ),
    "tl_mi300_torch_compile_triton.json.gz": Expected(
        events=(41, 59, 1, 1, 12, 0),
        total_ns=12549021,
        names=8,
        longest_name=478,
        devices={2},
        streams={0},
        external_ids=(12, 0, 12),
        correlated=12,
        launched=12,
        first=(77074, 0, 6, 6),
        first_launch=("hipModuleLaunchKernel", "triton_red_fused_add_mean_mul_pow_rsqrt_0"),
        without_operator=0,
        disagree=0,
        operators={
            "aten::mm": 7,
            "triton_red_fused_add_mean_mul_pow_rsqrt_0": 1,
            "aten::_flash_attention_forward": 1,
            "triton_red_fused__unsafe_view_add_mean_mul_pow_rsqrt_1": 1,
            "triton_poi_fused__unsafe_view_mul_silu_2": 1,
            "triton_poi_fused__unsafe_view_add_3": 1,
        },
    ),
}


@pytest.fixture(params=CORPUS, scope="module")
def case(request: pytest.FixtureRequest, shared: Path) -> tuple[Trace, Expected]:
    return chrome_trace.read(shared / "corpus" / "kineto" / request.param), CORPUS[request.param]


def kernels_of(trace: Trace) -> pd.DataFrame:
    return trace.kernels[trace.kernels["kind"] == "kernel"]


def operator_ids(trace: Trace) -> set[int]:
    return set(trace.ranges["external_id"][trace.ranges["category"] == "op"]) - {0}


def test_every_event_is_read_as_what_it_is(case: tuple[Trace, Expected]) -> None:
    trace, expected = case
    ranges, kinds = Counter(trace.ranges["category"]), Counter(trace.kernels["kind"])
    read = (ranges["op"], len(trace.calls), ranges["annotation"], ranges["device"], kinds["kernel"])
    assert (*read, kinds["memcpy"] + kinds["memset"]) == expected.events
    assert trace.partial == ()
    assert trace.device_type == ("cuda" if len(trace.kernels) else "cpu")
    assert any("no kernels" in note or "no activity" in note for note in trace.notes) == trace.kernels.empty


def test_kernels_keep_their_time_names_and_place(case: tuple[Trace, Expected]) -> None:
    trace, expected = case
    kernels = kernels_of(trace)
    assert kernels["duration_ns"].sum() == expected.total_ns
    assert kernels["name"].nunique() == expected.names
    assert max(kernels["name"].str.len(), default=0) == expected.longest_name
    assert set(kernels["device"]) == expected.devices
    assert set(kernels["stream"]) == expected.streams
    assert kernels["start_ns"].is_monotonic_increasing
    if expected.first:
        first = kernels.iloc[0]
        assert tuple(first[["duration_ns", "stream", "correlation", "external_id"]]) == expected.first


def test_ids_are_read_with_their_gaps(case: tuple[Trace, Expected]) -> None:
    trace, expected = case
    kernels = kernels_of(trace)
    external = kernels["external_id"]
    present, _zero, known = expected.external_ids  # an id of zero is none
    assert ((external != 0).sum(), external.isin(operator_ids(trace)).sum()) == (present, known)
    correlations = kernels["correlation"]
    assert (correlations != 0).sum() == expected.correlated
    assert correlations.isin(trace.calls["correlation"]).sum() == expected.launched
    per_id = Counter(correlations)
    assert (sum(count > 1 for count in per_id.values()), max(per_id.values(), default=1)) == expected.shared


def test_launches_nest_in_operators(case: tuple[Trace, Expected]) -> None:
    trace, expected = case
    kernels, calls = kernels_of(trace), trace.calls
    operators = trace.ranges[trace.ranges["category"] == "op"]
    start, end, thread = (operators[name].to_numpy() for name in ("start_ns", "end_ns", "thread"))
    call = link(trace).call[kernels.index]
    operator = np.full(len(kernels), -1)
    launched = call >= 0
    at, at_thread = (calls[name].to_numpy()[call[launched]] for name in ("start_ns", "thread"))
    operator[launched] = enclosing(start, end, thread, at, at_thread)
    names = np.append(operators["name"], "")[operator]  # -1 picks the last
    if len(kernels):
        assert (np.append(calls["name"], "")[call[0]], names[0]) == expected.first_launch
    if expected.without_operator is None:
        return
    assert (operator < 0).sum() == expected.without_operator
    known = kernels["external_id"].isin(operator_ids(trace)).to_numpy() & (operator >= 0)
    nested_ids = np.append(operators["external_id"], 0)[operator]
    assert (known & (nested_ids != kernels["external_id"])).sum() == expected.disagree
    found = Counter(names)
    assert {name: found[name] for name in expected.operators} == expected.operators


def test_what_only_some_traces_have(shared: Path) -> None:
    corpus = shared / "corpus" / "kineto"

    def read(name: str) -> Trace:
        return chrome_trace.read(corpus / name)

    steps = read("hta_v100_19370_kernels_54MB.json.gz")
    assert steps.iterations == 5
    assert (steps.meta["rank"], steps.meta["world_size"]) == (1, 2)
    gpu = {"name": "Tesla V100-SXM2-32GB", "capability": (7, 0), "sm_count": 80, "max_threads_per_sm": 2048}
    assert steps.meta["devices"][0].items() >= gpu.items()
    assert steps.ranges["sequence"].max() > 0
    assert set(steps.kernels["process"]) == {783658}, "the process that launched, not the device"

    stacks = read("tl_h100_bert.json.gz")
    assert any("1385 python_function" in note for note in stacks.notes)
    assert stacks.meta["with_stack"] and stacks.meta["base_ns"] == 1751410836000000000
    assert stacks.meta["versions"]["cuda_runtime_version"] == 12040
    assert stacks.kernels["start_ns"][0] == 1419247333430849
    one = stacks.kernels.iloc[0]
    assert tuple(one[["grid_x", "grid_y", "grid_z", "block_x", "registers"]]) == (564, 1, 1, 128, 32)

    counters = read("hta_a100_cupti_range_profiler_no_kernel_cat.json.gz")
    assert any("77 cuda_profiler_range" in note for note in counters.notes)

    job = read("hta_cpu_only_gloo_rank34.json.gz")
    assert (job.meta["rank"], job.meta["backend"], job.iterations) == (34, "gloo", 5)
    assert not [key for key in job.meta if key.startswith(("tw_", "mast_"))], "nothing of the job's surroundings"


def test_a_file_that_is_no_trace_says_what_it_seems_to_be(shared: Path) -> None:
    with pytest.raises(TraceError, match=r"hta_execution_trace.*seems to be an execution trace"):
        chrome_trace.read(shared / "corpus" / "kineto" / "hta_execution_trace_not_kineto.json.gz")


@pytest.mark.parametrize(
    ("capture", "kernels", "launches"),
    [("h200_sdpa", 22, 22), ("h200_graph", 44, 4), ("h200_block", 42, 42), ("h200_dynamic", 88, 88)],
)
def test_captures_have_their_kernels(shared: Path, capture: str, kernels: int, launches: int) -> None:
    trace = chrome_trace.read(shared / "captures" / capture / "kineto.trace.json.gz")
    assert set(trace.kernels["kind"]) == {"kernel"}
    assert len(trace.kernels) == kernels
    assert trace.kernels["correlation"].nunique() == launches
    assert trace.meta["devices"][0]["name"] == "NVIDIA H200"
    assert trace.meta["devices"][0]["shared_per_block_optin"] == 232448
