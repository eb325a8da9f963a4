"""remove_redundant_casts_and_copies: what becomes what, bit by bit, and what has to stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.registry import PassContext, Stage
from fxopt.torch_api import inductor
from fxopt.verify import parse_precision
from passes.remove_redundant_casts_and_copies import _HOLDS, RemoveRedundantCastsAndCopies, _first_of_each

P = RemoveRedundantCastsAndCopies()
BF16, FP32 = torch.bfloat16, torch.float32
x32, w16, v16 = torch.randn(4, 8), torch.randn(8, 8).to(BF16), torch.randn(8, 8).to(BF16)


def ran(fn: Any, *inputs: Any, **options: Any) -> testing.Result:
    graph = testing.capture(fn, *inputs, stage="post_grad")
    result = testing.run(P, graph, **options)
    assert not result.report.error, result.report.error
    return result


def ops(text: str) -> list[str]:
    return [line.split(" = ")[1].split("(")[0].removeprefix("aten.") for line in text.splitlines() if "(" in line]


def same_bits(fn: Any, *inputs: Any) -> None:
    result = ran(fn, *inputs)
    assert result.report.rewritten, result
    for a, b in zip(result.fn(*inputs), testing.capture(fn, *inputs, stage="post_grad")(*inputs), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def two_products(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(BF16) @ a, x.to(BF16) @ b


def test_one_value_is_cast_once_for_all_products_that_read_it():
    result = ran(two_products, x32, w16, v16)
    assert ops(result.before).count("prims.convert_element_type.default") == 2
    assert ops(result.after).count("prims.convert_element_type.default") == 1
    assert result.report.rewritten == 1
    same_bits(two_products, x32, w16, v16)


def test_casts_of_equal_views_are_one_cast():
    def fn(x, a, b):
        return x.t().to(BF16) @ a, x.t().to(BF16) @ b

    assert ops(ran(fn, torch.randn(8, 4), w16, v16).after) == [
        "permute.default", "prims.convert_element_type.default", "mm.default", "mm.default"
    ]  # fmt: skip
    same_bits(fn, torch.randn(8, 4), w16, v16)


def test_casts_of_different_views_or_to_different_types_stay():
    def views(x, a):
        return x.t().to(BF16) @ a, x.to(BF16) @ a

    def types(x, a):
        return x.to(BF16) @ a, x.to(torch.float16) @ a.to(torch.float16)

    assert not ran(views, torch.randn(8, 8), w16).changed
    assert not ran(types, torch.randn(8, 8), w16).changed


def widened(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = (x @ w).float()
    return wide.t().to(BF16) @ x, wide.sum()


def test_a_cast_to_a_wider_type_and_back_is_the_value_itself_through_views():
    result = ran(widened, w16, v16)
    assert "permute_default: bf16[8, 8][1, 8] = aten.permute.default(mm, [1, 0])" in result.after
    same_bits(widened, w16, v16)


def test_a_cast_to_a_narrower_type_and_back_rounds_and_stays():
    def fn(x, w):
        narrow = (x @ w).to(BF16)
        return narrow.t().to(FP32) @ x, narrow.sum()

    assert not ran(fn, torch.randn(8, 8), torch.randn(8, 8)).changed


def test_float16_and_bfloat16_hold_neither_of_the_other():
    def fn(x, w):
        half = (x @ w).to(torch.float16)
        return half.t().to(BF16) @ x, half.sum()

    assert not ran(fn, w16, v16).changed


def test_a_cast_of_a_lossless_cast_reads_the_narrow_value():
    def fn(x, w):
        wide = (x @ w).float()
        return wide.to(torch.float64).sum(), wide.sin()

    result = ran(fn, w16, v16)
    assert "prims.convert_element_type.default(mm, float64)" in result.after
    same_bits(fn, w16, v16)


@pytest.mark.parametrize("narrow", list(_HOLDS))
def test_every_value_of_a_type_comes_back_from_the_types_that_hold_it(narrow):
    if narrow.is_floating_point and narrow.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(narrow)
        values = values[~values.isnan()]
    elif narrow.is_floating_point:
        info = torch.finfo(narrow)
        values = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 2, info.eps, torch.inf, -0.0])
    elif narrow is torch.bool:
        values = torch.tensor([False, True])
    else:
        info = torch.iinfo(narrow)
        values = torch.cat([torch.arange(info.min, min(info.min + 70000, info.max)), torch.tensor([info.max, -1])])
        values = values.to(narrow)
    for wide in _HOLDS[narrow]:
        assert torch.equal(values.to(wide).to(narrow), values), wide


def test_a_copy_into_another_layout_and_back_is_the_value_itself():
    def fn(x):
        there = x.permute(0, 2, 1).contiguous()
        back = there.permute(0, 2, 1).contiguous()
        return back + 1, back * 2

    x = torch.randn(2, 3, 4)
    result = ran(fn, x)
    assert ops(result.after) == ["add.Tensor", "mul.Tensor"]
    same_bits(fn, x)


def test_a_copy_that_does_not_come_back_stays():
    def once(x):
        return x.permute(1, 2, 0).contiguous().permute(1, 2, 0).contiguous() + 1

    def transposed(x):  # the same order, but the caller's strides are others
        return x.permute(0, 2, 1).contiguous().permute(0, 2, 1).contiguous() + 1

    assert not ran(once, torch.randn(3, 3, 3)).changed
    result = ran(transposed, torch.randn(4, 3, 2).permute(2, 1, 0))
    assert result.report.refused == (("clone_1", "what is there has other strides"),)


def test_outputs_keep_memory_of_their_own():
    def twice(x):
        return x.to(BF16), x.to(BF16)

    def input_itself(x):
        wide = x.float()
        return wide.t().to(BF16), wide

    def copied(x):
        return x.permute(1, 0).contiguous().permute(1, 0).contiguous()

    because = "an output would come to share memory with an input or another output"
    for fn, x in ((twice, x32), (input_itself, w16), (copied, x32)):
        result = ran(fn, x)
        assert not result.changed and result.report.refused[0][1] == because, result


def test_the_second_of_two_outputs_stays_where_the_first_took_the_value():
    """Each of them alone could be the product itself; both cannot."""

    def fn(x, w):
        product = x @ w
        wide = product.float()
        return wide.view(64).to(BF16), wide.view(2, 32).to(BF16), wide.sum()

    result = ran(fn, w16, v16)
    assert result.report.matched == 2 and result.report.rewritten == 1
    first, second, _ = result.fn(w16, v16)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_memory_that_is_written_to_is_refused():
    def fn(x, w):
        wide = x.float()
        narrow = wide.t().to(BF16) @ w
        x.add_(1)
        return narrow, wide.sum()

    refused = ran(fn, w16.clone(), v16).report.refused
    assert refused == (("convert_element_type_1", "its memory is written to"),)


def test_two_casts_with_a_write_between_them_stay_two():
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    cast = torch.ops.prims.convert_element_type.default
    before = graph.call_function(cast, (x, BF16))
    graph.call_function(torch.ops.aten.copy_.default, (x, w))
    after = graph.call_function(cast, (x, BF16))
    first = _first_of_each(graph)
    assert first[after] is after and first[before] is before


def test_symbolic_sizes_are_refused():
    testing.refuses(P, two_products, x32, w16, v16, because="its sizes are symbolic", dynamic=True)


def test_only_what_is_labelled_is_rewritten():
    result = ran(two_products, x32, w16, v16, labels={"mm": "memory_bound"})
    assert result.report.refused == (
        ("convert_element_type_1", "not labelled with traffic of casts, copies or memory"),
    )


@pytest.mark.parametrize("fn", [two_products, widened])
def test_the_numbers_over_layouts(fn):
    inputs = (x32, w16, v16) if fn is two_products else (w16, v16)
    cases = testing.check(P, fn, *inputs, dynamic=(False,), must_rewrite=False)
    assert any(case.result.changed for case in cases)


def test_inductor_writes_one_cast_fewer(fresh_dynamo):
    """Counted in the generated code: what is cast for two library calls is stored once."""

    class Labelled(PassContext):  # the names of nodes are not known before the graph is compiled
        def answers(self, node: torch.fx.Node, axes: Any) -> bool:
            return True

    context = Labelled(device=torch.device("cpu"), budget=parse_precision("fp32"))
    slot = SlotPass([P], context, Stage.POST_GRAD)

    def stored(slots: dict[str, Any]) -> int:
        codes = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            compiled = inductor.compile_graph(gm, inputs, patches={}, slots=slots, caches=False)
            codes.append(compiled.graph.source_code)
            return compiled.fn

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(two_products, backend=backend)(x32, w16, v16)
        return codes[0].count(".store(out_ptr")

    assert (stored({}), stored({"post_grad": slot})) == (2, 1)
    assert slot.reports[0].rewritten == 1
