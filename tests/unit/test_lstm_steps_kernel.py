"""The kernel of an LSTM's steps, run by Triton's interpreter on the CPU, against the operator's own form and fp64."""

from __future__ import annotations

import pytest
from triton_checks import agrees, compiled_for_h200

pytest.importorskip("triton", reason="needs Triton, whose interpreter runs the kernel on the CPU")

COMMON = """
import math, torch
from passes.kernels.lstm_steps import Config, launch
from passes.split_products import split
from passes.split_rnn import STEPS

torch.manual_seed(0)

def layer(steps, batch, hidden, gain=1.0):
    weight = torch.randn(4 * hidden, hidden) * gain / hidden**0.5
    return torch.randn(batch, 4 * hidden), torch.randn(steps, batch, 4 * hidden), torch.randn(batch, hidden), weight

def exact(first, pre, cell, weight):
    first, pre, cell, weight = (t.double() for t in (first, pre, cell, weight))
    states, gates = [], first
    for step in range(pre.shape[0]):
        if step:
            gates = pre[step] + states[-1] @ weight.mT
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        states.append(o.sigmoid() * cell.tanh())
    return torch.stack(states), cell
"""

NUMBERS = """
CASES = [
    # steps, batch, hidden, rows, units, depth
    (5, 16, 32, Config(16, 4, 16)),   # several steps of the product
    (4, 5, 48, Config(16, 8, 16)),    # a batch that fills no tile
    (3, 33, 32, Config(32, 16, 32)),  # two tiles of the batch, the second with one row
    (1, 3, 16, Config(16, 4, 16)),    # a single step: no product
    (6, 2, 80, Config(16, 16, 16)),   # units that no tile divides
]
for steps, batch, hidden, config in CASES:
    first, pre, cell, weight = layer(steps, batch, hidden, 2.0)
    before = [t.clone() for t in (first, pre, cell)]
    found = launch(first, pre, cell, split(weight), config)
    own, true = STEPS(first, pre, cell, *split(weight)), exact(first, pre, cell, weight)
    for mine, theirs, right in zip(found, own, true, strict=True):
        assert mine.shape == theirs.shape and mine.is_contiguous()
        error, reference = ((t.double() - right).norm() / right.norm() for t in (mine, theirs))
        assert error <= max(4 * reference, 2.0**-22), (steps, batch, hidden, error, reference)
    assert all(map(torch.equal, before, (first, pre, cell))), "inputs stay as they are"
print("agrees")
"""

SPECIAL = """
config = Config(16, 4, 16)
# A weight that planes cannot hold, and saturated, infinite and undefined gates.
first, pre, cell, weight = layer(4, 6, 32)
weight[5, 3], weight[40, 7] = 1e-30, 1e20
first[0, 0], pre[1, 1, 40], pre[2, 2, 70] = math.inf, -math.inf, 1e30
pre[1, 3, 5] = math.nan
cell[4, 3] = math.inf
found = launch(first, pre, cell, split(weight), config)
own = STEPS(first, pre, cell, *split(weight))
for mine, theirs in zip(found, own, strict=True):
    assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.isinf(), theirs.isinf())
    finite = theirs.isfinite()
    assert finite.any() and not finite.all()
    assert (mine - theirs)[finite].abs().max() <= 2e-6 * theirs[finite].abs().max()
# Small states keep their relative error down to 2^-28.
for size in (1e-3, 1e-6, 1e-8):
    first, pre, cell, weight = layer(3, 4, 32)
    first, pre, cell = first * size, pre * size, cell * size
    (mine, _), (right, _) = launch(first, pre, cell, split(weight), config), exact(first, pre, cell, weight)
    assert (mine.double() - right).norm() / right.norm() <= 1e-6, size
print("agrees")
"""

GUARDED = """
# What lies beside the tensors is neither written nor, were it undefined, read.
config = Config(32, 16, 16)
first, pre, cell, weight = layer(3, 5, 48)
def guarded(t):
    around = torch.full((t.numel() + 4096,), math.nan)
    inside = around[2048 : 2048 + t.numel()].view(t.shape)
    return inside.copy_(t)
held, original = [], torch.Tensor.new_empty
def new_empty(self, *shape, dtype=None, **others):
    if others:  # the interpreter's own
        return original(self, *shape, dtype=dtype, **others)
    size, dtype = math.prod(shape), dtype or self.dtype
    around = torch.full((size + 4096,), 7.0, dtype=dtype)
    held.append((around, size))
    return around[2048 : 2048 + size].view(shape)
inputs = [guarded(t) for t in (first, pre, cell)]
planes = split(weight)
torch.Tensor.new_empty = new_empty
found = launch(*inputs, planes, config)
assert len(held) == 2
for around, size in held:
    assert (around[:2048] == 7).all() and (around[2048 + size :] == 7).all()
right = exact(first, pre, cell, weight)
assert all((a.double() - b).norm() / b.norm() < 1e-6 for a, b in zip(found, right))
print("agrees")
"""


@pytest.mark.parametrize("check", [NUMBERS, SPECIAL, GUARDED], ids=["numbers", "special", "guarded"])
def test_the_kernel_computes_what_the_operator_says(check):
    agrees(COMMON + check)


@pytest.mark.parametrize(("batch", "hidden"), [(1, 16), (32, 512), (128, 1024), (300, 2048), (8, 80)])
def test_programs_have_few_units_and_a_step_that_divides_the_product(batch, hidden):
    from passes.kernels.lstm_steps import choose

    chosen = choose(batch, hidden, 132)
    assert hidden % chosen.depth == 0 and 16 <= chosen.rows <= 64
    programs = -(-hidden // chosen.units) * -(-batch // chosen.rows)
    assert programs <= 132 or chosen.units == 16
    loads = (chosen.rows + 4 * chosen.units) * chosen.depth * 4 * chosen.stages
    assert loads <= 96 * 1024


@pytest.mark.parametrize("config", [(32, 4), (64, 16), (16, 4)])
def test_the_kernel_compiles_for_an_h200_and_uses_its_matrix_units(config):
    from passes.kernels.lstm_steps import kernel

    fixed = {"HIDDEN": 512, "BM": config[0], "UNITS": config[1], "BK": 64}
    kinds = dict.fromkeys(("pre", "out", "cell", "w_scale"), "*fp32")
    kinds |= dict.fromkeys(("planes", "w_high", "w_low"), "*fp16")
    compiled = compiled_for_h200(kernel, fixed, kinds, (*kinds, "batch"), num_warps=4, num_stages=4)
    ptx = compiled.asm["ptx"]
    assert ("mma.sync" in ptx or "wgmma" in ptx) and "cp.async" in ptx
    assert compiled.metadata.shared <= 227 * 1024
