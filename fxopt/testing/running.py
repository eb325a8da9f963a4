"""One pass on one graph, with the labels and the context that a test gives it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxopt import effects, manager
from fxopt.labels import Axis, Label
from fxopt.precision import Precision, parse_precision
from fxopt.registry import (
    ConfigPass,
    Configuration,
    GraphPass,
    Pass,
    PassContext,
    PassReport,
    RuntimePass,
)
from fxopt.testing.capturing import EXAMPLE_INPUTS, STATIC_INPUTS, capture, placeholders
from fxopt.testing.printing import text
from fxopt.torch_api import casts, dynamo, graph_effects, inductor
from fxopt.torch_api.rnn import BeforeAutograd

__all__ = ["Labels", "Result", "context", "labels", "refuses", "run"]

#: None: everything that the pass answers; by node name; or labels themselves.
Labels = Iterable[Label] | Mapping[str, Axis | str | Iterable[Axis | str]] | None


@dataclass(frozen=True)
class Result:
    """What a pass made of a graph. `str(result)` shows the graph before and after, and the report.

    report: what the pass says it did. before, after: the graph as text. module: the rewritten graph; after a config
    pass with the frozen inputs folded in and what it does before AOTAutograd done, after a runtime pass as it was. fn:
    takes the inputs of the graph as it was and runs what the pass made. configuration: what a config pass asks for; its
    Inductor options do not show in a graph that is not compiled.
    """

    report: PassReport
    before: str
    after: str
    module: fx.GraphModule
    fn: Callable[..., Any]
    configuration: Configuration | None = None

    @property
    def changed(self) -> bool:
        return self.report.changed

    def __str__(self) -> str:
        report = self.report
        lines = [f"before:\n{_indented(self.before)}"]
        lines.append("after: the same" if self.after == self.before else f"after:\n{_indented(self.after)}")
        if self.configuration is not None and self.configuration.patches:
            lines.append(f"Inductor options: {dict(self.configuration.patches)}")
        lines.append(f"{report.name}: {report.matched} matched, {report.rewritten} rewritten")
        lines += [f"  refused {target}: {reason}" for target, reason in report.refused]
        if report.error:
            lines.append(f"  undone: {report.error}")
        return "\n".join(lines)


def _indented(lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines.splitlines())


def context(
    p: Pass | type[Pass] | None = None,
    *,
    labels: Sequence[Label] = (),
    device: str | torch.device = "cpu",
    precision: str | float | None = None,
    **fields: Any,
) -> PassContext:
    """A context in which passes may run: weights may be held constant, no gradients, and a device that has matrix units
    for bf16 and fp16.

    precision: as the option; None is the class that `p` needs. fields: any other field of PassContext.
    """
    needed = getattr(p, "precision", Precision.FP32)
    given: dict[str, Any] = {"session": True, "matrix_units": frozenset({"bfloat16", "float16", "tf32"})} | fields
    return PassContext(
        device=torch.device(device),
        budget=parse_precision(needed if precision is None else precision),
        labels=tuple(labels),
        **given,
    )


def labels(
    graph: fx.Graph | fx.GraphModule, *axes: Axis | str, nodes: Iterable[str] | None = None
) -> tuple[Label, ...]:
    """Labels that put each of `axes` on the nodes named in `nodes`, or on every node that computes something.

    ValueError names a node that is not in the graph, or an axis that there is not.
    """
    known = [node.name for node in _graph(graph).nodes if node.op == "call_function"]
    chosen = known if nodes is None else list(nodes)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"no node is named {', '.join(map(repr, unknown))}; the graph is\n{text(graph)}")
    return tuple(
        Label(
            axis=Axis(axis),
            scope="graph" if axis == Axis.LAUNCH_BOUND else "group",
            nodes=tuple(chosen),
            launch="",
            evidence=(),
            confidence="high",
            headroom_ns=1.0,
            why="given by a test",
        )
        for axis in axes
    )


def run(
    p: Pass,
    graph: fx.GraphModule,
    *,
    labels: Labels = None,
    precision: str | float | None = None,
    context: PassContext | None = None,
    inputs: Sequence[Any] | None = None,
) -> Result:
    """Run one pass on a copy of `graph` as fxopt would, and report; `graph` itself is left alone.

    labels: None is every axis that `p` answers on every node; a dict gives nodes their axes by name ({"mm":
    "memory_bound"}); or Label objects. precision: the class asked for, by default the one that `p` needs. context:
    in place of one made from the graph. inputs: real inputs, which config and runtime passes look at; a captured graph
    has its own.

    A pass that the context, the precision or the device rules out refuses the target "graph". A runtime pass wraps the
    interpreted graph.
    """
    given = _chosen(p, graph, labels)
    if context is None:
        context = _context_of(p, graph, given, precision)
    elif labels is not None:
        context = replace(context, labels=given)
    report = PassReport(p.name, p.stage.value)
    before = text(graph)
    why = _ruled_out(p, context)
    if why:
        return Result(replace(report, refused=(("graph", why),)), before, before, graph, graph)
    if isinstance(p, GraphPass):
        module = _copied(graph)
        report = manager.run_pass(p, module.graph, context)
        module.recompile()
        return Result(report, before, text(module), module, module)
    real = list(graph.meta.get(EXAMPLE_INPUTS, ()) if inputs is None else inputs)
    if len(real) != len(placeholders(graph)):
        raise ValueError(f"{p.name} looks at the inputs themselves: take the graph from capture(), or give inputs=")
    try:
        if isinstance(p, ConfigPass):
            return _configured(p, graph, real, context)
        if isinstance(p, RuntimePass):
            return _wrapped(p, graph, real, context, report)
    except Exception as error:  # a pass that raises is undone, as it is when fxopt compiles
        return Result(replace(report, error=f"{type(error).__name__}: {error}"), before, before, graph, graph)
    raise TypeError(f"{p.name} is neither a GraphPass nor a ConfigPass nor a RuntimePass")


def refuses(
    p: Pass,
    fn: Callable[..., Any],
    *inputs: Any,
    because: str,
    labels: Labels = None,
    precision: str | float | None = None,
    context: PassContext | None = None,
    freeze: bool = False,
    dynamic: bool = False,
) -> PassReport:
    """Assert that `p` leaves the graph of `fn(*inputs)` alone and gives a reason that matches the regex `because`."""
    graph = capture(fn, *inputs, stage=graph_stage(p), freeze=freeze, dynamic=dynamic)
    result = run(p, graph, labels=labels, precision=precision, context=context)
    if result.changed or result.report.rewritten:
        raise AssertionError(f"{p.name} was expected to refuse this because of {because!r}, and rewrote it\n{result}")
    if result.report.error:
        raise AssertionError(f"{p.name} was expected to refuse this because of {because!r}, and was undone\n{result}")
    if not any(re.search(because, reason) for _, reason in result.report.refused):
        found = "gives other reasons" if result.report.refused else "considers no node"
        raise AssertionError(f"{p.name} was expected to refuse this because of {because!r}, and {found}\n{result}")
    return result.report


def graph_stage(p: Pass) -> str:
    """The stage at which a pass finds its graph: config and runtime passes are shown the joint one."""
    return p.stage.value if p.stage.value in inductor.SLOTS else "joint"


def _graph(graph: fx.Graph | fx.GraphModule) -> fx.Graph:
    return graph.graph if isinstance(graph, fx.GraphModule) else graph


def _chosen(p: Pass, graph: fx.GraphModule, given: Labels) -> tuple[Label, ...]:
    if given is None:
        return labels(graph, *sorted(p.answers))
    if isinstance(given, Mapping):
        found: list[Label] = []
        for name, axes in given.items():
            found += labels(graph, *([axes] if isinstance(axes, str) else axes), nodes=[name])
        return tuple(found)
    return tuple(given)


def _context_of(p: Pass, graph: fx.GraphModule, given: tuple[Label, ...], precision: str | float | None) -> PassContext:
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
    return context(
        p,
        labels=given,
        device=device,
        precision=precision,
        static=frozenset(graph.meta.get(STATIC_INPUTS, ())),
        mutated=written_inputs(graph),
        random=tuple(graph_effects.random_operations(graph)),
        dynamic=dynamo.symbolic([], graph),
    )


def written_inputs(graph: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that the graph writes to."""
    written = {source for node in graph.graph.nodes for source in effects.writes_to(node)}
    return frozenset(i for i, node in enumerate(placeholders(graph)) if node in written)


