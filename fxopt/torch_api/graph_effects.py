"""What a graph does beside giving its outputs: random numbers, other ranks, operators with effects."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def random_operations(gm: fx.GraphModule) -> list[str]:
    """Names of the graph's nodes that draw random numbers, as far as their target says so."""
    found = []
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if any(word in target for word in ("rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")):
            found.append(node.name)
        elif "dropout" in target:
            training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
            probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
            if training and probability:
                found.append(node.name)
    return found


#: where functional collectives and traced calls of torch.distributed come from
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor")


def collectives(gm: fx.GraphModule) -> list[str]:
    """Names of the graph's nodes that communicate with other ranks: one rank that runs them alone waits for ever."""
    found = []
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = node.target
            if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                operator = target if isinstance(target, torch._ops.OpOverloadPacket) else target.overloadpacket
                communicates = operator._qualified_op_name.partition("::")[0] in _COLLECTIVES
            else:
                communicates = str(getattr(target, "__module__", "")).startswith("torch.distributed")
            if communicates and node.op == "call_function":
                found.append(node.name)
    return found


def effectful(gm: fx.GraphModule) -> list[str]:
    """Names of the graph's nodes that call operators registered as having effects, which torch never repeats, drops or
    puts into another order: they print, log or send something, and measuring would do so dozens of times."""
    from torch._higher_order_ops import effects

    effect_of = getattr(effects, "_get_effect", None)
    if effect_of is None:  # torch before 2.11
        return []

    def acts(target: Any) -> bool:
        if isinstance(target, torch._ops.OpOverloadPacket):
            return any(acts(getattr(target, name)) for name in target.overloads())
        return isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) and bool(effect_of(target))

    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return [n.name for graph in graphs for n in graph.nodes if n.op == "call_function" and acts(n.target)]
