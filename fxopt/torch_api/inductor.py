"""Inductor: one compilation of a Dynamo graph, its configuration, and the custom-pass slots.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import fxopt.torch_api.preload  # isort: skip  # noqa: F401  # before any module of Inductor's

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar, get_origin

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch import fx
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from fxopt.frozen import FrozenCode
from fxopt.options import OptionError
from fxopt.own_outputs import OwnOutputs
from fxopt.torch_api import casts, dynamo, variants

T = TypeVar("T")

#: Inductor's slots that take a pass over an fx.Graph, by fxopt's name of the stage.
SLOTS = {"joint": "joint_custom_pre_pass", "post_grad": "post_grad_custom_pre_pass"}

__all__ = [
    "SLOTS",
    "Backward",
    "Compiled",
    "CustomGraphPass",
    "InferenceAwareGraphPass",
    "call_custom",
    "compile_graph",
    "compile_plain",
    "config_fingerprint",
    "config_keys",
    "config_value",
    "custom_passes",
    "installed_pass",
    "lays_out",
    "list_modes",
    "lowers",
    "observe",
    "replace_nodes",
]

#: A custom pass that Inductor tells at the post-grad stage whether the graph is for inference; torch 2.11 has none.
InferenceAwareGraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


@dataclass
class Backward:
    """The backward of a graph with gradients: Inductor's CompiledFxGraph (None where there was nothing to compile), and
    the graph that it lowered."""

    graph: Any
    post_grad: fx.GraphModule

    def wrap(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `around` around the compiled backward, which autograd calls, on whatever thread."""
        if self.graph is not None:
            self.graph.current_callable = around(self.graph.current_callable)


@dataclass
class Compiled:
    """The result of one compilation.

    fn: takes the inputs at `kept` (all of them unless weights were frozen) as positional arguments and returns a
        list or tuple of outputs, exactly as Inductor made it; of frozen weights, with outputs of its own (OwnOutputs).
    kept: positions of Dynamo's inputs that `fn` takes, or None for all of them.
    graph: Inductor's CompiledFxGraph, None where a cache served the code or the graph was empty.
    post_grad: the graph that Inductor lowered, None on a cache hit.
    new_guards: shape guards that this compilation added (a dynamic size that it specialised).
    mutated: positions, in `fn`'s own argument order, of the inputs that it writes to; None where AOTAutograd's cache
        served the code and did not say (never with `capture`).
    written: names of the graph's own tensors that it writes to, as far as `mutated` is known.
    backward: of a graph with gradients, with `capture`; None elsewhere. `fn` then gives outputs that lead to it.
    """

    fn: Callable[..., Any]
    kept: list[int] | None
    graph: Any
    post_grad: fx.GraphModule | None
    new_guards: int
    mutated: frozenset[int] | None
    seconds: float
    frozen: frozenset[int]
    scope: dynamo.CompileScope
    placeholders: int | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    backward: Backward | None = None
    written: tuple[str, ...] = ()

    def flat(self, inputs: Sequence[Any] = (), check_contents: bool = True) -> Callable[..., Any]:
        """A callable over all of Dynamo's inputs, which is `fn` itself wherever nothing was frozen.

        inputs: Dynamo's inputs, of which the frozen ones are remembered.
        """
        if self.kept is None:
            return self.fn
        return FrozenCode(self.fn, self.kept, {i: inputs[i] for i in self.frozen}, check_contents)


def check_values(patches: Mapping[str, Any]) -> None:
    """Raises OptionError for a value of another type than the key of Inductor's config has, as torch.compile does."""
    type_of = getattr(inductor_config, "get_type", None)
    for key, value in patches.items():
        kind = type_of(key) if type_of is not None else None
        # Of a union or a list torch.compile does not look at the value either.
        if isinstance(kind, type) and get_origin(kind) is None and not isinstance(value, kind):
            raise OptionError(
                f"{key} is {value!r}, a {type(value).__name__}; Inductor's option of that name is a {kind.__name__}"
            )


