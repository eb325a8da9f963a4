"""Many tiny layers: the device waits for the next kernel to be launched.

Slow: at batch 1 each layer takes a microsecond or two, and starting it takes longer.
Look at: `launch_bound`, a label of the whole graph. Its headroom is the time in which no kernel runs.
On a GPU: `cuda_graphs` records all launches once and replays them with one. On a CPU
frozen weights help a little.
Try: BATCH = 4096. The kernels get long, the gaps stay as they are, and the label goes.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

BATCH, WIDTH, DEPTH = 1, 64, 32

torch.manual_seed(0)
layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers).eval().to(DEVICE)
x = torch.randn(BATCH, WIDTH, device=DEVICE)

# Two passes, so that the example takes seconds; without `passes` fxopt tries every one that answers a label.
fast = fxopt.optimize(model, (x,), time_limit=TIME_LIMIT, passes=["freeze_weights", "cuda_graphs"])
show(fast.report, "cuda_graphs", "freeze_weights")
