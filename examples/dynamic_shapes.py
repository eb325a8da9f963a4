"""Batches of several sizes: one graph for the first, and one whose size is a symbol for all others.

Slow: fxopt measures each graph, and passes that prove or replay something for one size refuse the second.
Look at: three sizes, two graphs, and why `merge_projections` and `cuda_graphs` leave the second alone.
Try: pad every batch to the largest size, inputs = [torch.randn(48, 256)] * 3: one graph, and every pass may run.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt


class Projections(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(256, 512)
        self.up = torch.nn.Linear(256, 512)

    def forward(self, x):
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


torch.manual_seed(0)
model = Projections().eval().to(DEVICE)
sizes = (16, 24, 48)
inputs = [torch.randn(size, 256, device=DEVICE) for size in sizes]

passes = ["freeze_weights", "merge_projections", "cuda_graphs"]
fast = fxopt.optimize(model, (inputs[0],), time_limit=TIME_LIMIT, passes=passes)
for x in inputs[1:]:
    fast(x)
print(f"{len(sizes)} sizes, {len(fast.report.graphs)} graphs")
show(fast.report, "merge_projections", "cuda_graphs")
