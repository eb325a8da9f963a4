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

def layers(steps, batch, hidden, count=1, gain=1.0):
    def weights(n):
        return torch.randn(n, 4 * hidden, hidden) * gain / hidden**0.5
    first, pre = torch.randn(count, batch, 4 * hidden), torch.randn(steps, batch, 4 * hidden)
    bias = torch.randn(count - 1, 4 * hidden) if count > 1 else None
    below = weights(count - 1) if count > 1 else None
    return first, pre, bias, torch.randn(count, batch, hidden), below, weights(count)

def cut(first, pre, bias, cell, below, weight):
    return first, pre, bias, cell, None if below is None else split(below), split(weight)

def own(*given):
    *given, below, weight = cut(*given)
    return STEPS(*given, list(below or ()), list(weight))

def exact(*given):
    first, pre, bias, cell, below, weight = (t if t is None else t.double() for t in given)
    inputs, last, cells = pre, [], []
    for layer in range(len(cell)):
        states, c = [], cell[layer]
        for step in range(len(pre)):
            gates = first[layer] if step == 0 else bias[layer - 1] if layer else inputs[step]
            if layer:
                gates = gates + inputs[step] @ below[layer - 1].mT
            if step:
                gates = gates + states[-1] @ weight[layer].mT
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            states.append(o.sigmoid() * c.tanh())
        inputs = torch.stack(states)
        last.append(states[-1])
        cells.append(c)
    return inputs, torch.stack(last), torch.stack(cells)
"""

NUMBERS = """
CASES = [
    # steps, batch, hidden, layers, configuration
    (5, 16, 32, 1, Config(16, 4, 16)),   # several steps of the product
    (4, 5, 48, 2, Config(16, 8, 16)),    # a batch that fills no tile
    (3, 33, 32, 3, Config(32, 16, 32)),  # two tiles of the batch, the second with one row; as many layers as steps
    (1, 3, 16, 1, Config(16, 4, 16)),    # a single step: no product
    (1, 3, 16, 3, Config(16, 4, 16)),    # and more layers than steps
    (6, 2, 80, 2, Config(16, 16, 16)),   # units that no tile divides
]
for steps, batch, hidden, count, config in CASES:
    given = layers(steps, batch, hidden, count, 2.0)
    before = [t.clone() for t in given if t is not None]
    found = launch(*cut(*given), config)
    for mine, theirs, right in zip(found, own(*given), exact(*given), strict=True):
        assert mine.shape == theirs.shape and mine.is_contiguous()
        error, reference = ((t.double() - right).norm() / right.norm() for t in (mine, theirs))
        assert error <= max(4 * reference, 2.0**-22), (steps, batch, hidden, count, error, reference)
    assert torch.equal(found[0][-1], found[1][-1])
    assert all(map(torch.equal, before, [t for t in given if t is not None])), "inputs stay as they are"
print("agrees")
"""

SPECIAL = """
config = Config(16, 4, 16)
# Weights that planes cannot hold, and saturated, infinite and undefined gates.
given = first, pre, bias, cell, below, weight = layers(4, 6, 32, 2)
weight[0, 5, 3], weight[1, 40, 7], below[0, 100, 9], below[0, 70, 2] = 1e-30, 1e20, 1e-32, 1e15
first[0, 0, 0], pre[1, 1, 40], pre[2, 2, 70] = math.inf, -math.inf, 1e30
pre[1, 3, 5] = math.nan
cell[0, 4, 3] = math.inf
for mine, theirs in zip(launch(*cut(*given), config), own(*given), strict=True):
    assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.isinf(), theirs.isinf())
    finite = theirs.isfinite()
    assert finite.any() and not finite.all()
    assert (mine - theirs)[finite].abs().max() <= 2e-6 * theirs[finite].abs().max()
# Small states keep their relative error down to 2^-28.
for size in (1e-3, 1e-6, 1e-8):
    first, pre, bias, cell, below, weight = layers(3, 4, 32, 2)
    given = first * size, pre * size, bias * size, cell * size, below, weight
    mine, right = launch(*cut(*given), config)[0], exact(*given)[0]
    assert (mine.double() - right).norm() / right.norm() <= 1e-6, size
print("agrees")
"""

GUARDED = """
# What lies beside the tensors is neither written nor, were it undefined, read.
config = Config(32, 16, 16)
first, pre, bias, cell, below, weight = layers(3, 5, 48, 2)
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
inputs = [guarded(t) for t in (first, pre, bias, cell)]
planes = split(below), split(weight)
torch.Tensor.new_empty = new_empty
found = launch(*inputs, *planes, config)
assert len(held) == 3
for around, size in held:
    assert (around[:2048] == 7).all() and (around[2048 + size :] == 7).all()
right = exact(first, pre, bias, cell, below, weight)
assert all((a.double() - b).norm() / b.norm() < 1e-6 for a, b in zip(found, right, strict=True))
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


@pytest.mark.parametrize(("layers", "early"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("config", [(32, 4), (64, 16), (16, 4)])
def test_the_kernel_compiles_for_an_h200_and_uses_its_matrix_units(config, layers, early):
    from passes.kernels.lstm_steps import kernel

    fixed = {"HIDDEN": 512, "LAYERS": layers, "BM": config[0], "UNITS": config[1], "BK": 64, "EARLY": early}
    kinds = dict.fromkeys(("first", "pre", "bias", "out", "recent", "cell", "ih_scale", "hh_scale"), "*fp32")
    kinds |= dict.fromkeys(("planes", "ih_high", "ih_low", "hh_high", "hh_low"), "*fp16")
    compiled = compiled_for_h200(kernel, fixed, kinds, (*kinds, "batch"), num_warps=4, num_stages=4)
    ptx = compiled.asm["ptx"]
    assert ("mma.sync" in ptx or "wgmma" in ptx) and "cp.async" in ptx
    assert ("griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx) == early
    assert compiled.metadata.shared <= 227 * 1024
