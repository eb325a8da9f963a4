"""split_precision_gemm: the graph after, its numbers, what is shared and folded, its variants, and what it refuses.

On the CPU, where the operators have the kernel's arithmetic in torch; the kernel is in test_split_gemm_kernel.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from fxopt import testing, verify
from fxopt.manager import SlotPass
from fxopt.precision import FP32_FLOOR, Precision, parse_precision
from fxopt.registry import Stage, discover
from fxopt.torch_api import inductor
from fxopt.torch_api.inductor import lowers
from passes import split_products
from passes.kernels import launch, tiling
from passes.split_precision_gemm import SplitPrecisionGemm

aten: Any = torch.ops.aten
SPLIT: Any = torch.ops.fxopt.split_gemm.default
SCALED: Any = torch.ops.fxopt.scaled_gemm.default
ROWS: Any = torch.ops.fxopt.split_rows.default
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


@dataclass(frozen=True)
class OnCpu(SplitPrecisionGemm):
    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@pytest.fixture(autouse=True)
def the_library_is_faster(monkeypatch):
    """What bf16x3 measures on a card."""
    monkeypatch.setattr(tiling.Choices, "library", lambda *given: -10.0)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls(module: fx.GraphModule, *wanted: Any) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in wanted]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def run(fn, *inputs: Any, method: str = "fp16x3", labels: Any = None) -> Any:
    precision = {"fp16x3": None, "bf16x3": 1.5e-5, "fp16": "tf32"}[method]
    result = testing.run(OnCpu(method), testing.capture(fn, *inputs), precision=precision, labels=labels)
    assert result.changed and not result.report.error, str(result)
    return result


def in_fp32(module: fx.GraphModule) -> fx.GraphModule:
    """The module with products that have a CPU kernel in place of `mm.dtype`, which gives cuBLAS's fp32 sums."""
    for node in calls(module, aten.mm.dtype, aten.bmm.dtype):
        node.target = lambda a, b, dtype: a.to(dtype) @ b.to(dtype)
    module.recompile()
    return module


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(values(features, out)), nn.Parameter(values(out, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


# ---------------------------------------------------------------- before and after


def test_a_product_becomes_a_split_one_of_two_split_operands():
    result = run(lambda x, w, b: torch.addmm(b, torch.relu(x), w), values(32, 64), values(64, 48), values(48))
    assert "addmm: f32[32, 48] = aten.addmm.default(b, relu, w)" in result.before
    assert result.after.splitlines()[-2].startswith("split_gemm_default: f32[32, 48] = fxopt.split_gemm.default(")
    assert result.after.splitlines()[-1] == "return split_gemm_default"
    (product,) = calls(result.module, SPLIT)
    assert not calls(result.module, *PRODUCTS)
    assert all(lowers(node.target) for node in result.module.graph.nodes if node.op == "call_function")
    shapes = [(tuple(a.meta["val"].shape), a.meta["val"].dtype) for a in product.args[:6]]
    rows, columns = (32, 64), (48, 64)
    assert shapes == [
        *((rows, torch.int16), (rows, torch.int16), ((32, 1), torch.float32)),
        *((columns, torch.int16), (columns, torch.int16), ((48, 1), torch.float32)),
    ]
    assert all(a.meta["val"].is_contiguous() for a in product.args[:6])
    assert product.args[6].name == "b", "a bias is added by the kernel"


def test_one_rounding_becomes_one_scaled_product():
    result = run(lambda x, w: x @ w, values(32, 64), values(64, 48), method="fp16")
    (product,) = calls(result.module, SCALED)
    assert [a.meta["val"].dtype for a in product.args[:4]] == [torch.float16, torch.float32] * 2
    assert not calls(result.module, *PRODUCTS, SPLIT)


@pytest.mark.parametrize(("lead", "operator"), [((), aten.mm.dtype), ((3,), aten.bmm.dtype)], ids=["mm", "bmm"])
def test_parts_are_multiplied_by_the_library_over_three_times_k(lead, operator):
    result = run(lambda x, w: x @ w, values(*lead, 32, 64), values(*lead, 64, 48), method="bf16x3")
    (product,) = calls(result.module, operator)
    a, b = (node.meta["val"] for node in product.args[:2])
    assert (a.shape, b.shape) == ((*lead, 32, 192), (*lead, 192, 48)) and a.dtype == b.dtype == torch.bfloat16
    assert product.args[2] is torch.float32 and product.meta["val"].dtype == torch.float32
    assert not calls(result.module, *PRODUCTS, SPLIT, SCALED)


FORMS = {
    "mm": (torch.mm, ((32, 64), (64, 48))),
    "addmm": (torch.addmm, ((48,), (32, 64), (64, 48))),
    "addmm of a matrix": (torch.addmm, ((32, 48), (32, 64), (64, 48))),
    "addmm of one number": (torch.addmm, ((1,), (32, 64), (64, 48))),
    "addmm of its operand": (lambda x, w: torch.addmm(x, x, w), ((32, 32), (32, 32))),
    "bmm": (torch.bmm, ((3, 32, 64), (3, 64, 48))),
    "baddbmm": (torch.baddbmm, ((3, 32, 48), (3, 32, 64), (3, 64, 48))),
    "linear of three dimensions": (F.linear, ((2, 16, 64), (48, 64), (48,))),
    "linear without bias": (F.linear, ((2, 16, 64), (48, 64))),
    "transposed": (lambda x, w: x.t() @ w, ((64, 32), (64, 48))),
    "expanded": (lambda x, w: x.expand(32, 64) @ w, ((1, 64), (64, 48))),
    "sliced": (lambda x, w: x[:, 3:67] @ w, ((32, 80), (64, 48))),
    "with its own transpose": (lambda x: x @ x.t(), ((32, 64),)),
    "long rows": (lambda x, w: x @ w, ((32, 2048), (2048, 32))),
    "a long odd row": (lambda x, w: x @ w, ((32, 1111), (1111, 32))),
}


@pytest.mark.parametrize("method", ["fp16x3", "bf16x3", "fp16"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_product_is_as_accurate_as_the_method_says(name, method):
    fn, shapes = FORMS[name]
    inputs = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    exact, fp32 = fn(*(x.double() for x in inputs)), fn(*inputs)
    result = run(fn, *inputs, method=method)
    assert not calls(result.module, *PRODUCTS)
    (found,) = in_fp32(result.module)(*inputs)
    assert found.stride() == fp32.stride() and found.dtype == torch.float32
    least, most = {
        "fp16x3": (0.0, max(4 * error(fp32, exact), FP32_FLOOR)),
        "bf16x3": (1e-7, 1e-5),
        "fp16": (1e-5, 5e-4),
    }[method]
    assert least <= error(found, exact) <= most


def test_layouts_of_the_inputs_do_not_matter():
    testing.check(
        OnCpu(), lambda x, w, b: F.linear(x, w, b), values(32, 64), values(48, 64), values(48), dynamic=[False]
    )


def test_gpt2s_layer_is_rewritten():
    layer, x = Conv1D(64, 48).eval(), values(2, 16, 64, seed=2)
    with torch.no_grad():
        result = testing.run(OnCpu(), testing.capture(layer, x))
        exact = Conv1D(64, 48).double()(x.double())
    assert result.changed, str(result)
    inputs = [*layer.parameters(), x]
    order = [n.name for n in result.module.graph.nodes if n.op == "placeholder"]
    assert order == ["p_weight", "p_bias", "x"] or order == ["p_bias", "x", "p_weight"], order
    by_name = dict(zip(("p_weight", "p_bias", "x"), inputs, strict=True))
    (found,) = result.module(*(by_name[name] for name in order))
    assert error(found, exact) <= max(4 * error(layer(x), exact), FP32_FLOOR)


def test_integers_elsewhere_in_the_graph_do_not_disturb_it():
    def embedded(ids, table, w):
        return F.embedding(ids, table) @ w, ids + 1

    inputs = torch.arange(16), values(20, 32), values(32, 16)
    found, ids = run(embedded, *inputs).module(*inputs)
    exact = embedded(inputs[0], inputs[1].double(), inputs[2].double())[0]
    assert error(found, exact) <= FP32_FLOOR and torch.equal(ids, inputs[0] + 1)


@pytest.mark.parametrize("how", split_products.ROWS)
def test_the_split_of_an_activation_is_one_operator_that_inductor_fuses_into_its_producer(how, fresh_dynamo):
    x = values(32, 512)
    x[3] *= torch.logspace(-12, 12, 512)
    x[4, 5], x[5, 6], x[6] = float("inf"), float("nan"), 0.0

    def producer_and_split(x):
        return torch.ops.fxopt.split_rows(torch.relu(x) * 2, how)

    split_products._lower_rows()
    found, made = run_and_get_code(torch.compile(producer_and_split), x)
    expected = split_products.ROWS[how][0](torch.relu(x) * 2)
    for part, own, fake in zip(found, expected, split_products._fake_rows(x.to("meta"), how), strict=True):
        assert part.shape == own.shape == fake.shape and part.dtype == own.dtype == fake.dtype
        assert part.stride() == own.stride() == fake.stride()
        assert (
            torch.equal(part.nan_to_num(7.0), own.nan_to_num(7.0))
            if part.is_floating_point()
            else torch.equal(part, own)
        )
    assert "ops.fxopt.split_rows" not in made[0], "it is not called: it is loops of its producer's kernel"


# ---------------------------------------------------------------- what is shared, and where a bias is added


def test_a_value_of_several_products_is_split_once():
    def three(x, a, b, c):
        return x @ a, x @ b, c @ x

    inputs = values(32, 32), values(32, 16), values(32, 24), values(16, 32)
    result = run(three, *inputs)
    one, two, right = calls(result.module, SPLIT)
    assert one.args[:3] == two.args[:3] and one.args[3] is not two.args[3]
    assert right.args[3] not in one.args, "as a right operand it is split by columns"
    rows, columns = calls(result.module, ROWS), calls(result.module, aten.amax.default)
    assert (len(rows), len(columns)) == (2, 3), "x and c by rows; x, a and b by columns"
    for found, exact in zip(result.module(*inputs), three(*(x.double() for x in inputs)), strict=True):
        assert error(found, exact) <= FP32_FLOOR


def test_a_graph_that_was_copied_is_left_as_it_was():
    """A note of what had been split, shared with the copy, would send a later run to nodes of other values."""
    graph = testing.capture(lambda x, a, b: torch.relu(x @ a) @ b, *(values(32, 32, seed=i) for i in range(3)))
    before = [set(node.meta) for node in graph.graph.nodes]
    first = testing.run(OnCpu(), graph)
    assert [set(node.meta) for node in graph.graph.nodes] == before
    assert testing.run(OnCpu(), graph).after == first.after


def test_a_graph_that_has_been_rewritten_and_copied_still_shares_its_splits():
    graph = testing.capture(lambda x, a, b: (x @ a, x @ b), *(values(32, 32, seed=i) for i in range(3)))
    one = testing.run(OnCpu(), graph, labels={"mm": "tensor_core_idle"})
    both = testing.run(OnCpu(), one.module, labels={"mm_1": "tensor_core_idle"})
    first, second = calls(both.module, SPLIT)
    assert first.args[:3] == second.args[:3]


@pytest.mark.parametrize(
    ("bias", "in_kernel"),
    [
        (lambda c: c, True),
        (lambda c: c[:1], False),
        (lambda c: c[:1].expand(48), False),
        (lambda c: torch.cat([c, c])[::2], False),
        (lambda c: c.expand(32, 48), False),
    ],
    ids=["a row", "one number", "one number repeated", "every second number", "a matrix"],
)
def test_only_what_the_kernel_can_read_is_added_by_it(bias, in_kernel):
    """It reads N numbers beside each other, wherever they come from."""

    def fn(c, x, w):
        return torch.addmm(bias(c), x, w)

    inputs = values(48, seed=3), values(32, 64), values(64, 48, seed=1)
    result = run(fn, *inputs)
    (product,) = calls(result.module, SPLIT)
    assert (product.args[6] is not None) is in_kernel
    assert error(result.module(*inputs)[0], fn(*(x.double() for x in inputs))) <= FP32_FLOOR


def test_shares_along_k_are_summed_in_the_graph_and_the_bias_after_them(monkeypatch):
    monkeypatch.setattr(tiling.Choices, "tile", lambda *given: ((64, 64, 64, 4, 4, 3), 0.0))
    inputs = values(32, seed=3), values(32, 1024), values(1024, 32, seed=1)
    result = run(torch.addmm, *inputs)
    (product,) = calls(result.module, SPLIT)
    assert product.args[6] is None and product.meta["val"].shape == (4, 32, 32)
    (total,) = product.users
    assert total.target is aten.sum.dim_IntList and total.args == (product, [-3])
    assert [user.target for user in total.users] == [aten.add.Tensor]
    assert error(result.module(*inputs)[0], torch.addmm(*(x.double() for x in inputs))) <= FP32_FLOOR


def test_the_tile_is_chosen_for_the_product_and_kept_in_the_folder_for_measurements(monkeypatch, tmp_path):
    asked = []

    def tile(self, product, device):
        asked.append((self.path, product, device))
        return (64, 64, 64, 1, 4, 3), 1.0

    monkeypatch.setattr(tiling.Choices, "tile", tile)
    cpu, kept = torch.device("cpu"), tmp_path / "tiles.json"
    batches = testing.capture(torch.bmm, values(3, 32, 64), values(3, 64, 48))
    biased = testing.capture(torch.addmm, values(48), values(32, 2048), values(2048, 48))
    for method, terms, block in (("fp16x3", 3, 128), ("fp16", 1, 0)):
        for graph in (batches, biased):
            labels = testing.labels(graph, "tensor_core_idle")
            context = testing.context(OnCpu, labels=labels, precision="tf32", cache=tmp_path)
            assert testing.run(OnCpu(method), graph, context=context).changed
        assert list(dict.fromkeys(asked)) == [
            (kept, tiling.Product(32, 48, 64, batch=3, terms=terms), cpu),
            (kept, tiling.Product(32, 48, 2048, terms=terms, block=block, bias=True), cpu),
        ]
        asked.clear()


def test_bf16_parts_are_for_products_for_which_they_measure_faster(monkeypatch):
    monkeypatch.setattr(tiling.Choices, "tile", lambda *given: ((64, 64, 64, 1, 4, 3), 10.0))
    inputs = values(32, 64), values(64, 48)
    # 9 us and a kernel that writes parts are more than 10 us; 8 us and that kernel are less.
    for took, operator in ((8.0, aten.mm.dtype), (9.0, SPLIT)):
        monkeypatch.setattr(tiling.Choices, "library", lambda *given, took=took: took)
        result = run(torch.mm, *inputs, method="bf16x3")
        assert len(calls(result.module, operator)) == len(calls(result.module, aten.mm.dtype, SPLIT)) == 1


# ---------------------------------------------------------------- inputs of every kind


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), 1e-42, 3e38])
@pytest.mark.parametrize("k", [64, 2048])
def test_what_an_input_holds_at_run_time_comes_out_as_in_fp32(bad, k):
    x, w, b = values(32, k), values(k, 48, seed=1) * 0.1, values(48, seed=2)
    result = run(torch.addmm, b, x, w)
    x[3, 5] = bad
    w[7, 4] = bad
    (found,), fp32 = result.module(b, x, w), torch.addmm(b, x, w)
    assert torch.equal(found.isnan(), fp32.isnan()) and torch.equal(found.isinf(), fp32.isinf())
    finite = fp32.isfinite()
    assert finite.sum() > 1000
    assert ((found - fp32)[finite].abs() <= 1e-5 * (x.abs().double() @ w.abs().double())[finite]).all()


# ---------------------------------------------------------------- compiled


class Two(nn.Module):
    """A layer on whole rows, and one on rows that are split by blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 2048), nn.Linear(2048, 32)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(self.norm(x))))


def compiled(p: SplitPrecisionGemm, model: nn.Module, x: torch.Tensor, freeze: bool) -> tuple[Any, Any, Any, Any]:
    """(compiled graph, Dynamo's graph, its inputs, report) of a model compiled with `p` in Inductor's slot."""
    gm, inputs = dynamo_graph(model, x)
    graph = testing.capture(model, x)
    labels = testing.labels(graph, "tensor_core_idle", nodes=[node.name for node in calls(graph, *PRODUCTS)])
    slot = SlotPass([p], testing.context(p, labels=labels), Stage.JOINT)
    frozen = frozenset(i for i, v in enumerate(inputs) if isinstance(v, nn.Parameter)) if freeze else frozenset()
    with torch.no_grad():
        made = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, freeze=frozen, caches=False)
    (report,) = slot.reports
    return made, gm, inputs, report


def test_of_a_frozen_weight_only_the_parts_are_left(fresh_dynamo):
    torch.manual_seed(0)
    model, x = Two().eval(), values(32, 256)
    made, _, inputs, report = compiled(OnCpu(), model, x, freeze=True)
    assert (report.rewritten, report.error) == (2, "")
    products = calls(made.post_grad, SPLIT)
    assert len(products) == 2
    assert all(part.op == "get_attr" for node in products for part in node.args[3:6])
    assert not calls(made.post_grad, torch.ops.fxopt.split_weight.default), "folded, as one operator each"
    assert {tuple(node.args[2].meta["val"].shape) for node in products} == {(32, 1), (32, 16, 1)}
    assert [node.args[1] for node in calls(made.post_grad, ROWS)] == ["rows0", "rows128"]
    assert not calls(made.post_grad, aten.__rshift__.Scalar), "what a split is is written out when it is lowered"
    with torch.no_grad():
        (found,) = made.flat(inputs)(*inputs)
        own = model(x)
        exact = model.double()(x.double())
    assert error(found, exact) <= max(4 * error(own, exact), FP32_FLOOR)


@pytest.mark.parametrize("freeze", [True, False])
def test_products_in_even_parts_count_in_zeros_that_one_operator_makes_anew_in_each_call(
    freeze, fresh_dynamo, monkeypatch
) -> None:
    """Folded into the code they would be there once for all calls, those at the same time on other streams included."""
    even: launch.Tile = (128, 64, 64, 0, launch.HOPPER, 4)
    monkeypatch.setattr(tiling.Choices, "tile", lambda *given: (even, 1.0))
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 200), nn.ReLU(), nn.Linear(200, 32)).eval()
    x = values(160, 256)
    made, _, inputs, _ = compiled(OnCpu(), model, x, freeze=freeze)
    (zeros,) = calls(made.post_grad, torch.ops.fxopt.zero_counts.default)
    products = calls(made.post_grad, SPLIT)
    assert all(tuple(node.args[7]) == even and node.args[8] is zeros for node in products)
    needed = [2 * 2 * tiles for tiles in (32, 4, 1)]  # two tiles of 160 rows
    firsts = [node.args[9] for node in products]
    assert firsts == [0, needed[0], needed[0] + needed[1]] and zeros.args[1] == sum(needed)
    assert zeros.meta["val"].shape == (sum(needed),) and zeros.meta["val"].dtype == torch.int32
    with torch.no_grad():
        (found,) = made.flat(inputs)(*inputs)
        own = model(x)
        exact = model.double()(x.double())
    assert error(found, exact) <= max(4 * error(own, exact), FP32_FLOOR)


def test_a_product_of_constants_in_even_parts_counts_in_zeros_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(tiling.Choices, "tile", lambda *given: ((128, 64, 64, 0, launch.HOPPER, 4), 1.0))

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", values(64, 64))

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return self.a @ w

    result = run(Constants(), values(64, 48))
    (product,) = calls(result.module, SPLIT)
    held = any(node.op == "get_attr" for node in result.module.graph.nodes)
    assert not calls(result.module, torch.ops.fxopt.zero_counts.default) or not held
    assert len(product.args) == (8 if held else 10)


@pytest.mark.parametrize("how", split_products.WEIGHTS)
def test_a_weight_split_by_one_operator_is_what_the_graph_would_make_of_it(how) -> None:
    weight = values(256, 96)
    parts = torch.ops.fxopt.split_weight(weight, how)
    split_by, count = split_products.WEIGHTS[how]
    assert len(parts) == count
    assert all(torch.equal(part, wanted) for part, wanted in zip(parts, split_by(weight), strict=True))


def test_a_weight_that_may_change_is_split_by_the_graph(fresh_dynamo) -> None:
    made, *_ = compiled(OnCpu(), nn.Linear(64, 48).eval(), values(32, 64), freeze=False)
    assert not calls(made.post_grad, torch.ops.fxopt.split_weight.default)


def by_casts(x: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split` as one would write it: right, until a compiler takes the cast to fp16 and back for the identity."""
    scale = 2.0 ** (14 - torch.floor(torch.log2(x.abs().amax(-1, keepdim=True))))
    y = x * scale
    hi = y.to(torch.float16)
    lo = ((y - hi.float()) * split_products.LOW).to(torch.float16)
    return hi.view(torch.int16), lo.view(torch.int16), scale


def test_the_numerics_gate_refuses_a_split_that_inductor_took_the_low_part_from(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(split_products, "split", by_casts)
    model, x = nn.Linear(64, 48).eval(), values(32, 64)
    made, gm, inputs, report = compiled(OnCpu(), model, x, freeze=False)
    assert report.rewritten == 1 and not report.error

    def verdict(fn, precision):
        with torch.no_grad():
            return verify.verify(fn, gm, gm, [inputs], (), parse_precision(precision), logits=False)

    refused = verdict(made.flat(inputs), "fp32")
    assert not refused.ok and "relative L2 error" in refused.reason
    assert 1e-4 < refused.rel_l2 < 1e-3, "what is left is a product of fp16 operands"
    interpreted = run(lambda x, w, b: F.linear(x, w, b), x, model.weight.detach(), model.bias.detach())
    exact = F.linear(*(t.detach().double() for t in (x, model.weight, model.bias)))
    with torch.no_grad():
        assert error(interpreted.module(x, model.weight, model.bias)[0], exact) <= FP32_FLOOR, "interpreted it is right"
    monkeypatch.undo()
    torch._dynamo.reset()
    made, gm, inputs, _ = compiled(OnCpu(), model, x, freeze=False)
    assert verdict(made.flat(inputs), "fp32").ok


# ---------------------------------------------------------------- which methods are tried


@pytest.mark.parametrize(
    ("precision", "methods"),
    [
        ("fp32", ["fp16x3"]),
        ("tf32", ["fp16", "fp16x3"]),
        ("bf16", ["fp16", "fp16x3"]),
        (1.5e-5, ["bf16x3", "fp16x3"]),
        (5e-6, ["fp16x3"]),
        (1e-3, ["fp16", "bf16x3", "fp16x3"]),
    ],
)
def test_what_the_precision_leaves_room_for_is_tried_the_fastest_first(precision, methods):
    offered = SplitPrecisionGemm().variants(testing.context(SplitPrecisionGemm, precision=precision))
    assert [p.method for p in offered] == methods
    assert all(
        p.precision is Precision.FP32 and p.applicable(testing.context(precision=precision)) == "" for p in offered
    )


@pytest.mark.parametrize(
    ("method", "precision"), [("fp16", "fp32"), ("bf16x3", "fp32"), ("fp16", 1e-4), ("bf16x3", "tf32")]
)
def test_a_method_that_the_precision_does_not_allow_is_refused(method, precision):
    testing.refuses(
        *(OnCpu(method), torch.mm, values(32, 32), values(32, 32)),
        because=f"{method} is not within the precision asked for",
        precision=precision,
    )


def test_an_unknown_method_is_told_the_known_ones():
    with pytest.raises(ValueError, match="method is 'fp8'; it must be one of fp16x3, bf16x3, fp16"):
        SplitPrecisionGemm("fp8")


def test_it_is_registered_and_never_in_one_trial_with_promotion():
    assert discover()["split_precision_gemm"] is SplitPrecisionGemm
    assert "promote_matmul_precision" in SplitPrecisionGemm.conflicts


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("fn", "shapes", "because"),
    [
        (lambda a, b: a.double() @ b.double(), ((32, 32), (32, 32)), "operands are float64, not float32"),
        (lambda a, b: a.bfloat16() @ b.bfloat16(), ((32, 32), (32, 32)), "operands are bfloat16, not float32"),
        (lambda a, b: a.int() @ b.int(), ((32, 32), (32, 32)), "operands are int32, not float32"),
        (lambda a, b: a @ b, ((15, 32), (32, 32)), "a side has 15 elements"),
        (lambda a, b: a @ b, ((32, 8), (8, 32)), "a side has 8 elements"),
        (lambda a, b: a @ b, ((32, 32), (32, 3)), "a side has 3 elements"),
        (lambda a, b: a[:0] @ b, ((32, 32), (32, 32)), "a side has 0 elements"),
        (lambda a, b: torch.addmm(b, a, b, beta=0.5), ((32, 32), (32, 32)), "beta or alpha is not 1"),
        (lambda a, b: torch.addmm(b, a, b, alpha=2), ((32, 32), (32, 32)), "beta or alpha is not 1"),
        (lambda a, b: torch.baddbmm(b, a, b, beta=0), ((2, 32, 32), (2, 32, 32)), "beta or alpha is not 1"),
    ],
)
def test_what_is_left_alone(fn, shapes, because):
    testing.refuses(OnCpu(), fn, *(values(*shape) for shape in shapes), because=because)


def test_symbolic_sizes_are_left_alone():
    testing.refuses(OnCpu(), torch.mm, values(32, 40), values(40, 48), because="sizes are symbolic", dynamic=True)


def test_a_product_without_a_label_is_left_alone():
    graph = testing.capture(lambda x, a, b: x @ a @ b, *(values(32, 32, seed=i) for i in range(3)))
    result = testing.run(OnCpu(), graph, labels={"mm_1": "tensor_core_idle"})
    assert result.report.refused == (("mm", "not labelled tensor_core_idle"),)
    assert len(calls(result.module, aten.mm.default)) == len(calls(result.module, SPLIT)) == 1


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"matrix_units": frozenset({"bfloat16"})}, "cpu has no fp16 matrix units"),
    ],
)
def test_graphs_that_it_does_not_apply_to(fields, because):
    context = testing.context(OnCpu(), **fields)
    testing.refuses(OnCpu(), torch.mm, values(32, 32), values(32, 32), because=because, context=context)


