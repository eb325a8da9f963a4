"""The numerics gate: is a candidate as right as the baseline, on the caller's inputs and on fresh ones?

Both are compared with an fp64 run of the captured graph (fxopt/reference.py). A candidate may be off by a
small multiple of the baseline's own error, or by what the precision class that the user chose allows.
Everything else that a caller can see of the outputs (shape, strides, dtype, device, aliasing, writes to
inputs) has to be what the baseline gives.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxopt.fresh import fresh_inputs
from fxopt.numerics import CHUNK, Errors, compare, same
from fxopt.overlap import meeting
from fxopt.own_outputs import memory_of
from fxopt.precision import FP32_FLOOR, FP64_FLOOR, Budget, Precision, parse_precision
from fxopt.reference import Float64Mode, Reference, clone_inputs, reference, storage_groups

if TYPE_CHECKING:
    from fxopt.training import Gradients

__all__ = [
    "Budget",
    "Float64Mode",
    "Precision",
    "Reference",
    "Verdict",
    "clone_inputs",
    "fresh_inputs",
    "parse_precision",
    "reference",
    "verify",
]

PARTED = 2.0**-3
"""Baseline error above which the reference judges nothing: a comparison or a top-k went the other way in
fp64. Four times such an error as a limit would let anything pass, so the candidate is held to the baseline's
values instead. bf16 models stay below 1e-2."""
SPIKE = 16.0
"""One element may be off by this many times the limit, relative to the largest reference value. Rounding
errors spread over an output do not reach 16 times their rms; a wrong tile or tail element in a large output
does, while the L2 norm hides it."""
LOGITS_WIDTH = 1000
"""An output of two or more dimensions whose last one is at least this wide is taken for logits."""


@dataclass(frozen=True)
class Verdict:
    """Result of the gate.

    ok, reason: whether the candidate passed; why not, or what limited the check. rel_l2, baseline_rel_l2,
    limit: relative L2 errors against the reference, and the limit, of the tensor closest to its limit, over
    all input sets (NaN: nothing was compared). max_abs: largest absolute error of any element. nan_agree: NaN
    and Inf sit where the baseline has them. top1: share of rows of logits whose largest entry is the
    reference's, worst output (None: no logits). checked: input sets compared.
    """

    ok: bool
    reason: str
    rel_l2: float = math.nan
    max_abs: float = math.nan
    baseline_rel_l2: float = math.nan
    limit: float = math.nan
    nan_agree: bool = True
    top1: float | None = None
    checked: int = 0


@dataclass
class _Observed:
    """One run: outputs (copied, because a CUDA graph overwrites its own), what each one aliases, which have elements in
    common, and the inputs afterwards."""

    outputs: list[Any]
    strides: list[tuple[int, ...]]
    aliases: list[tuple[str, int] | None]  # (what, storage offset)
    meeting: set[tuple[int, int]]
    inputs: list[Any]


@dataclass
class _Tally:
    """What the checks of all input sets have found so far."""

    budget: Budget
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict(True, ""))

    def numbers(self, errors: Errors, limit: float) -> None:
        worst = self.verdict
        closest = math.isnan(worst.limit) or errors.candidate / limit > worst.rel_l2 / worst.limit
        if closest or math.isnan(errors.candidate):
            worst = replace(worst, rel_l2=errors.candidate, baseline_rel_l2=errors.baseline, limit=limit)
        largest = (
            errors.candidate_abs if math.isnan(worst.max_abs) else max(worst.max_abs, errors.candidate_abs)
        )
        agree = worst.nan_agree and not errors.misplaced
        self.verdict = replace(worst, max_abs=largest, nan_agree=agree)


def verify(
    candidate: Callable[..., Any],
    baseline: Callable[..., Any],
    gm: fx.GraphModule,
    input_sets: Sequence[Sequence[Any]],
    static: Collection[int],
    budget: Budget,
    *,
    logits: bool | None = None,
    gradients: Gradients | None = None,
    constants: Collection[torch.Tensor] = (),
) -> Verdict:
    """Compare ``candidate`` and ``baseline`` (called with the flat inputs, returning a tuple or list) on
    every set of inputs.

    gm: the captured graph of torch functions, run in fp64 as the reference. static: numbers of the inputs
    that are parameters; they are shared between runs, copied only where the graph writes them, and restored
    if the candidate does. gradients: both also take the cotangents, and return the gradients
    (``fxopt.training.Gradients.of``), which are judged as outputs are, but for strides and aliasing, which
    nobody sees of them. constants: what the candidate's code holds, of which no output may be a part: whoever
    writes to it would change later calls. logits: True checks top-1 agreement, False does not, None decides by shape
    (LOGITS_WIDTH). Every run gets fresh copies of the inputs and the same random seed; the caller's
    generators are left alone. A candidate that raises fails; errors of the baseline or the graph propagate.
    ValueError without input sets.
    """
    if not input_sets:
        raise ValueError("verify needs at least one set of inputs")
    tally = _Tally(budget)
    for number, inputs in enumerate(input_sets):
        _check_set(tally, number, candidate, baseline, gm, inputs, set(static), logits, gradients, constants)
        tally.verdict = replace(tally.verdict, checked=number + 1)
        if tally.failures:
            reason = f"input set {number}: " + "; ".join(tally.failures[:5])
            if len(tally.failures) > 5:
                reason += f"; and {len(tally.failures) - 5} more"
            return replace(tally.verdict, ok=False, reason="; ".join([reason, *dict.fromkeys(tally.notes)]))
    return replace(tally.verdict, reason="; ".join(dict.fromkeys(tally.notes)))


def _check_set(
    tally: _Tally,
    seed: int,
    candidate: Callable[..., Any],
    baseline: Callable[..., Any],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    static: set[int],
    logits: bool | None,
    gradients: Gradients | None,
    constants: Collection[torch.Tensor],
) -> None:
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    with _seeded(devices, seed):
        truth = reference(gm, inputs, gradients)
    shared = static - truth.mutated
    taken = gradients.inputs if gradients is not None else ()
    attributes = [(f"attribute {name}", value) for name, value in (*gm.named_parameters(), *gm.named_buffers())]
    held = [*(("a constant of the code", value) for value in constants), *attributes]
    right = _observe(baseline, inputs, shared, devices, seed, held, len(taken))
    try:
        tried = _observe(candidate, inputs, shared, devices, seed, held, len(taken))
    except Exception as error:  # whatever a candidate raises, it has failed
        tally.failures.append(f"the candidate raised {type(error).__name__}: {error}")
        return
    finally:
        for index in sorted(shared):
            if isinstance(inputs[index], torch.Tensor) and not same(inputs[index], truth.inputs[index]):
                with torch.no_grad():
                    inputs[index].copy_(truth.inputs[index])  # exact: the copy was raised from these values
                tally.failures.append(
                    f"input {index} (a parameter) is written by the candidate, not by the graph"
                )
    if truth.note:
        tally.notes.append(truth.note)
    true_outputs = tree_leaves(truth.outputs)
    if len(tried.outputs) != len(right.outputs):
        tally.failures.append(f"{len(tried.outputs)} outputs, baseline {len(right.outputs)}")
        return
    if len(true_outputs) != len(right.outputs):
        raise ValueError(f"the graph returns {len(true_outputs)} outputs, the baseline {len(right.outputs)}")
    count = len(right.outputs) - len(taken)  # gradients come after the outputs
    logit_outputs = _logit_outputs(right.outputs[:count], logits)
    for index, true in enumerate(true_outputs):
        is_gradient = index >= count
        name = f"gradient of input {taken[index - count]}" if is_gradient else f"output {index}"
        difference = _difference_of_form(index, tried, right, true, is_gradient)
        if difference:
            tally.failures.append(f"{name}: {difference}")
        elif isinstance(right.outputs[index], torch.Tensor):
            true = None if truth.random else true
            limit = _check_values(tally, name, true, right.outputs[index], tried.outputs[index], is_gradient)
            if index in logit_outputs:
                true = right.outputs[index] if true is None else true
                _check_top1(tally, index, true, right.outputs[index], tried.outputs[index], limit)
    for i, j in sorted(tried.meeting ^ right.meeting):
        now, before = ("share memory", "do not") if (i, j) in tried.meeting else ("share no memory", "do")
        tally.failures.append(f"outputs {i} and {j} {now}, in the baseline they {before}")
    for index, original in enumerate(inputs):
        if isinstance(original, torch.Tensor) and index not in shared:
            true = None if truth.random else truth.inputs[index]
            after = right.inputs[index], tried.inputs[index]
            _check_input(tally, index, original, true, *after, graph_writes=index in truth.mutated)


@contextlib.contextmanager
def _seeded(devices: Collection[torch.device], seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of ``devices`` (and of no other), and put their states back
    afterwards."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def _observe(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    shared: set[int],
    devices: Collection[torch.device],
    seed: int,
    held: Sequence[tuple[str, torch.Tensor]],
    gradients: int,
) -> _Observed:
    """held: what an output may be a part of beside inputs. gradients: how many of the results, the last, are such."""
    arguments = clone_inputs(inputs, shared)
    owner = {memory_of(value): name for name, value in held}
    for group in storage_groups(arguments):
        value = arguments[group[0]]
        owner[value.device, value.untyped_storage().data_ptr()] = f"input {group[0]}"
    with _seeded(devices, seed), torch.no_grad():
        results = tree_leaves(run(*arguments))
    seen = _Observed([], [], [], set(), arguments)
    places = [memory_of(value) if isinstance(value, torch.Tensor) else None for value in results]
    for value, place in zip(results, places, strict=True):
        strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        seen.aliases.append((owner[place], value.storage_offset()) if place is not None and place in owner else None)
        seen.strides.append(_significant_strides(value) if strided else ())
        seen.outputs.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
    outputs = range(len(results) - gradients)
    several = Counter(places[i] for i in outputs)
    seen.meeting = set(meeting({i: results[i] for i in outputs if places[i] is not None and several[places[i]] > 1}))
    return seen


def _significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with those of dimensions of size 1 dropped: they address nothing (as
    torch._prims_common.check_significant_strides)."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)


def _difference_of_form(index: int, tried: _Observed, right: _Observed, true: Any, is_gradient: bool) -> str:
    new, old = tried.outputs[index], right.outputs[index]
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        both = isinstance(new, torch.Tensor) == isinstance(old, torch.Tensor)
        return (
            ""
            if both and (new == old or (new != new and old != old))
            else f"{_brief(new)}, baseline {_brief(old)}"
        )
    for name in ("shape", "dtype", "device", "layout"):
        if getattr(new, name) != getattr(old, name):
            return f"{name} {_spelt(getattr(new, name))}, baseline {_spelt(getattr(old, name))}"
    if is_gradient:
        return ""
    # Inductor may return a slice of a padded product. The strides that the graph itself gives are what Dynamo has told
    # whatever comes after it.
    own = _significant_strides(true) if isinstance(true, torch.Tensor) and true.layout == torch.strided else None
    if tried.strides[index] not in (right.strides[index], own):
        return (
            f"strides {tried.strides[index]}, baseline {right.strides[index]} (of dimensions longer than 1)"
        )
    if tried.aliases[index] != right.aliases[index] and not _copies_a_constant(tried, right, index):
        return f"{_alias(tried.aliases[index])}, in the baseline it {_alias(right.aliases[index])}"
    return ""


def _copies_a_constant(tried: _Observed, right: _Observed, index: int) -> bool:
    """Whether an output is a copy of what torch has made a constant of the graph: a number that the program writes down
    anew in each call, so that nobody may count on one memory for all.
    """
    alias = right.aliases[index]
    return alias is not None and tried.aliases[index] is None and alias[0].startswith("attribute _tensor_constant")


def _brief(value: Any) -> str:
    return (
        f"a tensor {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"{value!r} ({type(value).__name__})"
    )


def _spelt(value: Any) -> str:
    return str(tuple(value) if isinstance(value, torch.Size) else value)


def _alias(alias: tuple[str, int] | None) -> str:
    return "aliases no input" if alias is None else f"aliases {alias[0]} at offset {alias[1]}"


def _check_input(
    tally: _Tally, index: int, original: Any, true: Any, right: Any, tried: Any, graph_writes: bool
) -> None:
    """Writes to inputs are outputs too. Where the graph writes, the baseline may write what was there: its own result
    of an earlier call, which a candidate that rounds otherwise does not write bit by bit.
    """
    if tried.shape != right.shape or tried.stride() != right.stride():
        tally.failures.append(f"input {index} has become {tuple(tried.shape)}, baseline {tuple(right.shape)}")
        return
    written, expected = (not same(value, original) for value in (tried, right))
    if written and not expected and not graph_writes:
        tally.failures.append(f"input {index} is written, the baseline leaves it alone")
    elif expected and not written:
        tally.failures.append(f"input {index} is left alone, the baseline writes it")
    elif written:
        _check_values(tally, f"input {index} after the call", true, right, tried)


# ---------------------------------------------------------------- numbers


def _check_values(
    tally: _Tally, name: str, true: Any, right: torch.Tensor, tried: torch.Tensor, is_gradient: bool = False
) -> float:
    """Record and judge the values of one tensor; returns the relative limit that was applied. ``true`` is
    None where no reference exists."""
    if not (right.is_floating_point() or right.is_complex()):
        different = (
            int((tried != right).sum()) if right.layout == torch.strided else int(not same(tried, right))
        )
        if different:
            tally.failures.append(
                f"{name}: {different} of {right.numel()} elements ({right.dtype}) differ from the baseline's"
            )
        return 0.0
    floor = FP64_FLOOR if right.dtype in (torch.float64, torch.complex128) else FP32_FLOOR
    usable = isinstance(true, torch.Tensor) and true.shape == right.shape
    errors = compare(true, right, tried) if usable else None
    if errors is not None and is_gradient and errors.baseline * PARTED >= 1:
        return _check_cancelled(tally, name, errors, torch.finfo(right.dtype).eps / 2)
    if errors is None or not errors.baseline <= PARTED:
        # Nothing in fp64 to hold on to: the baseline's own error is taken at the roundoff of its dtype.
        if errors is not None:
            tally.notes.append(
                f"{name}: compared with the baseline, which is {errors.baseline:.2g} away from the reference"
            )
        errors = replace(compare(right, right, tried), baseline=max(floor, torch.finfo(right.dtype).eps / 2))
    limit = tally.budget.limit(errors.baseline, floor)
    tally.numbers(errors, limit)
    spike = max(SPIKE * limit * errors.largest, SPIKE * errors.baseline_abs)
    if errors.misplaced:
        tally.failures.append(
            f"{name}: NaN or Inf in other places than the baseline's ({errors.misplaced} elements)"
        )
    if not errors.candidate <= limit:
        tally.failures.append(
            f"{name}: relative L2 error {errors.candidate:.3g} over the limit {limit:.3g}, "
            f"baseline {errors.baseline:.3g}"
        )
    elif not errors.candidate_abs <= (spike if errors.largest else limit):
        tally.failures.append(
            f"{name}: an element is off by {errors.candidate_abs:.3g}, limit {spike:.3g}, "
            f"baseline {errors.baseline_abs:.3g}"
        )
    return limit


def _check_cancelled(tally: _Tally, name: str, errors: Errors, roundoff: float) -> float:
    """A gradient that is 0 but for rounding (of a bias before a batch normalisation, of the keys' bias in attention):
    what the baseline gives is its own roundoff, which the candidate's may exceed by as much as its class's does.
    """
    limit = errors.baseline * max(tally.budget.multiple, tally.budget.limit(0.0, roundoff) / roundoff)
    tally.notes.append(f"{name}: it cancels, and holds rounding errors alone")
    if errors.misplaced or not errors.candidate <= limit:
        tally.failures.append(
            f"{name}: it cancels, and is {errors.candidate / errors.baseline:.3g} times as far from that as the "
            f"baseline's, over the limit of {limit / errors.baseline:.3g}"
        )
    return limit


def _logit_outputs(outputs: Sequence[Any], logits: bool | None) -> set[int]:
    if logits is False:
        return set()
    floats = {
        index: value
        for index, value in enumerate(outputs)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() >= 2
        and value.numel()
    }
    wide = {index for index, value in floats.items() if value.size(-1) >= LOGITS_WIDTH}
    return set(floats) if logits and not wide else wide


def _check_top1(
    tally: _Tally, index: int, true: torch.Tensor, right: torch.Tensor, tried: torch.Tensor, limit: float
) -> None:
    """Top-1 agreement of logits with the reference, beyond what ``limit`` explains.

    The largest two of V normal logits of standard deviation s lie about s / sqrt(2 ln V) apart, exponentially
    distributed (extreme value theory); errors of relative size e swap them in e * sqrt(2 ln V / pi) of the
    rows. That many are allowed at e = limit, with three standard deviations of counting, on top of those of
    the baseline. Logits that differ by less than the output dtype can tell are a tie.
    """
    width = right.size(-1)
    swapped = {"baseline": 0, "candidate": 0}
    rows = right.numel() // width
    step = max(1, CHUNK // width)
    flat = [value.reshape(-1, width) for value in (true, right, tried)]
    for start in range(0, rows, step):
        t, r, c = (value[start : start + step] for value in flat)
        t = t.to(right.dtype)
        top = t.amax(-1)
        for name, value in (("baseline", r), ("candidate", c)):
            chosen = t.gather(-1, value.argmax(-1, keepdim=True)).squeeze(-1)
            swapped[name] += int((chosen != top).sum())
    expected = rows * min(1.0, limit * math.sqrt(2 * math.log(width) / math.pi))
    allowed = swapped["baseline"] + int(expected + 3 * math.sqrt(expected))
    agreement = 1 - swapped["candidate"] / rows
    tally.verdict = replace(
        tally.verdict, top1=min(agreement, 1.0 if tally.verdict.top1 is None else tally.verdict.top1)
    )
    if swapped["candidate"] > allowed:
        tally.failures.append(
            f"output {index}: top-1 differs from the reference in {swapped['candidate']} of {rows} rows, "
            f"baseline {swapped['baseline']}, limit {allowed}"
        )
