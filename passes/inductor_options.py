"""inductor_options: Inductor's own search options, each as a candidate that is measured.

Answers compute_bound, tensor_core_idle, wave_starved, memory_bound, latency_bound, occupancy_limited, launch_bound and
excess_traffic. An option is offered where a label says what it could answer:

- coordinate_descent_tuning: the block sizes of pointwise and reduction kernels are tuned one at a time;
- max_autotune_pointwise: more of them are timed;
- combo_kernels: independent small kernels become one launch;
- max_autotune_gemm: Triton's (on the CPU, C++) templates are timed against the library's product;
- decompose_k: as that, and a product whose K is 4 times M and N (Inductor's own bound is 32) may split its K.

None changes a class of accuracy: sums are taken in another order, in the type they were in. What was really generated
is counted in the code, for autotuning may well choose what was there before. Options that this torch lacks, and those
that are set already, are not offered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, ConfigPass, Configuration, PassContext, RegistryError, Stage


@dataclass(frozen=True)
class Choice:
    """One option: what it sets, which labels it could answer, and the kernels that it leaves in generated code.

    sign: matches once in the definition of each kernel that is there, or is tuned, because of the option.
    """

    patches: dict[str, Any]
    axes: frozenset[Axis]
    sign: str
    devices: tuple[str, ...] = ("cuda",)

    def count(self, code: str) -> int:
        """Kernels of `code`, a generated module, that show the option."""
        definitions = re.split(r"^\w+ = async_compile\.", code, flags=re.MULTILINE)
        return sum(re.search(self.sign, definition) is not None for definition in definitions)


_GEMM = frozenset({Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.WAVE_STARVED})
_TILED = frozenset({Axis.MEMORY_BOUND, Axis.LATENCY_BOUND, Axis.OCCUPANCY_LIMITED, Axis.EXCESS_TRAFFIC})
_TEMPLATES = r"@triton_heuristics\.template\(|_micro_gemm"
_SPLIT = "decompose_k"
#: options by name, in the order in which they are tried. On an H200 the first made the kernels of conv_block, depthwise
#: and mlp 3 to 5 % shorter, and the next two no kernels of six workloads by more than 1.1 %; the others compile long.
CHOICES: dict[str, Choice] = {
    "coordinate_descent_tuning": Choice(
        {"coordinate_descent_tuning": True},
        _TILED | {Axis.WAVE_STARVED},
        r"@triton_heuristics\.(?!template)[\s\S]*'coordinate_descent_tuning': True",
    ),
    "max_autotune_pointwise": Choice(
        {"max_autotune_pointwise": True},
        _TILED,
        r"@triton_heuristics\.(?!template)[\s\S]*'max_autotune_pointwise': True",
    ),
    "combo_kernels": Choice(
        {"combo_kernels": True},
        frozenset({Axis.LAUNCH_BOUND, Axis.LATENCY_BOUND, Axis.WAVE_STARVED}),
        "'combo_grid_meta'",
    ),
    "max_autotune_gemm": Choice({"max_autotune_gemm": True}, _GEMM, _TEMPLATES, ("cpu", "cuda")),
    "decompose_k": Choice(
        {"max_autotune_gemm": True, "triton.decompose_k_threshold": 4},
        frozenset({Axis.WAVE_STARVED, Axis.LATENCY_BOUND, Axis.TENSOR_CORE_IDLE}),
        _SPLIT,
    ),
}


#: autotuning prints tables unless it is told not to
_QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}


@dataclass(frozen=True)
class InductorOptions(ConfigPass):
    """Inductor's own search options, each as a candidate that is measured."""

    name: ClassVar[str] = "inductor_options"
    answers: ClassVar[frozenset[Axis]] = frozenset[Axis]().union(*(choice.axes for choice in CHOICES.values()))
    stage: ClassVar[Stage] = Stage.CONFIG
    precision: ClassVar[Precision] = Precision.FP32
    last: ClassVar[bool] = True
    gradients: ClassVar[bool] = True

    #: names of options, joined by +
    choose: str = "coordinate_descent_tuning"

    def __post_init__(self) -> None:
        for name in self.choose.split("+"):
            if name not in CHOICES:
                raise RegistryError(f"inductor_options: {name!r} is none of {', '.join(CHOICES)}")

    def variants(self, context: PassContext) -> Sequence[InductorOptions]:
        offered = [name for name in CHOICES if not _reason(name, context) and _is_labelled(name, context)]
        both = [name for name in ("coordinate_descent_tuning", "max_autotune_gemm") if name in offered]
        names = [*offered, *(["+".join(both)] if len(both) == 2 else [])]
        return [type(self)(name) for name in names] or (self,)

    def candidates(
        self, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
    ) -> Iterable[tuple[int, Candidate]]:
        for position, name in enumerate(self.choose.split("+")):
            reason = _reason(name, context)
            if not reason and not _is_labelled(name, context):
                reason = "no label that it could answer"
            yield position, Candidate(name, f"{reason}")  # one of those that `_reason` gives, or none

    def configure(self, accepted: Sequence[int], context: PassContext) -> Configuration:
        from fxopt.torch_api import inductor  # heavy

        known = inductor.config_keys()
        patches: dict[str, Any] = {key: value for key, value in _QUIET.items() if key in known}
        for choice in self._choices(accepted):
            patches.update(choice.patches)
        return Configuration(patches=patches)

    def took_effect(self, compiled: Any, accepted: Sequence[int], context: PassContext) -> int:
        graphs = [compiled.graph, compiled.backward.graph if compiled.backward is not None else None]
        code = [graph.source_code for graph in graphs if graph is not None]  # else there was nothing to generate
        return sum(choice.count(text) for choice in self._choices(accepted) for text in code)

    def _choices(self, accepted: Sequence[int]) -> list[Choice]:
        names = self.choose.split("+")
        return [CHOICES[names[position]] for position in accepted]


def _is_labelled(name: str, context: PassContext) -> bool:
    return any(label.axis in CHOICES[name].axes for label in context.labels)


def _reason(name: str, context: PassContext) -> str:
    """Why an option cannot be tried here, "" if it can."""
    from fxopt.torch_api import inductor

    choice = CHOICES[name]
    if context.device.type not in choice.devices:
        return f"it is for {' and '.join(choice.devices)}"
    known = inductor.config_keys()
    missing = [key for key in choice.patches if key not in known]
    if missing:
        return f"this torch has no {missing[0]}"
    set_already = ("max_autotune",) if any("autotune" in key for key in choice.patches) else ()
    if all(inductor.config_value(key) == value for key, value in choice.patches.items()) or any(
        inductor.config_value(key) for key in set_already
    ):
        return "it is set already"
    return ""