def _ruled_out(p: Pass, context: PassContext) -> str:
    if context.device.type not in p.devices:
        return f"{p.name} is for {' and '.join(p.devices)}, and the graph is on {context.device.type}"
    why = p.applicable(context)
    if not why and not context.budget.allows(p.precision):
        why = f"it needs precision={p.precision.value!r}, and {context.budget.precision.value!r} was asked for"
    return why


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Nodes of its own, under the same names; tensors are shared."""
    module = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    module.meta.update(graph.meta)
    for old, new in zip(placeholders(graph), placeholders(module), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return module


def _configured(p: ConfigPass, graph: fx.GraphModule, inputs: list[Any], context: PassContext) -> Result:
    before = text(graph)
    accepted, report = manager.consider(p, graph, inputs, context)
    if not accepted:
        return Result(report, before, before, graph, graph)
    configuration = p.configure(accepted, context)
    module = _copied(graph)
    if configuration.compute:
        casts.cast_inputs(module, configuration.compute)
    kept = dynamo.freeze_inputs(module, inputs, configuration.freeze)

    before_autograd = configuration.patches.get(BeforeAutograd.OPTION)
    if before_autograd is not None:
        before_autograd(module.graph)
        module.recompile()

    def fn(*args: Any) -> Any:
        return module(*[args[i] for i in kept])

    changed = len(kept) < len(inputs) or bool(configuration.patches or configuration.compute)
    report = replace(report, rewritten=len(accepted) if changed else 0, changed=changed)
    return Result(report, before, text(module), module, fn, configuration)


def _wrapped(
    p: RuntimePass, graph: fx.GraphModule, inputs: list[Any], context: PassContext, report: PassReport
) -> Result:
    before = text(graph)
    compiled = inductor.Compiled(
        fn=graph,
        kept=None,
        graph=None,
        post_grad=graph,
        new_guards=0,
        mutated=context.mutated,
        seconds=0.0,
        frozen=frozenset(),
        scope=dynamo.CompileScope(),
    )
    why = p.refuse(compiled, inputs, context)
    if why:
        return Result(replace(report, refused=(("graph", why),)), before, before, graph, graph)
    fn = p.wrap(graph, inputs, compiled, context)
    changed = fn is not graph
    return Result(replace(report, matched=1, rewritten=int(changed), changed=changed), before, before, graph, fn)
