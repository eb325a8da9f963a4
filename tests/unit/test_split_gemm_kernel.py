"""The Triton kernel of split products, run by Triton's interpreter on the CPU, against fp64 and the operators."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from triton_checks import agrees, compiled_for_h200

from passes.kernels import tiling

pytest.importorskip("triton", reason="needs Triton, whose interpreter runs the kernel on the CPU")

COMMON = """
import contextlib, math, torch
from passes.kernels import launch
from passes.split_products import joined, rounded_once, split

torch.cuda.device = lambda device: contextlib.nullcontext()  # nothing of it is needed by the interpreter
torch.manual_seed(0)

def product(a, b, bias, tile, block=0, terms=3):
    made = (split(a, block), split(b)) if terms == 3 else [(x[0], None, x[1]) for x in map(rounded_once, (a, b))]
    shares = [tile[3]] if tile[3] > 1 else []
    out = torch.full((*a.shape[:-2], *shares, a.shape[-2], b.shape[-2]), math.nan)
    launch.gemm(*made, bias, out, tile)
    return out

def error(found, a, b, bias=0.0):
    exact = a.double() @ b.double().mT + bias
    return ((found.double() - exact).abs() / (a.double().abs() @ b.double().abs().mT)).max().item()
"""

NUMBERS = """
CASES = [
    # M, K, N, elements a scale, tile
    (40, 96, 50, 0, (32, 32, 32, 1, 4, 2)),     # edges in M and N
    (40, 100, 50, 0, (32, 32, 32, 2, 4, 2)),    # K no multiple of BK, in shares
    (33, 40, 17, 0, (32, 32, 32, 4, 4, 2)),     # more shares than steps
    (70, 256, 90, 128, (32, 64, 32, 1, 4, 2)),  # scales by block
    (70, 256, 90, 64, (64, 32, 32, 2, 4, 2)),
    (20, 384, 20, 128, (32, 32, 64, 1, 4, 2)),  # three blocks: padded to four
]
for m, k, n, block, tile in CASES:
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    own = max(error(a @ b.T, a, b), 2**-24)
    for added in (bias, None):
        found = product(a, b, added, tile, block)
        assert found.isfinite().all(), (m, k, n)
        found = found.sum(0) if tile[3] > 1 else found
        assert error(found, a, b, 0.0 if added is None else added.double()) <= 4 * own, (m, k, n, block)
    if not block:
        found = product(a, b, None, tile, terms=1)
        found = found.sum(0) if tile[3] > 1 else found
        assert 1e-6 < error(found, a, b) < 2**-10, (m, k, n)
print("agrees")
"""

SHARES = """
a, b, bias = torch.randn(20, 80), torch.randn(20, 80), torch.randn(20)
tile = (32, 32, 16, 2, 4, 2)
for terms in (3, 1):
    found = product(a, b, bias, tile, terms=terms)
    operator = torch.ops.fxopt.split_gemm if terms == 3 else torch.ops.fxopt.scaled_gemm
    made = (*split(a), *split(b)) if terms == 3 else (*rounded_once(a), *rounded_once(b))
    torch.testing.assert_close(found, operator(*made, bias, tile), rtol=0, atol=2e-5)
print("agrees")
"""

BATCHES = """
a, b, bias = torch.randn(3, 20, 48), torch.randn(3, 40, 48), torch.randn(40)
for shares in (1, 2):
    for left, right in ((a, b), (a[:1].expand(3, 20, 48), b)):
        found = product(left, right, bias, (32, 32, 16, shares, 4, 2))
        found = found.sum(1) if shares > 1 else found
        assert error(found, left, right, bias.double()) <= 1e-6, shares
planes = split(a[:1]), split(b)
once = tuple(t.expand(3, *t.shape[1:]) for t in planes[0])  # one matrix for all, without a copy
out = torch.full((3, 20, 40), math.nan)
launch.gemm(once, planes[1], None, out, (32, 32, 16, 1, 4, 2))
assert error(out, a[:1].expand(3, 20, 48), b) <= 1e-6
print("agrees")
"""

SPECIAL = """
for m, k, n, block, shares in ((40, 100, 50, 0, 1), (40, 100, 50, 0, 2), (70, 256, 90, 64, 1), (70, 256, 90, 128, 2)):
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    a[3, 5], a[4, 6], a[5, 7] = math.inf, math.nan, 3e38
    a[34], b[7, 8], b[9, 3], b[10] = a[34] * 10 ** (torch.rand(k) * 20 - 10), 1e-41, -math.inf, 0
    b[8] *= 1e-42
    found = product(a, b, bias, (32, 32, 32, shares, 4, 2), block)
    found = found.sum(0) if shares > 1 else found
    fp32 = torch.addmm(bias, a, b.T)
    assert torch.equal(found.isnan(), fp32.isnan()) and torch.equal(found.isinf(), fp32.isinf()), (m, block, shares)
    finite = fp32.isfinite()
    bound = (bias.abs() + a.double().abs() @ b.double().abs().T)[finite]
    assert ((found - fp32).double().abs()[finite] <= 2e-6 * bound).all(), (m, block, shares)
