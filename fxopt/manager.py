"""Runs graph passes in Inductor's custom-pass slots, under invariants.

A pass runs on a copy of the graph. Only if the copy satisfies every invariant does it take the graph's place, so a
pass that raises, or breaks something, has changed nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt.registry import Candidate, GraphPass, InvariantError, PassContext, PassReport, Stage
from fxopt.torch_api.inductor import CustomGraphPass, lowers

#: meta that says where a node comes from; new nodes inherit it from the node they replace
PROVENANCE_META = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
    "custom",
)


def chain_uuid(passes: Sequence[GraphPass], context: PassContext, stage: Stage) -> str:
    """Digest of everything that decides what the passes do to a graph: sources, options, labels, device, order."""
    parts = {
        "stage": stage.value,
        "passes": [(p.name, p.fingerprint()) for p in passes],
        "labels": [[label.axis.value, sorted(label.nodes)] for label in context.labels],
        "device": str(context.device),
        "budget": repr(context.budget),
        "units": sorted(context.matrix_units),
        "flags": [context.session, context.grad, context.dynamic],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class SlotPass(CustomGraphPass):
    """The passes of one stage as one Inductor custom pass, after whatever a user has already put in the slot.

    Inductor's slot has one owner in torch 2.11; so the user's pass is called first and its uuid is part of ours.
    """

    def __init__(self, passes: Sequence[GraphPass], context: PassContext, stage: Stage, installed: Any = None) -> None:
        self.passes = tuple(passes)
        self.context = context
        self.stage = stage
        self.installed: tuple[Any, ...] = (
            () if installed is None else tuple(installed) if isinstance(installed, (list, tuple)) else (installed,)
        )
        self.reports: list[PassReport] = []
        self.ran = False
        self._uuid = chain_uuid(passes, context, stage)

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.installed:
            other(graph)
        self.ran = True
        self.reports = [run_pass(p, graph, self.context) for p in self.passes]

    def uuid(self) -> Any:
        """None, which makes Inductor skip its caches, where a user's pass has no uuid of its own."""
        others = []
        for other in self.installed:
            uuid = other.uuid() if isinstance(other, CustomGraphPass) else None
            if uuid is None:
                return None
            others.append(str(uuid))
        return f"fxopt:{self._uuid}:{':'.join(others)}"


def run_pass(p: GraphPass, graph: fx.Graph, context: PassContext) -> PassReport:
    """Run one pass on `graph`, in place, if a trial on a copy holds every invariant. Never raises for the pass."""
    report = PassReport(name=p.name, stage=p.stage.value)
    try:
        found = list(p.candidates(graph, context))
        accepted = [c for c in found if not c.refused]
        report = replace(
            report,
            matched=len(accepted),
            refused=tuple((c.target, c.refused) for c in found if c.refused),
        )
        if not accepted:
            return report
        trial = _copy(graph)
        rewritten = _apply(p, trial, accepted, context)
        if rewritten == 0 or _text(trial) == _text(graph):
            raise InvariantError(f"{len(accepted)} candidates accepted, but the graph is as it was")
        _check(graph, trial)
        p.ensures(trial, context)
        _transplant(trial, graph)
        return replace(report, rewritten=rewritten, changed=True)
    except Exception as error:
        return replace(report, error=f"{type(error).__name__}: {error}")


