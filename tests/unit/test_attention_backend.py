"""attention_backend: one backend's operator for another's, the choice offered to the tuner, and what it refuses.

The graphs are those of CUDA tensors, made of fake ones. What a backend takes is torch's to say, which needs a device to
ask: `torch_says` stands in for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import registry, testing
from fxopt.torch_api import attention
from fxopt.torch_api.attention import BACKENDS
from fxopt.torch_api.tracing import fake_mode
from passes.attention_backend import AttentionBackend

SHAPE = (2, 4, 48, 64)


@pytest.fixture(autouse=True)
def torch_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """What torch answers for each backend; all yes, unless a test says otherwise."""
    answers = dict.fromkeys(BACKENDS, True)
    for name in BACKENDS:
        monkeypatch.setattr(
            torch.backends.cuda, f"can_use_{name}_attention", lambda params, debug=False, name=name: answers[name]
        )
    return answers


def graph(
    backend: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    causal: bool = False,
    biased: bool = False,
    contiguous: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    shape: tuple[int, ...] = SHAPE,
    outputs: Any = lambda o: o[0],
) -> torch.fx.GraphModule:
    def call(*operands: Any) -> Any:
        q, k, v, bias = (*operands, None)[:4]
        target, args, kwargs = attention.call(backend, q, k, v, causal, scale)
        given = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | {"dropout_p": dropout}
        given |= {} if bias is None else {"attn_bias": bias}
        return outputs(target(*given.values(), **kwargs))

    with fake_mode(False):
        b, h, n, d = shape
        made = torch.empty((b, h, n, d) if contiguous else (b, n, h, d), device=device, dtype=dtype)
        rows = [torch.empty_like(made) if contiguous else torch.empty_like(made).transpose(1, 2) for _ in range(3)]
        bias = [torch.empty(b, h, n, n, device=device, dtype=dtype)] if biased else []
        return make_fx(call)(*rows, *bias)


def rewritten(gm: torch.fx.GraphModule, backend: str, **context: Any) -> testing.Result:
    p = AttentionBackend(backend)
    labels = testing.labels(gm, *p.answers)
    return testing.run(p, gm, context=testing.context(p, **{"device": "cuda", "labels": labels} | context))


def calls(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.target in BACKENDS.values()]


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(BACKENDS, 2)))
def test_each_backend_becomes_each_other(old, new):
    gm = graph(old, causal=True, scale=0.3)
    result = rewritten(gm, new)
    assert (result.report.matched, result.report.rewritten, result.report.error) == (1, 1, ""), result
    (before,), (after,) = calls(gm), calls(result.module)
    assert after.target is BACKENDS[new]
    was, now = attention.arguments(before), attention.arguments(after)
    for name in ("query", "key", "value"):
        assert was[name].name == now[name].name
    assert (now["is_causal"], now["scale"], now["dropout_p"]) == (True, 0.3, 0.0)
    assert now.get("attn_bias") is None and not now.get("compute_log_sumexp")
    assert after.meta["val"][0].stride() == before.meta["val"][0].stride()


def test_the_tuner_is_offered_all_three():
    offered = registry.variants(AttentionBackend(), testing.context(device="cuda"))
    assert [p.backend for p in offered] == ["cudnn", "flash", "efficient"]


def test_there_is_no_fourth():
    with pytest.raises(ValueError, match="'math', not one of cudnn, flash, efficient"):
        AttentionBackend("math")


def test_torch_is_asked_about_the_very_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params, debug: seen.append(params))
    rewritten(graph("flash", causal=True), "cudnn")
    (params,) = seen
    assert tuple(params.query.shape) == SHAPE and params.query.stride() == (48 * 256, 64, 256, 1)
    assert params.query.dtype == torch.bfloat16 and params.query.is_cuda
    assert params.is_causal and params.attn_mask is None and params.dropout == 0


def test_what_torch_does_not_take_is_refused(torch_says):
    torch_says["cudnn"] = False
    result = rewritten(graph("flash"), "cudnn")
    assert not result.changed
    assert result.report.refused[0][1] == "torch's cudnn attention does not take it"


def test_flash_wants_head_dimensions_that_are_multiples_of_8():
    gm = graph("efficient", shape=(2, 4, 48, 20))
    assert "flash attention does not take it" in rewritten(gm, "flash").report.refused[0][1]


REFUSED = {
    "not labelled": ({"labels": ()}, {}, "not labelled compute_bound, memory_bound or tensor_core_idle"),
    "fp32": ({}, {"dtype": torch.float32}, "for split_precision_attention or promote_matmul_precision"),
    "cpu": ({}, {"device": "meta"}, "it is not on CUDA"),
    "log-sum-exp": ({}, {"outputs": lambda o: (o[0], o[1])}, "its log-sum-exp is used"),
    "dropout": ({}, {"dropout": 0.1}, "it has dropout"),
    "biased": ({}, {"biased": True}, "it has a bias"),
    "another layout": ({}, {"contiguous": True}, "cudnn gives its result the strides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_alone(name):
    context, options, because = REFUSED[name]
    result = rewritten(graph("efficient", **options), "cudnn", **context)
    assert not result.changed and not result.report.error, result
    assert because in result.report.refused[0][1]


def test_the_stride_of_a_single_head_does_not_matter():
    """It addresses nothing, and backends disagree on it."""
    result = rewritten(graph("efficient", shape=(2, 1, 48, 64), contiguous=True), "cudnn")
    assert result.report.rewritten == 1, result


def test_what_is_on_the_backend_already_is_left_alone():
    assert rewritten(graph("flash"), "flash").report.refused[0][1] == "it is on flash already"


def test_symbolic_sizes_are_left_alone():
    from fxopt.torch_api.tracing import new_symbol

    mode = fake_mode(True)
    with mode:
        n = new_symbol(mode, "n", 48)
        q, k, v = (torch.empty(2, n, 4, 64, device="cuda", dtype=torch.half).transpose(1, 2) for _ in range(3))
        gm = make_fx(lambda q, k, v: BACKENDS["flash"](q, k, v)[0], tracing_mode="symbolic")(q, k, v)
    result = rewritten(gm, "cudnn")
    assert not result.changed and result.report.refused[0][1] == "sizes are symbolic"


def test_the_backward_needs_what_its_own_forward_left():
    assert "gradients are on" in AttentionBackend().applicable(testing.context(device="cuda", grad=True))
    assert AttentionBackend().applicable(testing.context(device="cuda")) == ""
