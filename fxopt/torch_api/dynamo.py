"""What Dynamo hands a backend: the graph, its placeholders' origins, and the state that compiling touches.

Tested with torch 2.11 and 2.13. Everything here works on the objects of the current backend call and leaves
no trace: contexts are restored on every way out.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Collection, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.exc
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx._lazy_graph_module import _LazyGraphModule


class GraphUnsupported(RuntimeError):
    """The graph cannot be handled in the way asked for; the message says why."""


#: How Dynamo says "trace this frame again, differently" from inside a backend: never an error of the backend's.
CONTROL_FLOW: tuple[type[BaseException], ...] = (
    torch._dynamo.exc.RestartAnalysis,
    torch._dynamo.exc.SkipFrame,
)


def is_fake(value: Any) -> bool:
    """Whether a tensor has a shape and no values."""
    return isinstance(value, FakeTensor)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """The graph's inputs, in calling order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a Dynamo graph that `compile_fx` may take apart.

    `copy.deepcopy` loses what Dynamo hangs on the module and on its placeholders; without it AOTAutograd takes no
    input to be static, and CUDA graphs would copy every weight on each replay. Parameters, buffers and submodules
    are shared with the original, never copied. Its code is generated when it is first called, as with Dynamo's own:
    AOTAutograd's cache "recompiles" a graph twice, only to name its inputs.
    """
    copied = _LazyGraphModule(gm, copy.deepcopy(gm.graph))
    for key in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, key):
            setattr(copied, key, dict(getattr(gm, key)))
    copied.meta = dict(gm.meta)
    for node in copied.graph.nodes:
        # What Dynamo guards on, by a weak reference to the caller's tensor, which lets go of it once it has compiled:
        # of the original alone. torch.utils.swap_tensors takes no tensor that has weak references.
        node.meta.pop("grapharg", None)
    for old, new in zip(placeholders(gm), placeholders(copied), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


def compile_apart(model: torch.nn.Module, backend: Any) -> Any:
    """`torch.compile` of a model whose code no other backend will ever run. Where torch can keep it apart (2.13), it
    does not count against the number of times that Dynamo compiles one class for all."""
    known: Any = torch.compile
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(known).parameters else {}
    return known(model, backend=backend, **apart)


def captured(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph to be run and kept."""
    copied = copy_graph(gm)
    forget_values(copied)
    return copied


def forget_values(gm: fx.GraphModule) -> None:
    """Take from a graph what was of use to compile it alone. Fake values would keep Dynamo's fake mode, and with it a
    weak reference to every tensor that the graph takes."""
    gm.meta = {}
    for node in gm.graph.nodes:
        node.meta.pop("example_value", None)


def static_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the inputs that Dynamo lifted from a module: parameters and buffers.

    Their storage stays where it is from call to call unless the user replaces it.
    """
    found = set()
    for index, node in enumerate(placeholders(gm)):
        source = getattr(node, "_dynamo_source", None)
        # A Parameter that the caller passes as an argument may be another one in the next call.
        owned = source is not None and _guard_source(source).is_unspecialized_nn_module()
        if owned and (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
            found.add(index)
    return frozenset(found)


def written_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the tensors that the graph writes to, as Dynamo saw it while tracing; views of one memory count
    together.
    """
    written = set(_written(gm, placeholders(gm)))
    return frozenset(index for index, node in enumerate(placeholders(gm)) if node in written)


def written_attributes(gm: fx.GraphModule) -> list[str]:
    """Names of the graph's own tensors that it writes to. Dynamo makes no inputs of the parameters and the state of an
    optimizer whose step it traces.
    """
    return [str(node.target) for node in _written(gm, [n for n in gm.graph.nodes if n.op == "get_attr"])]


