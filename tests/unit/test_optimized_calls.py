"""A call of what `fxopt.optimize` gives, on its way to Dynamo: hooks, gradients and weights as any module has them."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_modules

from fxopt import backend, session
from fxopt.frozen import FrozenCode
from fxopt.torch_api import dynamo
from fxopt.warning import FxoptWarning

X = torch.tensor([[1.0, 2.0, 3.0]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Folding:
    """A tuner that folds the weights and leaves the rest as it is: nothing is measured or compiled."""

    modes: ClassVar[list[bool]] = []

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, session: bool, **options: Any) -> None:
        self.gm, self.inputs, self.session = gm, inputs, session

    def run(self) -> Callable[..., Any]:
        gm, inputs = self.gm, self.inputs
        if not self.session:
            return gm.forward
        frozen = {i: value for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
        kept = [i for i in range(len(inputs)) if i not in frozen]
        constants = {i: value.detach().clone() for i, value in frozen.items()}

        def fn(*args: Any) -> Any:
            self.modes.append(torch.is_grad_enabled())
            given = {**constants, **dict(zip(kept, args, strict=True))}
            return gm.forward(*(given[i] for i in range(len(inputs))))

        return FrozenCode(fn, kept, frozen)


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[session.OptimizedModule]:
    monkeypatch.setattr(backend, "Tuner", Folding)
    monkeypatch.setattr(Folding, "modes", [])
    torch._dynamo.reset()
    yield session.optimize(Model().eval(), X)
    torch._dynamo.reset()


def agrees(optimized: session.OptimizedModule, x: torch.Tensor = X) -> bool:
    """The call that sees a change, and the next, which folds anew."""
    return all(torch.equal(optimized(x), optimized.model(x)) for _ in range(2))


def test_each_kind_of_hook_runs_once_a_call(optimized):
    seen: list[str] = []
    optimized.register_forward_pre_hook(lambda m, args: seen.append("before"))
    optimized.register_forward_hook(lambda m, args, result: seen.append("after"))
    optimized.model.register_forward_hook(lambda m, args, result: seen.append("the model's own"))
    optimized(X)
    assert seen == ["before", "the model's own", "after"]
    double = optimized.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    doubled = optimized(X)
    double.remove()
    assert torch.equal(doubled, optimized(X * 2))


def test_hooks_of_all_modules_are_called_as_torch_compile_calls_them(optimized):
    """For the module that torch.compile makes, too, with its warning."""
    seen: list[str] = []
    hook = of_modules.register_module_forward_hook(lambda m, args, result: seen.append(type(m).__name__))
    try:
        with pytest.warns(UserWarning, match="global hooks"):
            optimized(X)
    finally:
        hook.remove()
    assert seen[-3:] == ["Model", "OptimizedModule", "OptimizedModule"]
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimized(X)
    assert not seen


@pytest.mark.parametrize("gradients", [True, False])
def test_the_code_runs_without_gradients_and_the_mode_is_put_back(optimized, gradients):
    with torch.set_grad_enabled(gradients):
        assert not optimized(X).requires_grad
        assert torch.is_grad_enabled() is gradients
        with pytest.raises((RuntimeError, TypeError)):
            optimized(torch.ones(1, 4))
        assert torch.is_grad_enabled() is gradients
    assert Folding.modes and not any(Folding.modes)
    with torch.inference_mode():
        assert optimized(X).is_inference() and torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


def test_every_way_to_change_the_weights_is_followed(optimized):
    assert agrees(optimized)
    optimized.model.layer.weight.data.mul_(2)
    assert agrees(optimized)
    optimized.load_state_dict(Model().state_dict())
    assert agrees(optimized)
    optimized.model.layer = nn.Linear(3, 2)
    assert agrees(optimized)
    optimized.model.layer.weight.data = torch.ones(2, 3)
    assert agrees(optimized) and optimized._folds == 4


def test_torch_compile_around_it_follows_its_weights(optimized):
    alone = torch.compile(optimized, backend="eager")
    inside = torch.compile(lambda x: optimized(x) + 1, backend="eager")
    for change in (lambda weight: None, lambda weight: weight.data.mul_(2)):
        change(optimized.model.layer.weight)
        assert torch.equal(alone(X), optimized.model(X)) and torch.equal(inside(X), optimized.model(X) + 1)
    assert torch.compile(optimized.train(), backend="eager", fullgraph=True)(X).requires_grad


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor(0)


@pytest.mark.parametrize(
    "change",
    [
        lambda buffers: buffers["num_batches_tracked"].add_(1),
        lambda buffers: buffers.update(num_batches_tracked=None),
        lambda buffers: buffers.pop("num_batches_tracked"),
        lambda buffers: buffers.update(num_batches_tracked=of_inference()),
    ],
    ids=["counted on", "none", "gone", "an inference tensor"],
)
def test_a_change_of_any_counter_of_batches_folds_anew_once(monkeypatch, change):
    monkeypatch.setattr(backend, "Tuner", Folding)
    torch._dynamo.reset()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).eval()
    optimized = session.optimize(model, X)
    for folds, layer in enumerate(model, 1):
        change(layer._buffers)
        assert agrees(optimized) and agrees(optimized) and optimized._folds == folds


def test_training_runs_the_model_itself(optimized):
    assert optimized.train()(X).requires_grad and not optimized.eval()(X).requires_grad


def test_a_copy_has_weights_and_code_of_its_own(optimized):
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        copied.model.layer.weight.zero_()
    assert agrees(copied) and agrees(optimized) and not torch.equal(copied(X), optimized(X))


class Counting(nn.Module):
    """Counts its calls in whatever a model can count them in, before a graph break and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.names = 0, list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.number += 1
        self.names.append("called")
        x.add_(1)
        y = self.first(x)
        torch._dynamo.graph_break()
        self.calls = self.calls + 1
        return self.last(y) * self.calls + torch.rand(())

    def state(self) -> tuple[Any, ...]:
        return self.calls.item(), self.number, len(self.names), torch.random.get_rng_state().sum().item()


