"""What torch.compile takes, through the backend with passes forced on: the same results, state and promises."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from forced_passes import (
    EXACT,
    FOLDING,
    TORCHS_KERNELS,
    compiled,
    force,
    given_ceilings,
    last,
    optimized,
    rewritten,
    warned,
)
from torch import nn

import fxopt
from fxopt import identity, measure, registry
from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, Stage
from fxopt.verify import Precision
from profiler_core.collect import kineto

aten = torch.ops.aten
#: few pairs: these tests are about what is decided and said, not about how fast anything is
QUICK = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1, "passes": [], **TORCHS_KERNELS}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    given_ceilings(monkeypatch)


@pytest.fixture
def new_reports() -> Iterator[Callable[[], list[Any]]]:
    with fxopt.collect_reports() as found:
        yield lambda: found


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_a_graph_break_makes_two_plans_and_one_report(plan_dir, tmp_path, new_reports):
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) + 1
        torch._dynamo.graph_break()
        return torch.cos(y) * 2

    x, file = torch.randn(8, 8), tmp_path / "report.json"
    with torch.no_grad():
        torch.testing.assert_close(compiled(broken, {"report": file, **QUICK})(x), broken(x))
    first, second = new_reports()
    assert fxopt.full_report().graphs[-2:] == [first, second]
    written = json.loads(file.read_text())["graphs"]
    assert [graph["key"] for graph in written] == [first.key, second.key] and first.key != second.key
    assert all(graph["profile"]["kernels"] for graph in written)
    assert {path.stem for path in (plan_dir / "plans").glob("*.json")} == {first.key, second.key}


def test_fullgraph_under_inference_mode(monkeypatch, new_reports):
    force(monkeypatch, *EXACT)
    x = torch.randn(4, 4)
    with torch.inference_mode():
        torch.testing.assert_close(
            compiled(lambda x: (x @ x).relu(), TORCHS_KERNELS, fullgraph=True)(x), (x @ x).relu()
        )
    (report,) = new_reports()
    assert report.source == "plan"


def test_apply_neither_measures_nor_writes(monkeypatch, plan_dir):
    for module, name in ((kineto, "measure"), (kineto, "kernel_time"), (measure, "compare"), (measure, "noise_floor")):
        monkeypatch.setattr(module, name, lambda *a, _name=name, **k: pytest.fail(f"{_name} in mode 'apply'"))
    x = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.sin, {"mode": "apply", **TORCHS_KERNELS})(x), x.sin())
    assert last().source == "apply" and not plan_dir.exists()


# -- sizes ------------------------------------------------------------------------------------------------------------


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Something for each of the passes to look at."""
    q, k, v = (x @ w).view(2, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).bfloat16().float()


@pytest.mark.parametrize("how", ["dynamic=True", "marked"])
def test_no_pass_specialises_a_dynamic_size(monkeypatch, new_reports, how):
    force(monkeypatch, *EXACT, "promote_matmul_precision")
    w = torch.randn(16, 48) / 4
    run = compiled(attention, {"precision": "bf16", **TORCHS_KERNELS}, dynamic=True if how == "dynamic=True" else None)
    for length in (5, 8, 13):
        x = torch.randn(2, length, 16)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 1)  # which raises where the size is specialised
        with torch.no_grad():
            torch.testing.assert_close(run(x, w), attention(x, w), rtol=5e-2, atol=5e-2)
    (report,) = new_reports()
    assert rewritten(report)["promote_matmul_precision"] > 0
    assert rewritten(report)["causal_mask"] == 0, "what is proved for one size holds for no other"


@dataclass(frozen=True)
class Specialising(GraphPass):
    """sin(x) becomes itself, seen with the size of the call at hand."""

    name: ClassVar[str] = "specialising"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        yield from (Candidate(n.name) for n in graph.nodes if n.target is aten.sin.default)

    def rewrite(self, graph, node, context):
        sizes = [int(size) for size in node.meta["val"].shape]
        with graph.inserting_before(node.next):
            new = graph.call_function(aten.view.default, (node, sizes))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def test_a_pass_of_a_plan_that_specialises_is_refused_and_leaves_no_guard(monkeypatch, new_reports):
    registry.register(Specialising)
    force(monkeypatch, "specialising")
    run = compiled(lambda x: x.sin() * 2, {"on_error": "fallback", **TORCHS_KERNELS})
    try:
        for length in (5, 8, 13):
            x = torch.randn(length, 3)
            torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.testing.assert_close(run(x), x.sin() * 2)
            assert len(warned(caught)) == (length == 5)
    finally:
        registry.unregister("specialising")
    (report,) = new_reports()
    assert report.source == "fallback" and "specialises" in report.messages[0]


# -- torch's settings -------------------------------------------------------------------------------------------------


def test_autocast_is_followed_and_part_of_the_key(monkeypatch):
    force(monkeypatch, *EXACT)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval(), torch.randn(4, 16)
    outside = identity.torch_flags()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(model, TORCHS_KERNELS)(x), model(x)
        assert identity.torch_flags() != outside
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert rewritten(last()).keys() == set(EXACT)


