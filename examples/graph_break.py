"""A line of Python in the middle of a model that Dynamo cannot trace.

Slow: the model is two graphs with the interpreter between them. Nothing is fused across the break, and on a GPU
`.item()` waits until everything before it is done.
Look at: two graphs where one was expected. Each is measured and decided on by itself.
Try: `x = torch.where(x.mean() > 0, x, -x)` in place of the two lines. One graph is left.
torch says where a break is and why: TORCH_LOGS=graph_breaks python examples/graph_break.py
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(256, 256)
        self.after = torch.nn.Linear(256, 256)

    def forward(self, x):
        x = self.before(x).relu()
        if x.mean().item() < 0:
            x = -x
        return self.after(x).relu()


torch.manual_seed(0)
model = Gated().eval().to(DEVICE)
x = torch.randn(64, 256, device=DEVICE)

compiled = torch.compile(model, backend="profile_guided", options={"time_limit": TIME_LIMIT, "passes": []})
with torch.no_grad():
    compiled(x)
report = fxopt.full_report()
print(f"{len(report.graphs)} graphs of one model")
show(report)