@pytest.mark.usefixtures("optimized")  # for its backend
def test_a_change_of_weights_repeats_nothing_that_has_run_in_the_call():
    model = Counting().eval()
    eager, fast = copy.deepcopy(model), None
    given = torch.zeros(1, 3), torch.zeros(1, 3)
    for change in (None, "first", None, "last", None):
        torch.manual_seed(0)
        with torch.no_grad():
            for m in (model, eager):
                if change is not None:
                    getattr(m, change).weight.mul_(2)
            expected = eager(given[1])
        state = eager.state()
        torch.manual_seed(0)
        if fast is None:
            fast = session.optimize(model, given[0])
        else:
            assert torch.equal(fast(given[0]), expected)
        assert model.state() == state and torch.equal(*given), change
    assert fast._folds == 1  # the first graph is compiled anew in each call, for another number


def test_threads_that_see_one_change_fold_anew_once(optimized):
    go, wrong = threading.Barrier(6), list[bool]()

    def call() -> None:
        go.wait()
        wrong.append(not agrees(optimized))

    with torch.no_grad():
        optimized.model.layer.weight.mul_(2)
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong) and len(wrong) == 6 and optimized._folds == 1


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.other = nn.Linear(2, 1)


def test_a_parents_state_dict_reaches_the_model_and_back(optimized):
    parent, source = Parent(optimized), Parent(Model())
    assert list(parent.state_dict()) == list(source.state_dict())
    assert str(parent.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(optimized.model.layer.weight, source.child.layer.weight) and agrees(optimized)
    saved = parent.state_dict()
    assert saved._metadata["child.model.layer"] == saved._metadata["child.layer"]
    other = Model()
    parent.load_state_dict({**saved, "child.layer.weight": other.layer.weight}, assign=True)
    assert torch.equal(optimized.model.layer.weight, other.layer.weight) and agrees(optimized)
    parent.load_state_dict({name: value for name, value in parent.named_parameters()})
    incomplete = {**{k: v for k, v in saved.items() if k != "child.layer.bias"}, "child.no": torch.ones(1)}
    found = parent.load_state_dict(incomplete, strict=False)
    assert found.missing_keys == ["child.layer.bias"] and found.unexpected_keys == ["child.no"]
    copied = copy.deepcopy(parent)
    copied.load_state_dict(source.state_dict())
    assert agrees(copied.child) and agrees(optimized)


def test_a_model_with_a_part_called_model_keeps_its_names(monkeypatch):
    monkeypatch.setattr(backend, "Tuner", Folding)
    torch._dynamo.reset()
    inner = nn.Sequential()
    inner.model = nn.Linear(3, 2)
    parent, source = Parent(session.optimize(inner.eval(), X)), Parent(copy.deepcopy(inner))
    nn.init.ones_(source.child.model.weight)
    assert list(parent.state_dict()) == list(source.state_dict())
    parent.load_state_dict(source.state_dict())
    assert torch.equal(inner.model.weight, torch.ones(2, 3)) and agrees(parent.child)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_module_may_be_part_of_a_model(monkeypatch):
    monkeypatch.setattr(backend, "Tuner", Folding)
    torch._dynamo.reset()
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), X)
    assert agrees(session.optimize(nn.Sequential(scripted, nn.Linear(3, 2)).eval(), X))


