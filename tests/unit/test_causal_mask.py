"""causal_mask: masks that are proved causal and dropped, in every form that they are built in, and what is refused."""

from __future__ import annotations

import math
import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from random_graph_helpers import for_all, masked_attention

from fxopt import testing
from fxopt.build import Builder
from fxopt.labels import Axis, Label
from passes import causal_mask
from passes.causal_mask import MASK, CausalMask

aten = torch.ops.aten
LOW = torch.finfo(torch.float32).min
Q, K, V = (torch.randn(2, 4, 16, 8) for _ in range(3))


def sdpa(mask, q=Q, k=K, v=V):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attentions(module):
    return [node for node in module.graph.nodes if node.target in MASK]


def causal_and_mask(module):
    """(is_causal, mask) of each attention."""
    found = [(causal_mask._arguments(node), MASK[node.target]) for node in attentions(module)]
    return [(given["is_causal"], given[name]) for given, name in found]


def rewritten(fn, *inputs):
    result = testing.run(CausalMask(), testing.capture(fn, *inputs))
    assert not result.report.error, result
    return result


# ---------------------------------------------------------------- what is dropped


def test_the_mask_and_all_that_built_it_are_gone():
    def attend(q, k, v):
        mask = torch.full((16, 16), -math.inf).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    result = rewritten(attend, Q, K, V)
    assert "where" in result.before and "iota" in result.before
    lines = result.after.splitlines()
    assert len(lines) == 6, result
    assert lines[3].endswith("aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)")
    assert (result.report.matched, result.report.rewritten) == (1, 1)


def bool_tril():
    return torch.ones(16, 16, dtype=torch.bool).tril()


def minus_infinity():
    return torch.full((16, 16), -math.inf).triu(1)


def least_number():
    return torch.full((16, 16), LOW).triu(1)


def inverted_ones():
    """As transformers extend a mask of ones: (1 - mask) times float32's least number."""
    return (1.0 - torch.ones(16, 16).tril()) * LOW


def compared_positions():
    positions = torch.arange(16)
    return (positions[None, :] <= positions[:, None])[None, None].expand(2, 4, 16, 16)


def indexed():
    allowed = torch.ones(32, 32, dtype=torch.bool).tril()
    rows = torch.arange(16)
    return allowed[rows[:, None], rows[None, :]]


def part_of_a_padded_one():
    """As attention on a GPU wants its mask: the rows aligned, the columns beyond cut off."""
    return F.pad(torch.full((16, 16), -math.inf).triu(1), (0, 3))[:, :16].expand(2, 4, 16, 16)


def joined():
    block = torch.ones(8, 8, dtype=torch.bool)
    upper = torch.cat([block.tril(), torch.zeros_like(block)], 1)
    return torch.cat([upper, torch.cat([block, block.tril()], 1)], 0)


def two_masks_together():
    return bool_tril() & torch.ones(16, dtype=torch.bool)[None, :] & ~torch.zeros(16, 1, dtype=torch.bool)


def literal():
    return torch.tensor([[0.0 if j <= i else -math.inf for j in range(16)] for i in range(16)])


CAUSAL = [
    bool_tril,
    minus_infinity,
    least_number,
    inverted_ones,
    compared_positions,
    indexed,
    part_of_a_padded_one,
    joined,
    two_masks_together,
    literal,
]


@pytest.mark.parametrize("build", CAUSAL, ids=lambda f: f.__name__)
def test_a_causal_mask_is_dropped_however_it_is_built(build):
    def attend(q, k, v):
        return sdpa(build(), q, k, v)

    assert causal_and_mask(rewritten(attend, Q, K, V).module) == [(True, None)]
    testing.check(CausalMask(), attend, Q, K, V, layouts=("contiguous", "sliced"), dynamic=(False,))


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.zeros(16, 16),
        lambda: torch.ones(2, 1, 1, 16, dtype=torch.bool).expand(2, 1, 16, 16),
        lambda: torch.arange(16)[None, :].expand(16, 16) >= 0,
    ],
    ids=["zeros", "true", "compared"],
)
def test_a_mask_that_hides_nothing_is_dropped_and_nothing_becomes_causal(build):
    def attend(q, k, v):
        return sdpa(build(), q, k, v)

    assert causal_and_mask(rewritten(attend, Q, K, V).module) == [(False, None)]
    testing.check(CausalMask(), attend, Q, K, V, layouts=("contiguous",), dynamic=(False,))


def test_one_query_that_sees_all_keys_needs_no_mask():
    def decode(q, k, v):
        return sdpa(torch.ones(1, 16, dtype=torch.bool), q, k, v)

    assert causal_and_mask(rewritten(decode, Q[:, :, :1], K, V).module) == [(False, None)]


