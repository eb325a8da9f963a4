"""tf32_matmul: the fp32 products that are left run on TF32 matrix units, in this graph alone.

Answers tensor_core_idle. cuBLAS and cuDNN read when they are called whether TF32 is allowed, from settings of the
whole process. So TF32 is allowed around the compiled code, and every setting is put back before that returns, whatever
it raises: neither another model nor Dynamo's guards see it. Inductor's own templates read the settings when they are
generated, so it is allowed then as well. Under `cuda_graphs`, which comes later, it is allowed while
the graph is captured, and a replay has nothing to switch.

before                                   after
    compiled(*args)                          with tf32(): compiled(*args)

Refuses a graph without an fp32 product that such a library computes, settings that allow TF32 already, and settings of
torch's older and newer interface that contradict each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import PassContext, RuntimePass, Stage

aten = torch.ops.aten

#: operators that cuBLAS or cuDNN may compute in TF32, and the setting that each of them reads
PRODUCTS: dict[Any, str] = {
    aten.mm.default: "matmul",
    aten.addmm.default: "matmul",
    aten.bmm.default: "matmul",
    aten.baddbmm.default: "matmul",
    aten.convolution.default: "conv",
    aten.convolution_backward.default: "conv",
    aten._cudnn_rnn.default: "rnn",
}

_backends: Any = torch.backends  # whose annotations lack the newer settings
_MATMUL = _backends.cuda.matmul
_CUDNN = (_backends.cudnn.conv, _backends.cudnn.rnn)
_SETTINGS = dict(zip(("matmul", "conv", "rnn"), (_MATMUL, *_CUDNN), strict=True))


@dataclass(frozen=True)
class Tf32Matmul(RuntimePass):
    """The fp32 products that are left run on TF32 matrix units, in this graph alone."""

    name: ClassVar[str] = "tf32_matmul"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.TF32
    before: ClassVar[tuple[str, ...]] = ("cuda_graphs",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    gradients: ClassVar[bool] = True

    def applicable(self, context: PassContext) -> str:
        if "tf32" not in context.matrix_units:
            return f"{context.device} has no TF32 matrix units"
        if context.budget.max_rel_l2 is not None and context.budget.max_rel_l2 < 1e-4:
            return "TF32 products are off by more than the error asked for"
        return ""

    def refuse(self, compiled: Any, inputs: Sequence[Any], context: PassContext) -> str:
        kinds = _kinds_of_products(compiled.post_grad)
        if compiled.backward is not None:
            kinds |= _kinds_of_products(compiled.backward.post_grad)
        if not kinds:
            return "no fp32 product is left for cuBLAS or cuDNN"
        if _allowed(kinds):
            return "the process allows TF32 already"
        with tf32():
            if not _allowed(kinds):
                return "the older and the newer TF32 settings of torch contradict each other"
        return ""

    def compiling(self) -> AbstractContextManager[None]:
        return tf32()

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        return self.wrap_backward(fn)

    def wrap_backward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with tf32():
                return fn(*args)

        return call


def _allowed(kinds: set[str]) -> bool:
    return all(_SETTINGS[kind].fp32_precision == "tf32" for kind in kinds)


def _kinds_of_products(post_grad: fx.GraphModule | None) -> set[str]:
    """Which settings the graph's fp32 products read; all of them where a cache served the code without its graph."""
    if post_grad is None:
        return set(_SETTINGS)
    found = set()
    for module in post_grad.modules():  # the branches of a condition are modules inside
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            value = node.meta.get("val")
            values = value if isinstance(value, (tuple, list)) else (value,)
            if node.target in PRODUCTS and any(getattr(v, "dtype", None) == torch.float32 for v in values):
                found.add(PRODUCTS[node.target])
    return found


class _Switch:
    """Allows TF32 in cuBLAS and cuDNN, and puts back what was.

    torch's older settings are switched, for they take the newer ones with them; the newer ones alone would make every
    read of the older raise, and torch.profiler reads those for each operator. Switched off, the older ones leave "ieee"
    where the newer had "none" (inherited), so those are put back as well. Settings that contradict each other, of which
    the older cannot be read, are left alone.
    """

    def __init__(self) -> None:
        self.newer: dict[Any, str] = {}  # what was switched, and its newer setting before
        self.matmul = self.cudnn = False
        try:
            self.matmul = torch.get_float32_matmul_precision() == "highest"
            self.cudnn = not _backends.cudnn.allow_tf32
        except RuntimeError:  # which says that the settings contradict each other
            pass
        if self.matmul:
            self.newer[_MATMUL] = _MATMUL.fp32_precision
            _MATMUL.allow_tf32 = True
        if self.cudnn:
            self.newer |= {setting: setting.fp32_precision for setting in _CUDNN}
            _backends.cudnn.allow_tf32 = True

    def restore(self) -> None:
        if self.matmul:
            _MATMUL.allow_tf32 = False
        if self.cudnn:
            _backends.cudnn.allow_tf32 = False
        for setting, before in self.newer.items():
            setting.fp32_precision = "none"
            if before != "none" and setting.fp32_precision != before:
                setting.fp32_precision = before


_lock = threading.Lock()
_inside = 0  # calls under way, in all threads
_switch: _Switch | None = None  # made by the first of them


class tf32:
    """TF32 allowed in cuBLAS and cuDNN. The last of several that overlap puts back what the first one found.

    It is in every call, so it is a class, which costs less than a generator.
    """

    def __enter__(self) -> None:
        global _inside, _switch
        with _lock:
            if _inside == 0:
                _switch = _Switch()
            _inside += 1

    def __exit__(self, *error: object) -> None:
        global _inside, _switch
        with _lock:
            _inside -= 1
            if _inside == 0 and _switch is not None:
                _switch.restore()
                _switch = None
