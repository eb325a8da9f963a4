"""The roofline floor of a graph: which unit counts for which precision, and what is read and written once."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.floor import floor, unit_rate
from fxopt.report.model import GraphReport, Report
from fxopt.verify import parse_precision
from profiler_core.roofline import Ceilings

GPU = Ceilings(
    "made", 1e12, {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12, "float16": 780e12}, "2026-01-01T00:00:00+00:00"
)
CPU = Ceilings("made", 1e11, {"float32": 1e12, "bfloat16": 4e12}, "2026-01-01T00:00:00+00:00")


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args).graph


@pytest.mark.parametrize(
    ("precision", "rate"),
    [("fp32", 260e12), ("tf32", 400e12), ("bf16", 800e12), (1.5e-5, 260e12), (1e-3, 400e12), (1e-2, 800e12)],
)
def test_fp32_operands_run_on_the_fastest_unit_that_the_precision_admits(precision, rate):
    """fp32 accuracy takes three products on 16-bit units, which beat the fp32 units of this device."""
    assert unit_rate("float32", GPU, parse_precision(precision)) == rate


def test_where_there_are_no_16_bit_units_fp32_ones_count():
    assert unit_rate("float32", CPU, parse_precision("fp32")) == 1e12
    assert unit_rate("float32", CPU, parse_precision("bf16")) == 4e12


def test_narrow_operands_run_on_their_own_unit_whatever_the_precision():
    assert unit_rate("bfloat16", GPU, parse_precision("fp32")) == 800e12
    assert unit_rate("float64", GPU, parse_precision("fp32")) == 800e12, "not measured: a bound from below"


def test_a_large_product_is_bound_by_its_flops():
    x = torch.empty(4096, 4096, device="meta")
    found = floor(traced(torch.mm, x, x), GPU, parse_precision("tf32"))
    assert found.flops == 2 * 4096**3
    assert found.ns == pytest.approx(1e9 * found.flops / 400e12)


def test_a_chain_of_pointwise_nodes_reads_its_input_and_writes_its_output_once():
    x = torch.empty(1 << 20, device="meta")
    found = floor(traced(lambda x: (x.sin() + x).relu(), x), GPU, parse_precision("fp32"))
    assert found.bytes == 2 * 4 * (1 << 20)
    assert found.ns == pytest.approx(1e9 * found.bytes / 1e12)


def test_a_table_counts_by_the_rows_that_are_read():
    table, rows = torch.empty(100_000, 64, device="meta"), torch.zeros(8, dtype=torch.long, device="meta")
    graph = traced(torch.ops.aten.embedding.default, table, rows)
    assert floor(graph, GPU, parse_precision("fp32")).bytes == 2 * 8 * 64 * 4 + 8 * 8


def test_the_gap_is_that_of_the_kernels_before_and_after():
    graph = GraphReport(floor_ns=10.0, baseline_kernel_ns=260.0, kept_kernel_ns=50.0)
    assert graph.gap_to_floor == (26.0, 5.0)
    assert Report([graph]).to_json()["graphs"][0]["gap_to_floor"] == [26.0, 5.0]
    assert GraphReport(baseline_kernel_ns=1.0, kept_kernel_ns=1.0).gap_to_floor is None
