"""gemm_epilogue: which activations become part of the product before them, what is refused, and the numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn

from fxopt import registry, testing
from fxopt.build import Builder
from fxopt.labels import Axis, Label
from fxopt.manager import SlotPass
from fxopt.precision import Precision
from fxopt.registry import GraphPass, Pass, Stage
from fxopt.torch_api import inductor
from passes import gemm_epilogue
from passes.bf16_graph import Bf16Graph
from passes.gemm_epilogue import GemmEpilogue
from passes.promote_matmul_precision import PromoteMatmulPrecision

BF16 = torch.bfloat16
Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EpilogueOnCpu(GemmEpilogue):
    """The pass on the CPU, where the operator computes the exact GELU."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


P = EpilogueOnCpu()
LAUNCHES = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "given by a test")


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


OPERANDS = rand(32), rand(4, 16), rand(16, 32)


def after_addmm(activation: Function) -> Callable[..., torch.Tensor]:
    def fn(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return activation(torch.addmm(bias, x, w))

    return fn


def run(fn: Callable[..., Any], *inputs: Any, **options: Any) -> testing.Result:
    return testing.run(P, testing.capture(fn, *inputs, stage="post_grad"), **options)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """As transformers write it for GPT-2."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_python(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def in_fp32(activation: Function) -> Function:
    """As a graph has it whose products alone are in 16 bits."""
    return lambda x: activation(x.float()).to(x.dtype)


# ------------------------------------------------------------------------------------------------- before and after


def test_a_relu_becomes_part_of_the_product():
    result = run(after_addmm(torch.relu), *OPERANDS)
    inputs = "bias: bf16[32] = input\nx: bf16[4, 16] = input\nw: bf16[16, 32] = input\n"
    assert sorted(result.before.splitlines()[:3]) == sorted(inputs.splitlines())
    assert result.before.splitlines()[3:] == [
        "addmm: bf16[4, 32] = aten.addmm.default(bias, x, w)",
        "relu: bf16[4, 32] = aten.relu.default(addmm)",
        "return relu",
    ]
    assert result.after.splitlines()[3:] == [
        "_addmm_activation_default: bf16[4, 32] = aten._addmm_activation.default(bias, x, w)",
        "return _addmm_activation_default",
    ]


def test_a_decomposed_gelu_becomes_part_of_the_product_through_its_views():
    def fn(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gelu_new(F.linear(x, w, bias)).sin()

    result = run(fn, rand(32), rand(2, 4, 16), rand(32, 16))
    assert len(result.before.splitlines()) == 17 and "tanh" in result.before
    assert result.after.splitlines()[3:] == [
        "view: bf16[8, 16] = aten.reshape.default(x, [8, 16])",
        "permute: bf16[16, 32][1, 16] = aten.permute.default(w, [1, 0])",
        "_addmm_activation_default: bf16[8, 32] = aten._addmm_activation.default(bias, view, permute, use_gelu=True)",
        "reshape_default: bf16[2, 4, 32] = aten.reshape.default(_addmm_activation_default, [2, 4, 32])",
        "sin: bf16[2, 4, 32] = aten.sin.default(reshape_default)",
        "return sin",
    ]


def plain_sum(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + bias)


def viewed_sum(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu((x @ w).view(3, 2, 32) + bias)


def bias_first(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(bias + x @ w).permute(1, 0)


def turned(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(bias, x, w).t().unsqueeze(0))


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (viewed_sum, (rand(32), rand(6, 16), rand(16, 32))),
        (plain_sum, OPERANDS),
        (bias_first, OPERANDS),
        (turned, OPERANDS),
        (after_addmm(F.gelu), OPERANDS),
        (after_addmm(in_fp32(torch.relu)), OPERANDS),
    ],
    ids=["a bias after a view", "a bias added", "a bias first", "a transposed sum", "GELU", "relu in float32"],
)
def test_numbers_shapes_and_strides_stay(fn: Any, inputs: tuple[torch.Tensor, ...]):
    testing.check(P, fn, *inputs, layouts=["contiguous", "transposed"], dynamic=(False,), precision="bf16")


# ------------------------------------------------------------------------------------------ what is an activation

EXACT = {"gelu": F.gelu, "gelu_python": gelu_python}
TANH = {
    "gelu_tanh": gelu_tanh,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_accurate": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
}


@pytest.mark.parametrize(("dtype", "form"), [(BF16, in_fp32), (torch.float16, lambda activation: activation)])
@pytest.mark.parametrize("name", [*EXACT, *TANH])
def test_a_gelu_is_known_by_what_it_computes(name: str, dtype: torch.dtype, form: Callable[[Function], Function]):
    activation = {**EXACT, **TANH}[name]
    bias, x, w = rand(32, dtype=dtype), rand(64, 16, dtype=dtype), rand(16, 32, dtype=dtype) / 4
    result = run(after_addmm(form(activation)), bias, x, w, precision="bf16")
    assert result.report.rewritten == 1 and "use_gelu=True" in result.after, result
    (found,) = result.fn(*inputs_of(result, bias=bias, x=x, w=w))
    exact_sum = x.double() @ w.double() + bias.double()
    # On the CPU the operator is the exact GELU, from which the tanh form is off by 5e-4 at most; the sum is rounded
    # once, and so is the result.
    rounding = 4 * torch.finfo(dtype).eps * exact_sum.abs().max()
    assert (found.double() - activation(exact_sum)).abs().max() < 5e-4 + rounding


def inputs_of(result: testing.Result, **given: torch.Tensor) -> list[torch.Tensor]:
    """In the order in which the graph takes them, which differs from one torch to the next."""
    return [given[node.name] for node in result.module.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize(
    "other",
    [
        F.silu,
        F.leaky_relu,
        torch.tanh,
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x.clamp_min(1e-7),
        lambda x: torch.relu(2 * x),
        lambda x: torch.relu(x - 1e-7),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.erf(0.7071 * x)),
        lambda x: x.softmax(-1),
        lambda x: 1 / x,
        lambda x: x**0.5,
        lambda x: x * (1 + torch.erf(x.view(4, 8, 4).transpose(0, 1).reshape(4, 32) * 0.7071067811865476)) * 0.5,
        lambda x: x,
    ],
)
def test_what_is_nearly_an_activation_is_none(other: Function):
    testing.refuses(P, after_addmm(other), *OPERANDS, because="^no relu or GELU is all that reads its sum$")


def test_what_follows_an_activation_stays():
    result = run(after_addmm(lambda x: torch.relu(x) + 1e-6), *OPERANDS)
    assert result.report.rewritten == 1 and "add" in result.after.splitlines()[-2]


# ------------------------------------------------------------------------------------------------ what is refused


def two_readers(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(bias, x, w)
    return torch.relu(y) + y


def inner_reader(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.addmm(bias, x, w)
    t = torch.erf(y * 0.7071067811865476)
    return y * 0.5 * (1 + t), t


def sum_returned(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.addmm(bias, x, w)
    return torch.relu(y), y


def halved(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(bias, x, w, beta=0.5))


def doubled(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(bias, x, w, alpha=2))


def wide_gelu(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.addmm(bias, x, w).float())


RELU = after_addmm(torch.relu)
NO_ACTIVATION = "no relu or GELU is all that reads its sum"
BIAS = "its bias is no row of N numbers of the operands' type"
SMALL = "M, K or N is less than 2"


@pytest.mark.parametrize(
    ("fn", "inputs", "because"),
    [
        (RELU, tuple(x.float() for x in OPERANDS), "operands are torch.float32: cuBLASLt's epilogue is used for"),
        (two_readers, OPERANDS, NO_ACTIVATION),
        (inner_reader, OPERANDS, NO_ACTIVATION),
        (sum_returned, OPERANDS, NO_ACTIVATION),
        (halved, OPERANDS, "beta or alpha is not 1"),
        (doubled, OPERANDS, "beta or alpha is not 1"),
        (RELU, (rand(4, 32), rand(4, 16), rand(16, 32)), BIAS),
        (RELU, (rand(4, 1), rand(4, 16), rand(16, 32)), BIAS),
        (RELU, (rand(1), rand(4, 16), rand(16, 32)), BIAS),
        (RELU, (rand(64)[::2], rand(4, 16), rand(16, 32)), BIAS),
        (plain_sum, (rand(4, 32), rand(4, 16), rand(16, 32)), BIAS),
        (plain_sum, (rand(32).float(), rand(4, 16), rand(16, 32)), BIAS),
        (RELU, (rand(32), rand(1, 16), rand(16, 32)), SMALL),
        (RELU, (rand(32), rand(4, 1), rand(1, 32)), SMALL),
        (RELU, (rand(1), rand(4, 16), rand(16, 1)), SMALL),
        (wide_gelu, OPERANDS, "its GELU is read in another type, for which the library would round it"),
    ],
)
def test_it_refuses(fn: Any, inputs: tuple[torch.Tensor, ...], because: str):
    testing.refuses(P, fn, *inputs, because=f"^{because}", precision="bf16")


def test_a_library_whose_relu_makes_numbers_of_nan_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    assert gemm_epilogue._keeps_nan(torch.device("cpu"), BF16)
    own = torch._addmm_activation
    monkeypatch.setattr(torch, "_addmm_activation", lambda *given: own(*given).nan_to_num())
    gemm_epilogue._keeps_nan.cache_clear()
    testing.refuses(P, RELU, *OPERANDS, because="^the library's relu makes numbers of NaN here$")
    assert run(after_addmm(gelu_new), *OPERANDS).changed, "GELU computes with it"
    gemm_epilogue._keeps_nan.cache_clear()


def test_symbolic_sizes_are_refused():
    testing.refuses(P, RELU, *OPERANDS, because="^its sizes are symbolic$", dynamic=True)


def test_an_exact_gelu_needs_the_class_bf16_and_the_others_none():
    because = "^its GELU is the exact one; the library's tanh form needs precision 'bf16'$"
    testing.refuses(P, after_addmm(F.gelu), *OPERANDS, because=because)
    testing.refuses(P, after_addmm(F.gelu), *OPERANDS, because=because, precision="tf32")
    testing.refuses(P, after_addmm(F.gelu), *OPERANDS, because=because, precision=1e-5)
    assert run(after_addmm(F.gelu), *OPERANDS, precision=1e-2).report.rewritten == 1
    assert run(after_addmm(gelu_tanh), *OPERANDS).report.rewritten == 1
    assert run(RELU, *OPERANDS).report.rewritten == 1 and P.precision is Precision.FP32


def test_a_product_without_a_bias_is_none_of_its_business():
    def folded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu((x @ w).view(2, 64) + w.view(8, 64)[0])

    for fn in (lambda x, w: torch.relu(x @ w), lambda x, w: torch.relu(x @ w + 1), folded):
        result = run(fn, rand(4, 16), rand(16, 32))
        assert not result.changed and not result.report.refused


def test_a_label_of_the_product_or_of_any_part_of_the_activation_will_do():
    graph = testing.capture(after_addmm(gelu_new), *OPERANDS, stage="post_grad")
    for labels in ({"tanh": "divergent"}, {"addmm": "compute_bound"}, {"mul_3": "l2_bound"}, [LAUNCHES]):
        assert testing.run(P, graph, labels=labels).report.rewritten == 1, labels
    for labels in ({}, {"tanh": "cast_traffic"}, {"addmm": "layout_conversion"}):
        (refused,) = testing.run(P, graph, labels=labels).report.refused
        assert refused == ("addmm", "neither it nor its activation is labelled with what this answers")


def test_gradients_and_a_torch_without_cublaslt_rule_it_out(monkeypatch: pytest.MonkeyPatch):
    context = testing.context(P, device="cuda")
    assert registry.inapplicable(GemmEpilogue(), context) == ""
    gradients = testing.context(P, device="cuda", grad=True)
    assert registry.inapplicable(GemmEpilogue(), gradients).startswith("gradients are on")
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    assert registry.inapplicable(GemmEpilogue(), context) == "DISABLE_ADDMM_CUDA_LT=1 keeps torch from calling cuBLASLt"
    assert GemmEpilogue.devices == ("cuda",)


# ------------------------------------------------------------------------------- graphs that other passes leave behind


def test_an_activation_in_float32_is_read_in_16_bits_where_it_was_cast_to_them():
    def fn(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(torch.addmm(bias, x, w).float()).view(2, 2, 32).to(BF16).view(4, 32) @ w.t()

    result = run(fn, *OPERANDS)
    assert result.report.rewritten == 1 and "convert_element_type" not in result.after, result


def test_a_relu_in_float32_is_widened_for_those_who_read_it_there():
    def fn(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(torch.addmm(bias, x, w).float())
        return y.to(BF16) @ w.t(), y

    graph = testing.capture(fn, *OPERANDS, stage="post_grad")
    result = testing.run(P, graph)
    assert result.after.count("convert_element_type.default(_addmm_activation_default, float32)") == 1, result
    assert result.after.count("convert_element_type.default(") == 1
    inputs = graph.meta["example_inputs"]
    for found, expected in zip(result.fn(*inputs), graph(*inputs), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


class _Stop(BaseException):
    """Ends the compilation where the last pass has run."""


class _Slot(SlotPass):
    """The passes of the last stage, after which nothing is compiled."""

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        super().__call__(graph, is_inference)
        self.text = str(graph)
        raise _Stop


def after_passes(model: nn.Module, *inputs: Any, before: Pass) -> _Slot:
    """What the pass does to the graph that `before` leaves."""
    gm, arguments = dynamo_graph(model, *inputs)
    context = testing.context(P, precision="bf16", labels=[LAUNCHES, *everything(gm)])
    slots: dict[str, Any] = {"post_grad": _Slot([P], context, Stage.POST_GRAD)}
    compute: dict[int, torch.dtype] = {}
    if isinstance(before, GraphPass):
        slots["joint"] = SlotPass([before], context, Stage.JOINT)
    else:
        accepted = [i for i, c in before.candidates(gm, arguments, context) if not c.refused]
        compute.update(before.configure(accepted, context).compute)
    with contextlib.suppress(_Stop), torch.no_grad():
        inductor.compile_graph(gm, arguments, patches={}, slots=slots, compute=compute, caches=False)
    if "joint" in slots:
        assert slots["joint"].reports[0].rewritten, slots["joint"].reports
    return slots["post_grad"]


def everything(gm: torch.fx.GraphModule) -> tuple[Label, ...]:
    """tensor_core_idle on all that promote_matmul_precision may meet in a joint graph."""
    names = [f"{kind}{number}" for kind in ("addmm", "mm") for number in ("", *(f"_{n}" for n in range(1, 20)))]
    return (Label(Axis.TENSOR_CORE_IDLE, "group", tuple(names), "k:1", (), "high", 1.0, "given by a test"),)


@pytest.mark.parametrize("before", [Bf16Graph(), PromoteMatmulPrecision()], ids=lambda p: p.name)
def test_all_mlp_activations_of_gpt2_are_taken(before: Pass, fresh_dynamo: None):
    transformers = pytest.importorskip("transformers", reason="the graph is GPT-2's, of transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16, "use_cache": False}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    assert config.activation_function == "gelu_new"
    model = transformers.GPT2Model(config).eval()
    slot = after_passes(model, torch.arange(16).view(2, 8), before=before)
    (report,) = slot.reports
    assert (report.matched, report.rewritten, report.error) == (2, 2, ""), report
    assert {reason for _, reason in report.refused} == {NO_ACTIVATION}
    assert slot.text.count("_addmm_activation") >= 2 and "tanh" not in slot.text


@pytest.mark.parametrize("before", [Bf16Graph(), PromoteMatmulPrecision()], ids=lambda p: p.name)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.GELU("tanh")], ids=str)
def test_an_mlp_is_taken_after(before: Pass, activation: nn.Module, fresh_dynamo: None):
    layers = [nn.Linear(16, 32), activation, nn.Linear(32, 32), activation, nn.Linear(32, 16)]
    (report,) = after_passes(nn.Sequential(*layers).eval(), torch.randn(4, 16), before=before).reports
    assert (report.rewritten, report.error) == (2, ""), report


def test_inductor_compiles_it_as_one_call(fresh_dynamo: None):
    gm, arguments = dynamo_graph(after_addmm(torch.relu), *OPERANDS)
    build = Builder(gm, arguments, {}, testing.context(P, labels=[LAUNCHES])).build([P])
    (report,) = build.reports
    assert report.rewritten == 1 and not report.error
    (found,) = build.fn(*arguments)
    assert torch.equal(found, gm(*arguments)[0])
    again = testing.run(P, testing.capture(torch.ops.aten._addmm_activation, *OPERANDS, stage="post_grad"))
    assert not again.changed
