"""fp32 matrix products on a device that multiplies narrower numbers several times as fast.

Slow: tensor cores (on a CPU: bf16 or AMX units) take no fp32 operands, and stand idle.
Look at: `tensor_core_idle`, and what keeps `promote_matmul_precision` from answering it: `precision="fp32"`, the
default, promises fp32's accuracy.
On a GPU: `split_precision_gemm` computes the products from two fp16 parts of each operand, as accurate as fp32.
Try: precision="bf16", or an error budget such as precision=1e-2. The last line has the error against fp64.
On a CPU without bf16 units nothing is idle: the label is `compute_bound`, and `onednn_linear` is what answers it.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

BATCH, WIDTH = 256, 1024
PASSES = ("freeze_weights", "split_precision_gemm", "onednn_linear", "promote_matmul_precision")

torch.manual_seed(0)
model = (
    torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))
    .eval()
    .to(DEVICE)
)
x = torch.randn(BATCH, WIDTH, device=DEVICE)

fast = fxopt.optimize(model, (x,), time_limit=TIME_LIMIT, precision="fp32", passes=PASSES)
show(fast.report, *PASSES)
verdict = fast.report.graphs[0].verdict
if verdict is not None:
    print(f"error against fp64: {verdict.rel_l2:.1e}, of Inductor's own code {verdict.baseline_rel_l2:.1e}")