def test_a_cpu_graph_and_a_product_on_the_cpu_are_not_for_it(monkeypatch):
    inputs = values(32, 32), values(32, 32)
    testing.refuses(SplitPrecisionGemm(), torch.mm, *inputs, because="is for cuda, and the graph is on cpu")
    graph = testing.capture(torch.mm, *inputs)
    labels = testing.labels(graph, "tensor_core_idle")
    p = SplitPrecisionGemm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if Triton were there
    context = testing.context(p, labels=labels, device="cuda")
    result = testing.run(p, graph, context=context)
    assert result.report.refused == (("mm", "operands are on cpu, the graph on cuda"),)


def test_without_triton_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    context = testing.context(device="cuda", precision=1e-3)
    offered = SplitPrecisionGemm().variants(context)
    assert len(offered) == 3
    assert {p.applicable(context) for p in offered} == {"Triton is not installed, and the kernel is written in it"}


def test_a_product_that_cublas_computes_faster_in_tf32_is_left_to_it(monkeypatch):
    """By `fp16`, which has TF32's accuracy; times as a GPU would give them."""
    own = {320: 20.0, 96: 5.0}
    monkeypatch.setattr(tiling.Choices, "tile", lambda self, p, device: (tiling.SINGLE_TILES[1], own[p.n]))
    monkeypatch.setattr(tiling.Choices, "tf32", lambda self, p, device: 10.0)

    def both(a, b, c):
        return a @ b, a @ c

    graph = testing.capture(both, torch.randn(64, 128), torch.randn(128, 320), torch.randn(128, 96))
    labels = testing.labels(graph, "tensor_core_idle")
    context = testing.context(OnCpu("fp16"), labels=labels, precision="tf32")
    found = [candidate.refused for candidate in OnCpu("fp16").candidates(graph.graph, context)]
    assert found == ["cuBLAS takes 10.0 us in TF32, this kernel 20.0 us", ""]
    exact = testing.context(OnCpu(), labels=labels, precision="fp32")
    assert [candidate.refused for candidate in OnCpu().candidates(graph.graph, exact)] == ["", ""]


