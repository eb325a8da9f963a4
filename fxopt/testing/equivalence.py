"""Whether what a pass made computes what the graph computed: numbers, forms, writes, aliases, random draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from fxopt import effects
from fxopt.precision import Budget, Precision, parse_precision
from fxopt.reference import Float64Mode, clone_inputs, storage_groups
from fxopt.registry import Pass
from fxopt.testing.running import Result, run
from fxopt.verify import Verdict, verify

__all__ = ["difference", "equivalent"]

_ROUNDOFF = {Precision.FP32: 2.0**-24, Precision.TF32: 2.0**-11, Precision.BF16: 2.0**-8}
"""Unit roundoff of the operands that a class allows (as in `fxopt.verify`)."""
_FP32_ON_THE_WAY = 2.0**-26
"""No graph in fp64 alone moves its outputs by this."""
_SAMPLES = 8
"""Random roundings of a graph: a single one may leave a scalar output where it is, by luck."""


def equivalent(p: Pass, graph: Any, *, precision: str | float | None = None) -> Result:
    """Assert that `p`, with every label that it answers, leaves a RandomGraph equivalent when interpreted.

    Both graphs run on two sets of inputs (of two sizes, where sizes are symbolic) from the same random state. Compared
    are the number, dtype, shape, strides and values of the outputs, what they alias, writes into inputs, and the state
    of the random generators afterwards. Floats may differ by what the precision class allows against an fp64 run
    (default: the class that `p` needs), integers not at all. A pass that was undone is a failure too. AssertionError
    shows the graph before and after.
    """
    sets = [graph.inputs(seed) for seed in (0, 1)]
    result = run(p, graph.module, precision=precision, inputs=sets[0])
    if result.report.error:
        raise AssertionError(f"{p.name} was undone on this graph: {result.report.error}\n{result}")
    if result.changed:
        budget = parse_precision(p.precision if precision is None else precision)
        why = difference(graph.module, result.fn, sets, budget=budget, static=graph.static)
        if why:
            raise AssertionError(f"{p.name} changes what this graph computes: {why}\n{result}")
    return result


def difference(
    graph: fx.GraphModule,
    fn: Callable[..., Any],
    input_sets: Sequence[Sequence[Any]],
    *,
    budget: Budget,
    static: Collection[int] = (),
) -> str:
    """What `fn` does otherwise than `graph` on these inputs, "" if nothing.

    The numerics gate of `fxopt.verify` decides, and outputs that share memory with each other and the random state
    afterwards are compared as well. Where a result fails by its numbers alone, the graph is asked how far its outputs
    move when every value is rounded at the class's precision: a badly conditioned graph (a difference of nearly equal
    numbers) gets four times that as its limit.
    """
    true = _in_plain_operators(graph)
    after, before = _Watched(fn), _Watched(graph)

    def verdict(allowed: Budget) -> Verdict:
        return verify(after, before, true, input_sets, static, allowed, logits=False)

    found = verdict(budget)
    if not found.ok and budget.max_rel_l2 is None:
        limit = 4 * max(_sensitivity(true, inputs, budget.precision, n) for n, inputs in enumerate(input_sets))
        # The gate's floor for an fp64 output is fp64's own, also where fp32 has been on the way to it.
        if limit > _FP32_ON_THE_WAY:
            found = verdict(Budget(budget.precision, max_rel_l2=max(limit, budget.limit(0.0))))
    if not found.ok:
        return found.reason
    for new, old in zip(after.seen, before.seen, strict=True):
        if new.shared != old.shared:
            return f"outputs {new.shared} share memory, before outputs {old.shared}"
        if new.states != old.states:
            return "the random generators are in another state after the call"
    return ""


@dataclass(frozen=True)
class _Trace:
    """What a call left behind: groups of outputs that lie in one storage, and the states of the generators."""

    shared: list[list[int]]
    states: list[bytes]


class _Watched:
    """A callable that notes what each call leaves behind."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.seen: list[_Trace] = []

    def __call__(self, *args: Any) -> Any:
        outputs = self.fn(*args)
        tensors = [value for value in tree_leaves((args, outputs)) if isinstance(value, torch.Tensor)]
        devices = {value.device for value in tensors if value.device.type == "cuda"}
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in sorted(devices, key=str))]
        self.seen.append(_Trace(_shared(tree_leaves(outputs)), [state.numpy().tobytes() for state in states]))
        return outputs