class Gpt2(torch.nn.Module):
    """Hugging Face's own, two layers; it builds its mask from positions alone where no attention_mask is given."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=64,
            n_head=2,
            vocab_size=100,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        self.model = transformers.GPT2Model(config).eval()

    def forward(self, ids, attention_mask=None):
        return self.model(ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def test_every_layer_of_gpt2_is_rewritten():
    model, ids = Gpt2(), torch.randint(0, 100, (2, 16))
    result = rewritten(model, ids)
    assert result.report.rewritten == 2 and not result.report.refused
    assert causal_and_mask(result.module) == [(True, None)] * 2
    left = {node.target for node in result.module.graph.nodes}
    assert not left & {aten.where.self, aten.le.Tensor, aten.bitwise_and.Tensor, aten.cumsum.default}
    testing.check(CausalMask(), model, ids, layouts=("contiguous",), dynamic=(False,))


def test_gpt2_with_padding_is_left_alone():
    ids = torch.randint(0, 100, (2, 16))
    padding = torch.ones(2, 16, dtype=torch.int64)
    because = "the mask depends on the input attention_mask"
    report = testing.refuses(CausalMask(), Gpt2(), ids, padding, because=because)
    assert [reason for _, reason in report.refused] == [because] * 2


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        (aten._scaled_dot_product_efficient_attention.default, (False,)),
        (aten._scaled_dot_product_cudnn_attention.default, (False,)),
    ],
    ids=["efficient", "cudnn"],
)
def test_attention_on_a_gpu_is_rewritten_as_well(attention, more):
    def attend(q, k, v):
        return attention(q, k, v, minus_infinity().expand(2, 4, 16, 16), *more, scale=0.5)[0]

    graph = testing.capture(attend, Q, K, V)
    for node in graph.graph.nodes:  # as on a GPU, which need not be there: masks are evaluated on the CPU
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
    p = CausalMask()
    context = testing.context(p, device="cuda", labels=testing.labels(graph, "tensor_core_idle"))
    assert [c.refused for c in p.candidates(graph.graph, context)] == [""]
    (node,) = attentions(graph)
    p.rewrite(graph.graph, node, context)
    assert causal_and_mask(graph) == [(True, None)]
    assert node.kwargs == {"scale": 0.5}


def test_equal_masks_of_several_layers_are_evaluated_once(monkeypatch):
    def layers(q, k, v):
        for _ in range(3):
            q = sdpa(minus_infinity(), q, k, v)
        return q

    evaluate, calls = causal_mask._Constants._evaluate, Counter()

    def counted(self, node):
        calls[node.target] += 1
        return evaluate(self, node)

    monkeypatch.setattr(causal_mask._Constants, "_evaluate", counted)
    assert causal_and_mask(rewritten(layers, Q, K, V).module) == [(True, None)] * 3
    assert calls[aten.where.self] == 1


def test_a_label_of_what_builds_the_mask_is_enough():
    def attend(q, k, v):
        return sdpa(compared_positions(), q, k, v)

    graph = testing.capture(attend, Q, K, V)
    where = next(node.name for node in graph.graph.nodes if node.target is aten.where.self)
    assert testing.run(CausalMask(), graph, labels={where: "memory_bound"}).changed
    assert testing.run(CausalMask(), graph, labels=testing.labels(graph, "launch_bound", nodes=[])).changed


def test_masks_are_evaluated_while_the_graph_is_compiled(fresh_dynamo):
    """There every new tensor is fake, unless the pass sees to it."""

    def attend(q, k, v):
        return sdpa(compared_positions(), q, k, v)

    reports = []

    def backend(gm, inputs):
        label = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "why")
        build = Builder(gm, inputs, {"force_disable_caches": True}, testing.context(labels=(label,))).build(
            [CausalMask()]
        )
        reports.extend(build.reports)
        left = {node.target for node in build.compiled.post_grad.graph.nodes if node.op == "call_function"}
        assert left == {aten._scaled_dot_product_flash_attention_for_cpu.default, operator.getitem}
        return build.fn

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attend, backend=backend, fullgraph=True)(Q, K, V), attend(Q, K, V))
    assert [(report.rewritten, report.error) for report in reports] == [(1, "")]


# ---------------------------------------------------------------- what is refused


def refused(build, because, q=Q, k=K, v=V, **kwargs):
    def attend(q, k, v):
        return sdpa(build(), q, k, v)

    testing.refuses(CausalMask(), attend, q, k, v, because=because, **kwargs)


def test_what_has_no_label_is_refused():
    refused(bool_tril, "no label that this pass answers", labels={})


def test_a_mask_that_is_an_input_is_refused_by_its_name():
    def attend(q, k, v, padding):
        return sdpa(bool_tril() & padding[:, None, None, :], q, k, v)

    padding = torch.ones(2, 16, dtype=torch.bool)
    testing.refuses(CausalMask(), attend, Q, K, V, padding, because="the mask depends on the input padding")


@pytest.mark.parametrize(("queries", "keys"), [(8, 16), (16, 8)])
def test_a_causal_mask_of_other_lengths_is_refused(queries, keys):
    mask = f"q_len {queries} is not kv_len {keys}"
    refused(
        lambda: torch.ones(queries, keys, dtype=torch.bool).tril(),
        mask,
        Q[:, :, :queries],
        K[:, :, :keys],
        V[:, :, :keys],
    )


def test_a_window_is_refused():
    refused(lambda: bool_tril().triu(-3), "the mask hides position 0 from 4: padding or a window")


def test_padding_that_is_part_of_the_graph_is_refused():
    refused(lambda: bool_tril() & (torch.arange(16) > 1), "the mask hides position 0 from 0: padding or a window")


def test_a_mask_that_shows_the_future_is_refused():
    refused(lambda: torch.ones(16, 16, dtype=torch.bool).tril(1), "the mask shows the later position 1 to 0")


def test_a_mask_that_is_not_causal_in_one_head_alone_is_refused():
    def build():
        first = torch.arange(4)[:, None, None] == 0
        return (bool_tril() | first)[None].expand(2, 4, 16, 16)

    refused(build, "the mask shows the later position 1 to 0")


def test_a_position_bias_is_refused():
    def build():  # ALiBi: half a unit for each position back
        positions = torch.arange(16)
        distance = (positions[None, :] - positions[:, None]).to(torch.float32)
        return torch.where(bool_tril(), distance * 0.5, -math.inf)

    refused(build, r"no pure mask: it adds -0\.5")


@pytest.mark.parametrize("low", [-1e9, -10000.0])
def test_a_large_negative_number_is_not_minus_infinity(low):
    refused(lambda: torch.full((16, 16), low).triu(1), "no pure mask: it adds -1")


def test_half_precision_s_least_number_is_no_more_than_a_score():
    low = torch.finfo(torch.float16).min
    q, k, v = (x.half() for x in (Q, K, V))
    refused(lambda: torch.full((16, 16), low, dtype=torch.float16).triu(1), "it adds -65504.0", q, k, v)


def test_a_mask_from_arithmetic_that_rounds_is_refused():
    """0.1 * 3 - 0.3 is zero or not, as a multiply-add rounds once or twice."""

    def build():
        return torch.full((16, 16), -math.inf).triu(1) + (torch.full((16, 16), 0.1) * 3 - 0.3)

    refused(build, "floating-point arithmetic that rounds")


def test_a_mask_from_an_operator_that_may_differ_between_devices_is_refused():
    refused(lambda: torch.log(bool_tril().to(torch.float32)), "made by aten.log.default, which is not evaluated")


def test_a_random_mask_is_refused():
    refused(lambda: bool_tril() & (torch.rand(16, 16) > 2), "the mask (is made by|depends on)")


def test_dropout_is_refused():
    def attend(q, k, v):
        return aten._scaled_dot_product_efficient_attention(q, k, v, minus_infinity().expand(2, 4, 16, 16), False, 0.5)[
            0
        ]

    testing.refuses(CausalMask(), attend, Q, K, V, because="it draws random numbers")


def test_a_causal_attention_with_a_mask_is_refused():
    def attend(q, k, v):
        bias = minus_infinity().expand(2, 4, 16, 16)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, True)[0]

    testing.refuses(CausalMask(), attend, Q, K, V, because="it is causal and takes a mask as well")


def test_symbolic_lengths_are_refused():
    def attend(q, k, v):
        return sdpa(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(), q, k, v)

    testing.refuses(CausalMask(), attend, Q, K, V, because="symbolic", dynamic=True)


def test_a_mask_that_is_too_large_to_evaluate_is_refused():
    def attend(q, k, v):
        return sdpa(bool_tril(), q, k, v)

    testing.refuses(CausalMask(max_bytes=100), attend, Q, K, V, because="more than max_bytes")


def test_gradients_are_refused():
    assert "gradients are on" in CausalMask().applicable(testing.context(CausalMask(), grad=True))


def test_a_constant_that_the_graph_writes_to_is_refused():
    graph = testing.capture(lambda q, k, v: sdpa(literal(), q, k, v), Q, K, V)
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert constants and testing.run(CausalMask(), graph).changed
    with graph.graph.inserting_before(graph.graph.output_node()):
        graph.graph.call_function(aten.copy_.default, (constants[0], constants[0]))
    context = testing.context(CausalMask(), labels=testing.labels(graph, "memory_bound"))
    (candidate,) = CausalMask().candidates(graph.graph, context)
    assert "which is not evaluated exactly" in candidate.refused


# ---------------------------------------------------------------- random graphs


def test_random_graphs_stay_equivalent():
    seen: Counter[bool] = Counter()
    strategy = testing.graphs([masked_attention], dynamic=False, max_nodes=8)
    for_all(strategy, 100, lambda graph: seen.update([testing.equivalent(CausalMask(), graph).changed]))
    assert seen[True] >= 30, seen
