"""Code with weights folded into it, and the check that they are still the weights of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from fxopt.samples import Samples


class StaleWeights(RuntimeError):
    """A call came with other weights than those that were folded in. `fxopt.optimize`'s module folds anew."""


class FrozenCode:
    """A callable over all of Dynamo's inputs that runs `fn`, which takes only those at `kept`.

    `frozen` maps positions to the tensors that were folded in. A call must bring the very same ones, unchanged: Dynamo
    compiles a code object once for all modules that share it, so another module's weights may arrive here. Replacing a
    parameter changes its identity, writing to it its version, assigning to `.data` its address; a fused optimizer's
    step changes none of the three, but comes with a new gradient. About 0.2 us a tensor, in loops that stay inside the
    interpreter's own C code. What none of them shows, samples of the elements do (`fxopt.samples`).
    `check_contents` false leaves the identity check alone.
    """

    def __init__(
        self, fn: Callable[..., Any], kept: Sequence[int], frozen: dict[int, torch.Tensor], check_contents: bool = True
    ) -> None:
        self._fn = fn
        self._kept = list(kept)
        positions = sorted(frozen)
        # itemgetter of one position gives the item itself, of several a tuple.
        self._pick: Callable[[Sequence[Any]], Any] = itemgetter(*positions) if len(positions) > 1 else _one(positions)
        self._tensors = [frozen[i] for i in positions]
        self._check_contents = check_contents
        self._state = self._read() if check_contents else None
        self._samples = Samples(self._tensors) if check_contents else None

    @property
    def output_copies(self) -> int | None:
        """Tensors that the wrapped code copies out per call, where it counts them."""
        return getattr(self._fn, "output_copies", None)

    def _read(self) -> tuple[list[Any], ...]:
        gradients = [g for g in map(attrgetter("grad"), self._tensors) if g is not None]
        return (
            list(map(attrgetter("_version"), self._tensors)),
            list(map(torch.Tensor.data_ptr, self._tensors)),
            list(map(id, gradients)),
            list(map(attrgetter("_version"), gradients)),
        )

    def __call__(self, *args: Any) -> Any:
        if not all(map(is_, self._pick(args), self._tensors)):
            raise StaleWeights("the call brings other weights than those folded into this code")
        if self._check_contents and self._read() != self._state:
            raise StaleWeights("the weights folded into this code have changed")
        if self._samples is not None and self._samples.changed():
            raise StaleWeights("the weights folded into this code have changed, unseen by torch (through .data?)")
        return self._fn(*[args[i] for i in self._kept])


def _one(positions: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    return lambda args: tuple(args[i] for i in positions)
