"""The backend end to end on the CPU: right whatever happens, remembering what it found, and saying what it did."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import forced_passes
import pytest
import torch
import torch.nn.functional as F
from forced_passes import TORCHS_KERNELS, given_ceilings
from torch import nn

import fxopt
from fxopt import registry
from fxopt.labels import Axis
from fxopt.testing.stand_ins import DoubledNegation
from fxopt.torch_api.inductor import CustomGraphPass
from fxopt.tuner import FxoptWarning
from profiler_core import roofline

aten = torch.ops.aten
#: few pairs: these tests are about what is decided and said, not about how fast anything is
QUICK = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1}
#: enough passes to try, where a test is not about which are found
FEW = ["freeze_weights", "onednn_linear", "promote_matmul_precision"]


class Block(nn.Module):
    """A transformer block, small enough to compile in seconds."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings far above any rate, so that labels do not depend on how busy the machine is: matrix units look idle."""
    given_ceilings(monkeypatch)


@pytest.fixture
def block() -> Block:
    return Block().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 16, 64)


def compiled(model, options=None, **kwargs):
    return torch.compile(model, backend="profile_guided", options={**QUICK, "passes": FEW, **(options or {})}, **kwargs)


def close(result, expected, tolerance=1e-5):
    assert result.shape == expected.shape and result.dtype == expected.dtype and result.stride() == expected.stride()
    assert ((result - expected).norm() / expected.norm()).item() < tolerance


# -- the main way -----------------------------------------------------------------------------------------------------


def test_measures_attributes_labels_and_explains(block, x, monkeypatch):
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"bfloat16"})  # as few machines have
    with torch.no_grad():
        close(compiled(block, {"passes": None})(x), block(x))  # all that are registered
    graph = fxopt.last_report().graphs[0]
    said = [message for message in graph.messages if not message.startswith("the same code took")]  # a busy machine
    assert graph.source == "tuned" and not said
    profile = graph.profile
    assert profile.attributed_ns + profile.unattributed_ns == profile.total_ns > 0
    assert profile.attributed_share >= 0.99
    nodes = profile.nodes.set_index("node")
    assert nodes.loc["addmm", "module_path"] == "qkv"
    assert nodes.loc["addmm", "file"].endswith("test_backend.py")
    assert "self.qkv" in nodes.loc["addmm", "source"]
    assert {label.axis for label in graph.labels} >= {Axis.TENSOR_CORE_IDLE}
    assert all(label.evidence and label.why for label in graph.labels)
    assert any(line.startswith("freeze_weights: weights may change") for line in graph.out_of_reach)
    assert any("promote_matmul_precision: needs precision='bf16'" in line for line in graph.out_of_reach)
    assert graph.decision == "baseline"
    json.dumps(fxopt.last_report().to_json(), allow_nan=False)


def test_a_second_compilation_finds_the_plan_and_measures_nothing(block, x, monkeypatch):
    from profiler_core.collect import kineto

    with torch.no_grad():
        first = compiled(block)(x)
    torch._dynamo.reset()
    monkeypatch.setattr(kineto, "measure", lambda *a, **k: pytest.fail("measured although a plan was there"))
    with torch.no_grad():
        second = compiled(block)(x)
    assert fxopt.last_report().graphs[0].source == "plan"
    assert torch.equal(first, second)


def test_the_kept_code_is_inductors_own_callable(block, x):
    """No wrapper of fxopt's is left in the path of later calls."""
    from fxopt.backend import Backend

    kept = []

    def backend(gm, inputs):
        kept.append(Backend(options=dict(QUICK))(gm, inputs))
        return kept[0]

    with torch.no_grad():
        torch.compile(block, backend=backend)(x)
    assert kept[0].__module__.startswith("torch.")


def test_options_of_inductor_reach_baseline_and_candidates_and_nothing_stays_set(block, x, monkeypatch):
    import torch._inductor.config as config

    class Mine(CustomGraphPass):
        seen: ClassVar[list[int]] = []

        def __call__(self, graph):
            self.seen.append(config.max_fusion_size)

        def uuid(self):
            return "a user's own pass"

    always_faster(monkeypatch)
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"bfloat16"})
    before = config.get_config_copy()
    flags = torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.initial_seed()
    mine = {"joint-custom-pre-pass": Mine(), "max_fusion_size": 7}
    options = {**mine, "precision": "bf16", "passes": ["promote_matmul_precision"]}
    with torch.no_grad():
        close(compiled(block, options)(x), block(x), tolerance=3e-2)
    assert fxopt.last_report().graphs[0].passes == ["promote_matmul_precision"]
    assert Mine.seen == [7, 7], "once in the baseline, once in the candidate, ahead of fxopt's pass in the same slot"
    assert config.get_config_copy() == before
    assert flags == (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.initial_seed())


