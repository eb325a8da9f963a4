"""pad_matmul: which products are padded, with what, and that the numbers and the form of the result stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fxopt import testing
from passes.pad_matmul import PadMatmul

BF16 = torch.bfloat16


@dataclass(frozen=True)
class PadOnCpu(PadMatmul):
    devices: ClassVar[tuple[str, ...]] = ("cpu",)


P = PadOnCpu()


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).relu()


def test_k_and_n_are_padded_to_multiples_of_eight_and_the_result_is_sliced():
    result = testing.run(P, testing.capture(product, rand(4, 70), rand(70, 77), stage="post_grad"))
    assert result.after == (
        "a: bf16[4, 70] = input\n"
        "b: bf16[70, 77] = input\n"
        "constant_pad_nd_default: bf16[4, 72] = aten.constant_pad_nd.default(a, [0, 2], 0.0)\n"
        "constant_pad_nd_default_1: bf16[72, 80] = aten.constant_pad_nd.default(b, [0, 3, 0, 2], 0.0)\n"
        "mm_default: bf16[4, 80] = aten.mm.default(constant_pad_nd_default, constant_pad_nd_default_1)\n"
        "slice_tensor: bf16[4, 77][80, 1] = aten.slice.Tensor(mm_default, -1, 0, 77)\n"
        "relu: bf16[4, 77] = aten.relu.default(slice_tensor)\n"
        "return relu"
    )


def test_only_what_is_unaligned_is_padded():
    k_only = testing.run(P, testing.capture(product, rand(4, 70), rand(70, 72), stage="post_grad"))
    assert "slice" not in k_only.after and "[0, 0, 0, 2]" in k_only.after
    n_only = testing.run(P, testing.capture(product, rand(4, 72), rand(72, 77), stage="post_grad"))
    assert n_only.after.count("constant_pad_nd.default") == 1 and "[0, 5]" not in n_only.after


def biased(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(c, a, b, beta=0.5, alpha=2).sin()


def viewed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = a @ b
    return y.view(-1) + 1, y.view(2, 2, -1) * 2, y.t().exp()


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (product, (rand(4, 70), rand(70, 77))),
        (torch.matmul, (rand(4, 70), rand(70, 77))),  # returned as it is
        (lambda a, b: (a @ b).t(), (rand(4, 70), rand(70, 77))),
        (viewed, (rand(4, 70), rand(70, 77))),
        (torch.bmm, (rand(3, 65, 70), rand(3, 70, 77))),
        (biased, (rand(77), rand(4, 70), rand(70, 77))),
        (biased, (rand(4, 77), rand(4, 70), rand(70, 77))),
        (biased, (rand(4, 1), rand(4, 70), rand(70, 77))),
        (torch.baddbmm, (rand(3, 4, 77), rand(3, 4, 70), rand(3, 70, 77))),
    ],
)
def test_numbers_shapes_and_strides_stay(fn: Any, inputs: tuple[torch.Tensor, ...]):
    testing.check(P, fn, *inputs, dynamic=(False,), precision="bf16")


def test_nan_and_inf_stay_where_they_were():
    a, b = rand(4, 70), rand(70, 77)
    a[1, 3], a[2, 5], b[0, 76] = torch.inf, torch.nan, -torch.inf
    result = testing.run(P, testing.capture(product, a, b, stage="post_grad"))
    (found,) = result.fn(a, b)
    expected = product(a, b)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert expected.isnan().any() and expected.isinf().any()


class Constant(torch.nn.Module):
    """A frozen weight [77, 70], read transposed, as Inductor's freezing leaves it."""

    def __init__(self, readers: int = 1) -> None:
        super().__init__()
        self.register_buffer("w", rand(77, 70))
        self.readers = readers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x @ self.w.t()).relu() + i for i in range(self.readers))


def frozen(readers: int = 1) -> torch.fx.GraphModule:
    """The graph of Constant with the weight as an attribute, without the packing that Inductor does for a CPU."""
    model = Constant(readers)
    graph = testing.capture(model, rand(4, 70), stage="post_grad")
    placeholder = next(n for n in graph.graph.nodes if n.op == "placeholder" and list(n.meta["val"].shape) == [77, 70])
    graph.register_buffer("w", model.w)
    with graph.graph.inserting_before(placeholder):
        held = graph.graph.get_attr("w")
    held.meta.update(placeholder.meta)
    placeholder.replace_all_uses_with(held)
    graph.graph.erase_node(placeholder)
    graph.recompile()
    return graph


def test_a_constant_weight_is_padded_once_and_keeps_its_layout():
    graph = frozen()
    x = rand(4, 70)
    expected = graph(x)[0]
    result = testing.run(P, graph, inputs=[x])
    assert result.report.rewritten == 1, result
    assert result.after.count("constant_pad_nd.default") == 1, "the activation alone is padded in the graph"
    (name,) = [n for n, _ in result.fn.named_buffers() if "padded" in n]
    wide = result.fn.get_buffer(name)
    assert wide.shape == (72, 80) and wide.stride() == (1, 72)
    assert not wide[70:].any() and not wide[:, 77:].any()
    assert torch.allclose(result.fn(x)[0], expected)


def test_a_constant_with_other_readers_is_not_held_twice():
    graph = frozen()
    (held,) = [n for n in graph.graph.nodes if n.op == "get_attr"]
    with graph.graph.inserting_after(held):
        other = graph.graph.call_function(torch.ops.aten.sin.default, (held,))
    other.meta["val"] = held.meta["val"]
    result = testing.run(P, graph, inputs=[rand(4, 70)])
    assert [reason for _, reason in result.report.refused] == [
        "a constant operand has other readers, and would be held twice"
    ]


@pytest.mark.parametrize(
    ("inputs", "because"),
    [
        ((rand(4, 72), rand(72, 80)), "K and N are multiples of 8"),
        ((rand(4, 70, dtype=torch.float32), rand(70, 77, dtype=torch.float32)), "padding is for 16-bit types"),
        ((rand(4, 9), rand(9, 77)), "K or N is smaller than 64"),
        ((rand(4, 70), rand(70, 1)), "K or N is smaller than 64"),
        ((rand(0, 70), rand(70, 77)), "K or N is smaller than 64"),
    ],
)
def test_what_is_left_alone(inputs: tuple[torch.Tensor, ...], because: str):
    testing.refuses(P, torch.mm, *inputs, because=because)


def test_symbolic_sizes_unlabelled_products_and_cpus_are_refused():
    testing.refuses(P, product, rand(5, 70), rand(70, 77), because="sizes are symbolic", dynamic=True)
    testing.refuses(P, product, rand(5, 70), rand(70, 77), because="not labelled", labels=[])
    testing.refuses(PadMatmul(), product, rand(5, 70), rand(70, 77), because="is for cuda")
