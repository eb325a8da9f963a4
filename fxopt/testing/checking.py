"""The numbers of a rewritten graph, over dtypes, layouts, shapes and symbolic sizes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from fxopt.precision import parse_precision
from fxopt.registry import Pass
from fxopt.testing.capturing import EXAMPLE_INPUTS, STATIC_INPUTS, capture, placeholders
from fxopt.testing.equivalence import difference
from fxopt.testing.running import Labels, Result, graph_stage, run
from fxopt.torch_api import tracing

__all__ = ["LAYOUTS", "Case", "check"]


@dataclass(frozen=True)
class Case:
    """One case of a check: what it was, and what the pass did. `refused`: why it left the case alone, "" if not."""

    name: str
    result: Result
    refused: str = ""


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def _sliced(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0:
        return x
    buffer = x.new_zeros([*x.shape[:-1], x.shape[-1] + 3])
    part = buffer[..., 2:-1]
    return part.copy_(x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,  # the last two dimensions change places in memory
    "sliced": _sliced,  # part of a larger buffer, and not at its beginning
}


def check(
    p: Pass,
    fn: Callable[..., Any],
    *inputs: Any,
    dtypes: Sequence[torch.dtype] | None = None,
    layouts: Sequence[str] = ("contiguous", "transposed", "sliced"),
    shapes: Sequence[tuple[Any, ...]] = (),
    dynamic: Sequence[bool] = (False, True),
    precision: str | float | None = None,
    must_rewrite: bool = True,
    labels: Labels = None,
    freeze: bool = False,
) -> list[Case]:
    """Assert that the graph of `fn`, rewritten by `p`, computes what it did: against an fp64 run of the graph, and in
    form, aliasing, writes and random draws. Returns the cases that were run.

    fn: a function or an nn.Module; see `capture`. A case is one of `dtypes` (of floating-point inputs and parameters;
    None: as they are), one of `layouts` of the input tensors, `inputs` or one of `shapes` (tuples of other inputs), and
    symbolic sizes or not; a graph with symbolic sizes is run at twice the sizes too. precision: None is the class that
    `p` needs. must_rewrite: a case in which nothing was rewritten is a failure, unless several `dtypes` are given and a
    reason for refusing names the case's own. AssertionError names the case and shows the graph before and after.
    """
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown:
        raise ValueError(f"no layout is named {', '.join(map(repr, unknown))}; known: {', '.join(LAYOUTS)}")
    budget = parse_precision(p.precision if precision is None else precision)
    cases: list[Case] = []
    seen: set[Any] = set()
    for dtype, layout, (index, given), symbolic in itertools.product(
        dtypes or (None,), layouts, enumerate((inputs, *shapes)), dynamic
    ):
        arguments = _arguments(given, dtype, LAYOUTS[layout])
        name = _name(dtype, layout, arguments, symbolic)
        form = (dtype, index, symbolic, _form(arguments))
        if form in seen:  # a vector has no transpose
            continue
        seen.add(form)
        model = _in_dtype(fn, dtype)
        graph = capture(model, *arguments, stage=graph_stage(p), dynamic=symbolic, freeze=freeze)
        result = run(p, graph, labels=labels, precision=precision)
        refused = ""
        if result.report.error:
            raise AssertionError(f"{p.name} was undone ({name}): {result.report.error}\n{result}")
        if not result.changed:
            refused = "; ".join(reason for _, reason in result.report.refused)
            excused = dtypes is not None and len(dtypes) > 1 and _names_dtype(refused, dtype)
            if must_rewrite and not excused:
                raise AssertionError(
                    f"{p.name} rewrote nothing ({name}); leave the case out (dtypes=, layouts=, dynamic=), or say "
                    f"must_rewrite=False\n{result}"
                )
        else:
            sets = [graph.meta[EXAMPLE_INPUTS], *([_at_twice_the_size(graph)] if symbolic else [])]
            why = difference(graph, result.fn, _runnable(graph, sets), budget=budget, static=graph.meta[STATIC_INPUTS])
            if why:
                raise AssertionError(f"{p.name} changes what is computed ({name}): {why}\n{result}")
        cases.append(Case(name, result, refused))
    return cases


def _arguments(given: Sequence[Any], dtype: torch.dtype | None, layout: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        cast = x.detach() if dtype is None or not x.is_floating_point() else x.detach().to(dtype)
        return layout(cast)

    return tree_map_only(torch.Tensor, laid_out, tuple(given))


def _in_dtype(fn: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    return copy.deepcopy(fn).to(dtype) if dtype is not None and isinstance(fn, nn.Module) else fn


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, tuple(arguments))
    return found


def _form(arguments: Sequence[Any]) -> Any:
    return tuple((tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) for x in _tensors(arguments))


def _name(dtype: torch.dtype | None, layout: str, arguments: Sequence[Any], symbolic: bool) -> str:
    shapes = ", ".join(str(list(x.shape)) for x in _tensors(arguments))
    own = [] if dtype is None else [str(dtype).removeprefix("torch.")]
    return ", ".join([*own, f"{layout} {shapes}", *(["symbolic sizes"] if symbolic else [])])


def _names_dtype(reason: str, dtype: torch.dtype | None) -> bool:
    name = str(dtype).removeprefix("torch.")
    return name in reason or name.replace("bfloat", "bf").replace("float", "fp") in reason


def _at_twice_the_size(graph: fx.GraphModule) -> list[Any]:
    """The graph's inputs with every symbol at twice its value, filled by repeating what they hold."""
    examples = graph.meta[EXAMPLE_INPUTS]
    sizes: dict[str, int] = {}
    for node, value in zip(placeholders(graph), examples, strict=True):
        fake = node.meta["val"]
        pairs = zip(fake.shape, value.shape, strict=True) if isinstance(fake, torch.Tensor) else [(fake, value)]
        for symbolic, number in pairs:
            if tracing.is_symbol(symbolic):
                sizes[str(symbolic)] = 2 * number
    return [_resized(node.meta["val"], value, sizes) for node, value in zip(placeholders(graph), examples, strict=True)]


def _resized(fake: Any, value: Any, sizes: dict[str, int]) -> Any:
    if not isinstance(fake, torch.Tensor):
        return tracing.substituted(fake, sizes) if isinstance(fake, torch.SymInt) else value
    shape, stride = ([tracing.substituted(n, sizes) for n in numbers] for numbers in (fake.shape, fake.stride()))
    if tuple(shape) == tuple(value.shape):
        return value
    offset = tracing.substituted(fake.storage_offset(), sizes)
    end = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    grown = value.new_zeros(end).as_strided(shape, stride, offset)
    for dim, size in enumerate(shape):
        value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return grown.copy_(value)


def _runnable(graph: fx.GraphModule, sets: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The sets on which the graph itself runs: the first always, others where it does not hold for one size alone."""
    found = [sets[0]]
    for inputs in sets[1:]:
        try:
            with torch.random.fork_rng(), torch.no_grad():
                graph(*copy.deepcopy(list(inputs)))
        except (RuntimeError, IndexError):  # traced for sizes that are in some relation to each other or to a number
            continue
        found.append(inputs)
    return found
