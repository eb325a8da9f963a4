"""A training step: the backend measures forward and backward together, and the profiler the whole step.

Slow: AdamW updates each parameter by itself, in a dozen operators that are launched one after another.
Look at: the note, for a call of the graph is forward and backward here; and the time of a step by part. The graph that
ends in "backward" is the backward pass; outside of graphs are the loss and the optimiser, which no pass reaches.
Try: torch.optim.AdamW(model.parameters(), fused=True); precision="bf16" among the options, with gradients checked
against fp64.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt
import profiler_core

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x, target = torch.randn(32, 256, device=DEVICE), torch.randint(10, (32,), device=DEVICE)

options = {"time_limit": TIME_LIMIT, "passes": ["promote_matmul_precision", "cuda_graphs"]}
compiled = torch.compile(model, backend="profile_guided", options=options)


def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(compiled(x), target).backward()
    optimizer.step()


step()
show(fxopt.last_report(), "promote_matmul_precision", "cuda_graphs")
profile = profiler_core.profile(step, counters="none")
print(f"a step takes {profile.wall_ns / 1e6:.2f} ms, {profile.kernel_ns / 1e6:.2f} ms of it in kernels")
for row in profile.by("graph").to_dict("records"):
    print(f"  {row['time_ns'] / 1e3:6.0f} us, {row['share']:4.0%}  {row['graph'] or 'outside of graphs'}")
