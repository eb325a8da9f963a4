"""The fp64 reference: what a graph computes when no floating-point value in it is rounded below fp64.

``reference`` runs a Dynamo-level graph (torch functions and Tensor methods) eagerly on fp64 copies of its
inputs. Upcasting the inputs is not enough: a model casts (``x.float()``), makes constants
(``torch.zeros(n)``) and divides integers, and each of those drops back to fp32. ``Float64Mode`` sits below
all of them, at the dispatcher, and raises what they make.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from fxopt.training import Gradients

__all__ = ["Float64Mode", "NoFloat64", "Reference", "clone_inputs", "reference", "storage_groups"]

_RAISED = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}

# GEMMs with a separate output dtype exist for 16-bit operands only; in fp64 they are the plain GEMM.
_PLAIN_GEMM = {
    f"aten.{name}.dtype": getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")
}
_CAST_METHODS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf"}
)


class NoFloat64(RuntimeError):
    """The graph has no fp64 form; the message names the operator and why."""


def _raised_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for any floating dtype, complex128 for any complex one, everything else unchanged."""
    return torch.float64 if dtype.is_floating_point else _RAISED.get(dtype, dtype)


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _raised_dtype(value.dtype) != value.dtype


# ---------------------------------------------------------------- copies of inputs


def _plain(tensor: torch.Tensor) -> bool:
    """Whether size, stride and offset into one storage describe the tensor completely."""
    return (
        tensor.layout == torch.strided
        and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def storage_groups(inputs: Sequence[Any]) -> list[list[int]]:
    """Indices of the plain strided tensors among ``inputs``, grouped by the storage they view, in input
    order."""
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and _plain(value):
            address = value.untyped_storage().data_ptr()
            # Empty storages all report address 0; they alias nothing.
            groups.setdefault((value.device, address or -1 - index), []).append(index)
    return list(groups.values())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Half-open range of storage elements that the tensor addresses (first, one past the last)."""
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first, first
    span = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + int(span) + 1


def copies_together(members: list[torch.Tensor], raise_to_fp64: bool = False) -> list[torch.Tensor]:
    """Copies of tensors that view one storage, viewing one new storage at the same offsets and strides."""
    dtypes = {member.dtype for member in members}
    if len(dtypes) > 1:
        if raise_to_fp64 and any(_raised_dtype(dtype) != dtype for dtype in dtypes):
            raise NoFloat64(f"inputs view one storage as {', '.join(sorted(map(str, dtypes)))}")
        storage = members[0].untyped_storage().clone()
    else:
        dtype = members[0].dtype
        extents = [extent(member) for member in members]
        first, end = min(low for low, _ in extents), max(high for _, high in extents)
        # Allocating from element 0 keeps the offsets, and with them the alignment that kernels expect.
        new = torch.empty(
            end, dtype=_raised_dtype(dtype) if raise_to_fp64 else dtype, device=members[0].device
        )
        if end > first:
            new[first:].copy_(members[0].as_strided((end - first,), (1,), first))
        storage = new.untyped_storage()
    copies = []
    for member in members:
        dtype = _raised_dtype(member.dtype) if raise_to_fp64 else member.dtype
        shell = torch.empty(0, dtype=dtype, device=member.device)
        copies.append(shell.set_(storage, member.storage_offset(), member.size(), member.stride()))
    return copies


def _copy_inputs(inputs: Sequence[Any], shared: Collection[int], raise_to_fp64: bool) -> list[Any]:
    copies = list(inputs)
    with torch.no_grad(), torch.inference_mode(False):
        grouped: set[int] = set()
        for group in storage_groups(inputs):
            grouped.update(group)
            if any(index in shared for index in group):
                continue
            members = [inputs[index].detach() for index in group]
            for index, tensor in zip(group, copies_together(members, raise_to_fp64), strict=True):
                copies[index] = tensor
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and index not in grouped and index not in shared:
                copies[index] = value.detach().clone()
                if raise_to_fp64 and _is_low(value):
                    copies[index] = copies[index].to(_raised_dtype(value.dtype))
            # Leaves that require grad may not be written in place; a non-leaf may, so its copy asks for none.
            if copies[index] is not value and not raise_to_fp64 and value.requires_grad and value.is_leaf:
                copies[index].requires_grad_()
    return copies


def clone_inputs(inputs: Sequence[Any], static: Collection[int]) -> list[Any]:
    """Copies of the flat ``inputs`` of a compiled graph.

    Strides, storage offsets and aliasing are kept: inputs that view one storage get copies that view one new
    storage. The inputs numbered in ``static`` (parameters), and whatever shares storage with them, are handed
    over uncopied. Non-tensors pass through.
    """
    return _copy_inputs(inputs, set(static), raise_to_fp64=False)


# ---------------------------------------------------------------- fp64 at the dispatcher


class Float64Mode(TorchDispatchMode):
    """Makes every floating-point tensor that an operator returns fp64 (complex: complex128).

    - A dtype argument below fp64 (casts, factories, ``softmax(dtype=)``, ``mm(out_dtype=)``) becomes float64.
    - A factory, or an operator on integers, that would produce the default dtype is run again in fp64.
    - What still comes out below fp64 is raised; ``below_fp64`` counts those that cannot be: tensors written
      in place.

    ``random`` names the random operators that ran: a fp64 generator draws other numbers, so such a run is no
    reference. Raises NoFloat64 on a bit-cast between floats and other types, whose result depends on the
    width of the float.
    """

    def __init__(self) -> None:
        super().__init__()
        self.below_fp64 = 0
        self.random: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _draws_random_numbers(func, args, kwargs):
            self.random.add(str(func))
        name = str(func)
        if name == "aten.view.dtype":
            _refuse_float_bit_cast(args[0], args[1] if len(args) > 1 else kwargs["dtype"])
        elif name in _PLAIN_GEMM:
            args = tuple(arg for arg in args if not isinstance(arg, torch.dtype))
            kwargs.pop("out_dtype", None)
            func = _PLAIN_GEMM[name]
        else:
            args, kwargs = tree_map(_raise_dtype_argument, (args, kwargs))
        written = _written_arguments(func, args, kwargs)

        def raise_read(value: Any) -> Any:
            # A tensor that no operator of ours made: a constant of the graph, or of a library.
            return (
                value.to(_raised_dtype(value.dtype)) if _is_low(value) and id(value) not in written else value
            )

        args, kwargs = tree_map(raise_read, (args, kwargs))
        out = func(*args, **kwargs)
        if not any(map(_is_low, tree_leaves(out))):
            return out
        if not written and not self.random:
            out = _again_in_fp64(func, args, kwargs, out)

        def raise_result(value: Any) -> Any:
            if not _is_low(value):
                return value
            if id(value) in written:
                self.below_fp64 += 1
                return value
            return value.to(_raised_dtype(value.dtype))

        return tree_map(raise_result, out)


def _raise_dtype_argument(value: Any) -> Any:
    return _raised_dtype(value) if isinstance(value, torch.dtype) else value


def _schema_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        else:
            yield argument, kwargs.get(argument.name, argument.default_value)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    if not func._schema.is_mutable:
        return set()
    return {
        id(leaf)
        for argument, value in _schema_arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    }


def _draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention, RNN and dropout operators carry the tag whether or not dropout is on.
    given = {argument.name: value for argument, value in _schema_arguments(func, args, kwargs)}
    if any(given.get(name) is False for name in ("train", "training")):
        return False
    return not any(given.get(name) == 0 for name in ("dropout_p", "dropout", "p") if name in given)


def _refuse_float_bit_cast(source: torch.Tensor, target: torch.dtype) -> None:
    # Bits of integers read as a float (packed weights) are a value like any other, raised afterwards.
    if source.dtype.is_floating_point or source.dtype.is_complex or target.is_complex:
        raise NoFloat64(f"aten.view.dtype reads the bits of a value as {target}")


def _again_in_fp64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """``func`` run so that it computes in fp64 rather than in the default dtype, or ``out`` where it has no
    such form."""
    if not isinstance(out, torch.Tensor):
        return out
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not leaves:
        if not any(argument.name == "dtype" for argument in func._schema.arguments):
            return out
        attempt: Callable[[], Any] = lambda: func(*args, **{**kwargs, "dtype": _raised_dtype(out.dtype)})  # noqa: E731
    else:

        def integers_to_fp64(value: Any) -> Any:
            is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point()
            return (
                value.double()
                if is_integer and not value.is_complex() and value.dtype != torch.bool
                else value
            )

        new_args, new_kwargs = tree_map(integers_to_fp64, (args, kwargs))
        attempt = lambda: func(*new_args, **new_kwargs)  # noqa: E731
    try:
        again = attempt()
    except Exception:  # an operator that takes indices: its default-dtype result is raised as it is
        return out
    right = (
        isinstance(again, torch.Tensor)
        and again.shape == out.shape
        and again.dtype == _raised_dtype(out.dtype)
    )
    return again if right else out


# ---------------------------------------------------------------- the run


class _EagerRun(fx.Interpreter):
    """Runs a graph eagerly on copies of its constants; ``fp64`` raises the constants and skips the autocast
    regions."""

    def __init__(self, gm: fx.GraphModule, fp64: bool, current: list[str]) -> None:
        super().__init__(gm)
        self._fp64 = fp64
        self._current = current
        self._constants: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._current[:] = [
            n.name if n.op == "placeholder" else f"{n.name} ({n._pretty_print_target(n.target)})"
        ]
        result = super().run_node(n)
        if self._fp64 and n.op == "call_method" and n.target in _CAST_METHODS:
            return self._with_aliasing_of_original(n, result)
        return result

    def _with_aliasing_of_original(self, n: fx.Node, result: Any) -> Any:
        """A cast returns its argument itself when the dtype is the same already; which casts do differs once
        all is fp64.

        Without this, writing in place into the result of a cast would reach tensors that it does not reach in
        the model.
        """
        source_node = n.args[0]
        if not isinstance(source_node, fx.Node):
            return result
        before, after = source_node.meta.get("example_value"), n.meta.get("example_value")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return result
        source = self.env[source_node]
        aliased = before.untyped_storage()._cdata == after.untyped_storage()._cdata
        aliases = source.untyped_storage()._cdata == result.untyped_storage()._cdata
        if aliased and not aliases:
            return source if source.dtype == result.dtype else result
        return result.clone() if aliases and not aliased else result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self._constants:
            value = super().get_attr(target, args, kwargs)
            self._constants[target] = _copy_inputs([value], set(), self._fp64)[0]
        return self._constants[target]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self._constants:
            with _disable_current_modes():  # a copy must not come out in another dtype halfway
                module = copy.deepcopy(self.fetch_attr(target))
                self._constants[target] = module.double() if self._fp64 else module
        module = self._constants[target]
        return self._subgraph(module, args) if isinstance(module, fx.GraphModule) else module(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Autocast leaves doubles alone today; an fp64 run does not depend on that.
        if self._fp64 and getattr(target, "__module__", "") == "torch.amp.autocast_mode":
            return None
        if self._fp64 and isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(target.name(), args, kwargs)
        return super().call_function(target, args, kwargs)

    def _higher_order(self, name: str, args: Any, kwargs: Any) -> Any:
        """Operators that call a subgraph and add nothing to its values."""
        if name == "invoke_subgraph":  # (subgraph, identifier, *operands)
            return self._subgraph(args[0], args[2:])
        if name in (
            "wrap",
            "tag_activation_checkpoint",
        ):  # (subgraph, *operands); keywords tell the checkpoint policy
            return self._subgraph(args[0], args[1:])
        if name == "cond":  # (predicate, if_true, if_false, operands)
            return self._subgraph(args[1] if args[0] else args[2], args[3])
        raise NoFloat64(f"higher-order operator {name}")

    def _subgraph(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        return _EagerRun(gm, self._fp64, self._current).run(*args)


@dataclass(frozen=True)
class Reference:
    """Outputs of a graph at the highest precision at hand.

    outputs: what the graph returns. below_fp64: floating tensors that could not be made fp64. dtype:
    "float64", or the dtype of the run that was possible. note: why it is not fp64, or not a reference at all;
    "" when there is nothing to say. inputs: the copies it ran on, in the state it left them. mutated: the
    inputs that it wrote. random: random operators in the graph: where there are any, the values depend on the
    generator, and only a run with the same generator and dtype is comparable.
    """

    outputs: Any
    below_fp64: int
    dtype: str
    note: str
    inputs: list[Any] = field(default_factory=list)
    mutated: frozenset[int] = frozenset()
    random: tuple[str, ...] = ()


def reference(gm: fx.GraphModule, inputs: Sequence[Any], gradients: Gradients | None = None) -> Reference:
    """Run ``gm`` in fp64 on copies of its flat ``inputs`` (tensors, ints, SymInts); neither is changed.
    With ``gradients`` also its backward: ``inputs`` then hold the cotangents, and the outputs the gradients.

    Where an operator has no fp64 form, or fp64 does not fit in memory, the graph runs in its own dtypes and
    the note says what stood in the way. Errors of that second run are the graph's own and propagate.
    """
    mode, current = Float64Mode(), ["the inputs"]
    try:
        outputs, copies, mutated = _run(gm, inputs, mode, current, gradients)
    except Exception as error:  # whatever an operator raises for a dtype that it lacks
        reason = (str(error).strip().splitlines() or [""])[0]
        why = f"no fp64 reference: {current[0]}: {type(error).__name__}: {reason}"
    else:
        note = _random_note(mode.random)
        return Reference(
            outputs, mode.below_fp64, "float64", note, copies, mutated, tuple(sorted(mode.random))
        )
    watch = _RandomWatch()
    outputs, copies, mutated = _run(gm, inputs, watch, current, gradients)
    low = sum(map(_is_low, tree_leaves(outputs)))
    note = "; ".join(filter(None, (why, _random_note(watch.random))))
    return Reference(
        outputs, low, _highest(outputs, inputs), note, copies, mutated, tuple(sorted(watch.random))
    )


class _RandomWatch(TorchDispatchMode):
    """Notes the random operators, changes nothing."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.random: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and _draws_random_numbers(func, args, kwargs):
            self.random.add(str(func))
        return func(*args, **kwargs)


def _run(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    mode: TorchDispatchMode,
    current: list[str],
    gradients: Gradients | None,
) -> tuple[Any, list[Any], frozenset[int]]:
    fp64 = isinstance(mode, Float64Mode)
    copies = _copy_inputs(inputs, set(), raise_to_fp64=fp64)
    tensors = {index: value for index, value in enumerate(copies) if isinstance(value, torch.Tensor)}
    before = {index: value._version for index, value in tensors.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if fp64:  # the caller may be inside an autocast block
            for device_type in {"cpu", *(value.device.type for value in tensors.values())}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(mode)
        run: Callable[..., Any] = _EagerRun(gm, fp64, current).run
        outputs = (run if gradients is None else gradients.of(run))(*copies)
    written = {index for index, value in tensors.items() if value._version != before[index]}
    aliases = {index for group in storage_groups(inputs) if written.intersection(group) for index in group}
    return outputs, copies, frozenset(written | aliases)


def _random_note(names: set[str]) -> str:
    return f"random operators ({', '.join(sorted(names))}): values depend on the generator" if names else ""


def _highest(outputs: Any, inputs: Sequence[Any]) -> str:
    floating = [
        value.dtype
        for value in [*tree_leaves(outputs), *inputs]
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    ]
    return str(max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)).removeprefix("torch.")
