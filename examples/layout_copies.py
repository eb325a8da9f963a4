"""An MLP-Mixer block: every other layer works across the rows, on a transposed copy of its input.

Slow: a linear layer reads rows that lie in memory one after another, so a transposed input is copied first: every
number is moved, and nothing is computed.
Look at: `layout_conversion`, and the source line that the profile gives it. What a model asks for by name no pass takes
away; the remedy is in the model.
Try: a product that reads x as it lies, without the two transposes, and the label goes:
    across = torch.baddbmm(self.across.bias[:, None], self.across.weight.expand(BATCH, -1, -1), x)
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

BATCH, ROWS, CHANNELS = 32, 196, 256


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.across = torch.nn.Linear(ROWS, ROWS)
        self.within = torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x):
        across = self.across(x.transpose(1, 2))
        return self.within(across.transpose(1, 2))


torch.manual_seed(0)
model = Block().eval().to(DEVICE)
x = torch.randn(BATCH, ROWS, CHANNELS, device=DEVICE)

compiled = torch.compile(model, backend="profile_guided", options={"time_limit": TIME_LIMIT, "passes": []})
with torch.no_grad():
    compiled(x)
report = fxopt.full_report()
show(report, labels=8)
profile = report.graphs[0].profile
if profile is not None:  # None after a plan was found: then nothing was measured
    lines = profile.nodes.groupby("source")["time_ns"].sum().sort_values(ascending=False)
    for source, time_ns in lines[lines > 0].items():
        print(f"  {time_ns / 1e3:6.0f} us  {source}")
