"""All steps of an LSTM in one launch: what a device can hold, and what is compiled for an H200.

Gluon has no interpreter; the numbers are in tests/gpu/test_rnn_cuda.py.
"""

from __future__ import annotations

import pytest
from triton_checks import compiled_for_h200

pytest.importorskip("triton", reason="needs Triton, in which the kernel is written")


@pytest.mark.parametrize(
    ("batch", "hidden", "layers", "rows"),
    [
        (32, 512, 2, 32),  # three sets of 32 programs
        (16, 512, 2, 16),
        (1, 512, 1, 8),
        (64, 512, 1, 16),  # in four parts, for 64 rows of states do not fit beside the weights
        (33, 512, 2, 0),  # six sets
        (32, 512, 3, 0),  # five sets
        (8, 256, 4, 8),
        (128, 256, 1, 16),
        (32, 1024, 1, 0),  # 64 rows of weights are 256 KiB
        (32, 80, 1, 0),  # not a multiple of 64
    ],
)
def test_a_device_holds_all_weights_or_the_kernel_is_not_used(batch, hidden, layers, rows):
    from passes.kernels.lstm_persistent import rows_of

    assert rows_of(batch, hidden, layers, 132) == rows


@pytest.mark.parametrize(
    ("hidden", "layers", "rows"), [(512, 2, 32), (512, 1, 8), (256, 3, 64), (64, 2, 8), (768, 1, 8)]
)
def test_the_kernel_compiles_for_an_h200_and_fits_it(hidden, layers, rows):
    from triton.experimental.gluon._runtime import GluonASTSource

    from passes.kernels.lstm_persistent import DEPTH, kernel, run_of

    fixed = {"HIDDEN": hidden, "LAYERS": layers, "BN": rows, "BK": DEPTH, "RUN": run_of(hidden)}
    fp32 = ("first", "pre", "bias", "out", "hidden", "passed", "cell", "ih_scale", "hh_scale")
    kinds = dict.fromkeys(fp32, "*fp32") | {"done": "*i32"}
    kinds |= dict.fromkeys(("planes", "ih_high", "ih_low", "hh_high", "hh_low"), "*fp16")
    options = {"num_warps": 4, "launch_cooperative_grid": True}
    compiled = compiled_for_h200(kernel, fixed, kinds, (*kinds, "batch"), of=GluonASTSource, **options)
    ptx = compiled.asm["ptx"]
    assert "wgmma" in ptx and "cp.async" in ptx
    assert "ld.global.gpu.acquire" in ptx and "atom.global.gpu.release.add" in ptx
    assert compiled.metadata.launch_cooperative_grid
    assert compiled.metadata.shared <= 227 * 1024
