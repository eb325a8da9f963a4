"""A recurrent layer, which torch.compile leaves to eager.

Slow: Dynamo does not trace nn.LSTM. The model falls apart around it, and no CUDA graph can hold it.
Look at: how many graphs torch.compile finds, and then fxopt.optimize, under which the layer is one operator of a graph.
On a GPU: `cuda_graphs` then captures the whole model, and `rnn_redispatch` has the layer in TF32, fp16 or bf16, where
the precision asked for allows that.
Try: precision="bf16".
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(64, 128, batch_first=True)
        self.head = torch.nn.Linear(128, 16)

    def forward(self, x):
        states, _ = self.lstm(x)
        return self.head(states.mean(1))


torch.manual_seed(0)
model = Tagger().eval().to(DEVICE)
x = torch.randn(8, 32, 64, device=DEVICE)

with torch.no_grad():
    found = torch._dynamo.explain(model)(x)
print(f"torch.compile: {found.graph_count} graphs")

torch._dynamo.reset()  # else Dynamo remembers that it has left this code to eager
fast = fxopt.optimize(model, (x,), time_limit=TIME_LIMIT, passes=["rnn_redispatch", "cuda_graphs"])
print(f"fxopt.optimize: {len(fast.report.graphs)} graph")
show(fast.report, "rnn_redispatch", "cuda_graphs")
