"""cudnn_algorithm: convolution algorithms that cuDNN measured, instead of those that its heuristic guesses.

Answers compute_bound, memory_bound and tensor_core_idle in graphs with convolutions. What
`torch.backends.cudnn.benchmark = True` does, for this code alone: the flag is set during its first call and put back.

torch keeps the plan of each convolution that has run, by its shapes and for each thread, and asks neither the heuristic
nor the flag again. In a thread that ran the model before, a search would therefore not take place; so the code runs in
a thread of its own, on the caller's stream. That costs a hand-over a call, unless the code is then captured in a CUDA
graph, whose replay no longer comes here.

A search takes the fastest kernel, and a kernel may be fast and wrong. So the first call runs the code as it was, too,
and where the two do not agree the search is thrown away: in each process, since each searches anew.
Refuses graphs without convolutions, sizes that change, code that may not run twice, and a process that asks for
deterministic algorithms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import PassContext, RuntimePass, Stage
from fxopt.warning import warn


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
        if compiled.mutated or context.random:
            return "it writes to inputs or draws random numbers, and the first call runs twice"
        return ""

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        return Searched(fn, context.device)


#: how often what a search found is compared with the code's own result
RUNS = 4


class Searched:
    """A callable whose first call lets cuDNN search; later ones run in one thread, which keeps what was found.

    The first call's result is the code's own. If what the search found gives another, it is not used, with a warning.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self._fn = fn
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fxopt-cudnn")
        self._lock = threading.Lock()
        self._found: bool | None = None  # whether a search was made, and is of use

    @property
    def output_copies(self) -> int | None:
        """Tensors that the wrapped code copies out per call, where it counts them."""
        return getattr(self._fn, "output_copies", None)

    def __call__(self, *args: Any) -> Any:
        if self._found is None:
            with self._lock:
                if self._found is None:
                    return self._first(args)
        return self._there(args) if self._found else self._fn(*args)

    def _first(self, args: tuple[Any, ...]) -> Any:
        expected = self._fn(*args)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return expected  # in a capture nothing can be looked at
        try:
            # Several times, for a kernel that is wrong may be so only now and then.
            self._found = all(agree(self._there(args, search=turn == 0), expected) for turn in range(RUNS))
            why = "what cuDNN's search found gives other results than its heuristic"
        except Exception as error:
            self._found, why = False, f"cuDNN's search failed: {type(error).__name__}: {error}"
        if not self._found:
            self._thread.shutdown(wait=False)
            warn(f"cudnn_algorithm: {why}; it is not used")
        return expected

    def _there(self, args: tuple[Any, ...], search: bool = False) -> Any:
        """The result of the code in its own thread, on the caller's stream."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return self._thread.submit(self._run, stream, modes, search, args).result()

    def _run(self, stream: Any, modes: tuple[bool, bool], search: bool, args: tuple[Any, ...]) -> Any:
        grad, inference = modes
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            if not search:
                return self._fn(*args)
            before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                return self._fn(*args)
            finally:
                torch.backends.cudnn.benchmark = before


def _alike(dtype: torch.dtype) -> float:
    """Relative L2 difference up to which two algorithms are taken to compute the same: eight unit roundoffs of what
    they may compute in, and of fp32, whose sums are long, what Winograd's transforms cost.
    """
    if dtype == torch.float32:
        return 8 * 2.0**-11 if _tf32() else 1e-5
    return {torch.float16: 8 * 2.0**-11, torch.bfloat16: 8 * 2.0**-8}.get(dtype, 1e-9)


def _tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the older and the newer settings contradict each other
        return True


def agree(found: Any, expected: Any) -> bool:
    """Whether two results of one code are the same but for rounding."""
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(b, torch.Tensor) or not b.is_floating_point():
            continue
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return False
        wide = torch.where(finite, b, 0).to(torch.float64)
        off = torch.linalg.vector_norm(torch.where(finite, a, 0).to(torch.float64) - wide)
        if off > _alike(b.dtype) * torch.linalg.vector_norm(wide):
            return False
    return True
