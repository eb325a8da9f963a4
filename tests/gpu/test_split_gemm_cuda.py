"""Split products on an NVIDIA GPU: every tile against fp64 and cuBLAS, what planes cannot hold, graphs, and models."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn

import fxopt
from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.precision import FP32_FLOOR
from fxopt.registry import Stage
from fxopt.torch_api import inductor
from passes.kernels import launch, tiling
from passes.split_precision_gemm import METHODS, SplitPrecisionGemm
from passes.split_products import rounded_once, split, split_mm, split_parts

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SPLIT: Any = torch.ops.fxopt.split_gemm.default
aten: Any = torch.ops.aten
#: M, K, N, elements a scale
SHAPES = [
    (512, 768, 768, 0),
    (300, 768, 200, 0),  # edges in M and N
    (129, 1000, 65, 0),  # K no multiple of BK
    (200, 90, 100, 0),  # rows that are not aligned
    (256, 4096, 512, 128),  # scales by block
    (70, 384, 90, 128),  # three blocks, padded to four
    (16, 16, 16, 0),
    (1, 64, 33, 0),
]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def tiles(terms: int) -> list[launch.Tile]:
    """Every tile that this device can run, in one share and in two, and in even parts where it can be."""
    known = tiling.TILES if terms == 3 else tiling.SINGLE_TILES
    if launch.has_hopper(DEVICE):
        known = (*known, *(tiling.HOPPER_TILES if terms == 3 else tiling.HOPPER_SINGLE_TILES))
    even = [(*tile[:3], 0, *tile[4:]) for tile in known if terms == 3 and tile[4] == launch.HOPPER]
    return [(*tile[:3], shares, *tile[4:]) for tile in known for shares in (1, 2)] + even


def product(a, b, bias=None, tile=tiling.TILES[-1], block=0, terms=3) -> torch.Tensor:
    """a [.., M, K] and b [.., N, K]."""
    if terms == 3:
        out = torch.ops.fxopt.split_gemm(*split(a, block), *split(b), bias, tile)
    else:
        out = torch.ops.fxopt.scaled_gemm(*rounded_once(a), *rounded_once(b), bias, tile)
    return out.sum(-3) if tile[3] > 1 else out


def error(found, a, b, bias=None) -> float:
    """Largest error of an element, against the sum of the magnitudes that it is a sum of."""
    exact = a.double() @ b.double().mT + (0 if bias is None else bias.double())
    return ((found.double() - exact).abs() / (a.double().abs() @ b.double().abs().mT)).max().item()


def rel(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_at_most_4_times_as_far_off_as_cublas(shape):
    m, k, n, block = shape
    a, b, bias = values(m, k), values(n, k, seed=1), values(n, seed=2)
    own = max(error(a @ b.T, a, b), 2.0**-24)
    for tile in tiles(3):
        assert error(product(a, b, None, tile, block), a, b) <= 4 * own, tile
        assert error(product(a, b, bias, tile, block), a, b, bias) <= 4 * own, tile


@pytest.mark.parametrize("shape", [shape[:3] for shape in SHAPES if shape[3] == 0], ids=str)
def test_one_product_has_eleven_bits_in_every_tile(shape):
    m, k, n = shape
    a, b, bias = values(m, k), values(n, k, seed=1), values(n, seed=2)
    for tile in tiles(1):
        assert 1e-6 < error(product(a, b, bias, tile, terms=1), a, b, bias) < 2.0**-10, tile


def test_the_error_does_not_grow_with_k_as_a_tensor_cores_own_sum_does():
    """It rounds towards zero, which numbers of one sign show: by 2^-14 over this K."""
    a, b = values(64, 32768).abs(), values(64, 32768, seed=1).abs()
    own = error(a @ b.T, a, b)
    for tile in tiles(3):
        for block in (0, 128):
            assert error(product(a, b, None, tile, block), a, b) <= max(4 * own, 2.0**-19), (tile, block)


@pytest.mark.parametrize("terms", [3, 1])
def test_batches_and_a_matrix_that_a_batch_has_in_common(terms):
    a, b, bias = values(6, 100, 200), values(6, 130, 200, seed=1), values(130, seed=2)
    limit = 1e-6 if terms == 3 else 2.0**-10
    for tile in tiles(terms):
        assert error(product(a, b, bias, tile, terms=terms), a, b, bias) <= limit, tile
        once = a[:1].expand(6, 100, 200)
        assert error(product(once, b, None, tile, terms=terms), once, b) <= limit, tile


def test_shares_are_sums_over_parts_of_k():
    a, b, bias = values(64, 320), values(64, 320, seed=1), values(64, seed=2)
    for tile in tiles(3):
        found = torch.ops.fxopt.split_gemm(*split(a), *split(b), bias, tile)
        expected = torch.ops.fxopt.split_gemm(*(t.cpu() for t in (*split(a), *split(b))), bias.cpu(), tile)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)


EVEN = [tile for tile in tiles(3) if tile[3] == 0] if torch.cuda.is_available() else []


@pytest.mark.skipif(not EVEN, reason="only Hopper's kernel deals steps out evenly")
def test_even_parts_give_the_same_each_time_and_leave_the_counts_as_they_were():
    for m, k, n, block in ((512, 768, 2304, 0), (512, 3072, 768, 128), (100, 8192, 130, 0), (1, 64, 8, 0)):
        a, b, bias = split(values(m, k), block), split(values(n, k, seed=1)), values(n, seed=2)
        for tile in EVEN:
            counts = torch.zeros(launch.needed_counts(m, n, tile) + 8, dtype=torch.int32, device=DEVICE)
            first, *others = (torch.ops.fxopt.split_gemm(*a, *b, bias, tile, counts, 4) for _ in range(30))
            assert all(torch.equal(first, other) for other in others), tile
            assert not counts.any(), tile


@pytest.mark.skipif(not EVEN, reason="only Hopper's kernel deals steps out evenly")
def test_even_parts_on_two_streams_at_once_with_counts_of_their_own():
    a, b = split(values(512, 768)), split(values(2304, 768, seed=1))
    expected = torch.ops.fxopt.split_gemm(*a, *b, None, EVEN[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(40):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(torch.ops.fxopt.split_gemm(*a, *b, None, EVEN[0]))
        torch.cuda.synchronize()
        assert all(torch.equal(one, expected) for one in found)


def test_rows_over_twelve_orders_of_magnitude():
    a, b = values(256, 512), values(200, 512, seed=1)
    a *= torch.logspace(-6, 6, 256, device=DEVICE)[:, None]
    b *= torch.logspace(6, -6, 200, device=DEVICE)[:, None]
    own = max(error(a @ b.T, a, b), 2.0**-24)
    for tile in tiles(3):
        assert error(product(a, b, None, tile), a, b) <= 4 * own, tile


# ---------------------------------------------------------------- what planes cannot hold


@pytest.mark.parametrize("block", [0, 128])
def test_nan_and_infinity_are_where_cublas_has_them(block):
    a, b, bias = values(200, 512), values(300, 512, seed=1), values(300, seed=2)
    a[3, 5], a[140, 6], a[5, 7], a[199, 511] = math.inf, math.nan, 3e38, -math.inf
    a[34] *= 10 ** (values(512, seed=3).clamp(-3, 3) * 4)  # mixed magnitudes
    b[7, 8], b[9, 3], b[10], b[299, 0] = 1e-41, -math.inf, 0, math.nan
    b[8] *= 1e-42
    fp32 = torch.addmm(bias, a, b.T)
    finite = fp32.isfinite()
    bound = (bias.abs() + a.double().abs() @ b.double().abs().T)[finite]
    assert 0 < (~finite).sum() < finite.sum()
    for tile in tiles(3):
        found = product(a, b, bias, tile, block)
        assert torch.equal(found.isnan(), fp32.isnan()), tile
        assert torch.equal(found == math.inf, fp32 == math.inf), tile
        assert torch.equal(found == -math.inf, fp32 == -math.inf), tile
        assert ((found - fp32).double().abs()[finite] <= 3e-6 * bound).all(), tile


def test_a_row_that_is_not_held_changes_no_other_tile():
    a, b = values(300, 256), values(300, 256, seed=1)
    whole = product(a, b)
    a[5, 5] = math.inf
    bm = tiling.TILES[-1][0]
    assert torch.equal(product(a, b)[bm:], whole[bm:])


def test_denormals_and_the_largest_numbers():
    a, b = values(64, 256), values(64, 256, seed=1)
    tiny, huge = a * 1e-40, a.sign() * 3e38
    for tile in tiles(3):
        found = product(tiny, b, None, tile)
        exact = tiny.double() @ b.double().T
        assert ((found.double() - exact).abs() <= 256 * 2.0**-149 + exact.abs() * 2.0**-20).all(), tile
        small = b * 2.0**-100
        assert error(product(huge, small, None, tile), huge, small) <= 1e-6, tile
        assert (product(huge.abs(), b.abs(), None, tile) == math.inf).all(), tile


@pytest.mark.parametrize("block", [0, 128])
def test_what_is_not_held_is_summed_as_well_as_cublas_sums_it_however_long_k_is(block):
    """cuBLAS shares K out between programs: one sum over it all is off by 4.8 times as much."""
    a, b, bias = values(256, 16384) * 1e30, values(256, 16384, seed=1), values(256, seed=2)
    own = error(a @ b.T, a, b)
    for tile in tiles(3):
        assert error(product(a, b, None, tile, block), a, b) <= 4 * own, tile
        assert error(product(a, b, bias, tile, block), a, b, bias) <= 4 * own, tile


def test_products_of_few_elements_are_at_most_4_times_as_far_off_as_cublas():
    a, b = values(256, 64), values(256, 64, seed=1)
    a, b = (x * (values(256, 64, seed=seed).abs() < 0.126) for seed, x in ((2, a), (3, b)))  # nine tenths are zeros
    exact = a.double() @ b.double().T
    bound = a.double().abs() @ b.double().abs().T
    own = max(torch.where(bound == 0, 0, (a @ b.T - exact).abs() / bound).max().item(), 2.0**-24)
    for tile in tiles(3):
        found = product(a, b, None, tile)
        assert torch.where(bound == 0, 0, (found - exact).abs() / bound).max() <= 4 * own, tile


def test_one_product_keeps_infinities_and_nan():
    a, b = values(100, 256), values(100, 256, seed=1)
    a[3, 5], a[4, 6], b[7, 3] = math.inf, math.nan, -math.inf
    fp32 = a @ b.T
    for tile in tiles(1):
        found = product(a, b, None, tile, terms=1)
        assert torch.equal(found.isnan(), fp32.isnan()) and torch.equal(found.isinf(), fp32.isinf()), tile
        finite = fp32.isfinite()
        assert rel(found[finite], fp32[finite].double()) < 1e-3, tile


def test_parts_are_placed_and_summed_by_cublas_as_in_fp32():
    a, b = values(100, 256), values(100, 256, seed=1)

    def by_parts() -> torch.Tensor:
        wide = split_parts(a, 0), split_parts(b, 1)
        return aten.mm.dtype(wide[0], wide[1].T, torch.float32)

    exact = a.double() @ b.double().T
    assert 1e-7 < rel(by_parts(), exact) < 1e-5
    b[:, 7] *= 0.1  # nothing comes near the largest number
    a[3, 5], a[4, 6], a[5, 7], b[7, 3], b[8, 5] = math.inf, math.nan, 3.4e38, -math.inf, 0
    found, fp32 = by_parts(), a @ b.T
    assert torch.equal(found.isnan(), fp32.isnan()) and torch.equal(found.isinf(), fp32.isinf())


# ---------------------------------------------------------------- how it is called


@pytest.mark.parametrize("terms", [3, 1])
def test_the_host_waits_for_nothing(terms):
    a, b = values(200, 256), values(200, 256, seed=1)
    a[3, 3] = math.inf
    for tile in tiles(terms):
        expected = product(a, b, None, tile, terms=terms)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = product(a, b, None, tile, terms=terms)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_graph_of_it_replays_with_other_rows_held():
    for tile in tiles(3):
        a, b = values(200, 256), values(200, 256, seed=1)
        product(a, b, None, tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = product(a, b, None, tile)
        a.mul_(0.5)
        a[150, 3] = math.nan
        graph.replay()
        torch.testing.assert_close(found, product(a, b, None, tile), rtol=0, atol=0, equal_nan=True)
        assert found[150].isnan().all() and found[:128].isfinite().all(), tile


def test_planes_of_other_layouts_are_read_by_their_strides():
    a, b = values(200, 256), values(100, 256, seed=1)
    (hi, lo, scale), right = split(a), split(b)
    expected = torch.ops.fxopt.split_gemm(hi, lo, scale, *right, None, tiling.TILES[-1])
    turned = tuple(t.T.contiguous().T for t in (hi, lo))
    shifted = tuple(F.pad(t, (1, 0))[:, 1:] for t in (hi, lo))  # neither aligned nor in whole 16-byte steps
    for tile in tiles(3):
        for planes in (turned, shifted, (hi, turned[1])):
            found = torch.ops.fxopt.split_gemm(*planes, scale, *right, None, tile)
            found = found.sum(0) if tile[3] > 1 else found
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "wanted",
    [
        tiling.Product(256, 320, 512),
        tiling.Product(256, 320, 512, terms=1),
        tiling.Product(64, 96, 2048, block=128, bias=True),
        tiling.Product(64, 96, 128, batch=6),
    ],
    ids=str,
)
def test_the_fastest_tile_is_measured_kept_and_right(wanted, tmp_path, monkeypatch):
    keep = tmp_path / "tiles.json"
    tile, took = tiling.Choices(keep).tile(wanted, DEVICE)
    assert 0 < took < 1e4
    assert tile in tiling.options(wanted, launch.multiprocessors(DEVICE), launch.has_hopper(DEVICE))
    assert list(json.loads(keep.read_text()).values()) == [[*tile, took]]
    a, b = values(wanted.m, wanted.k), values(wanted.k, wanted.n, seed=1)
    limit = 1e-6 if wanted.terms == 3 else 1e-3
    assert rel(split_mm(a, b, wanted.terms, tile), a.double() @ b.double()) < limit
    monkeypatch.setattr(tiling, "measure_tiles", None)  # not called
    assert tiling.Choices(keep).tile(wanted, DEVICE) == (tile, took)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_librarys_product_is_measured_beside_it(batch, tmp_path):
    assert 0 < tiling.Choices(tmp_path / "tiles.json").library(tiling.Product(256, 320, 512, batch=batch), DEVICE) < 1e4


# ---------------------------------------------------------------- the pass


@pytest.mark.parametrize("block", [0, 128])
def test_planes_made_by_inductor_are_those_made_eagerly(block, fresh_dynamo):
    """Elided casts would show here: the low plane would be zero."""
    x = values(4096, 256) * torch.logspace(-15, 20, 4096, device=DEVICE)[:, None]
    x[7, 3], x[9, 1], x[11, 2] = math.inf, math.nan, 1e-38

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split(torch.relu(x) * 2 - x, block)

    eager = fused(x)
    for made, expected in zip(torch.compile(fused)(x), eager, strict=True):
        assert torch.equal(made, expected)
    assert eager[1].count_nonzero() > 0.9 * x.numel()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.mm, ((200, 256), (256, 320))),
        (torch.addmm, ((320,), (200, 256), (256, 320))),
        (torch.addmm, ((200, 320), (200, 256), (256, 320))),
        (torch.baddbmm, ((4, 200, 320), (4, 200, 256), (4, 256, 320))),
        (F.linear, ((4, 50, 2048), (96, 2048), (96,))),
    ],
    ids=["mm", "addmm", "addmm of a matrix", "baddbmm", "linear over blocks"],
)
def test_a_rewritten_graph_is_as_accurate_as_the_method_says(fn, shapes, method):
    inputs = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    precision = {"fp16x3": None, "bf16x3": 1.5e-5, "fp16": "tf32"}[method]
    result = testing.run(SplitPrecisionGemm(method), testing.capture(fn, *inputs), precision=precision)
    assert result.report.rewritten == 1, str(result)
    exact, fp32 = fn(*(x.double() for x in inputs)), fn(*inputs)
    (found,) = result.fn(*inputs)
    assert found.stride() == fp32.stride()
    limit = {"fp16x3": max(4 * rel(fp32, exact), FP32_FLOOR), "bf16x3": 1e-5, "fp16": 5e-4}[method]
    assert rel(found, exact) <= limit


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_model_splits_its_frozen_weights_beforehand(method, fresh_dynamo):
    torch.manual_seed(0)
    model, x = Mlp(256, 2048).eval().to(DEVICE), values(200, 256)
    gm, inputs = dynamo_graph(model, x)
    graph = testing.capture(model, x)
    p = SplitPrecisionGemm(method)
    labels = testing.labels(graph, *p.answers)
    precision = {"fp16x3": None, "bf16x3": 1.5e-5, "fp16": "tf32"}[method]
    slot = SlotPass([p], testing.context(p, device=DEVICE, labels=labels, precision=precision), Stage.JOINT)
    frozen = frozenset(i for i, v in enumerate(inputs) if isinstance(v, nn.Parameter))
    with torch.no_grad():
        made = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, freeze=frozen, caches=False)
        (found,) = made.flat(inputs)(*inputs)
        own = model(x)
        exact = model.double()(x.double())
    assert slot.reports[0].rewritten == 2, slot.reports
    weights = {(256, 2048), (2048, 256)}
    left = [
        n
        for n in made.post_grad.graph.nodes
        if n.op == "call_function" and tuple(getattr(n.meta.get("val"), "shape", ())) in weights
    ]
    assert not left, left
    limit = {"fp16x3": max(4 * rel(own, exact), FP32_FLOOR), "bf16x3": 1.5e-5, "fp16": 1e-3}[method]
    assert rel(found, exact) <= limit


def test_optimize_keeps_the_pass_or_says_why_not():
    torch.manual_seed(0)
    model, x = Mlp(1024, 4096).eval().to(DEVICE), values(2048, 1024)
    with torch.no_grad():
        own = model(x)
    fast = fxopt.optimize(model, (x,), passes=["freeze_weights", "split_precision_gemm"])
    graph = fast.report.graphs[0]
    assert graph.source == "tuned", graph.messages
    tried = [c for c in graph.candidates if "split_precision_gemm" in c.passes]
    assert tried, (graph.labels, graph.out_of_reach)
    assert "split_precision_gemm" in graph.passes or all(c.reason for c in tried)
    assert all(c.verdict is None or c.verdict.ok for c in tried), [c.verdict for c in tried]
    found = fast(x)
    with torch.no_grad():
        exact = model.double()(x.double())
    assert rel(found, exact) <= max(4 * rel(own, exact), FP32_FLOOR)
