"""Elements of weights that were folded into code, by which writes are noticed that torch counts nowhere.

A write through `.data` (`p.data.copy_(average)`, the way in which many programs put averaged weights in) and the
statistics that a batch normalisation updates change neither a tensor's identity nor its version nor its address. To
compare the weights whole would take as long as the call. What writes to weights writes to all of them and to all of
each, though, so a few elements tell.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

#: elements of each weight that are compared from time to time, and of how many weights one is on every call
EACH, FEW = 4, 4
#: seconds after which all samples are compared again: on a GPU that waits for what is queued
INTERVAL = 1.0

_asked = 0


def look_again() -> None:
    """Makes the next call of all folded code compare all samples, as after training."""
    global _asked
    _asked += 1


class Samples:
    """What some elements of `tensors` hold. `changed()` says whether any holds something else by now.

    On every call one element each of a few tensors in the CPU's memory is compared (0.3 us each); on the first call
    after `INTERVAL` seconds or `look_again()`, a few elements of every tensor whose elements fill its memory. While a
    CUDA graph is captured, nothing that waits for the device is compared.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        views = [view for tensor in tensors if (view := _view(tensor)) is not None]
        for view in views:
            groups.setdefault((view.device, view.dtype), []).append(view)
        self._groups = list(groups.values())
        near = [view[len(view) // 2] for view in views if view.device.type == "cpu"]
        step = max(1, len(near) // FEW)
        self._few = [view for view in near[::step][:FEW] if view.item() == view.item()]  # no NaN
        self._few_before = self._read_few()
        self._before = self._read()
        self._looked, self._answered = time.monotonic(), _asked

    def changed(self) -> bool:
        if self._few and self._read_few() != self._few_before:
            return True
        now = time.monotonic()
        if now - self._looked < INTERVAL and self._answered == _asked:
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        self._looked, self._answered = now, _asked
        return not all(map(torch.equal, self._read(), self._before))

    def _read_few(self) -> list[object]:
        return list(map(torch.Tensor.item, self._few))

    def _read(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.cat(views).view(torch.uint8) for views in self._groups]  # as bytes: NaN is equal to itself


def _view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Elements at equal distances in the tensor's own memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.numel() == 0:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if reach != tensor.numel():
        return None
    count = min(EACH, reach)
    return tensor.detach().as_strided((count,), (reach // count,), tensor.storage_offset())