def test_a_graph_that_is_kept_to_be_run_has_no_reference_to_tensors_of_the_caller():
    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept.append(dynamo.captured(gm))
        return lambda *args: kept[0](*args)

    kept: list[fx.GraphModule] = []
    torch._dynamo.reset()
    model = Model()
    with torch.no_grad():  # with gradients Dynamo keeps it
        assert torch.equal(torch.compile(model, backend=keep)(X), model(X))
    gc.collect()
    torch.utils.swap_tensors(model.layer.weight, nn.Parameter(model.layer.weight.detach() * 3))
    assert torch.equal(kept[0](model.layer.weight, model.layer.bias, X)[0], model(X))


def test_models_that_are_gone_hold_no_weights_and_do_not_count_for_the_next_ones(monkeypatch):
    monkeypatch.setattr(backend, "Tuner", Folding)
    torch._dynamo.reset()
    alive, most = list[Any](), torch._dynamo.config.recompile_limit
    for _ in range(most + 2):
        model = Model().eval()
        fast = session.optimize(model, X)
        assert agrees(fast)
        assert fast.report.graphs
        alive.append(weakref.ref(model.layer.weight))
        del model, fast
        gc.collect()
    assert not any(weight() is not None for weight in alive)


def test_code_that_is_folded_anew_holds_nothing_of_what_it_was(optimized):
    (code,) = session._code[optimized._backend]
    constants = weakref.ref(code._fn)
    with torch.no_grad():
        optimized.model.layer.weight.mul_(2)
    assert agrees(optimized)
    gc.collect()
    assert constants() is None
    layer = optimized.model.layer
    assert torch.equal(code(layer.weight, layer.bias, X)[0], optimized(X)), "a thread may be in it"


def test_transforms_and_forward_mode_derivatives_go_through_the_model_itself(optimized):
    model, tangent = optimized.model, torch.ones_like(X)
    with pytest.warns(FxoptWarning, match="the original model"):
        got = torch.func.jvp(optimized, (X,), (tangent,))
    assert all(map(torch.equal, got, torch.func.jvp(model, (X,), (tangent,))))
    with pytest.warns(FxoptWarning, match="the original model"), forward_ad.dual_level():
        derivative = forward_ad.unpack_dual(optimized(forward_ad.make_dual(X, tangent))).tangent
        assert torch.equal(derivative, got[1])
    with pytest.warns(FxoptWarning, match="the original model"):
        gradient = torch.func.grad(lambda x: optimized(x).sum())(X)
    assert torch.equal(gradient, torch.func.grad(lambda x: model(x).sum())(X)) and gradient.any()
    assert agrees(optimized)
