"""The Triton kernel of split convolutions, run by Triton's interpreter on the CPU, against the operator's own form."""

from __future__ import annotations

import pytest
from triton_checks import agrees, compiled_for_h200

pytest.importorskip("triton")

CHECK = """
import itertools, sys, torch, torch.nn.functional as F
from passes.kernels.split_conv import Config, choose, launch
from passes.split_precision_conv import split_conv, split_rows

torch.manual_seed(0)
WINDOWS = [
    ((2, 16, 6, 5), (8, 16, 3, 3), [1, 1], [1, 1], [1, 1], True),
    ((1, 32, 7, 6), (20, 32, 3, 2), [2, 1], [0, 1], [1, 2], False),
    ((2, 32, 5, 5), (40, 32, 1, 1), [1, 1], [0, 0], [1, 1], True),
]
for (x, w, stride, padding, dilation, biased), terms, bad in itertools.product(WINDOWS, (3, 1), (None, "x", "w")):
    window, channels = list(w[2:]), x[1]
    x, w = torch.randn(x), torch.randn(w)
    bias = torch.randn(len(w)) if biased else None
    if bad == "x":
        x[0, 3, 2, 2], x[0, 0, 0, 0] = float("inf"), 1e-30
    if bad == "w":
        w[1, 2] *= 1e-12
    xs = split_rows(x.permute(0, 2, 3, 1), terms)
    ws = split_rows(w.permute(0, 2, 3, 1).reshape(len(w), -1), terms)
    expected = split_conv(*xs, *ws, bias, window, stride, padding, dilation)
    out = torch.full_like(expected, 7.0)
    launch(xs, ws, bias, out, window, stride, padding, dilation, Config(32, 32, 16, 4, 1))
    own = F.conv2d(x, w, bias, stride, padding, dilation).permute(0, 2, 3, 1)
    case = (tuple(x.shape), terms, bad)
    finite = own.isfinite() & expected.isfinite()
    assert torch.equal(out.isfinite(), expected.isfinite()), case
    if terms == 3:
        assert torch.equal(out.isnan(), own.isnan()) and torch.equal(out.isinf(), own.isinf()), case
    scale = expected[finite].abs().max()
    assert (out - expected)[finite].abs().max() <= 2e-6 * scale, case
    assert (out - own)[finite].abs().max() <= (4e-6 if terms == 3 else 2e-3) * scale, case
    for wide in (torch.randn(2 * len(w))[::2], torch.randn(1).expand(len(w))):  # a bias with gaps, one that repeats
        again = []
        for one in (wide, wide.clone()):
            again.append(torch.full_like(expected, 7.0))
            launch(xs, ws, one, again[-1], window, stride, padding, dilation, Config(32, 32, 16, 4, 1))
        assert torch.equal(again[0].nan_to_num(), again[1].nan_to_num()), case
print("agrees")
"""


def test_the_kernel_computes_what_the_operator_says():
    agrees(CHECK)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize(
    ("pixels", "outputs", "channels"),
    [(65536, 64, 64), (16384, 128, 128), (4096, 256, 256), (64, 8, 16), (50176, 128, 96)],
)
def test_tiles_divide_the_channels_and_fill_the_device_where_they_can(pixels, outputs, channels, terms):
    from passes.kernels.split_conv import choose

    chosen = choose(pixels, outputs, channels, terms)
    assert channels % chosen.channels == 0 and chosen.channels >= 16
    tiles = -(-pixels // chosen.pixels) * -(-outputs // chosen.outputs)
    assert tiles >= 120 or chosen.pixels == 64
    step = (chosen.pixels + chosen.outputs) * chosen.channels * 2 * (2 if terms == 3 else 1)
    assert 2 * step * chosen.stages <= 227 * 1024, "an H200 has shared memory for two at a time"


def test_the_kernel_compiles_for_an_h200_and_uses_its_matrix_units():
    from passes.kernels.split_conv import kernel

    planes = ("x_high", "x_low", "w_high", "w_low")
    fixed = {
        "CHANNELS": 64, "KERNEL_H": 3, "KERNEL_W": 3, "TERMS": 3, "HAS_BIAS": True,
        "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64,
    }  # fmt: skip
    kinds = dict.fromkeys(planes, "*fp16") | dict.fromkeys(("x_scale", "w_scale", "bias", "out"), "*fp32")
    compiled = compiled_for_h200(kernel, fixed, kinds, kinds, num_warps=4, num_stages=3)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx
    assert compiled.metadata.shared <= 227 * 1024
