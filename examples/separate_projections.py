"""Query, key and value, or gate and up, as separate matrix products of one input.

Slow: each product is too small to fill the device, and each reads the input again.
Look at: `merge_projections`, which makes one product of those that share their input. It needs constant weights
(`freeze_weights`), for otherwise it would join them on every call.
On a GPU: small products leave multiprocessors idle (`wave_starved`); merged, they have three times as many tiles.
Try: TOKENS = 8192. On a GPU the products then fill it by themselves, and the pass refuses them and says so.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

TOKENS, WIDTH = 16, 512


class Projections(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, WIDTH)
        self.key = torch.nn.Linear(WIDTH, WIDTH)
        self.value = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.query(x), self.key(x), self.value(x)


torch.manual_seed(0)
model = Projections().eval().to(DEVICE)
x = torch.randn(TOKENS, WIDTH, device=DEVICE)

fast = fxopt.optimize(model, (x,), time_limit=TIME_LIMIT, passes=["freeze_weights", "merge_projections"])
show(fast.report, "freeze_weights", "merge_projections")
