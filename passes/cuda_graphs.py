"""cuda_graphs: capture the compiled code once and replay it, so that the GPU no longer waits for the CPU.

Answers launch_bound. Inputs that may move are copied into fixed storage before each replay; parameters are read
where they are, and a replay whose parameters have moved captures anew. Outputs are copied out, so that a result
stays what it was when the next call runs: `output_copies` counts those copies. Refuses whatever a replay cannot
reproduce: CPU tensors, symbolic sizes, inputs that the code writes to, random numbers, more than one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fxopt.labels import Axis
from fxopt.registry import PassContext, RuntimePass, Stage
from fxopt.torch_api.cuda import cublas_workspaces_of_a_capture
from fxopt.verify import Precision


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

    def applicable(self, context: PassContext) -> str:
        if context.grad:
            return "gradients are on: a replay has no backward"
        if context.dynamic:
            return "sizes are symbolic: a graph holds one shape"
        return ""

    def refuse(self, compiled: Any, inputs: Sequence[Any], context: PassContext) -> str:
        if compiled.mutated:
            return f"the code writes to inputs {sorted(compiled.mutated)}"
        if context.random:
            return f"it draws random numbers ({', '.join(context.random[:3])})"
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                if value.device != context.device:
                    return f"input {position} is on {value.device}, the graph on {context.device}"
            elif not isinstance(value, (int, float, bool, type(None))):
                return f"input {position} is a {type(value).__name__}"
        return ""

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        return GraphReplay(fn, static=context.static, device=context.device, warmup=self.warmup)


class _Captured:
    """One capture: the graph, its fixed inputs and its outputs."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], static: frozenset[int], warmup: int) -> None:
        tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
        self.copied = [i for i in tensors if i not in static]
        self.fixed = [i for i in tensors if i in static]
        self.constants = {i: value for i, value in enumerate(args) if not isinstance(value, torch.Tensor)}
        # The code may have been compiled for these very strides, so the fixed storage keeps them.
        self.args = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            if i in set(self.copied)
            else value
            for i, value in enumerate(args)
        ]
        for i in self.copied:
            self.args[i].copy_(args[i])
        self.addresses = [args[i].data_ptr() for i in self.fixed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                fn(*self.args)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with (
            cublas_workspaces_of_a_capture(),
            torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"),
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
            if home is not None and self.args[home].dtype == out.dtype:
                offset = out.storage_offset() - self.args[home].storage_offset()
                view = None if self.args[home] is out else (out.size(), out.stride(), offset)
                self.inside[k] = (home, view)
        tensors_out = [k for k, out in enumerate(self.outputs) if isinstance(out, torch.Tensor)]
        self.copies = [k for k in tensors_out if k not in self.inside]
        # Outputs that lie in one memory have to do so in the caller's, too; and of an output with gaps `clone` does not
        # keep the strides.
        together: dict[int, list[int]] = {}
        for k in self.copies:
            if self.outputs[k].layout is torch.strided:
                together.setdefault(self.outputs[k].untyped_storage().data_ptr(), []).append(k)
        gaps = {k for k in self.copies if self.outputs[k].clone().stride() != self.outputs[k].stride()}
        self.shared = [group for address, group in together.items() if address and (len(group) > 1 or gaps & {*group})]
        self.apart = [k for k in self.copies if not any(k in group for group in self.shared)]
        self.stream = torch.cuda.current_stream()

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether the parameters are where they were and every other value is one that was captured."""
        return [args[i].data_ptr() for i in self.fixed] == self.addresses and all(
            args[i] == value for i, value in self.constants.items()
        )

    def replay(self, args: tuple[Any, ...]) -> Any:
        current = torch.cuda.current_stream()
        if current != self.stream:
            # The fixed buffers belong to one stream at a time.
            current.wait_stream(self.stream)
            self.stream = current
        mine = self.args
        for i in self.copied:
            mine[i].copy_(args[i], non_blocking=True)
        self.graph.replay()
        results = list(self.outputs)
        for k in self.apart:
            results[k] = self.outputs[k].clone()
        for group in self.shared:
            for k, copied in zip(group, _copied_together([self.outputs[k] for k in group]), strict=True):
                results[k] = copied
        for k, (i, view) in self.inside.items():
            if view is None:
                results[k] = args[i]
            else:
                size, stride, offset = view
                results[k] = args[i].as_strided(size, stride, args[i].storage_offset() + offset)
        return results[0] if self.single else results


def _copied_together(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory as these do, who all lie in one storage; an output that is there twice stays one."""
    device = outputs[0].device
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(outputs[0].untyped_storage()).clone()
    copies: dict[int, torch.Tensor] = {}
    for out in outputs:
        if id(out) not in copies:
            view = torch.empty(0, dtype=out.dtype, device=device)
            copies[id(out)] = view.set_(whole.untyped_storage(), out.storage_offset(), out.size(), out.stride())
    return [copies[id(out)] for out in outputs]


class GraphReplay:
    """A compiled callable behind a CUDA graph. Thread-safe; captures again when parameters have moved."""

    def __init__(self, fn: Callable[..., Any], *, static: frozenset[int], device: torch.device, warmup: int) -> None:
        self._fn = fn
        self._static = static
        self._device = device
        self._warmup = warmup
        self._lock = threading.Lock()
        self._captured: _Captured | None = None

    @property
    def output_copies(self) -> int | None:
        """Tensors copied out per call; None before the first call."""
        return len(self._captured.copies) if self._captured is not None else None

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            captured = self._captured
            if captured is None or not captured.fits(args):
                with torch.cuda.device(self._device):
                    captured = self._captured = _Captured(self._fn, args, self._static, self._warmup)
            return captured.replay(args)
