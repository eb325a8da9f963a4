"""A profile without the backend: which module, source line and operator the time of any function goes to.

Slow: the second of three equal layers is called twice. Nothing in the module tree says so.
Look at: the time by module and by line, and the part of it that is attributed.
Try: `profiler_core.load("trace.json")` reads what torch.profiler, nsys or ncu wrote elsewhere; `profile.kernels` and
`profile.nodes` are pandas frames; load the written trace in https://ui.perfetto.dev.
"""

import tempfile
from pathlib import Path

import torch

import profiler_core


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.layers[0](x))
        for _ in range(2):
            x = torch.relu(self.layers[1](x))
        return self.layers[2](x)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Model().eval().to(device)
x = torch.randn(256, 1024, device=device)

with torch.no_grad():
    profile = profiler_core.profile(torch.compile(model), x)
print(f"{profile.attributed_share:.0%} of {profile.kernel_ns / 1e3:.0f} us in kernels is attributed")
for column in ("module_path", "line"):
    for row in profile.by(column).to_dict("records"):
        print(f"  {row['time_ns'] / 1e3:6.0f} us, {row['share']:4.0%}  {row[column].rpartition('/')[2]}")

folder = Path(tempfile.mkdtemp())
profile.save(folder / "profile.json")
profile.to_chrome_trace(folder / "trace.json.gz")
print(f"kept in {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