def test_apply_never_measures(block, x, monkeypatch):
    from profiler_core.collect import kineto

    monkeypatch.setattr(kineto, "measure", lambda *a, **k: pytest.fail("measured in mode 'apply'"))
    with torch.no_grad(), pytest.warns(FxoptWarning, match="no plan for this graph.*there are no plans in"):
        close(compiled(block, {"mode": "apply"})(x), block(x))
    graph = fxopt.last_report().graphs[0]
    assert graph.source == "apply" and "no plan" in graph.messages[0]


def test_a_plan_that_is_not_found_is_told_from_the_nearest_one(block, x):
    from fxopt import nearest

    with torch.no_grad():
        compiled(block)(x)
        (path,) = Path(fxopt.last_report().graphs[0].plan_path).parent.glob("*.json")
        assert set(json.loads(path.read_text())["environment"][nearest.FIELD]) == set(nearest.SPELLED)
        torch._dynamo.reset()
        differs = f"{path.stem[:12]} is of this graph, but differs in fxopt's options"
        with pytest.warns(FxoptWarning, match=differs):
            close(compiled(block, {"mode": "apply", "precision": "tf32"})(x), block(x))


def test_random_state_buffers_and_inputs_are_as_after_one_call():
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            x.mul_(2)
            return self.linear(x) + self.count

    model, y = Stateful().eval(), torch.randn(4, 8)
    given, expected = y.clone(), model.linear(y * 2) + 1
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with torch.no_grad():
        result = compiled(model)(given)
    close(result, expected.detach())
    assert torch.equal(model.count, torch.ones(8))
    assert torch.equal(given, y * 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_dynamic_sizes_compile_once(block):
    with torch.no_grad():
        fn = compiled(block, dynamic=True)
        for length in (8, 12, 20):
            x = torch.randn(2, length, 64)
            close(fn(x), block(x))
    assert sum(r.source in ("tuned", "plan") for r in fxopt.recent_reports()[-1:]) == 1
    assert len({id(r) for r in fxopt.recent_reports()}) == len(fxopt.recent_reports())


# -- the session ------------------------------------------------------------------------------------------------------


def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing is not what these tests are about: a pass that is right makes the code faster, and each is of use."""
    from fxopt.trials import Trials

    forced_passes.always_faster(monkeypatch)
    monkeypatch.setattr(Trials, "as_fast", lambda self, entry, best: False)


def test_optimize_freezes_weights_and_remembers(block, x, monkeypatch):
    always_faster(monkeypatch)
    options = {**QUICK, "passes": ["freeze_weights"]}
    fast = fxopt.optimize(block, (x,), **options)
    close(fast(x), block(x).detach())
    graph = fast.report.graphs[0]
    assert (graph.decision, graph.frozen, graph.passes) == ("candidate", True, ["freeze_weights"])
    report = graph.candidates[-1].reports[0]
    assert (report.matched, report.rewritten) == (10, 10), "every weight and bias is gone from the inputs"
    torch._dynamo.reset()
    again = fxopt.optimize(block, (x,), **options)
    assert again.report.graphs[0].source == "plan" and again.report.graphs[0].frozen
    assert torch.equal(again(x), fast(x))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL for oneDNN to replace")
def test_frozen_linear_layers_go_to_onednn(block, x, monkeypatch):
    always_faster(monkeypatch)
    fast = fxopt.optimize(block, (x,), passes=["freeze_weights", "onednn_linear"], **QUICK)
    close(fast(x), block(x).detach())
    graph = fast.report.graphs[0]
    assert graph.passes == ["freeze_weights", "onednn_linear"]
    assert graph.candidates[-1].reports[1].rewritten == 4
    assert graph.verdict.rel_l2 <= graph.verdict.limit < 1e-5
    assert graph.memory_bytes >= sum(p.numel() * 4 for p in block.parameters() if p.dim() == 2)


def test_bf16_needs_to_be_asked_for_and_is_verified(block, x, monkeypatch):
    always_faster(monkeypatch)
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"bfloat16"})
    passes = ["freeze_weights", "promote_matmul_precision"]
    fast = fxopt.optimize(block, (x,), precision="bf16", passes=passes, **QUICK)
    graph = fast.report.graphs[0]
    assert graph.passes == ["freeze_weights", "promote_matmul_precision"]
    assert graph.candidates[-1].reports[1].rewritten == 5, "four linear layers and the attention"
    assert 1e-4 < graph.verdict.rel_l2 < graph.verdict.limit
    close(fast(x), block(x).detach(), tolerance=3e-2)


def test_changed_weights_are_seen(block, x, monkeypatch):
    always_faster(monkeypatch)
    fast = fxopt.optimize(block, (x,), passes=FEW, **QUICK)
    assert fast.report.graphs[0].frozen
    with torch.no_grad():
        block.down.weight.mul_(3)
    close(fast(x), block(x).detach())
    other = Block().eval()
    fast.load_state_dict(other.state_dict())
    close(fast(x), other(x).detach())
    block.up.bias = nn.Parameter(torch.ones_like(block.up.bias))
    close(fast(x), block(x).detach())
    block.up.weight.data = torch.randn_like(block.up.weight)
    close(fast(x), block(x).detach())
    block.out = nn.Linear(64, 64)
    close(fast(x), block(x).detach())
    before = fast(x).clone()
    block.double().float()  # the same values at other addresses
    close(fast(x), before)


def test_training_mode_runs_the_model_itself(block, x):
    fast = fxopt.optimize(block, (x,), passes=["freeze_weights"], **QUICK, **TORCHS_KERNELS)
    fast.train()
    fast(x).sum().backward()
    assert block.qkv.weight.grad is not None


def test_keyword_and_single_inputs(block, x):
    quick = {**QUICK, **TORCHS_KERNELS, "passes": []}
    close(fxopt.optimize(block, x, **quick)(x), block(x).detach())
    close(fxopt.optimize(block, {"x": x}, **quick)(x=x), block(x).detach())


def test_a_model_without_a_graph_says_so(x):
    class Eager(nn.Module):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.warns(FxoptWarning, match="no graph of this model reached the compiler"):
        fast = fxopt.optimize(Eager().eval(), (x,), passes=FEW, **QUICK)
    assert torch.equal(fast(x), x + 1)


def test_a_training_model_and_a_non_module_are_refused(block, x):
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        fxopt.optimize(block.train(), (x,))
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        fxopt.optimize(lambda x: x, (x,))


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_the_list_and_the_model_runs(block, x):
    with pytest.warns(FxoptWarning, match=r"unknown option 'precison'.*precision") as caught, torch.no_grad():
        close(compiled(block, {"precison": "bf16"})(x), block(x))
    assert sum(issubclass(w.category, FxoptWarning) for w in caught) == 1
    with pytest.raises(fxopt.options.UnknownOption, match="objective"):
        fxopt.optimize(block, (x,), precison="bf16")


@pytest.mark.parametrize("damage", ["truncated", "other schema", "not json"])
def test_a_damaged_plan_is_named_set_aside_and_made_anew(block, x, damage):
    with torch.no_grad():
        compiled(block)(x)
        path = Path(fxopt.last_report().graphs[0].plan_path)
        text = path.read_text()
        damaged = {"truncated": text[: len(text) // 2], "other schema": "{}", "not json": "\x00\x01"}[damage]
        path.write_text(damaged)
        torch._dynamo.reset()
        with pytest.warns(FxoptWarning, match=path.name):
            close(compiled(block)(x), block(x))
    assert fxopt.last_report().graphs[0].source == "tuned"
    assert list(path.parent.glob("*.corrupt*")), "nothing is lost"
    assert json.loads(path.read_text())["key"] == path.stem


def test_a_plan_store_that_cannot_be_written_costs_nothing_but_the_plan(block, x, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.warns(FxoptWarning, match="the plan is not kept") as caught, torch.no_grad():
        close(compiled(block, {"plan_dir": str(blocked)})(x), block(x))
    assert sum(issubclass(w.category, FxoptWarning) for w in caught) == 1
    graph = fxopt.last_report().graphs[0]
    assert graph.source == "tuned" and graph.profile is not None


def test_a_fault_that_nobody_foresaw_falls_back_with_one_warning(block, x, monkeypatch):
    """Those at each stage are in test_faults.py."""
    from fxopt.plan import PlanStore

    def fault(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(PlanStore, "save", fault)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        close(compiled(block)(x), block(x))
    mine = [w for w in caught if issubclass(w.category, FxoptWarning)]
    assert len(mine) == 1 and "injected" in str(mine[0].message) and "plain Inductor" in str(mine[0].message)
    assert fxopt.last_report().graphs[0].source == "fallback"


# -- mutants: each gate catches what it is there for ------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant(DoubledNegation):
    """What gelu's erf gives becomes something else: each subclass says what."""

    name: ClassVar[str] = "mutant"
    targets: ClassVar[tuple[object, ...]] = (aten.erf.default,)

    def twin(self, graph, node):
        return graph.call_function(aten.mul.Tensor, (node, 1.0))


@pytest.fixture
def with_pass(block, x):
    registered = []

    def run(cls, **options):
        registered.append(registry.register(cls).name)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            close(compiled(block, {"passes": [cls.name], **TORCHS_KERNELS, **options})(x), block(x))
        graph = fxopt.last_report().graphs[0]
        assert graph.decision == "baseline" and len(graph.candidates) == 1
        return graph.candidates[0], [str(w.message) for w in caught if issubclass(w.category, FxoptWarning)]

    yield run
    for name in registered:
        registry.unregister(name)


def mutant(**members):
    return dataclass(frozen=True)(type("Mutant", (Mutant,), {"__module__": __name__, **members}))


def test_wrong_numbers_are_caught(with_pass, monkeypatch):
    always_faster(monkeypatch)
    wrong = mutant(twin=lambda self, g, n: g.call_function(aten.mul.Tensor, (n, 1.001)))
    candidate, _ = with_pass(wrong)
    assert candidate.reports[0].rewritten == 1
    assert not candidate.verdict.ok and candidate.reason.startswith("wrong: ")


def test_a_slower_candidate_is_caught(with_pass):
    def slow(self, g, n):
        # Right, and forty matrix products slower: the products with zero are added to the result.
        value = n.meta["val"]
        width = value.shape[-1]
        flat = g.call_function(aten.reshape.default, (n, [-1, width]))
        zero = g.call_function(aten.full.default, ([width, width], 0.0), {"dtype": torch.float32})
        total = flat
        for _ in range(40):
            total = g.call_function(aten.add.Tensor, (g.call_function(aten.mm.default, (total, zero)), flat))
        return g.call_function(aten.reshape.default, (total, list(value.shape)))

    candidate, _ = with_pass(mutant(twin=slow))
    assert candidate.verdict is not None and candidate.verdict.ok, candidate.reason
    assert candidate.paired.ratio < 1 and candidate.outcome == "rejected"
    assert "not shown to be faster" in candidate.reason


def test_a_claim_without_a_change_is_caught(with_pass):
    candidate, said = with_pass(mutant(rewrite=lambda self, graph, node, context: None))
    assert candidate.reports[0].matched == 1 and candidate.reports[0].rewritten == 0
    assert candidate.outcome == "failed" and "the graph is as it was" in candidate.reason
    assert any("the graph is as it was" in line for line in said)


def test_a_pass_that_raises_is_caught(with_pass):
    candidate, said = with_pass(mutant(rewrite=lambda self, graph, node, context: 1 / 0))
    assert candidate.outcome == "failed" and "ZeroDivisionError" in candidate.reason
    assert any("mutant" in line and "ZeroDivisionError" in line for line in said)


def test_a_pass_that_changes_an_outputs_stride_is_caught(with_pass):
    def transposed(self, graph, node, context):
        output = graph.output_node()
        value = output.args[0][0]
        with graph.inserting_before(output):
            t = graph.call_function(aten.permute.default, (value, [0, 2, 1]))
            c = graph.call_function(aten.clone.default, (t,), {"memory_format": torch.contiguous_format})
            back = graph.call_function(aten.permute.default, (c, [0, 2, 1]))
        output.args = ((back, *output.args[0][1:]),)

    candidate, said = with_pass(mutant(rewrite=transposed))
    assert candidate.outcome == "failed" and "output 0" in candidate.reason and "stride" in candidate.reason
    assert any("stride" in line for line in said)


def test_reports_survive_a_cache_hit(with_pass, block, x):
    """On a cache hit no pass body runs; what the pass did is still known."""
    from fxopt.plan import PlanStore
    first, _ = with_pass(Mutant)
    assert first.reports[0].rewritten == 1
    graph = fxopt.last_report().graphs[0]
    PlanStore(Path(graph.plan_path).parents[1]).remove(graph.key)
    torch._dynamo.reset()
    second, _ = with_pass(Mutant)
    assert fxopt.last_report().graphs[0].source == "tuned"
    assert second.reports == first.reports


# -- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(Mutant):
    """Right for factor 1 alone, so that the variants differ in whether they are kept."""

    name: ClassVar[str] = "scaled"
    factors: tuple[float, ...] = (1.0,)

    def variants(self, context):
        return [Scaled((1.01,)), Scaled((2.0, 0.5))]

    def twin(self, graph, node):
        for factor in self.factors:
            node = graph.call_function(aten.mul.Tensor, (node, factor))
        return node


@pytest.fixture
def scaled(monkeypatch):
    always_faster(monkeypatch)
    yield registry.register(Scaled)
    registry.unregister("scaled")


def tune(block, x, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        close(compiled(block, {"passes": ["scaled"], **TORCHS_KERNELS, **options})(x), block(x))
    return fxopt.last_report().graphs[0]


def test_each_variant_is_a_trial_and_the_plan_keeps_the_options_of_the_one_that_won(block, x, scaled):
    graph = tune(block, x)
    assert [c.name for c in graph.candidates] == ["scaled[factors=(1.01,)]", "scaled[factors=(2.0, 0.5)]"]
    wrong, kept = graph.candidates
    assert wrong.reason.startswith("wrong: ") and kept.outcome == "kept"
    assert kept.options == {"scaled": {"factors": [2.0, 0.5]}} and kept.headroom_ns > 0
    again = tune(block, x)
    assert again.source == "plan" and again.candidates[0].name == kept.name
    assert again.candidates[0].reports[0].rewritten == 1


def test_passes_see_the_same_labels_where_the_plan_is_applied_whatever_was_to_come(block, x, scaled, monkeypatch):
    """Else they might do what nobody verified, and Inductor's caches would not serve what was tuned."""
    from fxopt import manager
    from fxopt.labels import Label
    from fxopt.report import sources
    from fxopt.tuning import Tuning

    label = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "low", 1e3, "Once the other labels are answered: launches")
    monkeypatch.setattr(Tuning, "_to_come", lambda self, trials: self._expect([label]))
    seen, digest = [], manager.chain_uuid

    def chain_uuid(passes, context, stage):
        seen.append((digest(passes, context, stage), context.labels))
        return seen[-1][0]

    monkeypatch.setattr(manager, "chain_uuid", chain_uuid)
    graph = tune(block, x)
    tuned = list(seen)
    seen.clear()
    again = tune(block, x)
    assert again.source == "plan" and len(seen) == 1
    assert seen[0] in tuned and label not in seen[0][1]
    assert graph.labels[-1] == label and again.labels == graph.labels
    assert sources.read(Path(graph.plan_path)).graphs[0].labels == graph.labels


@dataclass(frozen=True)
class Rests(Mutant):
    """Finds nothing to do."""

    name: ClassVar[str] = "rests"

    def candidates(self, graph, context):
        return ()


@pytest.fixture
def rests(scaled, monkeypatch):
    monkeypatch.setattr(scaled, "variants", lambda self, context: [scaled((2.0, 0.5))])
    yield registry.register(Rests)
    registry.unregister("rests")


@pytest.mark.parametrize("then", ["rests", "wakes", "fails", "elsewhere"])
def test_a_plan_is_compiled_with_passes_that_rested_for_inductors_caches(block, x, scaled, rests, monkeypatch, then):
    """They are no part of it. One that does something after all is left out, for nobody verified that, and one with
    which nothing compiles; and on another machine, whose caches have none of it.
    """
    from fxopt import build, machine, manager

    compiled_with, digest = [], manager.chain_uuid

    def chain_uuid(passes, context, stage):
        compiled_with.append((digest(passes, context, stage), [p.name for p in passes]))
        if then == "fails" and len(compiled_with) > 1 and len(passes) > 1:
            raise RuntimeError("it does not compile")
        return compiled_with[-1][0]

    monkeypatch.setattr(manager, "chain_uuid", chain_uuid)
    graph = tune(block, x, passes=["scaled", "rests"])
    assert graph.passes == ["scaled"] and compiled_with[0][1] == ["rests", "scaled"]
    (tuned,) = compiled_with
    if then == "wakes":
        monkeypatch.setattr(build, "at_work", lambda report: True)
    if then == "elsewhere":
        monkeypatch.setattr(machine, "known", lambda here, machines: False)
    again = tune(block, x, passes=["scaled", "rests"])
    assert again.source == "plan" and again.passes == ["scaled"]
    assert [r.name for r in again.candidates[0].reports] == ["scaled"]
    alone = [["scaled"]] if then != "rests" else []
    with_it = [["rests", "scaled"]] if then != "elsewhere" else []
    assert [names for _, names in compiled_with[1:]] == with_it + alone
    assert then == "elsewhere" or compiled_with[1] == tuned


def test_the_gap_to_the_floor_is_measured_before_and_after(block, x, scaled):
    graph = tune(block, x)
    products = 2 * 2 * 16 * 64 * 64 * (3 + 1 + 4 + 4)
    assert graph.floor_flops > products and graph.floor_bytes > sum(4 * p.numel() for p in block.parameters())
    before, after = graph.gap_to_floor
    assert before == graph.baseline_kernel_ns / graph.floor_ns > 1 and after > 1
    json.dumps(graph.to_json(), allow_nan=False)


def test_an_ablation_is_measured_where_it_is_asked_for_and_stays_with_the_plan(block, x, scaled, monkeypatch):
    from fxopt.trials import Trials

    graph = tune(block, x)
    assert graph.ablation == [] and graph.decision == "candidate"
    later = tune(block, x, ablate=True)
    assert later.source == "plan", "the same plan, measured again for the ablation"
    (row,) = later.ablation
    assert (row.name, row.options, row.outcome) == ("scaled", {"factors": [2.0, 0.5]}, "kept")
    assert row.alone.wall.ratio == row.removed.wall.ratio == 2.0
    assert row.alone.kernel_ns > 0 and row.alone.kernel.low <= row.alone.kernel.ratio <= row.alone.kernel.high
    monkeypatch.setattr(Trials, "ablate", lambda *a: pytest.fail("measured although the plan has it"))
    assert tune(block, x, ablate=True).ablation == later.ablation


def test_an_ablation_while_tuning_tells_of_what_was_not_kept_too(block, x, scaled):
    graph = tune(block, x, ablate=True, passes=["scaled", "freeze_weights"])
    rows = {(row.name, row.outcome): row for row in graph.ablation}
    assert rows[("scaled", "kept")].alone.wall.ratio == 2.0
    assert rows[("scaled", "rejected")].reason.startswith("wrong: ")
    assert rows[("freeze_weights", "out of reach")].reason.startswith("weights may change")


def test_a_candidate_over_the_memory_limit_is_not_kept(block, x, monkeypatch):
    always_faster(monkeypatch)
    if not torch.backends.mkl.is_available():
        pytest.skip("without MKL nothing is packed")
    fast = fxopt.optimize(block, (x,), memory_limit=1000, passes=["freeze_weights", "onednn_linear"], **QUICK)
    packing = [c for c in fast.report.graphs[0].candidates if "onednn_linear" in c.passes]
    assert packing and all("the limit is" in c.reason for c in packing)
    assert "onednn_linear" not in fast.report.graphs[0].passes


# -- another process --------------------------------------------------------------------------------------------------


SCRIPT = """
    import sys, torch
    assert "fxopt" not in sys.modules
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
    x = torch.randn(8, 32)
    quick = {"pairs": 6, "iterations": 2, "passes": [], "fallback_by_default": True}
    fn = torch.compile(model, backend="profile_guided", options=quick)
    with torch.no_grad():
        y = fn(x)
    import fxopt
    graph = fxopt.last_report().graphs[0]
    print(graph.source, y.double().sum().item(), graph.profile is None)
"""


def test_a_second_process_finds_the_plan_and_gives_the_same_output():
    runs = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, check=True
        ).stdout.split()[-3:]
        for _ in range(2)
    ]
    assert [run[0] for run in runs] == ["tuned", "plan"]
    assert runs[0][1] == runs[1][1]
    assert runs[1][2] == "True", "no profile: nothing was measured"