def _copy(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names; values and provenance are shared, not copied."""
    copied = copy.deepcopy(graph)
    copied.owning_module = graph.owning_module
    return copied


def _text(graph: fx.Graph) -> str:
    """The graph with nodes numbered in order: names differ where one of two equal graphs has a longer history."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def spell(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda n: number[n]))

    return "\n".join(
        f"{number[n]} {n.op} {n.target if n.op != 'output' else ''} {spell(n.args)} {spell(n.kwargs)}"
        for n in graph.nodes
    )


def _apply(p: GraphPass, graph: fx.Graph, accepted: Sequence[Candidate], context: PassContext) -> int:
    """Rewrite each accepted candidate; returns how many changed the graph."""
    rewritten = 0
    for candidate in accepted:
        node = next((n for n in graph.nodes if n.name == candidate.target), None)
        if node is None:
            raise InvariantError(f"candidate {candidate.target} is not in the graph")
        before = set(graph.nodes)
        origin = {key: node.meta[key] for key in PROVENANCE_META if key in node.meta}
        p.rewrite(graph, node, context)
        new = [n for n in graph.nodes if n not in before]
        for n in new:
            for key, value in origin.items():
                n.meta.setdefault(key, value)
        rewritten += bool(new) or node not in set(graph.nodes)
    p.finish(graph, context)
    graph.eliminate_dead_code()
    return rewritten


def _check(before: fx.Graph, after: fx.Graph) -> None:
    """The invariants of every pass. Raises InvariantError naming the node and the rule."""
    try:
        after.lint()
    except Exception as error:
        raise InvariantError(f"the graph no longer lints: {error}") from error
    inputs_before = [n for n in before.nodes if n.op == "placeholder"]
    inputs_after = [n for n in after.nodes if n.op == "placeholder"]
    if [n.name for n in inputs_before] != [n.name for n in inputs_after]:
        raise InvariantError("the graph's inputs changed")
    for kind, pick in (("writes to memory", _mutates), ("draws random numbers", _random)):
        old, new = ([str(n.target) for n in g.nodes if pick(n)] for g in (before, after))
        if old != new:
            place = next(i for i, (a, b) in enumerate(zip_longest(old, new)) if a != b)
            one, other = (names[place] if place < len(names) else "nothing" for names in (old, new))
            raise InvariantError(
                f"what {kind} changed: {len(old)} nodes became {len(new)}, and number {place} {one} became {other}"
            )
    known = {n.target for n in before.nodes}
    for node in after.nodes:
        if node.op == "call_function" and node.target not in known and not lowers(node.target):
            raise InvariantError(
                f"{node.name}: {node.target} is decomposed before this stage, and Inductor has no lowering for one "
                "that a pass puts here; write what it decomposes into"
            )
    _propagate(inputs_after, after)
    for node in after.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise InvariantError(f"{node.name}: no value is known for it")
    old_out, new_out = (pytree.tree_leaves(g.output_node().args) for g in (before, after))
    if len(old_out) != len(new_out):
        raise InvariantError(f"{len(old_out)} outputs became {len(new_out)}")
    for index, (a, b) in enumerate(zip(old_out, new_out, strict=True)):
        if isinstance(a, fx.Node) != isinstance(b, fx.Node):
            raise InvariantError(f"output {index} changed its kind")
        if isinstance(a, fx.Node):
            _same_output(index, a, b)


def _same_output(index: int, a: fx.Node, b: fx.Node) -> None:
    old, new = a.meta.get("val"), b.meta.get("val")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return
    for what, x, y in (
        ("dtype", old.dtype, new.dtype),
        ("shape", tuple(old.shape), tuple(new.shape)),
        ("stride", tuple(old.stride()), tuple(new.stride())),
        ("device", old.device, new.device),
    ):
        if x != y:
            raise InvariantError(f"output {index} ({b.name}): {what} {x} became {y}")
    if (a.op == "placeholder" or b.op == "placeholder") and a.name != b.name:
        raise InvariantError(f"output {index}: {a.name} became {b.name}, so what it aliases changed")


def _propagate(inputs: Sequence[fx.Node], graph: fx.Graph) -> None:
    """Recompute every value under fake tensors: what a pass claims in `meta` is not taken on trust."""
    values: list[Any] = [n.meta.get("val") for n in inputs]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if mode is None or graph.owning_module is None:
        return
    module = fx.GraphModule(graph.owning_module, graph)
    try:
        with mode, mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else _nothing():
            FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)
    except Exception as error:
        raise InvariantError(f"the rewritten graph cannot be evaluated: {error}") from error


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


def _transplant(source: fx.Graph, graph: fx.Graph) -> None:
    """Make `graph`, which Inductor holds on to, hold the nodes of `source`, under the same names."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph._graph_namespace = fx.graph._Namespace()
    copied: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(source, copied)
    old = source.output_node()
    graph.output(outputs, type_expr=old.type).meta = dict(old.meta)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _random(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":  # attention is tagged for its dropout alone
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) != 0)
    return True


def failures(reports: Sequence[PassReport]) -> list[str]:
    """One line for each pass that was undone."""
    return [f"{r.name}: {r.error}" for r in reports if r.error]


def reports_to_json(reports: Sequence[PassReport]) -> list[Mapping[str, Any]]:
    return [r.to_json() for r in reports]


__all__ = ["SlotPass", "chain_uuid", "failures", "reports_to_json", "run_pass"]
