"""The columns of the comparison: every way to run a workload that a user could pick instead of fxopt, and fxopt.

Inputs and outputs are fp32 in all of them; a column of a lower class casts inside what is compiled. A training step is
forward, backward and a fused AdamW step, the same in every column; what differs is how forward and backward run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from case_studies import runner
from case_studies.runner import Variant

BASE = "inductor_fp32"
OBJECTIVES = ("kernel", "wall")
DEFAULT_OBJECTIVE = "wall"
CLASSES = ("fp32", "tf32", "bf16")


class InBfloat16(nn.Module):
    """A bf16 model with fp32 inputs and output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        cast = (x.bfloat16() if x.is_floating_point() else x for x in args)
        out: torch.Tensor = self.model(*cast)
        return out.float()


class Autocast(nn.Module):
    """An fp32 model under bf16 autocast, with an fp32 output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.device_type = next(model.parameters()).device.type

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            out: torch.Tensor = self.model(*args)
        return out.float()


class TrainingStep:
    """Forward, backward and AdamW step of a model that gives its loss. `check` gives loss and gradients alone."""

    def __init__(self, model: nn.Module, forward: Callable[..., torch.Tensor] | None = None) -> None:
        self.forward = model if forward is None else forward
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = self.forward(*args)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def check(self, *args: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            loss = self.forward(*args)
            loss.backward()
        gradients = [p.grad.clone() for p in self.parameters if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.detach().clone(), *gradients]


@dataclass
class Column:
    """One column. precision: its class, or fxopt's error budget. slow: compiled last. reports: fxopt's, once built.
    ablated: whether building it ablates its passes.
    """

    name: str
    precision: str
    variant: Variant
    slow: bool = False
    objective: str = ""
    reports: list[Any] = field(default_factory=list)
    ablated: bool = False


def names(precisions: Sequence[str], objectives: Sequence[str]) -> list[tuple[str, str]]:
    """(precision, column) of all rows of a workload, in the order in which they are built. The competition of all three
    classes is always there: a more accurate column competes in every lower class.
    """
    quick = [("fp32", "eager_fp32"), ("fp32", BASE), ("tf32", "inductor_tf32")]
    quick += [("bf16", "inductor_autocast"), ("bf16", "inductor_bf16")]
    quick += [(of, f"reduce_overhead_{of}") for of in CLASSES]
    ours = [(precision, fxopt_name(objective)) for precision in precisions for objective in objectives]
    return quick + ours + [(of, f"max_autotune_{of}") for of in CLASSES]


def fxopt_name(objective: str) -> str:
    return "fxopt" if objective == DEFAULT_OBJECTIVE else f"fxopt_{objective}"


def columns(
    model: nn.Module,
    inputs: Sequence[Any],
    device: torch.device,
    wanted: Sequence[tuple[str, str]],
    *,
    trains: bool,
    plan_dir: Path,
    tuning_limit: float,
    ablated: Sequence[str] = (),
) -> list[Column]:
    """The columns of `names` that are `wanted`, in its order. Each copies the fp32 `model` when it is built.

    ablated: precisions of which each kept pass is measured alone and taken away.
    """
    cuda = device.type == "cuda"
    no_bf16 = "" if runner.bf16_units(device) else "this device has no bf16 matrix units"
    made = []
    for precision, name in wanted:
        reports: list[Any] = []
        objective = why = ""
        ablates = False
        if name.startswith("fxopt"):
            objective = name.removeprefix("fxopt").lstrip("_") or DEFAULT_OBJECTIVE
            options = _options(device, precision, objective, plan_dir, tuning_limit, ablated)
            ablates = options.get("ablate", False)
            build = partial(_fxopt, model, inputs, options, f"{name}_{precision}", reports, trains)
        else:
            build = partial(_competitor, model, name, device, trains)
            if not cuda and (precision == "tf32" or name.startswith(("reduce_overhead", "max_autotune"))):
                why = "CUDA only"
            elif precision == "bf16":
                why = no_bf16
        context = partial(runner.fp32_matmuls, tf32=precision == "tf32" and not objective) if cuda else nullcontext
        variant = Variant(f"{name} {precision}", build, not why, why, context, compiles=not name.startswith("eager"))
        made.append(Column(name, precision, variant, name.startswith("max_autotune"), objective, reports, ablates))
    return made


def own(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model whose `forward` has a code object of its own (see runner)."""
    net = copy.deepcopy(model)
    for module in net.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy's weights lie apart, and cuDNN would put them together at each call
    net.__class__ = runner.with_own_forward(type(net), name)
    return net


def _competitor(model: nn.Module, name: str, device: torch.device, trains: bool) -> Callable[..., Any]:
    net = own(model, name)
    if name.endswith("bf16"):
        net = runner.with_own_forward(InBfloat16, name)(net)
    elif name.endswith("autocast"):
        net = runner.with_own_forward(Autocast, name)(net)
    if name.startswith("eager"):
        compiled: Callable[..., Any] = net
    elif name.startswith("reduce_overhead"):
        compiled = torch.compile(net, mode="reduce-overhead")
    elif name.startswith("max_autotune"):
        compiled = torch.compile(net, mode="max-autotune")
    else:
        compiled = torch.compile(net, options=runner.kernel_events(device))
    return TrainingStep(net, compiled) if trains else compiled


def _options(
    device: torch.device,
    precision: str,
    objective: str,
    plan_dir: Path,
    tuning_limit: float,
    ablated: Sequence[str],
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "precision": precision if precision in CLASSES else float(precision),
        "objective": objective,
        "plan_dir": str(plan_dir),
        "time_limit": tuning_limit,
        **runner.kernel_events(device),
    }
    # Each pass alone and removed is measured once a precision, not once an objective.
    if precision in ablated and objective == DEFAULT_OBJECTIVE:
        options["ablate"] = True
    return options


def _fxopt(
    model: nn.Module, inputs: Sequence[Any], options: dict[str, Any], name: str, reports: list[Any], trains: bool
) -> Callable[..., Any]:
    import fxopt
    from fxopt.report.model import Report

    net = own(model, name)
    if not trains:
        optimized = fxopt.optimize(net, inputs, **options)
        reports.append(optimized.report)
        return optimized
    step = TrainingStep(net, torch.compile(net, backend="profile_guided", options=options))
    with fxopt.collect_reports() as graphs:  # they exist only when it has been called
        step.check(*inputs)
    reports.append(Report(graphs))
    return step