def test_asking_for_the_backend_without_any_graph_is_said_at_the_end():
    script = """
        import torch
        class Eager(torch.nn.Module):
            @torch._dynamo.disable
            def forward(self, x):
                return x + 1
        print(torch.compile(Eager(), backend="profile_guided")(torch.ones(2)))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert "tensor([2., 2.])" in run.stdout
    assert "no graph reached it" in run.stderr


# -- found by trying to break it --------------------------------------------------------------------------------------


def test_modules_that_share_one_compiled_function_keep_their_own_weights(monkeypatch):
    """Dynamo compiles a code object once: after a graph break every block runs the first one's code."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return F.relu(x)

    always_faster(monkeypatch)
    model, x = nn.Sequential(Broken(), Broken(), Broken()).eval(), torch.randn(4, 16)
    with pytest.warns(FxoptWarning, match="weights are no longer folded"):
        fast = fxopt.optimize(model, (x,), passes=["freeze_weights"], **QUICK, **TORCHS_KERNELS)
    close(fast(x), model(x).detach())


def test_weights_of_a_module_that_is_not_registered_are_seen(x, monkeypatch):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(64, 64)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x)

    always_faster(monkeypatch)
    model = Hidden().eval()
    fast = fxopt.optimize(model, (x,), passes=["freeze_weights"], **QUICK, **TORCHS_KERNELS)
    with torch.no_grad():
        model.hidden[0].weight.mul_(2)
    close(fast(x), model(x).detach())


