"""cuda_graphs: capture the compiled code once and replay it, so that the GPU no longer waits for the CPU.

Answers launch_bound. Inputs that may move are copied into fixed storage before each replay, all of one type by one
kernel. Parameters, and inputs that the code writes to (a static key-value cache), are used where they are: each call
looks at their addresses, and one whose memory has moved is captured anew, a bounded number of times, and runs
plainly after that. Warming up writes to copies, so that a first call changes its inputs once. A result stays what it
was for as long as the caller holds it: outputs are handed out where the graph wrote them, and while anything of that
memory is held, another capture of the same code runs, whose outputs are copied out. Refuses whatever a replay cannot
reproduce: CPU tensors, symbolic sizes, random numbers, more than one device, an input that shares memory with one that
is written to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fxopt.frozen import picker
from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import PassContext, RuntimePass, Stage
from fxopt.torch_api.calls import current_stream_address, storage_users
from fxopt.torch_api.cuda import cublas_workspaces_of_a_capture


@dataclass(frozen=True)
class CudaGraphs(RuntimePass):
    """Capture the compiled code once and replay it, so that the GPU no longer waits for the CPU."""

    name: ClassVar[str] = "cuda_graphs"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.LAUNCH_BOUND})
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    #: calls before the capture, on a side stream, so that lazy initialisation is over (torch's own advice)
    warmup: int = 2
    #: captures held at most, one for each set of addresses and numbers; after as many, one call in 100 may be captured
    captures: int = 8

    def applicable(self, context: PassContext) -> str:
        if context.grad:
            return "gradients are on: a replay has no backward"
        if context.dynamic:
            return "sizes are symbolic: a graph holds one shape"
        return ""

    def refuse(self, compiled: Any, inputs: Sequence[Any], context: PassContext) -> str:
        if context.random:
            return f"it draws random numbers ({', '.join(context.random[:3])})"
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                if value.device != context.device:
                    return f"input {position} is on {value.device}, the graph on {context.device}"
                if position not in context.static and _overlaps_itself(value):
                    return f"input {position} holds one element in several places, which nothing can be copied into"
            elif not isinstance(value, (int, float, bool, type(None))):
                return f"input {position} is a {type(value).__name__}"
        places = {i: _place(value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        for written in sorted(compiled.mutated or ()):
            for other, place in places.items():
                if other != written and place and place == places.get(written):
                    return f"input {other} shares memory with input {written}, which the code writes to"
        return ""

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        return GraphReplay(
            fn,
            static=context.static,
            written=frozenset(compiled.mutated or ()),
            device=context.device,
            warmup=self.warmup,
            captures=self.captures,
        )


class MovedMetadata(RuntimeError):
    """The code gives an input another shape or another storage, which no replay does."""


def _seen_in(value: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `out`, which lies in the memory of `value`, is a strided view of it, or of it as another type."""
    same_bits = value.is_conj() == out.is_conj() and value.is_neg() == out.is_neg()
    return same_bits and value.dtype.itemsize == out.dtype.itemsize and value.is_complex() == out.is_complex()


def _place(value: torch.Tensor) -> int:
    """Address of the memory that a tensor is part of; 0 where it has none of its own."""
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else 0


def _overlaps_itself(value: torch.Tensor) -> bool:
    """Whether two elements lie in one place: an expanded tensor."""
    return value.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(value.size(), value.stride(), strict=True)
    )


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, for which the code may have been compiled. It can be written to in any mode."""
    with torch.inference_mode(False):
        place = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return _filled(place, value)


def _filled(place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`place` with what `value` holds."""
    with torch.inference_mode(False), torch.no_grad():
        return place.copy_(value)