def config_keys() -> frozenset[str]:
    """Names of every Inductor option."""
    return frozenset(inductor_config.get_config_copy())


def config_value(key: str) -> Any:
    """What an Inductor option is set to, by configuration or by default. KeyError for one that this torch lacks."""
    return inductor_config.get_config_copy()[key]


def list_modes() -> dict[str, dict[str, Any]]:
    """torch.compile's modes and the options that each stands for."""
    return {name: dict(patches) for name, patches in torch._inductor.list_mode_options().items()}


def config_fingerprint() -> str:
    """A digest of Inductor's whole configuration, for cache keys."""
    import hashlib

    saved = inductor_config.save_config_portable()
    text = repr(sorted((key, repr(value)) for key, value in saved.items() if not key.endswith("_dir")))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def installed_pass(stage: str, patches: Mapping[str, Any]) -> Any:
    """What a user has already put into the slot of `stage`, by options or by configuration; None if nothing."""
    slot = SLOTS[stage]
    return patches[slot] if slot in patches else getattr(inductor_config, slot)


def lowers(target: Any) -> bool:
    """Whether Inductor compiles what a node calls that appears in a graph after its decompositions have run.

    It lowers an operator itself or calls it as it is. An operator that it decomposes does not appear any more by then,
    and one that a pass puts there fails to compile ("both a fallback and a decomp for same op"). What is no operator,
    such as `torch.sin`, it compiles only where it has a lowering for that very function, as for arithmetic on sizes.
    """
    import operator

    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    if target in lowerings or target is operator.getitem:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target not in select_decomp_table()
    if isinstance(target, torch._ops.OpOverloadPacket):
        return False
    return isinstance(target, torch._ops.HigherOrderOperator) or hasattr(target, "_inductor_lowering_function")


def lays_out(graph: fx.Graph, is_inference: bool = True) -> bool:
    """Whether Inductor, as it is configured, will put this graph's convolutions in channels-last order."""
    from torch._inductor.graph import GraphLowering

    looked_at: Any = SimpleNamespace(graph=graph)  # all that the decision looks at
    return bool(GraphLowering.decide_layout_opt(looked_at, is_inference=is_inference))


def custom_passes(installed: Any) -> tuple[Any, ...]:
    """What a slot holds, as passes: nothing, one, or (since torch 2.13) a list of them."""
    if installed is None:
        return ()
    return tuple(installed) if isinstance(installed, (list, tuple)) else (installed,)


def call_custom(custom: Any, graph: fx.Graph, is_inference: bool | None) -> None:
    """Call a custom pass as Inductor does; `is_inference` is None where Inductor does not say."""
    if is_inference is not None and isinstance(custom, InferenceAwareGraphPass):
        custom(graph, is_inference=is_inference)
    else:
        custom(graph)


@contextlib.contextmanager
def _unobserved(module: Any) -> Iterator[None]:
    """Without what others want to be told of the nodes made and erased in graphs of `module`."""
    held = {name: vars(module)[name] for name in _OBSERVERS if name in vars(module)}
    try:
        for name in held:
            setattr(module, name, [])
        yield
    finally:
        for name, observers in held.items():
            setattr(module, name, observers)


_OBSERVERS = ("_create_node_hooks", "_erase_node_hooks", "_replace_hooks")


def observe(module: Any, name: str, run: Callable[[], T]) -> T | None:
    """Call `run` as Inductor runs a pass of its own: under an observer of that name, which times it in torch's own
    record of the compilation and extends `from_node` of the nodes made; None where Inductor's `disabled_passes` has the
    name, and `run` was not called.

    module: what owns the graph, or the copies of it, that `run` rewrites. The observer of the slot as a whole, which
    would put the slot's name to the same nodes, is not told of them.
    """
    if not isinstance(module, fx.GraphModule):
        return run()
    with _unobserved(module):
        return GraphTransformObserver(module, name).apply_graph_pass(lambda graph: run())


