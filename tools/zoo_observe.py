"""What a caller can see of a model's calls, and how two sets of calls differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from zoo_models import Call, Model

#: an error of one kind counts as the same where this much more of it is there than in plain Inductor
LIKEWISE = 4.0
FLOATS = (bool, int, float, str)


@dataclass
class Seen:
    """One call. values: tensors and numbers by name ("output.0", "gradient.layer.weight", "random state"). form: what
    else a caller can tell of the outputs (type, dtype, shape, strides, shared memory). error: the exception.
    """

    values: dict[str, Any] = field(default_factory=dict)
    form: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it should be. call: which one, from 0. rel_l2: of tensors, NaN where it says nothing."""

    call: int
    name: str
    what: str
    rel_l2: float = math.nan


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors and other values in nested containers and dataclasses, by name; containers also, by their type."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield f"{name} is", type(value).__name__
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{name} is", type(value).__name__
        for position, item in enumerate(value):
            yield from leaves(item, f"{name}.{position}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{name} is", type(value).__name__
        for item in dataclasses.fields(value):
            yield from leaves(getattr(value, item.name), f"{name}.{item.name}")
    else:
        yield name, value if isinstance(value, FLOATS) or value is None else type(value).__name__


def observe(model: Model, under: str, compiled: Callable[[Callable[..., Any], Call], Callable[..., Any]]) -> list[Seen]:
    """Make the model anew and call what `compiled(fn, first call)` gives once for each of its calls."""
    torch._dynamo.reset()
    fn, calls, state = model.build()
    if isinstance(fn, nn.Module):
        fn.train(under == "grad")
    torch.manual_seed(1)
    run = compiled(fn, calls[0])
    seen = []
    for call in calls:
        now = Seen()
        seen.append(now)
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}[
            under
        ]():
            try:
                output = run(*call.args, **call.kwargs)
            except Exception as error:
                now.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            else:
                _outputs(now, output, call)
        if under == "grad" and not now.error:
            _train(now, output, fn)
        _surroundings(now, fn, call, state)
    return seen


def _outputs(seen: Seen, output: Any, call: Call) -> None:
    shared: dict[int, str] = {}
    for name, value in leaves([call.args, dict(call.kwargs)], "input"):
        if isinstance(value, torch.Tensor) and value.numel():
            shared.setdefault(value.untyped_storage().data_ptr(), name)
    for name, value in leaves(output, "output"):
        if not isinstance(value, torch.Tensor):
            seen.values[name] = value
            continue
        seen.values[name] = value.detach().clone()
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
        parts = [type(value).__name__, str(value.dtype), str(tuple(value.shape)), f"strides {strides}"]
        parts += ["gradient"] * value.requires_grad + ["inference"] * value.is_inference()
        if value.numel():
            owner = shared.setdefault(value.untyped_storage().data_ptr(), name)
            parts += [f"shares memory with {owner}, offset {value.storage_offset()}"] * (owner != name)
        seen.form[name] = ", ".join(parts)


def _train(seen: Seen, output: Any, fn: Any) -> None:
    losses = []
    for _, value in leaves(output, "output"):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.numel():
            flat = (value.abs() if value.is_complex() else value).flatten().double()
            # Weighted, for the squares of what leaves a normalisation add up to a constant, whose gradient is noise.
            losses.append((flat.square() * torch.arange(1, flat.numel() + 1).sin()).nansum() / flat.numel())
    if not losses:
        return
    torch.stack(losses).sum().backward()
    with torch.no_grad():
        for name, parameter in fn.named_parameters():
            if parameter.grad is not None:
                seen.values[f"gradient.{name}"] = parameter.grad.clone()
                parameter -= 0.01 * parameter.grad.nan_to_num()
                parameter.grad = None


def _surroundings(seen: Seen, fn: Any, call: Call, state: Mapping[str, torch.Tensor]) -> None:
    for name, value in leaves([call.args, dict(call.kwargs)], "input"):
        seen.values[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    for name, value in state.items():
        seen.values[f"state.{name}"] = value.detach().clone()
    seen.values["random state"] = torch.get_rng_state()
    if isinstance(fn, nn.Module):
        for name, value in [*fn.named_parameters(), *fn.named_buffers()]:
            seen.values[f"weight.{name}"] = value.detach().clone()
        for path, module in fn.named_modules():
            numbers = {key: value for key, value in vars(module).items() if type(value) in (bool, int, float)}
            seen.values |= {f"attribute.{path}.{key}": value for key, value in numbers.items() if key[0] != "_"}


def error_of(right: torch.Tensor, tried: torch.Tensor) -> float:
    """Relative L2 difference over what is finite in both; infinite where NaN, Inf or integers are not the same."""
    if not (right.is_floating_point() or right.is_complex()):
        return 0.0 if torch.equal(right, tried) else math.inf
    a, b = (
        (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double() for value in (right, tried)
    )
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    size, off = a[finite].norm().item(), (a[finite] - b[finite]).norm().item()
    return off / size if size else off


def differences(right: Sequence[Seen], tried: Sequence[Seen], tolerance: float) -> tuple[list[Difference], float]:
    """How `tried` differs from `right`, and the largest relative difference that `tolerance` lets pass."""
    found, largest = [], 0.0
    for number, (a, b) in enumerate(zip(right, tried, strict=True)):
        if a.error.partition(":")[0] != b.error.partition(":")[0]:
            found.append(Difference(number, "error", f"{b.error or 'none'}; expected {a.error or 'none'}"))
            continue
        for name in [*a.values, *(name for name in b.values if name not in a.values)]:
            if name not in a.values or name not in b.values:
                found.append(Difference(number, name, "is missing" if name in a.values else "is there as well"))
                continue
            one, other = a.values[name], b.values[name]
            if a.form.get(name) != b.form.get(name):
                found.append(Difference(number, name, f"{b.form.get(name)}; expected {a.form.get(name)}"))
            if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
                if type(one) is not type(other) or one != other:
                    found.append(Difference(number, name, f"{_brief(other)}; expected {_brief(one)}"))
            elif one.shape == other.shape and one.dtype == other.dtype:
                error = error_of(one, other)
                if error > tolerance:
                    what = f"relative difference {error:.2g}" if math.isfinite(error) else "other values"
                    found.append(Difference(number, name, what, error))
                else:
                    largest = max(largest, error)
            elif name not in a.form:
                found.append(Difference(number, name, f"{_brief(other)}; expected {_brief(one)}"))
    return found, largest


def _brief(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def explain(
    mine: Sequence[Difference], plain: Sequence[Difference], apart: Sequence[Difference]
) -> list[dict[str, Any]]:
    """Each difference from eager with why it is none of fxopt's, "" where it may be.

    plain: how plain Inductor differs from eager; apart: how the tried code differs from plain Inductor.
    """
    likewise = {(d.call, d.name): d for d in plain}
    own = {(d.call, d.name) for d in apart}
    rows = []
    for d in mine:
        theirs, why = likewise.get((d.call, d.name)), ""
        if theirs is not None and (d.call, d.name) not in own:
            why = "plain Inductor differs the same way"
        elif theirs is not None and d.rel_l2 <= LIKEWISE * theirs.rel_l2 < math.inf:
            why = f"rounding: plain Inductor is off by {theirs.rel_l2:.2g}"
        rows.append({"call": d.call, "name": d.name, "what": d.what, "why": why})
    return rows