def _by_dtype(positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """`positions` in groups whose tensors one kernel can copy."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in positions:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())


class _Captured:
    """One capture: the graph, its fixed inputs and its outputs.

    stream: what it is captured on, one for all that share a pool, for a pool's memory is used again on the stream alone
    that had it. other: a capture of the same code whose pool is used. lends: whether outputs may be handed out where
    they lie. Only the first capture of a pool may: nothing that it keeps is given to a later one, which does use again
    what the first needs for a while. twin: whether `other` was captured for these arguments, so that its fixed inputs
    can be shared.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        static: frozenset[int],
        written: frozenset[int],
        warmup: int,
        stream: Any,
        other: _Captured | None = None,
        lends: bool = False,
        twin: bool = False,
    ) -> None:
        tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
        self.written = [i for i in tensors if i in written]
        self.fixed = [i for i in tensors if i in static or i in written]
        self.copied = [i for i in tensors if i not in self.fixed]
        self.constants = [(i, value) for i, value in enumerate(args) if not isinstance(value, torch.Tensor)]
        shared: list[Any] | None = other.args if twin and other is not None else None
        self.args: list[Any] = [
            value if i not in self.copied else _copy(value) if shared is None else _filled(shared[i], value)
            for i, value in enumerate(args)
        ]
        groups = _by_dtype(self.copied, self.args)
        self.inputs = [([self.args[i] for i in group], picker(group)) for group in groups]
        self._all_fixed = picker(self.fixed)
        self.addresses = self._addresses(args)
        # What is written to stays as it is until the first replay: only copies of it are written while warming up.
        rehearsal = [_copy(value) if i in self.written else value for i, value in enumerate(self.args)]
        forms = [_form(rehearsal[i]) for i in self.written]
        stream.wait_stream(torch.cuda.current_stream())
        rehearsed: Any = None
        with torch.cuda.stream(stream):
            for _ in range(max(warmup, 1 if self.written else 0)):
                for i in self.written:
                    rehearsal[i].copy_(args[i])
                rehearsed = fn(*rehearsal)
                if [_form(rehearsal[i]) for i in self.written] != forms:
                    raise MovedMetadata
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        del rehearsal
        self.graph = torch.cuda.CUDAGraph()
        with (
            cublas_workspaces_of_a_capture(),
            torch.cuda.graph(
                self.graph,
                stream=stream,
                pool=None if other is None else other.graph.pool(),
                capture_error_mode="thread_local",
            ),
        ):
            outputs = fn(*self.args)
        self.single = not isinstance(outputs, (list, tuple))
        self.outputs = [outputs] if self.single else list(outputs)
        # An output that lies in one of the caller's own inputs must go on doing so; it is not copied.
        self.inside: dict[int, tuple[int, Any]] = {}
        homes = {self.args[i].untyped_storage().data_ptr(): i for i in tensors if self.args[i].layout is torch.strided}
        for k, out in enumerate(self.outputs):
            if not isinstance(out, torch.Tensor) or out.layout is not torch.strided:
                continue
            home = homes.get(out.untyped_storage().data_ptr()) if out.untyped_storage().nbytes() else None
            home = next((i for i in tensors if self.args[i] is out), home)
            if home is not None and _seen_in(self.args[home], out):
                offset = out.storage_offset() - self.args[home].storage_offset()
                view = None if self.args[home] is out else (out.dtype, out.size(), out.stride(), offset)
                self.inside[k] = (home, view)
        tensors_out = [k for k, out in enumerate(self.outputs) if isinstance(out, torch.Tensor)]
        # What lies where it lay in a call before is not the graph's own: a constant of the code, or memory that it uses
        # on each call.
        others = {0, *homes, *map(_place, _tensors(rehearsed))}
        outside = [k for k in tensors_out if k not in self.inside]
        own = [k for k in outside if self._own(k, others)]
        # What is copied does not share memory with what is handed out, as it may have to.
        copied = {_place(self.outputs[k]) for k in outside if k not in own}
        own = [k for k in own if _place(self.outputs[k]) not in copied]
        self.lent = own if lends and storage_users is not None and rehearsed is not None else []
        first = {id(self.outputs[k]): k for k in reversed(self.lent)}
        self.again = [(k, first[id(self.outputs[k])]) for k in self.lent if first[id(self.outputs[k])] != k]
        self.copies = [k for k in outside if k not in self.lent]
        # Outputs that lie in one memory have to do so in the caller's, too; and of an output with gaps `clone` does not
        # keep the strides.
        together: dict[int, list[int]] = {}
        for k in self.copies:
            if self.outputs[k].layout is torch.strided:
                together.setdefault(self.outputs[k].untyped_storage().data_ptr(), []).append(k)
        gaps = {k for k in self.copies if self.outputs[k].clone().stride() != self.outputs[k].stride()}
        self.shared = [group for address, group in together.items() if address and (len(group) > 1 or gaps & {*group})]
        alone = [k for k in self.copies if not any(k in group for group in self.shared)]
        dense = [k for k in alone if self.outputs[k].layout is torch.strided]
        groups = [*_by_dtype(dense, self.outputs), *([k] for k in alone if k not in dense)]
        self.apart = [(group, [self.outputs[k] for k in group]) for group in groups]
        del rehearsed, outputs
        self._storages = [self.outputs[k].untyped_storage() for k in self.lent]
        self._homes = [storage._cdata for storage in self._storages]
        self._users, self._lying = self._in_use(), self._places()
        # The caller's memory is the caller's to free: a replay is only ever made where it lies as it did.
        for i in self.fixed:
            self.args[i] = None
        for k in self.inside:
            self.outputs[k] = None

    def _own(self, k: int, others: set[int]) -> bool:
        """Whether output k can be handed out where it lies: a plain tensor in memory that the capture allocated."""
        out = self.outputs[k]
        plain = type(out) is torch.Tensor and out.layout is torch.strided
        return plain and not out.is_conj() and not out.is_neg() and _place(out) not in others

    def _in_use(self) -> list[int]:
        # How many tensors hold each memory, and how many hold Python's object of it, of which there is one for all.
        tensors = map(storage_users, self._homes) if storage_users is not None else ()
        return [*tensors, *map(sys.getrefcount, self._storages)]

    def _places(self) -> list[int]:
        return [self.outputs[k].data_ptr() for k in self.lent]

    def free(self) -> bool:
        """Whether nobody holds anything of the memory of the outputs that were handed out, and it is where it was:
        `resize_` of what was handed out moves it.
        """
        return self._in_use() == self._users and self._places() == self._lying

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that inputs are copied into and that outputs lie in."""
        held = [self.args[i] for i in self.copied] + [self.outputs[k] for k in (*self.copies, *self.lent)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in held if t.layout is torch.strided}
        return sum(storage.nbytes() for storage in storages.values())

    def _addresses(self, args: tuple[Any, ...]) -> list[int]:
        # Parameters are looked at one by one, for `p.data = ...` moves one without a trace; 148 take 12 us.
        return list(map(torch.Tensor.data_ptr, self._all_fixed(args)))

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether parameters and written inputs are where they were and every other value is one that was captured."""
        for i, value in self.constants:
            if args[i] != value:
                return False
        return not self.fixed or self._addresses(args) == self.addresses

    def replay(self, args: tuple[Any, ...]) -> Any:
        for mine, pick in self.inputs:
            if len(mine) == 1:
                mine[0].copy_(pick(args)[0], True)
            else:
                torch._foreach_copy_(mine, pick(args), True)
        self.graph.replay()
        if self.written:
            torch.autograd.graph.increment_version([args[i] for i in self.written])
        results = list(self.outputs)
        for k in self.lent:
            results[k] = _alias(results[k])
        for k, earlier in self.again:
            results[k] = results[earlier]
        for group, captured in self.apart:
            if len(group) == 1:
                results[group[0]] = captured[0].clone()
                continue
            copies = list(map(torch.empty_like, captured))
            torch._foreach_copy_(copies, captured)
            for k, copied in zip(group, copies, strict=True):
                results[k] = copied
        for group in self.shared:
            for k, copied in zip(group, _copied_together([self.outputs[k] for k in group]), strict=True):
                results[k] = copied
        for k, (i, view) in self.inside.items():
            if view is None:
                results[k] = args[i]
            else:
                dtype, size, stride, offset = view
                seen = args[i] if args[i].dtype == dtype else args[i].view(dtype)
                results[k] = seen.as_strided(size, stride, seen.storage_offset() + offset)
        return results[0] if self.single else results


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Those of an output; none of None."""
    return [t for t in (outputs if isinstance(outputs, (list, tuple)) else [outputs]) if isinstance(t, torch.Tensor)]


def _alias(out: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory, which is of use in any mode, whatever the capture's was."""
    if out.is_inference():
        there = torch.empty(0, dtype=out.dtype, device=out.device)
        return there.set_(out.untyped_storage(), out.storage_offset(), out.size(), out.stride())
    return out.data


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return value.size(), value.stride(), value.storage_offset(), value.data_ptr()