# ---------------------------------------------------------------- behind split attention

ATTENTION: Any = torch.ops.fxopt.split_attention
HEADS = (values(2, 3, 32, 64), values(2, 3, 40, 64, seed=1), values(2, 3, 40, 64, seed=2), values(192, 48, seed=3))


def projected(q, k, v, w):
    o = ATTENTION(q, k, v, None, 0.125, False)
    return o.transpose(1, 2).contiguous().view(2, 32, 192).view(64, 192) @ w


def test_attention_writes_the_operand_of_the_product_after_it() -> None:
    result = run(projected, *HEADS)
    (written,) = calls(result.module, torch.ops.fxopt.split_attention_split.default)
    assert not calls(result.module, ATTENTION.default)
    (product,) = calls(result.module, SPLIT)
    assert product.args[0].meta["val"].shape == (64, 3, 64) and product.args[2].meta["val"].shape == (64, 3, 1)
    q, k, v, w = (x.double() for x in HEADS)
    exact = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(64, 192) @ w
    (found,) = result.module(*HEADS)
    assert error(found, exact) <= FP32_FLOOR
    assert written.meta["from_node"], "nothing says where it comes from"


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v, w: (projected(q, k, v, w), ATTENTION(q, k, v, None, 0.125, False) + 0),
        lambda q, k, v, w: ATTENTION(q, k, v, None, 0.125, False).contiguous().view(64, 192) @ w,
        lambda q, k, v, w: ATTENTION(q[..., :32], k[..., :32], v[..., :32], None, 0.125, False)
        .transpose(1, 2).reshape(64, 96) @ w[:96],
        lambda q, k, v, w: (ATTENTION(q, k, v, None, 0.125, False).transpose(1, 2) + 1).reshape(64, 192) @ w,
    ],
    ids=["twice", "heads not beside each other", "narrow heads", "something between"],
)  # fmt: skip
def test_attention_is_left_where_the_product_reads_something_else(fn) -> None:
    result = run(fn, *HEADS)
    found = len(calls(result.module, torch.ops.fxopt.split_attention_split.default))
    assert found == (1 if isinstance(fn(*HEADS), tuple) else 0), str(result)
    assert calls(result.module, ATTENTION.default)


def test_attention_that_somebody_else_reads_is_left() -> None:
    def fn(q, k, v, w):
        o = ATTENTION(q, k, v, None, 0.125, False).transpose(1, 2).reshape(64, 192)
        return o @ w, o.sum(-1)

    assert not calls(run(fn, *HEADS).module, torch.ops.fxopt.split_attention_split.default)
