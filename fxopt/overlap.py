"""Inputs that overlap in memory while the graph writes to one of them.

What AOTAutograd and Inductor make of such a call is wrong (seen in torch 2.11 and 2.13: the write does not reach the
other input), or fails in a later call whose inputs lie apart; and nothing guards code that was compiled for inputs
apart from each other. Such a call runs the graph as Dynamo captured it. Only graphs that write to an input of the
caller's are looked at, half a microsecond an input and call; their parameters and buffers where another tensor may lie
in the memory of a written input.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxopt.frozen import picker
from fxopt.torch_api import dynamo
from fxopt.torch_api.calls import storage_users


class OverlapWatch:
    """The inputs of one graph that may come to overlap, and the graph as it was captured.

    written, watched: positions of the inputs that the graph writes to, and of the caller's that could overlap with
    these. static: those of parameters and buffers, which could as well.
    """

    def __init__(
        self, gm: fx.GraphModule, written: frozenset[int], watched: Sequence[int], static: Sequence[int]
    ) -> None:
        self.captured = dynamo.captured(gm)
        self._written, self._in_order = written, sorted(written)
        self._watched, self._static, self._pick_static = list(watched), list(static), picker(static)
        self._last: tuple[Any, bool] = (None, False)  # what was found of which tensors in one memory
        self._last_static: tuple[Any, bool] = (None, False)

    @staticmethod
    def of(gm: fx.GraphModule, inputs: Sequence[Any]) -> OverlapWatch | None:
        """None where nothing can overlap: the graph writes to none of the caller's tensors, or gets only one."""
        if any(dynamo.is_fake(value) for value in inputs):
            return None
        static = dynamo.static_inputs(gm, inputs)
        strided = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.layout is torch.strided]
        watched = [i for i in strided if i not in static]
        written = dynamo.written_inputs(gm) & frozenset(watched)
        if not written or len(strided) < 2:
            return None
        return OverlapWatch(gm, written, watched, [i for i in strided if i in static])

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether an input that is written to has an element in common with another one."""
        tensors = [args[i] for i in self._watched]
        if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors):
            where = [_place(tensor) for tensor in tensors]
            known, found = self._last
            if known != where:
                found = self._any_meet(args, self._watched)
                self._last = where, found
            if found:
                return True
        return bool(self._static) and self._overlaps_static(args)

    def _overlaps_static(self, args: Sequence[Any]) -> bool:
        written = [args[i] for i in self._in_order]
        if not any(map(_in_use_elsewhere, written)):
            return False
        # One by one, for `p.data = ...` moves a parameter without a trace; 148 take 12 us.
        where = [*map(torch.Tensor.data_ptr, self._pick_static(tuple(args))), *map(_place, written)]
        known, found = self._last_static
        if known != where:
            memory = {tensor.untyped_storage().data_ptr() for tensor in written}
            near = [i for i in self._static if args[i].untyped_storage().data_ptr() in memory]
            found = self._any_meet(args, [*self._in_order, *near])
            self._last_static = where, found
        return found

    def _any_meet(self, args: Sequence[Any], positions: Sequence[int]) -> bool:
        return any(True for _ in meeting({i: args[i] for i in positions}, self._written))

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, but for calls with overlapping inputs, which run the captured graph."""

        def checked(*args: Any) -> Any:
            return self.captured(*args) if self.overlap(args) else fn(*args)

        return checked


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


def _in_use_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether anything but this tensor and Python's object of its memory holds that, as a view does."""
    return storage_users is None or storage_users(tensor.untyped_storage()._cdata) > 2


def meeting(
    tensors: Mapping[int, torch.Tensor], wanted: Container[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Pairs of strided tensors, by position, that have an element in common; of all, or of those with one `wanted`."""
    spans = sorted((*_addresses(tensor), i) for i, tensor in tensors.items() if tensor.numel())
    for n, (_, end, i) in enumerate(spans):
        for low, _, j in spans[n + 1 :]:
            if low >= end:
                break
            if (wanted is None or i in wanted or j in wanted) and _meet(tensors[i], tensors[j]):
                yield min(i, j), max(i, j)


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Half-open range of addresses, from the first element to past the last."""
    from fxopt.reference import extent  # only where inputs lie in one memory

    low, high = extent(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + (high - low) * tensor.element_size()


#: steps after which two tensors count as overlapping; views of an ordinary tensor take a handful
_MOST_STEPS = 1000


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors whose ranges overlap have an address in common, as columns of one matrix have not.

    They have if y's first address minus x's is a sum of c * stride over the strides of both, each c within the sizes.
    The largest stride is chosen first, so that what the others can still reach leaves few c to try.
    """
    apart = y.data_ptr() - x.data_ptr()
    if x.element_size() != y.element_size() or apart % x.element_size():
        return True
    steps: dict[int, list[int]] = {}
    for tensor, side in ((x, 1), (y, 0)):
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
            steps.setdefault(stride, [0, 0])[side] += size - 1
    terms = [(stride, -low, high) for stride, (low, high) in sorted(steps.items(), reverse=True) if stride]
    left = _MOST_STEPS

    def reachable(target: int, n: int) -> bool:
        nonlocal left
        if n == len(terms):
            return target == 0
        stride, low, high = terms[n]
        least, most = (sum(term[side] * term[0] for term in terms[n + 1 :]) for side in (1, 2))
        first, last = max(low, -((most - target) // stride)), min(high, (target - least) // stride)
        left -= max(0, last - first + 1)
        return left < 0 or any(reachable(target - c * stride, n + 1) for c in range(first, last + 1))

    return reachable(apart // x.element_size(), 0)
