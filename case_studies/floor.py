"""The least time that a workload could take on a device: its FLOPs and its compulsory bytes over measured ceilings.

FLOPs are those of matrix products and convolutions, counted by torch's FlopCounterMode in one eager call (a causal
product counts in full), and of recurrent layers, which that does not count: two for each weight and step. Bytes are
each weight, input and output once, an embedding's table only where it is read; a training step reads weights and both
of AdamW's moments and writes them. The two may overlap perfectly, so the floor is the longer one; launches are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

ADAMW_PASSES = 6  # read and write the weight and two moments


@dataclass(frozen=True)
class Work:
    """flops: of a call. weight_bytes: weights and caches as stored in fp32. other_bytes: inputs and output."""

    flops: float
    weight_bytes: int
    other_bytes: int


def work(model: nn.Module, inputs: Sequence[Any], *, trains: bool) -> Work:
    """What one call of the fp32 `model` has to do. Runs it once."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    recurrent: dict[str, float] = {}
    rows: dict[str, int] = {}

    def of_recurrent(name: str, module: nn.Module, args: Any) -> None:
        steps = args[0].numel() // args[0].shape[-1]
        recurrent[name] = 2.0 * steps * sum(p.numel() for p in module.parameters() if p.dim() == 2)

    def of_embedding(name: str, module: nn.Embedding, args: Any) -> None:
        rows[name] = min(module.num_embeddings, args[0].numel()) * module.embedding_dim

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            hooks.append(module.register_forward_pre_hook(partial(of_recurrent, name)))
        elif isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_pre_hook(partial(of_embedding, name)))
    try:
        counter = FlopCounterMode(display=False)
        # The plain formulation is made of products that the counter knows on every device.
        with sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(trains), counter:
            output = model(*inputs)
            if trains:
                output.backward()
                model.zero_grad(set_to_none=True)
    finally:
        for hook in hooks:
            hook.remove()
    counts = counter.get_flop_counts()
    already = sum(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in recurrent)
    flops = counter.get_total_flops() - already + sum(recurrent.values())
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if trains or id(p) not in tables)
    weights = weights * ADAMW_PASSES if trains else weights + sum(rows.values())
    weights += sum(b.numel() for b in model.buffers() if b.is_floating_point())
    other = sum(t.numel() * t.element_size() for t in (*inputs, output))
    return Work(flops, 4 * weights, other)


def floor_ns(of: Work, ceilings: Any, precision: str) -> float:
    """Nanoseconds a call, on the fastest unit that this class or error budget admits (`fxopt.floor.unit_rate`). In the
    bf16 class weights are kept at half the size.
    """
    from fxopt.floor import unit_rate
    from fxopt.verify import parse_precision

    rate = unit_rate("float32", ceilings, parse_precision(precision))
    moved = of.other_bytes + of.weight_bytes / (2 if precision == "bf16" else 1)
    return max(of.flops / rate, moved / ceilings.copy_bytes_per_s) * 1e9
