"""Code with weights folded into it, and the check that they are still the weights of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from fxopt.samples import Samples

_version, _gradient = attrgetter("_version"), attrgetter("grad")
_address = torch.Tensor.data_ptr


class StaleWeights(RuntimeError):
    """A call came with other weights than those that were folded in."""


class FrozenCode:
    """A callable over all of Dynamo's inputs that runs `fn`, which takes only those at `kept`.

    `frozen` maps positions to the tensors that were folded in. A call must bring the very same ones, unchanged: Dynamo
    compiles a code object once for all modules that share it, so another module's weights may arrive here. Replacing a
    parameter changes its identity, writing to it its version, assigning to `.data` its address; a fused optimizer's
    step changes none of the three, but comes with a new gradient. About 0.2 us a tensor, in loops that stay inside the
    interpreter's own C code. What none of them shows, samples of the elements do (`fxopt.samples`).
    `check_contents` false leaves the identity check alone.

    otherwise: what runs in its place, with the reason and the call's arguments; StaleWeights is raised where it is
    None. (Whoever calls cannot call once more: of a model with graph breaks, graphs before this one have run.)
    """

    # Dynamo puts a function around this, and copies what stands in a __dict__ to it, where `let_go` would not reach.
    __slots__ = (
        *("_addresses", "_fn", "_gradients", "_pick", "_pick_kept", "_run", "_samples", "_tensors"),
        *("_versions", "__weakref__", "otherwise"),
    )

    def __init__(
        self, fn: Callable[..., Any], kept: Sequence[int], frozen: dict[int, torch.Tensor], check_contents: bool = True
    ) -> None:
        self._fn = fn
        self._run = self._first
        self.otherwise: Callable[..., Any] | None = None
        positions = sorted(frozen)
        self._pick, self._pick_kept = picker(positions), picker(kept)
        self._tensors = [frozen[i] for i in positions]
        self._versions = list(map(_version, self._tensors)) if check_contents else []
        self._addresses = list(map(_address, self._tensors)) if check_contents else []
        self._gradients = self._read_gradients() if check_contents else []
        self._samples = Samples(self._tensors) if check_contents else None

    @property
    def output_copies(self) -> int | None:
        """Tensors that the wrapped code copies out per call, where it counts them."""
        return getattr(self._fn, "output_copies", None)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the wrapped code holds for its calls, where it counts them."""
        return getattr(self._fn, "held_bytes", 0)

    def _read_gradients(self) -> list[tuple[int, int]]:
        return [(id(g), g._version) for g in map(_gradient, self._tensors) if g is not None]

    def __call__(self, *args: Any) -> Any:
        run, tensors, samples = self._run, self._tensors, self._samples
        if not all(map(is_, self._pick(args), tensors)):
            return self._stale("the call brings other weights than those folded into this code", args)
        if samples is not None:
            if (
                list(map(_version, tensors)) != self._versions
                or list(map(_address, tensors)) != self._addresses
                or self._read_gradients() != self._gradients
            ):
                return self._stale("the weights folded into this code have changed", args)
            if samples.changed():
                unseen = "the weights folded into this code have changed, unseen by torch (through .data?)"
                return self._stale(unseen, args)
        return run(*self._pick_kept(args))

    def _first(self, *args: Any) -> Any:
        """The first call, after which the code knows what is to run, without anything around it (`OwnOutputs`)."""
        fn = self._fn
        outputs = fn(*args)
        if self._fn is fn:  # `let_go` may have been called meanwhile
            self._run = getattr(fn, "settled", None) or fn
        return outputs

    def let_go(self) -> None:
        """Hold neither weights nor what was folded of them any more: every later call is one with other weights."""
        self._tensors = [object()] * len(self._tensors)  # type: ignore[list-item]
        self._fn = self._run = self._stale
        self._samples = None

    def _stale(self, reason: str, args: Sequence[Any]) -> Any:
        if self.otherwise is None:
            raise StaleWeights(reason)
        return self.otherwise(reason, *args)


def picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes the items at `positions` out of a tuple, as a tuple; neighbours are one slice of it."""
    first = positions[0] if positions else 0
    if list(positions) == list(range(first, first + len(positions))):
        return itemgetter(slice(first, first + len(positions)))
    return itemgetter(*positions)
