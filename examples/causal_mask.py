"""A causal mask that the model builds and adds in every layer, as most models on the hub do.

Slow: attention reads a mask of sequence x sequence numbers, and computes the half of the scores that it hides.
Look at: `causal_mask`, which computes the mask while compiling, proves that it is causal, and hands the kernel a flag.
On a GPU: the flag also opens the way to kernels that take no mask, such as flash attention.
Try: `positions[:, None] + 5`. The mask then shows later positions; the pass names one, and leaves the mask alone.
"""

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

BATCH, LENGTH, WIDTH, HEADS, DEPTH = 2, 256, 256, 4, 2


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention() for _ in range(DEPTH))

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        mask = positions[None, :] <= positions[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x


torch.manual_seed(0)
model = Decoder().eval().to(DEVICE)
x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)

fast = fxopt.optimize(model, (x,), time_limit=TIME_LIMIT, passes=["causal_mask"])
show(fast.report, "causal_mask")