def replace_nodes(graph: fx.Graph, source: fx.Graph) -> None:
    """Make `graph`, which somebody holds on to, hold the nodes of `source`, under the same names."""
    with _unobserved(graph.owning_module) if graph.owning_module is not None else contextlib.nullcontext():
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        graph._graph_namespace = fx.graph._Namespace()
        outputs = graph.graph_copy(source, {})
        old = source.output_node()
        graph.output(outputs, type_expr=old.type).meta = dict(old.meta)


class _Capture:
    """An `inner_compile` that keeps what Inductor was given and what it made."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.post_grad: fx.GraphModule | None = None
        self.backward: Backward | None = None
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        output = compile_fx_inner(gm, example_inputs, **kwargs)
        _let_go_with(output)
        if kwargs.get("is_backward"):
            self.backward = Backward(_with_source(output), gm)
            return output
        self.calls += 1
        if self.calls == 1:
            self.graph, self.post_grad = output, gm
        return output


@contextlib.contextmanager
def _autograd(*, cache: bool, whole: bool) -> Iterator[None]:
    """AOTAutograd with or without its cache. whole: a backward is compiled at once, and not when it is first run, where
    nobody is left who could fall back. It then does not know yet whether the graph is retained, so that activations
    must not be overwritten ("donated").
    """
    with contextlib.ExitStack() as stack:
        if not cache:
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        if whole and torch.is_grad_enabled():  # an option that changes the cache's key
            options = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
            stack.enter_context(functorch_config.patch(options))
        yield


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    slots: Mapping[str, CustomGraphPass] | None = None,
    freeze: frozenset[int] = frozenset(),
    compute: Mapping[int, torch.dtype] | None = None,
    capture: bool = False,
    caches: bool = True,
    keep_guards: bool = False,
    back_to_back: bool = False,
) -> Compiled:
    """Compile a copy of Dynamo's graph with Inductor; `gm` itself is left as it was.

    patches: Inductor options for this compilation alone.
    slots: custom passes by stage; they must already chain what a user has installed (see `installed_pass`).
    freeze: positions of the inputs to hold constant, folded by Inductor's freezing (inference only).
    compute: types by position that fp32 inputs are cast to; fp32 outputs stay fp32.
    capture: ask for `graph` and `post_grad`, and `backward`; AOTAutograd's cache is passed by if it would hide them.
    caches: False compiles afresh whatever the caches hold.
    keep_guards: leave the shape guards that compiling adds (for the code that will be kept).
    back_to_back: its kernels' variants will be timed as the module `variants` does, and not by Inductor.

    Raises whatever Inductor raises.
    """
    started = time.perf_counter()
    options = dict(patches)
    options.setdefault("trace.provenance_tracking_level", 1)
    for stage, custom in (slots or {}).items():
        options[SLOTS[stage]] = custom
    if freeze:
        options["freezing"] = True
    if not caches:
        options["force_disable_caches"] = True

    def attempt(
        autograd_cache: bool,
    ) -> tuple[Callable[..., Any], list[int] | None, _Capture, dynamo.CompileScope, list[str]]:
        copied = dynamo.copy_graph(gm)
        kept: list[int] | None = None
        arguments = list(inputs)
        if compute:
            casts.cast_inputs(copied, compute)
        if freeze:
            kept = dynamo.freeze_inputs(copied, inputs, freeze)
            arguments = [inputs[index] for index in kept]
        seen, own = _Capture(), list(dynamo.attributes(copied))
        autograd = _autograd(cache=autograd_cache, whole=bool(slots) or capture)
        timing = variants.timed_back_to_back() if back_to_back else contextlib.nullcontext()
        with dynamo.isolated(keep_guards=keep_guards) as scope, autograd, timing:
            fn: Any = compile_fx(copied, arguments, inner_compile=seen, config_patches=options)
            dynamo.nothing_donated()
        dynamo.forget_values(copied)  # AOTAutograd's callable keeps the graph for the names of its parameters
        return fn, kept, seen, scope, own

    fn, kept, seen, scope, own = attempt(autograd_cache=caches)
    if capture and caches and seen.calls == 0:
        # AOTAutograd's cache served the code without asking Inductor; the graph is needed, so ask again.
        fn, kept, seen, scope, own = attempt(autograd_cache=False)

    graph, backward = _with_source(seen.graph), seen.backward
    constants = _constants(graph) if graph is not None else _attributes(seen.post_grad)
    if freeze:
        fn = OwnOutputs(fn, dynamo.own_outputs(gm), constants.values())
    written = scope.mutated_inputs or frozenset()
    passed = kept if kept is not None else range(len(inputs))
    if scope.mutated_inputs is not None and scope.inputs != len(own) + len(passed):
        # It made one input of several in one memory, and its numbers are of those: what Dynamo saw is left.
        seen_written = dynamo.written_inputs(gm)
        written = frozenset(len(own) + n for n, position in enumerate(passed) if position in seen_written)
    return Compiled(
        fn=fn,
        kept=kept,
        graph=graph,
        post_grad=seen.post_grad,
        new_guards=scope.new_guards,
        # AOTAutograd numbers the graph's own tensors, of which frozen parameters are some, before the inputs.
        mutated=(
            None
            if scope.mutated_inputs is None
            else frozenset(index - len(own) for index in written if index >= len(own))
        ),
        seconds=time.perf_counter() - started,
        frozen=frozenset(range(len(inputs))) - frozenset(kept) if kept is not None else frozenset(),
        scope=scope,
        placeholders=_count_placeholders(seen.post_grad),
        constants={
            **constants,
            **{f"backward {name}": held for name, held in _constants(backward.graph if backward else None).items()},
        },
        backward=backward,
        written=tuple(own[index] for index in sorted(written) if index < len(own)),
    )


def _with_source(output: Any) -> Any:
    """What Inductor made of a graph; None where there was nothing to compile."""
    return output if hasattr(output, "source_code") else None


def _constants(graph: Any) -> dict[str, torch.Tensor]:
    """The tensors that compiled code holds: its constants, and weights that were frozen or folded, which Inductor keeps
    on the module that it generated.
    """
    from torch._inductor.codecache import PyCodeCache

    found = dict(getattr(graph, "constants", None) or {})
    key = getattr(graph, "cache_key", None)
    holders = [m for m in PyCodeCache.modules if key is not None and getattr(m, "key", None) == key]
    for name in getattr(graph, "frozen_param_names", None) or {}:
        for module in holders[-1:]:
            if isinstance(getattr(module, name, None), torch.Tensor):
                found[name] = getattr(module, name)
    return found


def _attributes(post_grad: fx.GraphModule | None) -> dict[str, torch.Tensor]:
    """The tensors of a graph in which nothing was left to compile, so that it runs as it is."""
    return {} if post_grad is None else dynamo.attributes(post_grad)


def _let_go_with(output: Any) -> None:
    """Inductor lists all modules that it generated, and sys.modules does: weights that were folded into a candidate
    would stay for good. A module that holds any is taken from both when the code that runs it is gone.
    """
    from torch._inductor.codecache import PyCodeCache

    key = getattr(output, "cache_key", None)
    shared = PyCodeCache.modules_no_attr.values()  # of equal code that holds nothing
    for module in PyCodeCache.modules[-1:]:
        if key is not None and getattr(module, "key", None) == key and not any(module is other for other in shared):
            weakref.finalize(output, _let_go, module).atexit = False


def _let_go(module: ModuleType) -> None:
    from torch._inductor.codecache import PyCodeCache

    PyCodeCache.modules[:] = [other for other in PyCodeCache.modules if other is not module]
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def _count_placeholders(gm: fx.GraphModule | None) -> int | None:
    return None if gm is None else sum(node.op == "placeholder" for node in gm.graph.nodes)


def compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Plain Inductor, as `torch.compile` would run it: the fallback of every failure."""
    fn: Any = compile_fx(gm, list(inputs), config_patches=dict(patches) or None)
    return fn