def test_a_fused_optimizers_step_is_seen(block, x, monkeypatch):
    """It writes to the parameters without counting a version."""
    always_faster(monkeypatch)
    fast = fxopt.optimize(block, (x,), passes=FEW, **QUICK)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, fused=True)
    block.train()
    block(x).sum().backward()
    optimizer.step()
    block.eval()
    close(fast(x), block(x).detach())


def test_a_counter_that_indexes_a_cache_stays_inside_it_while_measuring():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("position", torch.zeros(1, dtype=torch.long))
            self.register_buffer("rows", torch.randn(16, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x + self.rows[self.position])
            self.position.add_(1)
            return out

    model, x = Cache().eval(), torch.randn(4, 8)
    with torch.no_grad():
        expected = model.linear(x + model.rows[:1])
        close(compiled(model)(x), expected)
    assert model.position.item() == 1
    assert fxopt.last_report().graphs[0].source == "tuned", fxopt.last_report().graphs[0].messages


def test_integers_with_a_table_for_each_column_are_not_mixed_up(monkeypatch):
    """A row number of the large table, moved to the small table's column, would end the process."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(1000, 16), nn.Embedding(4, 16)
            self.linear = nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.linear(self.large(ids[:, 0]) + self.small(ids[:, 1]))

    always_faster(monkeypatch)
    model = Two().eval()
    ids = torch.stack([torch.randint(900, 1000, (32,)), torch.randint(0, 4, (32,))], dim=1)
    quick = {**QUICK, **TORCHS_KERNELS, "passes": ["freeze_weights"]}
    close(fxopt.optimize(model, (ids,), **quick)(ids), model(ids).detach())


def test_models_that_differ_inside_a_checkpoint_have_plans_of_their_own(x):
    from torch.utils.checkpoint import checkpoint

    def model(body):
        return lambda x: checkpoint(body, x, use_reentrant=False)

    keys = []
    for body in (torch.sin, torch.cos):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(model(body), {"passes": [], **TORCHS_KERNELS})(x)
        keys.append(fxopt.last_report().graphs[0].key)
    assert keys[0] != keys[1]


def test_a_plan_that_gives_up_accuracy_holds_for_the_weights_it_was_verified_with(block, x):
    def key(model, precision):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(model, {"precision": precision, "passes": [], **TORCHS_KERNELS})(x)
        return fxopt.last_report().graphs[0].key

    other = Block().eval()
    assert key(block, "fp32") == key(other, "fp32")
    for precision in ("bf16", 1e-2):
        assert key(block, precision) == key(block, precision) != key(other, precision)


def test_an_input_that_wants_a_gradient_is_told_once_that_it_gets_none(block, x):
    fast = fxopt.optimize(block, (x,), passes=[], **QUICK, **TORCHS_KERNELS)
    asked = x.clone().requires_grad_()
    with pytest.warns(FxoptWarning, match="an input requires a gradient, but an optimised model in eval mode"):
        y = fast(asked)
    assert not y.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxoptWarning)
        fast(asked)
        fast(x)
    fast.train()(asked).sum().backward()
    assert asked.grad is not None
