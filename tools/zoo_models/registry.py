"""What a model of the zoo is: how it is made, with which inputs it is called, and under which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: relative L2 difference from eager that another order of fp32 operations explains in a model of a few layers
FP32 = 2e-5
#: the same in bf16: eager rounds after every operator, Inductor's fused code need not
BF16 = 3e-2
#: why what draws random numbers differs from eager
OWN_STREAM = "Inductor draws from a random stream of its own unless fallback_random is set"


@dataclass(frozen=True)
class Call:
    """One call: its arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


#: what a maker returns: a module or function, the calls to make one after another, and tensors that it may write to
#: besides a module's own
Made = tuple[Callable[..., Any], Sequence[Any]] | tuple[Callable[..., Any], Sequence[Any], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Model:
    """One model of the zoo.

    make: makes it anew, with the same weights and inputs under the same seed; inputs are a Call, or a tuple of
    positional arguments. under: "no_grad", "inference_mode" and "grad" (in training mode, with a backward and a step
    of SGD after each call). tolerance: relative L2 difference from eager that counts as none. inductor: options of
    Inductor. dynamic: as torch.compile takes it. session: also through fxopt.optimize. autotuned: Inductor's own
    searches are among the candidates. reason: why plain Inductor differs from eager, where it does.
    """

    name: str
    about: str
    make: Callable[[], Made]
    under: tuple[str, ...] = ("no_grad",)
    tolerance: float = FP32
    inductor: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    session: bool = False
    autotuned: bool = False
    reason: str = ""

    def build(self) -> tuple[Callable[..., Any], list[Call], dict[str, torch.Tensor]]:
        """The model, its calls, and its state outside of modules, always the same ones."""
        torch.manual_seed(0)
        made = self.make()
        calls = [call if isinstance(call, Call) else Call(tuple(call)) for call in made[1]]
        return made[0], calls, made[2] if len(made) == 3 else {}


MODELS: dict[str, Model] = {}


def model(about: str, **settings: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Decorator: the function makes the model that has the function's name."""

    def known(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__
        if name in MODELS:
            raise ValueError(f"two models are named {name}")
        MODELS[name] = Model(name, about, make, **settings)
        return make

    return known
