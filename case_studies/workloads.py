"""The models that more than one study runs: random weights from a fixed seed, fp32, eval mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SEED = 0


class Attention(nn.Module):
    """A pre-norm attention block with separate projections without bias, a residual and a norm after it."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before(x)

        def split(projection: nn.Module) -> torch.Tensor:
            projected: torch.Tensor = projection(y)
            return projected.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query), split(self.key), split(self.value))
        out: torch.Tensor = self.after(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return out


class Recurrent(nn.Module):
    """Two LSTM layers, the mean over time, and a linear head."""

    def __init__(self, width: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0].mean(dim=1))
        return out


@dataclass(frozen=True)
class Workload:
    """``build(device)`` gives the model and its input. ``small`` has the same structure and fits a test."""

    name: str
    what: str
    build: Callable[[torch.device, bool], tuple[nn.Module, torch.Tensor]]


def _sdpa(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    width, batch, length = (64, 2, 16) if small else (512, 8, 512)
    return Attention(width).eval().to(device), torch.randn(batch, length, width, device=device)


def _lstm(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    width, batch, length = (32, 2, 8) if small else (512, 32, 128)
    return Recurrent(width).eval().to(device), torch.randn(batch, length, width, device=device)


def _gpt2(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    from case_studies.gpt2 import LastHidden, random_model

    try:
        import transformers
    except ImportError as error:
        raise RuntimeError(
            "GPT-2 needs Hugging Face transformers: pip install 'fxopt[case-studies]', or choose another workload"
        ) from error
    make_config: type = transformers.GPT2Config
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512} if small else {}
    config = make_config(attn_implementation="sdpa", use_cache=False, **sizes)
    batch, length = (2, 16) if small else (4, 128)
    ids = torch.randint(config.vocab_size, (batch, length), device=device)
    return LastHidden(random_model(config)).eval().to(device), ids


WORKLOADS = {
    w.name: w
    for w in (
        Workload("gpt2", "GPT-2 small, batch 4, sequence 128", _gpt2),
        Workload("sdpa", "pre-norm attention block, 8 heads of 64, batch 8, sequence 512", _sdpa),
        Workload("lstm", "2-layer LSTM of 512, batch 32, sequence 128, linear head", _lstm),
    )
}


def build(name: str, device: torch.device, *, small: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """The model and one input of a workload, the same in every process."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        return WORKLOADS[name].build(device, small)