def test_deterministic_algorithms_stay_on_and_are_part_of_the_key(monkeypatch):
    force(monkeypatch, *EXACT)
    outside = identity.torch_flags()
    index, x = torch.randint(0, 4, (64,)), torch.randn(64)

    def scatter(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4).index_put((index,), x, accumulate=True)

    torch.use_deterministic_algorithms(True)
    try:
        assert identity.torch_flags() != outside
        run = compiled(scatter, TORCHS_KERNELS)
        with torch.no_grad():
            first = run(x)
            assert all(torch.equal(run(x), first) for _ in range(3))
            torch.testing.assert_close(first, scatter(x))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_aliased_inputs_and_views_as_outputs(monkeypatch):
    force(monkeypatch, *EXACT)

    def views(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.t(), b[1:], a + b, (a * 2).t()

    for make in (lambda s: (s, s), lambda s: (s[:3], s[1:4]), lambda s: (s[:2], s[2:])):
        mine = torch.arange(16.0).view(4, 4)
        theirs = mine.clone()
        run = compiled(views, TORCHS_KERNELS)
        with torch.no_grad():
            got, expected = run(*make(mine)), views(*make(theirs))
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other) and one.stride() == other.stride()
            for result in (got, expected):  # a write to a view is a write to the input
                result[0].mul_(3)
                result[1].sub_(1)
        assert torch.equal(mine, theirs)


def test_a_view_of_a_weight_as_an_output_of_folded_code(monkeypatch):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.layer.weight.t()

    force(monkeypatch, *FOLDING)
    model, x = Tied().eval(), torch.randn(2, 4)
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    weight = fast(x)[1]
    assert weight.data_ptr() == model.layer.weight.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
        torch.testing.assert_close(fast(x)[0], model(x)[0])
    (report,) = [r for r in fast.report.graphs[0].candidates[0].reports if r.name == "freeze_weights"]
    assert [reason for _, reason in report.refused] == ["the graph returns it, or a view of it"]


# -- kinds of tensors -------------------------------------------------------------------------------------------------


def test_a_tensor_subclass_is_left_to_plain_inductor_without_a_warning():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(lambda x: x.sin() + 1, QUICK)(x)
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close(got.a, x.a.sin() + 1)
    torch.testing.assert_close(got.b, x.b.sin() + 1)
    assert last().source == "skipped" and last().messages == ["an input is a tensor subclass (TwoTensor)"]
    assert not warned(caught)


def test_another_device_is_left_to_plain_inductor_with_one_line():
    x = torch.empty(4, 4, device="meta")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(lambda x: x.sin() @ x, QUICK)(x)
    assert got.device.type == "meta" and got.shape == (4, 4)
    assert last().source == "skipped"
    assert last().messages == ["fxopt measures on CPU and CUDA; this graph runs on meta"]
    assert not warned(caught)


# -- threads ----------------------------------------------------------------------------------------------------------


class Busy:
    """A thread that runs something else all the time."""

    def __enter__(self) -> Busy:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        x = torch.randn(32, 32)
        while not self._stop.is_set():
            torch.tanh(x @ x)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def busy() -> Iterator[None]:
    with Busy():
        yield


def test_several_models_are_tuned_at_once_in_threads(busy, new_reports):
    functions = [lambda x: x.sin() * 2, lambda x: (x + 1).cos(), lambda x: x.tanh() - x]
    inputs = [torch.randn(8, 8) for _ in functions]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            with torch.no_grad():  # which each thread has for itself
                run = compiled(functions[i], QUICK)
                results[i] = [run(inputs[i]) for _ in range(3)]
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (function, x) in enumerate(zip(functions, inputs, strict=True)):
        assert isinstance(results[i], list), results[i]
        for result in results[i]:
            torch.testing.assert_close(result, function(x))
    assert [report.source for report in new_reports()] == ["tuned"] * 3
    assert all("mm" not in str(list(report.profile.nodes["target"])) for report in new_reports())


def test_an_operator_with_effects_is_called_once_a_call(monkeypatch):
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    given_ceilings(monkeypatch)
    calls: list[int] = []

    @torch.library.custom_op("fxopt_tests::sends", mutates_args=())
    def sends(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    sends.register_fake(torch.empty_like)
    handle = _register_effectful_op("fxopt_tests::sends", _EffectType.ORDERED)
    try:
        model, x = compiled(lambda x: sends(x) * 2), torch.ones(3)
        for number in (1, 2):
            assert torch.equal(model(x), torch.full((3,), 4.0)) and len(calls) == number
        assert last().source == "skipped" and "effects beside its outputs (sends" in last().messages[0]
    finally:
        handle.destroy()


def test_a_size_that_has_no_value_yet_is_left_to_plain_inductor_without_a_warning():
    x, layer = torch.randn(5, 8), nn.Linear(8, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(layer)(x), layer(x))
    assert not warned(caught) and last().source == "skipped" and "has no value before" in last().messages[0]
