"""One activation, cast to bf16 once for each matrix product that reads it.

Slow: by hand or by autocast, every product casts its operands. Inductor merges equal casts in frozen graphs only, so
each is computed, and written to memory, again.
Look at: `cast_traffic`, and `remove_redundant_casts_and_copies`, which keeps the first of equal casts, bit by bit the
same.
Try: one cast, `x = x.bfloat16()`, before the products. The pass has nothing left to do.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

TOKENS, WIDTH = 2048, 512


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weights = (torch.randn(WIDTH, 64).bfloat16() for _ in range(3))
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, x):
        return [(x.bfloat16() @ weight).float() for weight in self.weights]


torch.manual_seed(0)
model = Heads().eval().to(DEVICE)
x = torch.randn(TOKENS, WIDTH, device=DEVICE)

options = {"time_limit": TIME_LIMIT, "passes": ["remove_redundant_casts_and_copies"]}
compiled = torch.compile(model, backend="profile_guided", options=options)
with torch.no_grad():
    compiled(x)
show(fxopt.full_report(), "remove_redundant_casts_and_copies", labels=8)
