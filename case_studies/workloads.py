"""The models that more than one study runs: random weights from a fixed seed, fp32, eval mode.

`WORKLOADS` take one tensor and give one; `COMPARED` adds decoding, which takes two, and training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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


class Perceptron(nn.Module):
    """Four linear layers, each with another activation."""

    def __init__(self, narrow: int = 512, wide: int = 2048) -> None:
        super().__init__()
        widths = (narrow, wide, wide, wide, narrow)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = F.gelu(second(F.relu(first(x))))
        return torch.tanh(last(F.silu(third(x))))


class Stack(nn.Module):
    """Layers one after the other. A class of its own, since its `forward` is copied (see runner)."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TokenModel(nn.Module):
    """Embedding, layer norm, a feed-forward of four times the width, and a projection to logits."""

    def __init__(self, vocabulary: int = 32000, width: int = 512) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.logits(self.down(F.gelu(self.up(self.norm(self.table(ids))))))
        return out


class Decoder(nn.Module):
    """One step of decoding with GPT-2's own layers: ids (batch, 1) at `position` (1,) give the last hidden state.

    The keys and values of all `length` positions lie in buffers, and the step writes its own there in place: calling it
    again with the same arguments changes nothing. Positions after `position` are masked.
    """

    gpt2: Any
    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        super().__init__()
        self.gpt2 = model
        self.heads, width = self.gpt2.config.n_head, self.gpt2.config.n_embd
        shape = (self.gpt2.config.n_layer, batch, self.heads, length, width // self.heads)
        self.register_buffer("keys", torch.randn(shape))
        self.register_buffer("values", torch.randn(shape))
        self.register_buffer("places", torch.arange(length))

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.gpt2.wte(ids) + self.gpt2.wpe(position)
        seen = (self.places <= position).view(1, 1, 1, -1)
        for number, block in enumerate(self.gpt2.h):
            mixed = self._attend(block.attn.c_attn(block.ln_1(x)), number, position, seen)
            x = x + block.attn.c_proj(mixed)
            x = x + block.mlp(block.ln_2(x))
        out: torch.Tensor = self.gpt2.ln_f(x)
        return out

    def _attend(self, qkv: torch.Tensor, layer: int, position: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        batch, one, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = (part.view(batch, one, self.heads, -1).transpose(1, 2) for part in qkv.split(width, dim=2))
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return mixed.transpose(1, 2).reshape(batch, one, width)


class NextTokenLoss(nn.Module):
    """GPT-2's loss on its own input, with the logits from the tied embedding."""

    gpt2: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.gpt2 = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.gpt2(ids, use_cache=False).last_hidden_state[:, :-1]
        logits = F.linear(hidden, self.gpt2.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Workload:
    """``build(device, small)`` gives the model and its input, a tensor or a tuple of them. ``small`` has the same
    structure and fits a test. ``trains``: the model gives a loss, and a call is a whole training step.
    """

    name: str
    what: str
    build: Callable[[torch.device, bool], tuple[nn.Module, Any]]
    trains: bool = False


def _sdpa(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    width, batch, length = (64, 2, 16) if small else (512, 8, 512)
    return Attention(width).eval().to(device), torch.randn(batch, length, width, device=device)


def _lstm(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    width, batch, length = (32, 2, 8) if small else (512, 32, 128)
    return Recurrent(width).eval().to(device), torch.randn(batch, length, width, device=device)


def _mlp(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    narrow, wide, batch = (32, 64, 8) if small else (512, 2048, 256)
    return Perceptron(narrow, wide).eval().to(device), torch.randn(batch, narrow, device=device)


def _convolved(channels: int, out: int, **how: Any) -> list[nn.Module]:
    """Convolution without bias, batch norm with statistics as training leaves them, ReLU."""
    norm = nn.BatchNorm2d(out)
    nn.init.normal_(norm.running_mean, std=0.1)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return [nn.Conv2d(channels, out, bias=False, **how), norm, nn.ReLU()]


def _conv_block(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    widths, batch, side = ((4, 8), 2, 16) if small else ((64, 128, 256), 16, 64)
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        layers += _convolved(channels, width, kernel_size=3, padding=1)
        layers += _convolved(width, width, kernel_size=3, padding=1)
        layers.append(nn.MaxPool2d(2))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return Stack(layers).eval().to(device), torch.randn(batch, 3, side, side, device=device)


def _depthwise(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    widths, batch, side = ((4, 8, 16), 2, 8) if small else ((32, 64, 128, 256), 16, 56)
    layers: list[nn.Module] = []
    for channels, out in pairwise(widths):
        layers += _convolved(channels, channels, kernel_size=3, padding=1, groups=channels)
        layers += _convolved(channels, out, kernel_size=1)
    return Stack(layers).eval().to(device), torch.randn(batch, widths[0], side, side, device=device)


def _embedding(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    vocabulary, width, shape = (256, 32, (2, 8)) if small else (32000, 512, (64, 128))
    return TokenModel(vocabulary, width).eval().to(device), torch.randint(vocabulary, shape, device=device)


def _gpt2_model(small: bool, **options: Any) -> Any:
    """GPT2Model on the CPU; ImportError's remedy where transformers is missing."""
    from case_studies.gpt2 import random_model

    try:
        import transformers
    except ImportError as error:
        raise RuntimeError(
            "GPT-2 needs Hugging Face transformers: pip install 'fxopt[case-studies]', or choose another workload"
        ) from error
    make_config: type = transformers.GPT2Config
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512} if small else {}
    return random_model(make_config(attn_implementation="sdpa", use_cache=False, **sizes, **options))


def _gpt2_ids(model: Any, device: torch.device, small: bool) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (2, 16) if small else (4, 128), device=device)


def _gpt2(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    from case_studies.gpt2 import LastHidden

    model = _gpt2_model(small)
    return LastHidden(model).eval().to(device), _gpt2_ids(model, device, small)


def _gpt2_train(device: torch.device, small: bool) -> tuple[nn.Module, torch.Tensor]:
    # Without dropout, so that a step can be compared with one in fp64.
    model = _gpt2_model(small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return NextTokenLoss(model).train().to(device), _gpt2_ids(model, device, small)


def _gpt2_decode(length: int) -> Callable[[torch.device, bool], tuple[nn.Module, Any]]:
    def build(device: torch.device, small: bool) -> tuple[nn.Module, Any]:
        model = _gpt2_model(small)
        places = 16 if small else length
        ids = torch.randint(model.config.vocab_size, (1, 1), device=device)
        return Decoder(model, 1, places).eval().to(device), (ids, torch.tensor([places - 1], device=device))

    return build


WORKLOADS = {
    w.name: w
    for w in (
        Workload("gpt2", "GPT-2 small, batch 4, sequence 128", _gpt2),
        Workload("sdpa", "pre-norm attention block, 8 heads of 64, batch 8, sequence 512", _sdpa),
        Workload("lstm", "2-layer LSTM of 512, batch 32, sequence 128, linear head", _lstm),
        Workload("conv_block", "VGG-style convolutions up to 256 channels, batch 16, 3x64x64", _conv_block),
        Workload("depthwise", "depthwise-separable convolutions, 32 to 256 channels, batch 16, 56x56", _depthwise),
        Workload("mlp", "512-2048-2048-2048-512 with four activations, batch 256", _mlp),
        Workload("embedding", "embedding, feed-forward, 32000 logits, width 512, batch 64, sequence 128", _embedding),
    )
}

COMPARED = WORKLOADS | {
    w.name: w
    for w in (
        Workload("gpt2_decode_128", "GPT-2 small, one token, static cache of 128, batch 1", _gpt2_decode(128)),
        Workload("gpt2_decode_1024", "GPT-2 small, one token, static cache of 1024, batch 1", _gpt2_decode(1024)),
        Workload("gpt2_train", "GPT-2 small, a training step with AdamW, batch 4, sequence 128", _gpt2_train, True),
    )
}


def build(name: str, device: torch.device, *, small: bool = False) -> tuple[nn.Module, Any]:
    """The model and one input of a workload, the same in every process."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        return COMPARED[name].build(device, small)


def more_inputs(model: nn.Module, like: Any, sets: int) -> list[tuple[torch.Tensor, ...]]:
    """`sets` inputs: `like`, and fresh ones of its form (ids within the vocabulary; a position stays what it is)."""
    first = like if isinstance(like, tuple) else (like,)
    generator = torch.Generator(device=first[0].device).manual_seed(SEED + 1)
    vocabulary = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 0)

    def fresh(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, device=x.device, generator=generator)
        return torch.randint(vocabulary, x.shape, device=x.device, generator=generator)

    return [first, *((fresh(first[0]), *first[1:]) for _ in range(sets - 1))]