def _shared(outputs: Sequence[Any]) -> list[list[int]]:
    """Groups of outputs that lie in one storage."""
    # A tensor without elements shares nothing, whatever it is a view of.
    held = [value if isinstance(value, torch.Tensor) and value.numel() else None for value in outputs]
    return [group for group in storage_groups(held) if len(group) > 1]


def _in_plain_operators(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without operators that exist in narrow types only, for the fp64 run: MKL's packed linear layers, and
    fused attention on a GPU.
    """
    packet: Any = getattr(torch.ops.mkl, "_mkl_linear", None)
    packed = () if packet is None else (packet, packet.default)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention.default
    if not any(node.target in (*packed, fused) for node in graph.graph.nodes):
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in list(copied.graph.nodes):
        if node.target in packed:
            x, _, weight, bias, _ = node.args
            node.target, node.args = torch.ops.aten.linear.default, (x, weight, bias)
        elif node.target is fused:
            node.target = _attention
    for node in list(copied.graph.nodes):
        if node.op == "get_attr" and not node.users:
            copied.graph.erase_node(node)
    copied.recompile()
    return copied


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    log_sum_exp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention in plain operators, with the outputs of the fused one that a graph may use without dropout."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if bias is not None:
        scores = scores + bias
    # As the fused operator lays it out: heads next to features.
    output = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().transpose(1, 2)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    return output, scores.logsumexp(-1) if log_sum_exp else scores.new_empty((*scores.shape[:2], 0)), none, none


# ---------------------------------------------------------------- conditioning


class _Drawn(fx.Interpreter):
    """Runs a graph in its own types and keeps the random numbers that it draws."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._draws = set(effects.analyse(graph.graph).draws)
        self.drawn: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self._draws:
            self.drawn[n] = tree_map(_raised, result)
        return result


class _Perturbed(fx.Interpreter):
    """Runs a graph in fp64 and changes operands and results by a random relative error, as rounding at `unit` would.

    Random rounding of each operation shows how errors grow through a computation (Parker, "Monte Carlo Arithmetic",
    UCLA CSD-970002, 1997). Nodes that compute in another type than fp32 are rounded at that type's own precision.
    `drawn` holds the results of nodes that draw random numbers.
    """

    def __init__(self, graph: fx.GraphModule, unit: float, drawn: dict[fx.Node, Any], seed: int) -> None:
        super().__init__(graph)
        self._unit = unit
        self._drawn = drawn
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        if n in self._drawn:
            return self._drawn[n]
        results = [v for v in tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)]
        computes = n.op == "call_function" and not _is_alias(n.target)  # a view rounds nothing, nor does a write
        if not self._unit or not computes or not results or not results[0].is_floating_point():
            return super().run_node(n)
        dtype = results[0].dtype
        unit = self._unit if dtype == torch.float32 else torch.finfo(dtype).eps / 2

        def rounded(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
            return x * (1 + unit * noise.to(x.device))

        args, kwargs = tree_map(rounded, self.fetch_args_kwargs_from_env(n))
        return tree_map(rounded, self.call_function(n.target, args, kwargs))


def _is_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _raised(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _sensitivity(graph: fx.GraphModule, inputs: Sequence[Any], precision: Precision, seed: int) -> float:
    """Largest relative L2 change of an output or a written input when each operation rounds at `precision`.

    seed: of the random numbers that the graph draws.
    """
    devices = {v.device.index or 0 for v in inputs if isinstance(v, torch.Tensor) and v.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.no_grad():
        torch.manual_seed(seed)
        random = _Drawn(graph)
        random.run(*clone_inputs(inputs, ()))

    def outputs(unit: float, sample: int) -> list[torch.Tensor]:
        raised = tree_map(_raised, clone_inputs(inputs, ()))
        with torch.no_grad(), Float64Mode():
            results = _Perturbed(graph, unit, random.drawn, sample).run(*raised)
        return [v for v in tree_leaves((results, raised)) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    largest, exact = 0.0, outputs(0.0, 0)
    for sample in range(_SAMPLES):
        for true, moved in zip(exact, outputs(_ROUNDOFF[precision], sample), strict=True):
            finite = true.isfinite() & moved.isfinite()
            norm = torch.where(finite, true, 0.0).double().norm().item()
            change = torch.where(finite, moved - true, 0.0).double().norm().item()
            largest = max(largest, change / (norm or 1.0))
    return largest