def _written(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of `nodes` that the graph writes to."""
    several = {  # which count no version on fake tensors
        written
        for node in gm.graph.nodes
        if node.op == "call_function" and _writes_to_lists(node.target)
        for written in node.all_input_nodes
    }
    found = []
    for node in nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.is_inference():  # which counts no versions
            continue
        if value._version > 0 or node in several:
            found.append(node)
    return found


def _writes_to_lists(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def attributes(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The graph's own tensors by name, in the order in which AOTAutograd puts them before the inputs."""
    return {
        **dict(gm.named_parameters(remove_duplicate=False)),
        **dict(gm.named_buffers(remove_duplicate=False)),
    }


def _guard_source(source: Any) -> Any:
    """Where Dynamo reads an input from; a method in torch 2.11, a property since."""
    found = source.guard_source
    return found() if callable(found) and not hasattr(found, "is_unspecialized_nn_module") else found


_VIEWS = {"view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "long", "to", "int"}
_LOOKS = {"size", "getattr", "eq", "ne", "dim", "numel"}


def fixed_integers(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of integer tensors whose numbers may not change places.

    They may where all of them index one embedding table. A column of its own for each of several tables, sequence
    offsets, or positions in a cache must stay as they are.
    """

    def free(node: fx.Node) -> bool:
        for user in node.users:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            if name == "embedding" and user.args and user.args[0] is node:
                continue
            if name in _LOOKS or user.op == "output":
                continue
            if name not in _VIEWS or not free(user):
                return False
        return True

    return frozenset(
        index
        for index, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True))
        if isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
        and not free(node)
    )


#: what the attributes are called that `freeze_inputs` makes
_FROZEN = "_fxopt_frozen_"


def is_frozen(node: fx.Node) -> bool:
    """Whether an input of a joint graph is an attribute that `freeze_inputs` made.

    AOTAutograd lifts it to an input, of which it remembers the name, until Inductor has run the joint stage.
    """
    target = str(getattr(node.meta.get("desc"), "target", ""))
    return node.op == "placeholder" and target.startswith(_FROZEN)


def freeze_inputs(gm: fx.GraphModule, inputs: Sequence[Any], positions: frozenset[int]) -> list[int]:
    """Turn the inputs at `positions` into attributes of `gm`, in place; return the positions still to be passed.

    Dynamo lifts parameters to inputs before a backend runs unless a process-wide flag forbids it, and Inductor
    freezes only attributes. Putting them back per graph needs no flag. `gm` must be a copy of Dynamo's graph.
    """
    sources = dict(getattr(gm, "_param_name_to_source", {}) or {})
    seen: set[Any] = set()
    kept = []
    for index, (node, value) in enumerate(zip(placeholders(gm), inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        if index not in positions or not isinstance(value, torch.Tensor) or source is None or source in seen:
            kept.append(index)
            continue
        seen.add(source)
        name = f"{_FROZEN}{index}"
        # A tensor of its own, not the Parameter: assigning to `parameter.data` must not pull the memory away from
        # under code that holds it constant (or from under a CUDA graph that holds its address).
        gm.register_buffer(name, value.detach())
        sources[name] = source
        with gm.graph.inserting_before(node):
            attribute = gm.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        gm.graph.erase_node(node)
        node.meta = {}  # the graph keeps what it has erased, for its name
    gm._param_name_to_source = sources  # type: ignore[assignment]
    gm.recompile()
    return kept


def storage_of(node: fx.Node) -> int | None:
    """What tells the memory of a node's value in Dynamo's graph from any other; None where it is no plain tensor."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def beside(inputs: Sequence[Any], positions: Collection[int]) -> frozenset[int]:
    """`positions`, and those of the inputs that lie in the memory of one of these."""

    def memory(value: Any) -> tuple[torch.device, int] | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return value.device, value.untyped_storage().data_ptr()

    there = {memory(inputs[i]) for i in positions} - {None} if positions else set()
    return frozenset(positions) | {i for i, value in enumerate(inputs) if there and memory(value) in there}


def own_outputs(gm: fx.GraphModule) -> dict[int, Any]:
    """Positions of the outputs in memory that Dynamo's graph allocates itself, and what tells it from any other's."""
    given = {storage_of(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")} - {None}
    found: dict[int, Any] = {}
    returned: Any = gm.graph.output_node().args[0]
    for position, node in enumerate(returned):
        if isinstance(node, fx.Node) and (memory := storage_of(node)) not in given:
            found[position] = node.name if memory is None else memory
    return found


def value_of(node: fx.Node) -> Any:
    """What is known of a node's value, in Dynamo's graph or in an ATen one."""
    return node.meta.get("example_value", node.meta.get("val"))


def symbolic(inputs: Sequence[Any], gm: fx.GraphModule) -> bool:
    """Whether any input, or any size of one, is symbolic (a dynamic shape)."""
    if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in inputs):
        return True
    for node in placeholders(gm):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            return True
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            return True
    return False


def concrete(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as a real call passes them: symbolic numbers by the value they were traced with, without a guard."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return [_hint(value) if isinstance(value, symbols) else value for value in inputs]


def without_value(inputs: Sequence[Any]) -> str:
    """Why nothing can be measured where a size is said to be anybody's (`mark_unbacked`); "" elsewhere."""
    try:
        concrete(inputs)
    except GraphUnsupported as error:
        return str(error)
    return ""


def _hint(value: Any) -> Any:
    hint = value.node.hint
    if hint is None:
        raise GraphUnsupported(f"the input {value} has no value before the program runs, so it cannot be measured")
    return hint


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real code from inside a backend call: no fake tensors and no tracing context, as in a normal call."""
    with tracing(None), unset_fake_temporarily():
        yield


@dataclass
class CompileScope:
    """What one compilation left in the tracing state, filled in when `isolated` ends."""

    new_guards: int = 0
    mutated_inputs: frozenset[int] | None = None  # None: not known
    inputs: int = 0  # how many these are numbers of
    context: TracingContext | None = None

    def adopt(self) -> None:
        """Hand the guards that AOTAutograd asked for to the enclosing trace: call it for the code that is kept."""
        outer = TracingContext.try_get()
        if outer is None or self.context is None:
            return
        known = outer.guards_context.aotautograd_guards
        known.extend(g for g in self.context.guards_context.aotautograd_guards if g not in known)
        outer.fw_metadata = self.context.fw_metadata
        outer.output_strides = self.context.output_strides


_SCALARS = (bool, int, type(None))


def _snapshot(shape_env: Any) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for name, value in vars(shape_env).items():
        if isinstance(value, _SCALARS):
            saved[name] = value
        elif isinstance(value, (MutableSequence, MutableMapping, MutableSet)):  # torch's OrderedSet is no `set`
            saved[name] = copy.copy(value)
    return saved


@contextlib.contextmanager
def isolated(*, keep_guards: bool) -> Iterator[CompileScope]:
    """One compilation with its own tracing context; with `keep_guards` false its shape guards are taken back.

    Every compile of one backend call shares Dynamo's ShapeEnv: a candidate that specialises a dynamic size would
    otherwise leave its guard in the code that is kept, and force a recompile. `scope.new_guards` counts the guards
    and replacements that appeared.
    """
    outer = TracingContext.try_get()
    scope = CompileScope()
    if outer is None:
        yield scope
        return
    inner = copy.copy(outer)
    inner.guards_context = copy.copy(outer.guards_context)
    inner.guards_context.aotautograd_guards = []
    inner.fw_metadata = None
    inner.output_strides = None
    inner.params_flat = None
    inner.params_flat_unwrap_subclasses = None
    inner.params_unwrapped_to_flat_index = None
    scope.context = inner
    shape_env = outer.fake_mode.shape_env if outer.fake_mode is not None else None
    saved = _snapshot(shape_env) if shape_env is not None else {}
    cleanup = shape_env.cleanup if shape_env is not None else None
    try:
        if shape_env is not None:
            # `tracing` cleans the ShapeEnv up on exit, which belongs to the end of Dynamo's own trace.
            shape_env.cleanup = lambda: None  # type: ignore[method-assign]
        with tracing(inner):
            yield scope
    finally:
        if shape_env is not None:
            del shape_env.cleanup
            assert cleanup is not None
            # Symbols of this compilation's own, for sizes that data decide, are renamed to those of the trace.
            replaced = [symbol for symbol in shape_env.replacements if symbol not in saved["replacements"]]
            guards = len(shape_env.guards) - len(saved["guards"])
            scope.new_guards = guards + sum(symbol in saved["var_to_range"] for symbol in replaced)
            if not keep_guards and (guards or replaced):
                version = getattr(shape_env, "_version_counter", 0)
                vars(shape_env).update(saved)
                # Caches inside the ShapeEnv are keyed by this counter: it must move forward, never back.
                if hasattr(shape_env, "_version_counter"):
                    shape_env._version_counter = version + 1
        metadata = inner.fw_metadata
        if metadata is not None:
            scope.inputs = len(metadata.input_info)
            scope.mutated_inputs = frozenset(
                index
                for index, info in enumerate(metadata.input_info)
                if info.mutates_data or info.mutates_metadata or getattr(info, "mutates_storage_metadata", False)
            )


def nothing_donated() -> None:
    """Say of what was just compiled, where it does not say, that its backward overwrites no activation: else autograd
    refuses to run it with `retain_graph=True`, whatever was asked for when it was compiled.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and getattr(metadata, "bw_donated_idxs", []) is None:
        metadata.bw_donated_idxs = []


def current_compile_id() -> str:
    """Dynamo's id of the compilation under way ("0/0"), or "" outside one."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else ""


def backend_loaded(name: str) -> bool:
    """Whether torch.compile was asked for the backend `name` in this process."""
    from torch._dynamo.backends import registry

    return name in registry._COMPILER_FNS


def compiled_from(gm: fx.GraphModule) -> str:
    """What the graph was compiled from, for people: "Encoder (model.py:12)" of a model's own forward, "step
    (train.py:7)" of a function, "Linear" of a model of torch's; "" where Dynamo does not tell.
    """
    torchs = str(torch.__file__).removesuffix("__init__.py")
    context = TracingContext.try_get()
    for code in getattr(context, "traced_code", None) or ():
        if not code.co_filename.startswith(torchs):
            qualified = getattr(code, "co_qualname", code.co_name)  # Python 3.10 knows the name alone
            name = qualified.rpartition("<locals>.")[2].removesuffix(".forward")
            return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    outermost = next((next(iter(stack.values()))[1] for stack in stacks if stack), "")
    return outermost.__name__ if isinstance(outermost, type) else str(outermost).rpartition(".")[2]
