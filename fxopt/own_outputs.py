"""Outputs of folded code that are the caller's to write to, as those of code that computes them in each call are.

An output that depends on weights alone is itself a constant of the code: what a caller, or the next graph after a graph
break, writes to it would be in every later call's. And where freezing lays out convolutions anew, equal values become
one tensor (torch 2.11 and 2.13), so that what is written to one output is in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fxopt.overlap import meeting


class OwnOutputs:
    """`fn`, with copies in place of such outputs.

    own: positions of the outputs in memory that the graph allocates itself, and what tells that memory from any other's
    (`dynamo.own_outputs`): those in one memory stay together. constants: the tensors that the code holds.

    Which outputs have to be copied lies in the code, and shows in the first call. From then on `settled` is what runs:
    `fn` itself where there are none.
    """

    def __init__(self, fn: Callable[..., Any], own: Mapping[int, Any], constants: Iterable[torch.Tensor]) -> None:
        self._fn, self._own = fn, own
        # Addresses, for the code keeps the constants alive as long as this is used, and nothing else should.
        self._held = {place for value in constants if (place := memory_of(value)) is not None}
        self.settled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.settled is not None:
            return self.settled(*args)
        outputs = self._fn(*args)
        groups = self._copied(outputs)
        self.settled = partial(_run, self._fn, groups) if groups else self._fn
        return _with_copies(outputs, groups)

    def _copied(self, outputs: Sequence[Any]) -> list[list[int]]:
        """Positions of the outputs to be copied, in groups that share memory in Dynamo's graph, too."""
        keys = {
            i: (memory, place)
            for i, memory in self._own.items()
            if isinstance(outputs[i], torch.Tensor) and (place := memory_of(outputs[i])) is not None
        }
        copied = {key: None for key in keys.values() if key[1] in self._held}
        several = Counter(place for _, place in keys.values())
        for i, j in meeting({i: outputs[i] for i, (_, place) in keys.items() if several[place] > 1}):
            if keys[i] != keys[j]:
                copied[keys[j]] = None
        return [[i for i in keys if keys[i] == key] for key in copied]


def memory_of(value: torch.Tensor) -> tuple[torch.device, int] | None:
    """What tells the memory of a tensor from any other; None where it has none, or none to look at."""
    if value.layout is not torch.strided or value.is_mkldnn or value.numel() == 0:
        return None
    return value.device, value.untyped_storage().data_ptr()


def _run(fn: Callable[..., Any], groups: Sequence[Sequence[int]], *args: Any) -> Any:
    return _with_copies(fn(*args), groups)


def _with_copies(outputs: Sequence[Any], groups: Sequence[Sequence[int]]) -> Sequence[Any]:
    if not groups:
        return outputs
    copied = list(outputs)
    for group in groups:
        for i, value in zip(group, _copies([outputs[i] for i in group]), strict=True):
            copied[i] = value
    return copied


def _copies(members: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one memory that lie in one memory, with the same strides."""
    first = members[0]
    if any(value.is_conj() or value.is_neg() for value in members):
        return [value.clone() for value in members]
    if len(members) == 1:
        copy = first.clone()
        if copy.stride() == first.stride():
            return [copy]
    from fxopt.reference import copies_together  # what has gaps, or views, is rare

    return copies_together(list(members))
