"""The graph that Inductor really hands to a pass, without compiling it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxopt.torch_api import dynamo, inductor, tracing

__all__ = ["EXAMPLE_INPUTS", "STATIC_INPUTS", "CaptureError", "capture", "placeholders"]

#: Keys of a module's `meta`: real inputs, one a placeholder, and the positions of those that are parameters.
EXAMPLE_INPUTS = "example_inputs"
STATIC_INPUTS = "static_inputs"


class CaptureError(RuntimeError):
    """The function gives no single graph; the message says why."""


class _Captured(BaseException):
    """Ends the compilation. Not an Exception, which Inductor would wrap in one of its own."""


class _CaptureSlot(inductor.InferenceAwareGraphPass):
    """Keeps a copy of the graph that arrives in the slot, then ends the compilation."""

    def __init__(self, installed: Any) -> None:
        self.installed = inductor.custom_passes(installed)
        self.module: fx.GraphModule | None = None

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        for other in self.installed:  # what a user has put into the slot runs before fxopt's passes do
            inductor.call_custom(other, graph, is_inference)
        self.module = fx.GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph))
        raise _Captured

    def uuid(self) -> Any:
        return None


def capture(
    fn: Callable[..., Any], *inputs: Any, stage: str = "joint", freeze: bool = False, dynamic: bool = False
) -> fx.GraphModule:
    """The graph of `fn(*inputs)` as Inductor hands it to a pass at `stage`, with values (fake tensors) on every node.

    fn: a function or an nn.Module, whose parameters and buffers become inputs, as under `torch.compile`. It is traced,
    never run, with gradients off. stage: "joint" or "post_grad". freeze: parameters are held constant and folded as
    under `fxopt.optimize`; the graph shows it from the post-grad stage on, at the joint stage they are still inputs.
    dynamic: the sizes of the inputs are symbolic. Nothing is compiled, and no cache is read or written.

    Inputs bear the names of the function's parameters; a module's own are named after where they are, as
    torch.export does (`p_layer_weight`, `b_scale`). Other nodes are numbered in order. The module's `meta` holds its
    `example_inputs`, one a placeholder, and the positions of the `static_inputs` (parameters and buffers) among them.
    Raises CaptureError where `fn` gives no graph or more than one, else what Dynamo or Inductor raise.
    """
    if stage not in inductor.SLOTS:
        raise ValueError(f"stage={stage!r}: give one of {', '.join(map(repr, inductor.SLOTS))}")
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, flat: Sequence[Any]) -> Callable[..., Any]:
        found.append(_at_stage(gm, list(flat), stage, freeze, _parameter_names(fn, len(inputs))))

        def stop(*args: Any) -> Any:
            raise _Captured

        return stop

    def call(*args: Any) -> Any:
        return fn(*args)

    # A code object of its own: what Dynamo remembers of it goes with it, and what it knows of `fn` stays as it was.
    once = types.FunctionType(call.__code__.replace(), call.__globals__, "captured", None, call.__closure__)
    name = getattr(fn, "__name__", type(fn).__name__)
    with torch.no_grad(), tracing.forgotten(backend):
        try:
            torch.compile(once, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
        except _Captured:
            return found[0]
        except tracing.BACKEND_FAILED as error:
            raise error.inner_exception from None
        except tracing.GRAPH_BREAKS as error:
            raise CaptureError(f"{name} gives more than one graph, because Dynamo breaks it: {error}") from error
    raise CaptureError(f"{name} gives no graph: it calls no operator on a tensor that Dynamo traces")


def _at_stage(
    gm: fx.GraphModule, inputs: list[Any], stage: str, freeze: bool, arguments: Sequence[str]
) -> fx.GraphModule:
    """Runs in Dynamo's backend call: Inductor's own pipeline up to the slot of `stage`."""
    static = dynamo.static_inputs(gm, inputs)
    slot = _CaptureSlot(inductor.installed_pass(stage, {}))
    with contextlib.suppress(_Captured):
        inductor.compile_graph(
            gm, inputs, patches={}, slots={stage: slot}, freeze=static if freeze else frozenset(), caches=False
        )
    if slot.module is None:
        raise CaptureError(f"the graph is empty, so nothing reaches the stage {stage!r}")
    order = _order(len(placeholders(slot.module)), len(inputs), static if freeze else frozenset())
    names = [_input_name(name, arguments) for name in tracing.source_names(gm)]
    module = _renamed(slot.module, [names[i] for i in order])
    tracing.with_sources(module.graph, [node.name for node in placeholders(module)])
    module.meta[EXAMPLE_INPUTS] = dynamo.concrete([inputs[i] for i in order])
    module.meta[STATIC_INPUTS] = frozenset(k for k, i in enumerate(order) if i in static)
    return module


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, in calling order."""
    return dynamo.placeholders(module)


def _order(count: int, total: int, frozen: frozenset[int]) -> list[int]:
    """Which of Dynamo's inputs each of `count` placeholders is: frozen ones come first, or are gone."""
    kept = [i for i in range(total) if i not in frozen]
    order = kept if count == len(kept) else [*sorted(frozen), *kept]
    if len(order) != count:
        raise CaptureError(
            f"{total} inputs became {count}: inputs that share memory while one of them is written, and tensor "
            "subclasses, are not supported"
        )
    return order


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional arguments."""
    try:
        positional = fn.forward if isinstance(fn, torch.nn.Module) else fn
        return list(inspect.signature(positional).bind(*range(count)).arguments)
    except (TypeError, ValueError):  # a built-in, or called with arguments that it does not take
        return []


def _input_name(source: str, arguments: Sequence[str]) -> str:
    """A name for an input that Dynamo reads as `source`, such as `L['args'][0]['mask']`."""
    argument = re.match(r"L\['args'\]\[(\d+)\](.*)", source)
    if argument is not None:
        position, rest = int(argument[1]), re.findall(r"\w+", argument[2])
        base = arguments[position] if position < len(arguments) else f"arg{position}"
        if re.search(r"(size|stride|storage_offset)\(\)", argument[2]):  # a symbolic size is an input of its own
            return f"{base}_{'_'.join(rest)}"
        return "_".join([base, *rest])
    words = re.findall(r"\w+", source)
    path = [word for word in words[2:] if word not in ("_modules", "_parameters", "_buffers")]
    prefix = "b" if "_buffers" in words else "p" if "_parameters" in words else "c"
    return "_".join([prefix, *path]) if path else "input"


def _renamed(module: fx.GraphModule, inputs: Sequence[str]) -> fx.GraphModule:
    """A copy with other names: what Inductor numbers differs from version to version where sizes are symbolic."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    names = iter(inputs)
    for node in module.graph.nodes:
        name = next(names) if node.op == "placeholder" else re.sub(r"(_\d+)+$", "", node.name)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copied[n])
        target = name if node.op == "placeholder" else node.target
        new = copied[node] = graph.create_node(node.op, target, args, kwargs, name=name)
        new.meta = copy.copy(node.meta)
    return fx.GraphModule(module, graph)
