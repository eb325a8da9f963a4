"""Fused attention: which of torch's kernels take a call, and what a call's arguments are.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = ["BACKENDS", "arguments", "call", "only_result_used", "result", "usable"]

aten: Any = torch.ops.aten

#: name of a backend -> its operator
BACKENDS: dict[str, Any] = {
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
}


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a node that calls an operator, by its name in the schema, defaults included."""
    target: Any = node.target
    named = {a.name: a.default_value for a in target._schema.arguments}
    return {**named, **dict(zip(named, node.args, strict=False)), **node.kwargs}


def only_result_used(node: fx.Node) -> bool:
    """Whether nothing reads another output than the first: not the log-sum-exp, nor the state of dropout."""
    return all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)


def call(backend: str, q: Any, k: Any, v: Any, causal: bool, scale: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """(operator, args, kwargs) of a call without bias and dropout whose log-sum-exp nobody wants."""
    if backend == "flash":
        return BACKENDS[backend], (q, k, v, 0.0, causal), {"scale": scale}
    return BACKENDS[backend], (q, k, v, None, False, 0.0, causal), {"scale": scale}


def result(backend: str, q: Any, k: Any, v: Any, causal: bool, scale: Any) -> torch.Tensor:
    """The fake result of a call with fake tensors: its shape, dtype and strides."""
    target, args, kwargs = call(backend, q, k, v, causal, scale)
    with q.fake_mode:
        output: torch.Tensor = target(*args, **kwargs)[0]
    return output


def usable(backend: str, q: Any, k: Any, v: Any, causal: bool) -> bool:
    """Whether a backend takes these tensors (fake ones will do) on the current device, as torch itself would decide.

    torch looks at device, dtype, head dimension, layout, and what the user has switched off.
    """
    cuda = torch.backends.cuda
    can = {
        "cudnn": cuda.can_use_cudnn_attention,
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
    }
    # scaled_dot_product_attention pads to a multiple of 8 before it calls flash; the operator itself wants that.
    if backend == "flash" and q.shape[-1] % 8:
        return False
    return bool(can[backend](cuda.SDPAParams(q, k, v, None, 0.0, causal, False), False))
