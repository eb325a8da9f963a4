"""One workload, three tools: the kernels of nsys, torch.profiler and ncu are the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_core.attribute.call_order import match
from profiler_core.collect import chrome_trace, ncu, nsys
from profiler_core.names import canonical, same_kernel

SHAPE = [f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"]

LAYER_NORM, RESIDUAL = "triton_per_fused_native_layer_norm_0", "triton_per_fused__unsafe_view_add_native_layer_norm_1"
ATTENTION = "fmha_cutlassF_f32_aligned_64x64_rf_sm80"
TILE = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"
PRODUCT = [f"{TILE}_execute_kernel__5x_cublas", f"{TILE}_execute_split_k_kernel__5x_cublas"]
CALL = [LAYER_NORM, *PRODUCT * 3, ATTENTION, *PRODUCT, RESIDUAL]


class Launches:
    """Names and shapes of kernels or rows, in order."""

    def __init__(self, frame: Any) -> None:
        self.names: list[str] = frame["name"].tolist()
        self.shapes = frame[SHAPE].to_numpy()

    def take(self, positions: Sequence[int]) -> Launches:
        taken = object.__new__(Launches)
        taken.names = [self.names[i] for i in positions]
        taken.shapes = self.shapes[list(positions)]
        return taken

    def __len__(self) -> int:
        return len(self.names)


def of_kineto(file: Path) -> Launches:
    kernels = chrome_trace.read(file).kernels
    return Launches(kernels[kernels["kind"] == "kernel"])


def of_nsys(file: Path) -> Launches:
    """The kernels of the measured calls: those launched within a range of emit_nvtx."""
    trace = nsys.read(file)
    kernels = trace.kernels[trace.kernels["kind"] == "kernel"]
    launched = kernels.merge(trace.calls, on=["process", "correlation"], suffixes=("", "_call"))["start_ns_call"]
    assert len(launched) == len(kernels)
    first, last = trace.ranges["start_ns"].min(), trace.ranges["end_ns"].max()
    return Launches(kernels[((launched >= first) & (launched < last)).to_numpy()])


def joined(kernels: Launches, rows: Launches, shapes: bool = True) -> list[int]:
    known = {"kernel_shapes": kernels.shapes, "counter_shapes": rows.shapes} if shapes else {}
    return match(kernels.names, rows.names, **known).index.tolist()


def test_all_kernels_of_two_calls_are_the_same_in_three_tools(shared: Path) -> None:
    folder = shared / "captures" / "h200_sdpa"
    tools = {
        "nsys": of_nsys(folder / "nsys.sqlite"),
        "kineto": of_kineto(folder / "kineto.trace.json.gz"),
        "ncu": Launches(ncu.read(folder / "ncu_raw.csv").rows),
    }
    for one in tools.values():
        assert [canonical(name) for name in one.names] == CALL * 2
    for one in tools.values():
        for other in tools.values():
            result = match(one.names, other.names, kernel_shapes=one.shapes, counter_shapes=other.shapes)
            assert result.exact and result.index.tolist() == list(range(22))
    assert len(set(tools["nsys"].names)) < len(set(tools["nsys"].names + tools["kineto"].names))  # spelt differently


def test_the_whole_recording_of_nsys_matches_no_row_to_a_warm_up_call(shared: Path) -> None:
    """56 kernels, of which five calls: which two of the five ncu measured is not to be guessed."""
    folder = shared / "captures" / "h200_sdpa"
    everything = Launches(nsys.read(folder / "nsys.sqlite").kernels.query("kind == 'kernel'"))
    assert len(everything) == 56
    result = match(everything.names, Launches(ncu.read(folder / "ncu_raw.csv").rows).names)
    assert result.index.tolist() == [-1] * 56
    assert any("more than one place" in note for note in result.notes)


def test_the_block_capture_is_joined_in_order(shared: Path) -> None:
    folder = shared / "captures" / "h200_block"
    kernels = of_kineto(folder / "kineto.trace.json.gz")
    table = ncu.read(folder / "ncu_raw_base_units.csv")
    assert len(kernels) == 42 and joined(kernels, Launches(table.rows)) == list(range(42))


# --- perturbed -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["h200_sdpa", "h200_block", "h200_graph", "h200_dynamic"])
def sides(request: pytest.FixtureRequest, shared: Path) -> tuple[Launches, Launches]:
    """Kernels as torch.profiler saw them, and the rows of ncu; the kernels once more where ncu did not run."""
    folder = shared / "captures" / request.param
    kernels = of_kineto(folder / "kineto.trace.json.gz")
    rows = [Launches(ncu.read(file).rows) for file in folder.glob("ncu*.csv")]
    assert len(kernels) == {"h200_sdpa": 22, "h200_block": 42, "h200_graph": 44, "h200_dynamic": 88}[request.param]
    return kernels, (rows or [kernels])[0]


def perturbations(names: list[str]) -> list[tuple[set[int], list[int]]]:
    """Each launch dropped, doubled, and swapped with a neighbour of another name: launches concerned, new order."""
    order = list(range(len(names)))
    changed = []
    for at in order:
        changed.append(({at}, order[:at] + order[at + 1 :]))
        changed.append(({at}, order[: at + 1] + order[at:]))
        if at + 1 < len(order) and not same_kernel(names[at], names[at + 1]):
            changed.append(({at, at + 1}, [*order[:at], at + 1, at, *order[at + 2 :]]))
    return changed


@pytest.mark.parametrize("shapes", [True, False], ids=["names and shapes", "names"])
def test_perturbing_a_row_changes_the_match_of_its_kernel_alone(sides: tuple[Launches, Launches], shapes: bool) -> None:
    kernels, rows = sides
    assert joined(kernels, rows, shapes) == list(range(len(kernels)))
    for concerned, order in perturbations(rows.names):
        found = joined(kernels, rows.take(order), shapes)
        for kernel, row in enumerate(found):
            # A row is known by the launch that it was before.
            assert (order[row] if row >= 0 else None) in ({kernel, None} if kernel in concerned else {kernel})


@pytest.mark.parametrize("shapes", [True, False], ids=["names and shapes", "names"])
def test_perturbing_a_kernel_changes_its_own_match_alone(sides: tuple[Launches, Launches], shapes: bool) -> None:
    kernels, rows = sides
    for concerned, order in perturbations(kernels.names):
        found = joined(kernels.take(order), rows, shapes)
        for kernel, row in zip(order, found, strict=True):
            assert (row if row >= 0 else None) in ({kernel, None} if kernel in concerned else {kernel})
        assert len({row for row in found if row >= 0}) == int(np.sum(np.asarray(found) >= 0))
