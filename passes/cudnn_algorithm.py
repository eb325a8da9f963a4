"""cudnn_algorithm: convolution algorithms that cuDNN measured, instead of those that its heuristic guesses.

Answers compute_bound, memory_bound and tensor_core_idle in graphs with convolutions. What
`torch.backends.cudnn.benchmark = True` does, for this code alone: the flag is set during its first call and put back.

torch keeps the plan of each convolution that has run, by its shapes and for each thread, and asks neither the heuristic
nor the flag again. In a thread that ran the model before, a search would therefore not take place; so the code runs in
a thread of its own, on the caller's stream. That costs a hand-over a call, unless the code is then captured in a CUDA
graph, whose replay no longer comes here.
Refuses graphs without convolutions, sizes that change, and a process that asks for deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fxopt.labels import Axis
from fxopt.registry import PassContext, RuntimePass, Stage
from fxopt.verify import Precision


@dataclass(frozen=True)
class CudnnAlgorithm(RuntimePass):
    """Convolution algorithms that cuDNN measured, instead of those that its heuristic guesses."""

    name: ClassVar[str] = "cudnn_algorithm"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32
    before: ClassVar[tuple[str, ...]] = ("cuda_graphs",)
    #: by itself, so that what a search found is verified and timed apart from other passes
    last: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def applicable(self, context: PassContext) -> str:
        if context.grad:
            return "gradients are on: the backward runs in other threads"
        if context.dynamic:
            return "sizes are symbolic: each would be searched for while it is used"
        if not torch.backends.cudnn.enabled:
            return "cuDNN is switched off"
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are asked for, and a search may end differently each time"
        if torch.backends.cudnn.benchmark:
            return "torch.backends.cudnn.benchmark is on already"
        return ""

    def refuse(self, compiled: Any, inputs: Sequence[Any], context: PassContext) -> str:
        # A cache that served the code keeps no graph, but the names of the measured one are known.
        nodes = compiled.post_grad.graph.nodes if compiled.post_grad is not None else ()
        if not any(node.target is torch.ops.aten.convolution.default for node in nodes) and not (
            compiled.post_grad is None and any(name.startswith("convolution") for name in context.origins)
        ):
            return "it has no convolution"
        return ""

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        return Searched(fn, context.device)


class Searched:
    """A callable whose first call lets cuDNN search; every call runs in one thread, which keeps what was found."""

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self._fn = fn
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fxopt-cudnn")
        self._searched = False

    @property
    def output_copies(self) -> int | None:
        """Tensors that the wrapped code copies out per call, where it counts them."""
        return getattr(self._fn, "output_copies", None)

    def __call__(self, *args: Any) -> Any:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return self._thread.submit(self._run, stream, modes, args).result()

    def _run(self, stream: Any, modes: tuple[bool, bool], args: tuple[Any, ...]) -> Any:
        grad, inference = modes
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            if self._searched:
                return self._fn(*args)
            before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                result = self._fn(*args)
            finally:
                torch.backends.cudnn.benchmark = before
            self._searched = True
            return result