def _copied_together(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory as these do, who all lie in one storage; an output that is there twice stays one."""
    device = outputs[0].device
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(outputs[0].untyped_storage()).clone()
    copies: dict[int, torch.Tensor] = {}
    for out in outputs:
        if id(out) not in copies:
            view = torch.empty(0, dtype=out.dtype, device=device)
            view.set_(whole.untyped_storage(), out.storage_offset(), out.size(), out.stride())
            view = torch._neg_view(view) if out.is_neg() else view
            copies[id(out)] = view.conj() if out.is_conj() else view
    return [copies[id(out)] for out in outputs]


class GraphReplay:
    """A compiled callable behind CUDA graphs. Thread-safe.

    A result is as good as a copy for whoever holds it, or a view of it, and for what the stream that it was made on
    still does with it. Who lets go of one that yet another stream reads has to wait for that stream first;
    `record_stream`, which does that for other tensors, does not do it here.

    static, written: positions of the arguments that are used where they are: parameters, and tensors that `fn` writes
    to. A call whose addresses and numbers fit none of the captures is captured. After `captures` of these, at most one
    call in 100 is, in place of the one not used for longest, and the others run `fn` itself: a capture costs as much as
    dozens of calls.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        static: frozenset[int],
        device: torch.device,
        warmup: int,
        written: frozenset[int] = frozenset(),
        captures: int = 8,
    ) -> None:
        self._fn = fn
        self._static = static
        self._written = written
        self._device = device
        self._warmup = warmup
        self._limit = captures
        self._lock = threading.Lock()
        self._captured: list[_Captured] = []  # the one used last comes first
        self._twin: _Captured | None = None  # of the capture that lends its outputs
        self._no_room = False  # whether there was no memory for it
        self._side: Any = None  # the stream of all captures
        self._lent_on: Any = None  # the stream on which outputs were last handed out
        self._lent_address: int | None = None
        self._made = 0
        self._calls = 0
        self._index = -1 if device.index is None else device.index  # of the device; -1: of the current one
        self._stream: Any = None
        self._address: int | None = None  # of that stream, which is asked for sooner than the stream itself

    @property
    def output_copies(self) -> int | None:
        """Tensors copied out on every call, also where nobody holds earlier ones; None before the first call."""
        return len(self._captured[0].copies) if self._captured else None

    @property
    def held_bytes(self) -> int:
        """Bytes of the fixed inputs and outputs of all captures; what code writes in between they share."""
        copied = [] if self._twin is None else [self._twin.outputs[k] for k in self._twin.copies]
        of_twin = sum(out.untyped_storage().nbytes() for out in copied if out.layout is torch.strided)
        return of_twin + sum(captured.held_bytes for captured in self._captured)

    @property
    def captures(self) -> int:
        """Sets of addresses and numbers captured so far."""
        return self._made

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            self._calls += 1
            held = self._captured
            captured = held[0] if held and held[0].fits(args) else self._find(args)
            if captured is None:
                return self._fn(*args)
            address, before = current_stream_address(self._index), self._address
            if address != before:
                self._follow(address)
            if captured.lent:
                if captured.free():
                    self._lend(address, before)
                else:
                    captured = self._without_lending(captured, args)
                    if captured is None:
                        return self._fn(*args)
            return captured.replay(args)

    def _lend(self, address: int, before: int | None) -> None:
        """Of a result that was let go of, its own stream may still read what the current one will write: the current
        one waits, unless it has waited for that one as the stream of the call before.
        """
        if address != self._lent_address:
            if self._lent_address not in (None, before):
                self._stream.wait_stream(self._lent_on)
            self._lent_on, self._lent_address = self._stream, address

    def _without_lending(self, lender: _Captured, args: tuple[Any, ...]) -> _Captured | None:
        """A capture of the same call whose outputs are copied out, for a caller that holds those of the lender; None
        where there is no memory for it.
        """
        if self._twin is None and not self._no_room:
            try:
                self._twin = self._capture(args, lender, twin=True)
            except RuntimeError:  # out of memory, which the end of a capture puts in other words, or MovedMetadata
                self._no_room = True
        return self._twin

    def _capture(self, args: tuple[Any, ...], other: _Captured | None, **kind: bool) -> _Captured:
        with torch.cuda.device(self._device):
            if self._side is None:
                self._side = torch.cuda.Stream()
            return _Captured(self._fn, args, self._static, self._written, self._warmup, self._side, other, **kind)

    def _follow(self, address: int) -> None:
        """The captures share memory, which belongs to one stream at a time: the current one, from now on."""
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._address = current, address

    def _find(self, args: tuple[Any, ...]) -> _Captured | None:
        """The capture that fits, made if need be; None where the code has to be called plainly."""
        for place, captured in enumerate(self._captured):
            if captured.fits(args):
                if place:
                    self._captured.insert(0, self._captured.pop(place))
                return captured
        if self._limit == 0 or self._made >= self._limit + self._calls // 100:
            return None
        # Replays follow one another, and what is handed out belongs to the first alone, so that all can work in the
        # same memory.
        other = self._captured[0] if self._captured else None
        try:
            captured = self._capture(args, other, lends=self._made == 0)
        except MovedMetadata:
            self._limit = 0
            return None
        self._made += 1
        self._captured = [captured, *self._captured[: self._limit - 1]]
        if not any(one.lent for one in self._captured):
            self._twin = None
        return captured
