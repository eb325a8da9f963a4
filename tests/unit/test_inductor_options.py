"""inductor_options: which options are offered for which labels, and that what they did is counted in the code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from fxopt import testing
from fxopt.build import Builder
from fxopt.labels import Axis
from fxopt.registry import PassContext, RegistryError
from fxopt.torch_api import dynamo
from fxopt.verify import parse_precision
from passes.freeze_weights import FreezeWeights
from passes.inductor_options import CHOICES, InductorOptions


def context(*axes: Axis, device: str = "cuda", **fields: Any) -> PassContext:
    graph = testing.capture(torch.relu, torch.zeros(2))
    return testing.context(InductorOptions(), labels=testing.labels(graph, *axes), device=device, **fields)


def offered(*axes: Axis, device: str = "cuda") -> list[str]:
    return [p.choose for p in InductorOptions().variants(context(*axes, device=device))]


def test_what_is_offered_depends_on_the_labels():
    assert offered(Axis.COMPUTE_BOUND) == ["max_autotune_gemm"]
    assert offered(Axis.TENSOR_CORE_IDLE) == ["max_autotune_gemm", "decompose_k"]
    assert offered(Axis.LAUNCH_BOUND) == ["combo_kernels"]
    assert offered(Axis.MEMORY_BOUND) == ["coordinate_descent_tuning", "max_autotune_pointwise"]
    assert offered(Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND) == [
        "coordinate_descent_tuning",
        "max_autotune_pointwise",
        "max_autotune_gemm",
        "coordinate_descent_tuning+max_autotune_gemm",
    ]


def test_every_axis_that_it_answers_offers_something_and_no_other_does():
    for axis in Axis:
        reasons = [reason for _, reason in refusals(InductorOptions(offered(axis)[0]), context(axis))]
        assert (reasons == []) == (axis in InductorOptions.answers), axis


def test_a_cpu_is_offered_only_what_works_there():
    assert offered(Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND, device="cpu") == ["max_autotune_gemm"]


def refusals(p: InductorOptions, context: PassContext) -> list[tuple[str, str]]:
    found = p.candidates(testing.capture(torch.relu, torch.zeros(2)), [], context)
    return [(candidate.target, candidate.refused) for _, candidate in found if candidate.refused]


def test_options_that_are_set_already_are_left_out():
    at = Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND
    with inductor_config.patch(coordinate_descent_tuning=True):
        assert offered(*at) == ["max_autotune_pointwise", "max_autotune_gemm"]
        found = refusals(InductorOptions("coordinate_descent_tuning"), context(*at))
        assert found == [("coordinate_descent_tuning", "it is set already")]
    with inductor_config.patch(max_autotune=True):
        assert offered(*at) == ["coordinate_descent_tuning"]


def test_options_that_this_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch):
    from fxopt.torch_api import inductor

    keys = inductor.config_keys() - {"combo_kernels"}
    monkeypatch.setattr(inductor, "config_keys", lambda: keys)
    assert refusals(InductorOptions("combo_kernels"), context(Axis.LAUNCH_BOUND)) == [
        ("combo_kernels", "this torch has no combo_kernels")
    ]


def test_every_option_is_one_that_this_torch_knows():
    from fxopt.torch_api import inductor

    assert {key for choice in CHOICES.values() for key in choice.patches} <= inductor.config_keys()


def test_labels_that_nothing_answers_and_unknown_names_are_refused():
    assert refusals(InductorOptions("combo_kernels"), context(Axis.CAST_TRAFFIC)) == [
        ("combo_kernels", "no label that it could answer")
    ]
    with pytest.raises(RegistryError, match="'max_autotune' is none of coordinate_descent_tuning"):
        InductorOptions("max_autotune")


def test_two_options_are_configured_together():
    p = InductorOptions("coordinate_descent_tuning+max_autotune_gemm")
    patches = p.configure([0, 1], context()).patches
    assert patches["coordinate_descent_tuning"] is True and patches["max_autotune_gemm"] is True
    assert "coordinate_descent_tuning" not in p.configure([1], context()).patches


KERNEL = """
triton_{kind}_fused_{name} = async_compile.triton('triton_{kind}_fused_{name}', '''
@triton_heuristics.{heuristics}(
    inductor_meta={{'grid_type': 'Grid1D', {meta}}},
)
''', device_str='cuda')
"""


def code(*kernels: tuple[str, str]) -> Any:
    text = "# AOT ID\nasync_compile = AsyncCompile()\n"
    for number, (heuristics, meta) in enumerate(kernels):
        text += KERNEL.format(kind=heuristics[:3], name=number, heuristics=heuristics, meta=meta)
    code = SimpleNamespace(source_code=text + "\nasync_compile.wait(globals())\n")
    return SimpleNamespace(graph=code, backward=None)


@pytest.mark.parametrize(
    ("choose", "kernels", "count"),
    [
        ("combo_kernels", [("pointwise", "'combo_grid_meta': {}"), ("pointwise", "'max_autotune': False")], 1),
        ("coordinate_descent_tuning", [("pointwise", "'coordinate_descent_tuning': True")] * 2, 2),
        ("coordinate_descent_tuning", [("template", "'coordinate_descent_tuning': True")], 0),
        ("max_autotune_pointwise", [("reduction", "'max_autotune_pointwise': True")], 1),
        ("max_autotune_pointwise", [("reduction", "'max_autotune_pointwise': False")], 0),
        ("max_autotune_gemm", [("template", "'x': 1"), ("pointwise", "'x': 1"), ("template", "'x': 1")], 2),
        ("max_autotune_gemm", [("pointwise", "'max_autotune': True")], 0),
        ("decompose_k", [("template", "'x': 1")], 0),
    ],
)
def test_kernels_are_counted_in_the_generated_code(choose: str, kernels: list[tuple[str, str]], count: int):
    assert InductorOptions(choose).took_effect(code(*kernels), [0], context()) == count


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def built(passes: list[Any]) -> Any:
    """The build of an MLP on the CPU with `passes`, and its largest difference from eager."""
    found: list[Any] = []
    model, x = Mlp(), torch.randn(32, 64)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        at = PassContext(
            device=torch.device("cpu"),
            budget=parse_precision("fp32"),
            labels=context(Axis.COMPUTE_BOUND).labels,
            static=dynamo.static_inputs(gm, inputs),
            session=True,
        )
        build = Builder(gm, inputs, {}, at, check_weights=False).build(passes)
        with dynamo.outside_tracing():
            found.append((build, (build.fn(*inputs)[0] - model(x)).abs().max()))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    return found[0]


def test_autotuned_products_of_a_cpu_are_counted_and_right(fresh_dynamo):
    build, difference = built([FreezeWeights(), InductorOptions("max_autotune_gemm")])
    report = build.reports[1]
    # Which kernel wins is the machine's choice: the count says so, one for each template in the code.
    assert report.rewritten == len(set(_templates(build.compiled.graph.source_code)))
    idle = () if report.rewritten else (("graph", "asked for 1, not in effect in the compiled graph"),)
    assert report.error == "" and report.refused == idle
    assert difference < 1e-5


def _templates(text: str) -> list[int]:
    """The starts of the kernels that hold a micro-kernel of a product."""
    import re

    starts = [found.start() for found in re.finditer(r"async_compile\.cpp_pybinding", text)]
    return [max(s for s in starts if s < m.start()) for m in re.finditer(r"inline void \w*_micro_gemm\b", text)]


def test_an_option_that_leaves_no_trace_is_not_in_effect(fresh_dynamo):
    """Products with weights that are no constants have no templates on a CPU. The second time a cache has the code."""
    for _ in range(2):
        torch._dynamo.reset()
        build, _ = built([InductorOptions("max_autotune_gemm")])
        assert build.errors == [] and not build.effective
        assert build.reports[0].refused == (("graph", "asked for 1, not in effect in the compiled graph"),)
        assert build.compiled.graph is not None, "what is counted is in there"
