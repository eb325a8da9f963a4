"""tf32_matmul: TF32 inside the compiled code, every setting of the process as before outside, and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fxopt import registry, testing
from fxopt.torch_api import inductor
from fxopt.verify import parse_precision
from passes.cuda_graphs import CudaGraphs
from passes.tf32_matmul import Tf32Matmul, tf32

backends: Any = torch.backends
P = Tf32Matmul()
ON = {"cuda.matmul": "tf32", "cudnn.conv": "tf32", "cudnn.rnn": "tf32"}


def read(get):
    try:
        return get()
    except RuntimeError:
        return "raises"


def settings():
    """All that torch says about fp32 products; the older settings raise where the newer contradict them."""
    newer = {
        "all": backends,
        "cuda.matmul": backends.cuda.matmul,
        "cudnn": backends.cudnn,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
    }
    return {name: setting.fp32_precision for name, setting in newer.items()} | {
        "older": read(torch.get_float32_matmul_precision),
        "cuda.matmul.allow_tf32": read(lambda: backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": read(lambda: backends.cudnn.allow_tf32),
    }


def test_inductor_compiles_under_what_calls_run_under():
    """Its own templates read the settings when they are generated."""
    before = settings()
    with P.compiling():
        assert ON.items() <= settings().items()
    assert settings() == before


def set_newer(setting, value):
    setting.fp32_precision = value


def set_older(setting, value):
    setting.allow_tf32 = value


@pytest.fixture(autouse=True)
def as_torch_starts():
    yield
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for setting in (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn.matmul):
        setting.fp32_precision = "none"
    assert settings()["older"] == "highest" and settings()["cuda.matmul"] == "none"


STATES = {
    "torch's own": lambda: None,
    "cuDNN off": lambda: set_older(backends.cudnn, False),
    "IEEE for all, inherited": lambda: (set_older(backends.cudnn, False), set_newer(backends, "ieee")),
    "IEEE for matmul": lambda: set_newer(backends.cuda.matmul, "ieee"),
    "IEEE for cuDNN": lambda: (set_older(backends.cudnn, False), set_newer(backends.cudnn, "ieee")),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium, cuDNN off": lambda: (torch.set_float32_matmul_precision("medium"), set_older(backends.cudnn, False)),
}
CONTRADICTIONS = {
    "older on, newer off": lambda: (
        torch.set_float32_matmul_precision("medium"),
        set_newer(backends.cuda.matmul, "ieee"),
    ),
    "convolutions alone": lambda: (
        set_older(backends.cudnn, False),
        set_newer(backends.cudnn.rnn, "tf32"),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_tf32_is_allowed_inside_and_every_setting_is_the_same_afterwards(state):
    STATES[state]()
    before = settings()
    with tf32():
        inside = settings()
    assert settings() == before
    assert inside | ON == inside
    assert "raises" not in inside.values(), "torch.profiler reads the older setting for each operator"


@pytest.mark.parametrize("state", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_left_alone(state):
    CONTRADICTIONS[state]()
    before = settings()
    assert "raises" in before.values()
    with tf32():
        inside = settings()
    assert settings() == before
    touched = {name for name in inside if inside[name] != before[name]}
    assert all(before[name] != "raises" for name in touched)


def test_an_error_puts_the_settings_back_and_goes_on():
    def fails():
        raise ZeroDivisionError

    before = settings()
    wrapped = P.wrap(fails, (), None, context())
    with pytest.raises(ZeroDivisionError):
        wrapped()
    assert settings() == before


def test_of_calls_that_overlap_the_last_one_puts_the_settings_back():
    before, entered, leave = settings(), threading.Event(), threading.Event()

    def other():
        with tf32():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with tf32():
        thread.start()
        entered.wait()
    assert settings() | ON == settings(), "the other call is still under way"
    leave.set()
    thread.join()
    assert settings() == before


def test_a_call_inside_another_leaves_tf32_to_the_outer_one():
    before = settings()
    with tf32():
        with tf32():
            pass
        assert settings() | ON == settings()
    assert settings() == before


def test_dynamo_compiles_once_and_a_product_beside_it_sees_no_tf32(fresh_dynamo):
    compiled, seen = [], []

    def backend(gm, inputs):
        compiled.append(gm)

        def fn(*args):
            seen.append(settings())
            return gm(*args)

        return P.wrap(fn, inputs, None, context())

    fn = torch.compile(lambda a, b: a @ b, backend=backend)
    a, before = torch.randn(4, 4), settings()
    for _ in range(3):
        fn(a, a)
        assert settings() == before
    assert len(compiled) == 1 and len(seen) == 3
    assert all(one | ON == one for one in seen)


def test_the_wrapped_code_gets_its_arguments_and_gives_its_results():
    wrapped = P.wrap(lambda *args: [args, settings()["cuda.matmul"]], (), None, context())
    assert wrapped(1, "b") == [(1, "b"), "tf32"]


def context(**fields):
    given = {"device": "cuda", "matrix_units": frozenset({"tf32"})} | fields
    return testing.context(P, **given)


def run(fn, *inputs, **fields):
    return testing.run(P, testing.capture(fn, *inputs), context=context(**fields)).report


def test_a_graph_with_an_fp32_product_is_wrapped():
    report = run(lambda a, b: torch.relu(a @ b), torch.randn(4, 4), torch.randn(4, 4))
    assert (report.matched, report.rewritten, report.refused) == (1, 1, ())


def test_a_convolution_is_wrapped_where_cudnn_may_not_use_tf32_yet():
    conv = lambda x, w: torch.conv2d(x, w)  # noqa: E731
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    assert run(conv, x, w).refused == (("graph", "the process allows TF32 already"),), "torch's default for cuDNN"
    backends.cudnn.allow_tf32 = False
    assert run(conv, x, w).rewritten == 1


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [(lambda a: torch.relu(a), torch.float32), (lambda a: a @ a, torch.bfloat16), (lambda a: a @ a, torch.float64)],
    ids=["no product", "bf16", "fp64"],
)
def test_a_graph_without_an_fp32_product_is_refused(fn, dtype):
    report = run(fn, torch.randn(4, 4, dtype=dtype))
    assert report.refused == (("graph", "no fp32 product is left for cuBLAS or cuDNN"),)


def test_code_that_a_cache_served_without_its_graph_is_wrapped():
    class Served:
        post_grad = backward = None

    backends.cudnn.allow_tf32 = False
    assert P.refuse(Served(), (), context()) == ""


def test_products_in_the_branches_of_a_condition_count():
    outer, branch = (testing.capture(fn, torch.randn(4, 4)) for fn in (torch.relu, lambda a: a @ a))
    compiled = type("Compiled", (), {"post_grad": outer, "backward": None})()
    assert P.refuse(compiled, (), context()) == "no fp32 product is left for cuBLAS or cuDNN"
    outer.true_graph_0 = branch
    assert P.refuse(compiled, (), context()) == ""


def test_products_of_the_backward_count():
    forward, backward = (testing.capture(fn, torch.randn(4, 4)) for fn in (torch.relu, lambda a: a @ a))
    compiled = type("Compiled", (), {"post_grad": forward, "backward": inductor.Backward(None, backward)})()
    assert P.refuse(compiled, (), context(grad=True)) == ""


def test_it_refuses_a_process_that_allows_tf32_already():
    torch.set_float32_matmul_precision("high")
    assert run(lambda a: a @ a, torch.randn(4, 4)).refused == (("graph", "the process allows TF32 already"),)


def test_it_refuses_settings_that_contradict_each_other():
    CONTRADICTIONS["older on, newer off"]()
    before = settings()
    assert "contradict" in P.refuse(type("Served", (), {"post_grad": None, "backward": None})(), (), context())
    assert settings() == before


def test_it_needs_tf32_units_and_a_gpu():
    assert P.applicable(context()) == ""
    assert P.applicable(context(matrix_units=frozenset({"bfloat16"}))) == "cuda has no TF32 matrix units"
    assert "cpu" not in P.devices


def test_a_cuda_graph_is_captured_with_tf32_inside_and_replays_without():
    assert [p.name for p in registry.order([CudaGraphs(), P])] == ["tf32_matmul", "cuda_graphs"]


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", True), (1e-4, True)])
def test_it_runs_in_the_classes_that_bear_tf32(precision, allowed):
    assert parse_precision(precision).allows(P.precision) is allowed