print("agrees")
"""

STRIDES = """
a, b = torch.randn(40, 64), torch.randn(50, 64)
rows, columns = split(a), split(b)
turned = tuple(t.T.contiguous().T for t in rows[:2])          # along M
apart = (columns[0], columns[1].T.contiguous().T)             # the two planes have strides of their own
scales = torch.cat([rows[2], rows[2]], 1)[:, :1]              # every second number
out = torch.full((40, 50), math.nan)
launch.gemm((*turned, scales), (*apart, columns[2]), None, out, (32, 32, 32, 1, 4, 2))
assert error(out, a, b) <= 1e-6
print("agrees")
"""


def interpreted(check: str) -> None:
    agrees(COMMON + check)


def test_numbers_are_fp32s_for_any_edge_block_share_and_bias():
    interpreted(NUMBERS)


def test_shares_are_those_that_the_operator_has_on_the_cpu():
    interpreted(SHARES)


def test_batches_and_a_matrix_that_a_batch_has_in_common():
    interpreted(BATCHES)


def test_what_planes_cannot_hold_is_computed_in_fp32():
    interpreted(SPECIAL)


def test_planes_of_other_layouts_are_read_by_their_strides():
    interpreted(STRIDES)


@pytest.mark.parametrize("terms", [3, 1])
def test_the_kernel_compiles_for_an_h200_and_uses_its_matrix_units(terms):
    from passes.kernels.split_gemm import split_gemm

    fixed = {
        "BM": 64, "BN": 64, "BK": 64, "BLOCK": 0, "BLOCKS": 1, "TERMS": terms,
        "EVEN_K": True, "HAS_BIAS": True, "GROUP": 8, "stride_ak": 1, "stride_bk": 1,
    }  # fmt: skip
    kinds = dict.fromkeys(("a_hi", "a_lo", "b_hi", "b_lo"), "*fp16")
    kinds |= dict.fromkeys(("a_scale", "b_scale", "bias", "out"), "*fp32")
    aligned = [*kinds, "K", "stride_am", "stride_bn", "batch_a", "batch_b"]
    compiled = compiled_for_h200(split_gemm, fixed, kinds, aligned, num_warps=4, num_stages=3)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("terms", [3, 1])
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (128, 256)], ids=str)
@pytest.mark.parametrize("even", [False, True], ids=["whole tiles", "even parts"])
def test_the_kernels_for_hopper_compile(terms, tile, even):
    hopper = pytest.importorskip("passes.kernels.split_gemm_hopper", reason="needs a Triton with Gluon for Hopper")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    known = [(*size[:2], size[5]) for size in (tiling.HOPPER_TILES if terms == 3 else tiling.HOPPER_SINGLE_TILES)]
    found = [stages for *size, stages in known if tuple(size) == tile]
    if not found or (even and terms == 1):
        pytest.skip("no such tile is tried")
    (bm, bn), bk = tile, 64
    kernel = hopper.split_gemm_hopper if terms == 3 else hopper.scaled_gemm_hopper
    fixed: dict[str, Any] = {"BM": bm, "BN": bn, "BK": bk, "STAGES": found[0], "HAS_BIAS": True, "GROUP": 8}
    fixed |= {"BLOCK": 0, "BLOCKS": 1, "EVEN": even} if terms == 3 else {}
    kinds = dict.fromkeys(("a_hi", "a_lo", "b_hi", "b_lo"), "*fp16") | {"counts": "*i32"}
    kinds |= dict.fromkeys(("a_scale", "b_scale", "bias", "out", "sums"), "*fp32")
    for side, rows in (("a", bm), ("b", bn)):
        layout = gl.NVMMASharedLayout.get_default_for([rows, bk], gl.float16)
        for name in (f"{side}h_desc", f"{side}l_desc", f"{side}_desc"):
            kinds[name] = f"tensordesc<fp16{[rows, bk]},{layout!r}>"
    kinds = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*"]
    compiled = compiled_for_h200(kernel, fixed, kinds, aligned, of=GluonASTSource, num_warps=4, maxnreg=168)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


# ---------------------------------------------------------------- even parts of all steps


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(512, 2304, 768), (512, 768, 3072), (256, 2048, 2048), (100, 100, 8192), (4096, 1536, 512), (1, 1, 64)],
)
def test_every_step_of_a_tile_is_some_programs_and_the_last_one_waits_for_the_others(m, n, k, programs, monkeypatch):
    hopper = pytest.importorskip("passes.kernels.split_gemm_hopper", reason="needs a Triton with Gluon for Hopper")
    now = {"program": 0}
    numbers = SimpleNamespace(
        cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max, program_id=lambda axis: now["program"],
        num_programs=lambda axis: programs,
    )  # fmt: skip
    monkeypatch.setattr(hopper, "gl", numbers)
    size = 128, 128, 64
    steps, tiles = -(-k // 64), -(-m // 128) * -(-n // 128)
    programs = min(programs, tiles * steps)
    done: dict[int, list[tuple[int, int, int]]] = {}
    for program in range(programs):
        now["program"] = program
        mine = range(*hopper._pieces.fn(m, n, k, 1, *size, True))
        pieces = [hopper._work.fn(at, m, n, k, 1, *size, 8, True) for at in mine]
        left = [i for i, (*_, end, _) in enumerate(pieces) if end < steps]
        assert left in ([], [0]), "what another program waits for comes first, and there is one place for it"
        for _, _, split, begin, end, tile in pieces:
            assert split == 0 and begin < end
            done.setdefault(tile, []).append((begin, end, program))
    assert sorted(done) == list(range(tiles))
    all_steps = tiles * steps
    for tile, parts in done.items():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == steps
        assert all(before[1] == after[0] for before, after in pairwise(parts)), "without a gap and without overlapping"
        owners = [program for _, _, program in parts]
        first = tile * steps * programs // all_steps  # as in `_gather`
        first += (first + 1) * all_steps // programs <= tile * steps
        assert owners == list(range(first, owners[-1] + 1)), "it waits for programs that were launched before it"


@pytest.mark.parametrize("columns", [64, 128])
def test_sums_that_are_handed_on_have_a_place_each(columns):
    hopper = pytest.importorskip("passes.kernels.split_gemm_hopper", reason="needs a Triton with Gluon for Hopper")
    places = [hopper._place.fn(row, column, 64) for row in range(64) for column in range(columns)]
    assert sorted(places) == list(range(64 * columns))
