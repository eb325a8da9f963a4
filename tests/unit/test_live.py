"""profile(): whatever can be called is called, attributed, and left as it was."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import profiler_core
from profiler_core import counters as known_counters
from profiler_core import counting, layer_classes, live
from profiler_core.attribute.engine import attribute
from profiler_core.collect import compile_capture
from profiler_core.collect.conflicts import ProfilerError
from profiler_core.collect.cupti import session
from profiler_core.collect.cupti.library import CountersNotPermitted
from profiler_core.counter_table import ROW_COLUMNS, CounterTable
from profiler_core.layer_classes import with_layer_classes
from profiler_core.profiles import KERNEL_COLUMNS, Profile

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Stack(nn.Module):
    """Three equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * scale


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight + bias)  # one addmm after Inductor's passes, so the graph that was given differs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provenance")


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    compile_capture.forget_compiled_code()
    yield
    compile_capture.forget_compiled_code()


@pytest.fixture
def take(store: Path) -> Callable[..., Profile]:
    """A short profile without counters."""

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Profile:
        return profiler_core.profile(
            fn, *args, **{"iterations": 2, "warmup": 1, "counters": "none", "clocks": "off", "store": store, **options}
        )

    return run


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Calls:
    """Counts the compiles of Inductor's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch._inductor.compile_fx as compile_fx

        self.compiled = 0
        inner = compile_fx._compile_fx_inner

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(compile_fx, "_compile_fx_inner", counting)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def launches(profile: Profile) -> dict[str, set[str]]:
    """By graph, the launches that its kernels are attributed to."""
    rows = profile.window[profile.window["launch"] != ""]
    return {graph: set(group["launch"]) for graph, group in rows.groupby("graph")}


def fx_nodes(profile: Profile) -> pd.DataFrame:
    return profile.nodes[profile.nodes["kind"] == "node"]


# --- what can be profiled --------------------------------------------------------------------------------------------


def test_eager_code_is_attributed_to_its_operators(take, x) -> None:
    profile = take(pointwise, x)
    assert profile.iterations == 2 and profile.attributed_share == 1.0
    assert list(profile.nodes["target"]) == ["aten::relu", "aten::add"]
    assert set(profile.nodes["kind"]) == {"operator"} and profile.notes == ()
    assert profile.environment["device_type"] == "cpu" and profile.wall_ns > 0


def test_modules_bound_methods_and_partials_are_functions_too(take, x) -> None:
    model = Block().eval()
    with torch.no_grad():
        found = [take(fn, x) for fn in (model, model.forward, partial(model.forward, x=x).func, lambda y: model(y))]
    assert len({tuple(profile.nodes["target"]) for profile in found}) == 1
    assert "aten::linear" in set(found[0].nodes["target"])


class Mixed(nn.Module):
    """A layer of the user's, and one of torch's that is called through torch's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.body(x))


def test_operators_of_an_eager_model_have_the_module_and_the_line_that_they_were_called_from(take, x) -> None:
    model = Mixed().eval()
    with torch.no_grad():
        profile = take(model, x)
    nodes = profile.nodes.set_index("target")
    calls, adds = (cls.forward.__code__.co_firstlineno + 1 for cls in (Mixed, Block))
    places = nodes[["module_path", "module_class", "line"]].apply(tuple, axis=1)
    assert places["aten::sigmoid"] == ("", "Mixed", calls)
    assert set(places["aten::linear"]) == {("body.0", "Linear", calls), ("body.1.up", "Linear", adds)}
    assert places["aten::layer_norm"] == ("body.1.norm", "LayerNorm", adds)
    assert set(nodes["file"]) == {__file__}
    assert nodes.loc["aten::sigmoid", "source"] == "return torch.sigmoid(self.body(x))"
    assert nodes.loc["aten::sigmoid", "node"] == f"aten::sigmoid@test_live.py:{calls}"
    assert profile.attributed_share == 1.0 and profile.notes == ()
    with torch.no_grad():
        without = take(model, x, lines=False)
    assert set(without.nodes["line"]) == {0} and "body.1.norm" in set(without.nodes["module_path"])


def test_the_python_call_and_the_command_place_operators_alike(take, tmp_path, monkeypatch) -> None:
    from fxopt.script import Target, run_profiled

    (tmp_path / "placed_alike.py").write_text(
        "import torch\n\nlayer = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()\nx = torch.ones(2, 4)\n\n\n"
        "@torch.no_grad()\ndef work():\n    return layer(x).relu()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import placed_alike

    command, _ = run_profiled(Target.of("placed_alike:work", []), skip=1, calls=2, counters="none")
    called = take(placed_alike.work)
    columns = ["node", "module_path", "module_class", "file", "line", "source"]
    assert command.nodes[columns].to_dict("records") == called.nodes[columns].to_dict("records")
    assert list(called.nodes["node"]) == ["aten::linear@0:9", "aten::relu@placed_alike.py:9"]


def test_where_a_debugger_traces_lines_are_missing_and_a_note_says_so(take, x) -> None:
    import sys

    def debugger(frame: Any, event: str, argument: Any) -> None:
        return None

    outer = sys.gettrace()
    sys.settrace(debugger)
    try:
        profile = take(pointwise, x)
    finally:
        sys.settrace(outer)
    assert set(profile.nodes["line"]) == {0} and profile.notes == (live.NO_LINES,)


def test_code_of_inductors_has_no_lines_whose_ranges_would_count_as_kernel_time(take, x) -> None:
    from profiler_core.collect.source_lines import LineRanges
    from profiler_core.range_names import line_of

    compiled = torch.compile(pointwise)
    compiled(x)
    ranges = LineRanges()
    with torch.profiler.profile() as profiler:
        assert ranges.start()
        try:
            compiled(x)
        finally:
            ranges.stop()
    names = [event.name for event in profiler.events()]
    files = {line_of(name)[0] for name in names} - {""}
    assert any("CompiledFxGraph" in name for name in names) and __file__ in files
    assert not any("inductor" in file for file in files)


def test_work_on_other_threads_counts_and_a_note_says_so(take, x) -> None:
    profile = take(lambda: ThreadPoolExecutor(1).submit(lambda: torch.relu(torch.tanh(x))).result())
    assert set(profile.nodes["node"]) == {"aten::tanh", "aten::relu"} and len(profile.window) == 4
    assert set(profile.window["iteration"]) == {0, 1} and profile.attributed_share == 1.0
    (note,) = profile.notes
    assert note.startswith("4 of 4 kernels ran on other threads than the caller's")


def test_graphs_compiled_during_the_measured_calls_are_noticed(take) -> None:
    compiled = torch.compile(lambda y: torch.relu(y) + 1, dynamic=False)
    sizes = iter(range(2, 100))
    profile = take(lambda: compiled(torch.ones(next(sizes), WIDTH)))
    assert "2 graphs were compiled during the measured calls; their compilation counts as work" in profile.notes


def test_one_profile_runs_at_a_time_and_nothing_stays_patched(take, x) -> None:
    import torch._inductor.compile_fx as compile_fx

    inner, calls = compile_fx._compile_fx_inner, []
    started, ended = threading.Event(), threading.Event()

    def waits() -> torch.Tensor:
        started.set()
        ended.wait()
        return torch.relu(x)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, waits)
        try:
            started.wait()
            with pytest.raises(ProfilerError, match="another profile"):
                take(lambda: calls.append(1))
        finally:
            ended.set()
        assert first.result().iterations == 2
    with pytest.raises(ProfilerError, match="another profile"):
        take(lambda: take(lambda: calls.append(1)))
    assert calls == [] and compile_fx._compile_fx_inner is inner
    assert take(pointwise, x).iterations == 2


def test_a_function_that_does_no_work_is_noticed(take) -> None:
    profile = take(lambda: None)
    assert profile.notes == ("no kernels: the function ran none during the measured calls",)


def test_what_cannot_be_called_is_refused(take, x) -> None:
    with pytest.raises(TypeError, match="fn is a Tensor: expected a module or a function, followed by what it"):
        take(x, Block())


def test_an_iterator_that_the_first_call_uses_up_is_noticed(take, x) -> None:
    (note,) = take(lambda given: [torch.relu(y) for y in given], (x for _ in range(2))).notes
    assert note.startswith("no kernels: ") and note.endswith("an argument is an iterator, which the calls before may "
                                                             "have used up: give a list")  # fmt: skip
    endless = iter(lambda: x, None)
    assert take(lambda given: torch.relu(next(given)), endless).notes == ()


def test_a_call_that_has_only_been_prepared_is_refused(take, x) -> None:
    def steps() -> Iterator[torch.Tensor]:
        yield torch.relu(x)

    async def later() -> torch.Tensor:
        return torch.relu(x)

    async def later_steps() -> Any:
        yield torch.relu(x)

    for fn, what in ((steps, "generator"), (later, "coroutine"), (later_steps, "async_generator")):
        with pytest.raises(ValueError, match=f"returned a {what}: call it through a function that runs it"):
            take(fn)


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_devices_whose_kernels_cannot_be_measured_are_refused(take, x, device) -> None:
    with pytest.raises(ValueError, match=f"device='{device}': expected cpu or cuda"):
        take(pointwise, x, device=device)
    with pytest.raises(ValueError, match="device='meta'"):
        take(pointwise, x.to("meta"))


def test_arguments_reach_the_function_as_given(take, x) -> None:
    seen = []
    take(lambda *args, **kwargs: seen.append((args, kwargs)) or torch.relu(x), x, 2, name="value")
    assert all(args == (x, 2) and kwargs == {"name": "value"} for args, kwargs in seen)
    # warm-up, warm-up of the profiler, timed without, its trial, timed with
    assert len(seen) == 1 + 1 + 2 + 1 + 2


def test_a_compiled_module_is_attributed_to_its_nodes_and_their_source_lines(take, x) -> None:
    compiled = torch.compile(Stack().eval())
    with torch.no_grad():
        profile = take(compiled, x, scale=2.0)
    assert profile.attributed_share == 1.0
    nodes = fx_nodes(profile)
    assert set(nodes["graph"]) == {"0/0"} and set(nodes["file"]) == {__file__}
    assert {"blocks.0.up", "blocks.2.norm"} <= set(nodes["module_path"])
    (classes,) = [note for note in profile.notes if "layers" in note]
    assert "graph 0/0: 3 layers of 1 class: " in classes and classes.endswith(" launches stand for all")
    in_layers = nodes["module_path"].str.startswith("blocks.")
    assert set(nodes.loc[in_layers, "layer_class"]) == {nodes.loc[in_layers, "layer_class"].iloc[0]} != {""}
    assert set(nodes.loc[~in_layers, "layer_class"]) <= {""}


def test_an_operator_outside_of_the_graphs_stands_beside_their_nodes(take, x) -> None:
    compiled = torch.compile(pointwise)
    profile = take(lambda: torch.cumsum(compiled(x), 0))
    assert profile.attributed_share == 1.0
    kinds = dict(zip(profile.nodes["target"], profile.nodes["kind"], strict=True))
    assert kinds == {"aten.relu.default": "node", "aten.add.Tensor": "node", "aten::cumsum": "operator"}


def test_code_compiled_before_is_compiled_again_once_and_a_note_says_so(take, x, compiles) -> None:
    compiled = torch.compile(pointwise)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled(x)
    assert compiles.compiled == 1
    first = take(compiled, x)
    assert compiles.compiled == 2 and launches(first).keys() == {"0/0"}
    assert first.notes == ("1 graph had been compiled without provenance, and everything was compiled again",)
    again = take(compiled, x)
    assert compiles.compiled == 2 and again.notes == ()
    assert launches(again) == launches(first) and again.attributed_share == 1.0


def test_a_cache_filled_without_provenance_is_not_served(take, x) -> None:
    """Nor one filled with another store, whose records are not at hand."""
    weight, bias = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    compiled = torch.compile(product)
    compiled(x, weight, bias)
    compile_capture.forget_compiled_code()
    profile = take(compiled, x, weight, bias)
    assert profile.attributed_share == 1.0 and profile.notes == ()
    assert set(fx_nodes(profile)["kind"]) == {"node"} and len(launches(profile)["0/0"]) == 2


def test_the_store_serves_a_later_process_and_one_that_lost_its_records_is_noticed(take, x, tmp_path) -> None:
    from torch._dynamo.utils import counters

    weight, bias = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    compiled = torch.compile(product)
    first = take(compiled, x, weight, bias, store=tmp_path)
    records = [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    assert len(records) == 1

    compile_capture.forget_compiled_code()  # as in a new process
    counters.clear()
    hit = take(compiled, x, weight, bias, store=tmp_path)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and counters["inductor"]["fxgraph_cache_miss"] == 0
    assert launches(hit) == launches(first) and list(hit.nodes["node"]) == list(first.nodes["node"])

    compile_capture.forget_compiled_code()
    records[0].unlink()
    profile = take(compiled, x, weight, bias, store=tmp_path)
    assert launches(profile) == launches(first) and list(profile.nodes["node"]) == list(first.nodes["node"])
    assert any("compiled without provenance" in note for note in profile.notes)


@pytest.mark.parametrize("setting", ["force_disable_caches", "freezing"])
def test_graphs_that_inductor_does_not_cache_are_told_apart_all_the_same(take, x, setting) -> None:
    model = Block().eval()
    with torch.no_grad(), torch._inductor.config.patch({setting: True}):
        compiled = torch.compile(model)
        profile = take(compiled, x)
    assert profile.attributed_share == 1.0 and profile.notes == ()
    assert len(launches(profile)["0/0"]) == 3 and (profile.window["launch"] != "").all()


def test_a_graph_break_gives_two_graphs_apart(take, x) -> None:
    def broken(y: torch.Tensor) -> torch.Tensor:
        y = torch.relu(y) + 1
        torch._dynamo.graph_break()
        return torch.sin(y) * 2

    profile = take(torch.compile(broken), x)
    assert profile.attributed_share == 1.0
    nodes = fx_nodes(profile)
    assert {graph: set(rows["node"]) for graph, rows in nodes.groupby("graph")} == {
        "0/0": {"relu", "add"},
        "1/0": {"sin", "mul"},
    }
    assert nodes["line"].nunique() == 2


def test_two_graphs_of_the_same_code_are_apart_and_each_has_its_own_lines(take, x) -> None:
    """Inductor's key for both, and the names of their kernels, are the same."""

    def broken(y: torch.Tensor) -> torch.Tensor:
        y = torch.relu(y) + 1
        torch._dynamo.graph_break()
        return torch.relu(y) + 1

    profile = take(torch.compile(broken), x)
    assert profile.attributed_share == 1.0
    assert launches(profile).keys() == {"0/0", "1/0"}
    lines = fx_nodes(profile).groupby("graph")["line"].unique()
    assert lines["1/0"][0] == lines["0/0"][0] + 2
    assert set(profile.window.groupby("graph").size()) == {2}


def test_a_graph_of_the_same_code_that_is_not_called_has_no_part_in_a_profile(take, x) -> None:
    def same(y: torch.Tensor) -> torch.Tensor:
        return torch.relu(y) + 1

    first, second = torch.compile(pointwise), torch.compile(same)
    take(first, x)
    profile = take(second, x)
    (graph,) = launches(profile)
    assert set(fx_nodes(profile)["graph"]) == {graph} and set(fx_nodes(profile)["line"]) == {
        same.__code__.co_firstlineno + 1
    }


def test_dynamic_shapes_give_two_compiles_with_the_same_kernel_names_and_they_are_kept_apart(take, x) -> None:
    compiled = torch.compile(lambda y: torch.relu(y @ y.T) + 1)
    other = torch.randn(4, WIDTH)

    def both() -> None:
        compiled(x)
        compiled(other)

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        profile = take(both)
    assert profile.attributed_share == 1.0
    found = launches(profile)
    assert found.keys() == {"0/0", "0/1"} and found["0/0"] == found["0/1"]
    for graph, size in (("0/0", 8), ("0/1", 4)):
        nodes = fx_nodes(profile)
        assert set(nodes.loc[(nodes["graph"] == graph) & (nodes["node"] == "mm"), "shape"]) == {(size, size)}
        assert (profile.window["graph"] == graph).sum() == 2 * 2


def test_a_training_step_has_a_forward_and_a_backward_graph(take, x) -> None:
    model = Block()
    compiled = torch.compile(model)
    profile = take(lambda: compiled(x).sum().backward())
    assert profile.attributed_share == 1.0
    assert launches(profile).keys() == {"0/0", "0/0 backward"}
    assert "aten::sum" in set(profile.nodes["target"])
    backward = profile.nodes[profile.nodes["graph"] == "0/0 backward"]
    assert {"up", "norm"} <= set(backward["module_path"])
    assert model.up.weight.grad is not None


def test_an_lstm_yields_no_graph_and_is_its_operator(take, x) -> None:
    profile = take(torch.compile(nn.LSTM(WIDTH, WIDTH).eval()), x[None])
    assert profile.attributed_share == 1.0 and "aten::lstm" in set(profile.nodes["target"])
    assert launches(profile) == {}
    assert profile.notes == ("Inductor compiled no graph of it: everything is attributed to operators",)


def test_another_backends_code_is_attributed_to_operators(take, x) -> None:
    profile = take(torch.compile(pointwise, backend="aot_eager"), x)
    assert profile.attributed_share == 1.0 and launches(profile) == {}


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"counters": "all"}, "counters='all': expected one of none, quick, full"),
        ({"counters": ["dram_throughput", "speed"]}, "no 'speed'; there are .*dram_throughput"),
        ({"iterations": 0}, "iterations=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"replay": "range"}, "replay='range': expected one of auto, application, kernel"),
        ({"clocks": "boost"}, "clocks='boost'"),
    ],
)
def test_an_option_that_is_none_is_refused_before_anything_is_called(take, options, says) -> None:
    called = []
    with pytest.raises(ValueError, match=says):
        take(lambda: called.append(1), **options)
    assert not called


def test_iterations_and_warm_up_are_as_asked_for(take, x) -> None:
    called = []
    profile = take(lambda: called.append(1) or torch.relu(x), iterations=3, warmup=0)
    assert profile.iterations == 3 and set(profile.window["iteration"]) == {0, 1, 2}
    assert len(called) == 1 + 1 + 3 + 1 + 3  # one warm-up there is: compilation is not to be timed


def test_without_a_gpu_of_nvidias_counters_are_left_out(take, x) -> None:
    profile = take(torch.relu, x, counters="full", device="cpu")
    assert "dram_throughput" not in profile.kernels and "counters" not in profile.kernels


def test_clocks_are_watched_unless_they_are_not(take, x) -> None:
    assert "clocks='off'" in str(take(torch.relu, x).environment["clocks"])
    assert "clocks='off'" not in str(take(torch.relu, x, clocks="monitor").environment["clocks"])


# A tensor on a device of which torch knows without having it.
AWAY = torch.empty(2, device="meta")
MODEL = nn.Linear(2, 2, device="meta")


def uses_globals() -> Any:
    return MODEL(AWAY)


def calls_another() -> Any:
    return uses_globals()


class Trainer:
    def __init__(self) -> None:
        self.model = MODEL

    def step(self) -> Any:
        return self.model(AWAY)


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize(
    "values",
    [
        (torch.relu, (AWAY,), {}),
        (torch.relu, (), {"input": {"nested": [(AWAY,)]}}),
        (MODEL, (torch.ones(2),), {}),
        (MODEL.forward, (), {}),
        (torch.compile(MODEL), (), {}),
        (partial(torch.relu, AWAY), (), {}),
        (closing_over(AWAY), (), {}),
        (closing_over([closing_over(MODEL)]), (), {}),
        (torch.compile(closing_over(MODEL)), (), {}),
        (torch.no_grad()(closing_over(MODEL)), (), {}),
        (uses_globals, (), {}),
        (calls_another, (), {}),
        (Trainer().step, (), {}),
    ],
    ids=lambda values: None,
)
def test_the_device_is_that_of_the_tensors_that_a_call_uses(values) -> None:
    assert live._device_of(values) == torch.device("meta")


def test_a_function_of_no_tensors_runs_on_the_cpu_unless_this_process_uses_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert live._device_of((len, (3, "text"), {})) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert live._device_of((len, (), {})) == torch.device("cuda")


class Unreadable(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("closed")

    def __iter__(self) -> Iterator[str]:
        return iter(["key"])

    def __len__(self) -> int:
        return 1


def test_a_mapping_that_cannot_be_read_is_passed_over(take, x) -> None:
    assert list(live._tensors([Unreadable(), AWAY])) == [AWAY]
    assert take(lambda y, settings: torch.relu(y), x, Unreadable()).iterations == 2


def test_arguments_that_contain_themselves_are_no_problem() -> None:
    loop: list[Any] = [AWAY]
    loop.append(loop)
    assert list(live._tensors(loop)) == [AWAY]


# --- what it leaves behind -------------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config

    configs = (torch._dynamo.config, inductor_config, functorch_config, torch.compiler.config)
    return {
        **{config.__name__: config.get_config_copy() for config in configs},
        "inner": compile_fx._compile_fx_inner,
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "environment": dict(os.environ),
        "profiler": torch.autograd.profiler._is_profiler_enabled,
    }


def test_settings_modes_and_random_state_are_as_before(take, x) -> None:
    model = Stack().train()
    compiled = torch.compile(model)
    compiled(x)  # so that torch has set what it sets when it first compiles
    before, state = settings(), torch.get_rng_state()
    weights = [p.detach().clone() for p in model.parameters()]
    take(compiled, x)
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, model.parameters(), strict=True))


def test_random_numbers_are_drawn_by_the_calls_alone(take) -> None:
    called = []
    torch.manual_seed(1)
    take(lambda: called.append(torch.rand(3)))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert all(torch.equal(torch.rand(3), drawn) for drawn in called)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 6], ids=["warm-up", "second", "timed", "profiler's first", "profiled"])
def test_what_the_function_raises_passes_through_and_nothing_stays_patched(take, x, call) -> None:
    from profiler_core.collect.inductor import _wrapper_call

    compiled = torch.compile(pointwise)
    count = 0

    def fails() -> None:
        nonlocal count
        count += 1
        compiled(x)
        if count == call:
            raise KeyError("in the model")

    compiled(x)
    compile_capture.forget_compiled_code()
    before = settings()
    with pytest.raises(KeyError, match="in the model"):
        take(fails)
    assert settings() == before
    graphs = [reference() for reference, _ in compile_capture._alive]
    assert len(graphs) == 1
    code = _wrapper_call(graphs[0]).__code__
    assert not any("fxopt::" in str(constant) for constant in code.co_consts)
    take(compiled, x)
    assert _wrapper_call(graphs[0]).__code__ is code


def test_inside_another_profiler_it_is_refused_by_name(take, x) -> None:
    with torch.profiler.profile(), pytest.raises(ProfilerError, match="already active"):
        take(torch.relu, x)


# --- hardware counters, with a stub in place of CUPTI ----------------------------------------------------------------


class Counted:
    """What stands in for :func:`session.collect`: runs the function as a session would, and counts what would be
    measured: the launches inside the gate, or all. Each is one kernel on the CPU.
    """

    def __init__(self, kernels_of_a_call: int) -> None:
        self.all, self.options, self.error = kernels_of_a_call, {}, None

    def __call__(self, fn: Callable[[], Any], metrics: list[str], **options: Any) -> session.Collection:
        self.options = {"metrics": list(metrics), **options}
        if self.error is not None:
            raise self.error
        gate = options["gate"]
        count = self.all
        if gate is not None:
            gate._start = gate._stop = lambda: None
        fn()
        if gate is not None:
            gate._start = gate._stop = None
            count = gate.opened
        columns = {name: np.full(count, default, dtype=dtype) for name, (dtype, default) in ROW_COLUMNS.items()}
        columns |= {name: np.arange(count) + 100.0 * i for i, name in enumerate(metrics)}
        columns["gpu__time_duration.sum"] = np.full(count, np.nan)  # made-up times would be seen through
        replay = "kernel" if gate is not None else options["replay"]
        reason = "only a part of the launches is measured" if gate is not None else "asked for"
        table = CounterTable(
            pd.DataFrame(columns), source="cupti", replay=replay, notes=(f"{replay} replay: {reason}",)
        )
        return session.Collection(table, 2, replay, reason, 0.1, (0.1,), (0.1,), 0.1, 0.1)


class Study:
    """A real profile of the compiled stack, and what live.profile would hand to CUPTI on a GPU."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = torch.compile(Stack().eval())
        self.x = torch.ones(8, WIDTH)
        self.draws = False
        device, notes = torch.device("cpu"), []
        trace, captured = live._measure(self.call, 2, 1, device, store, notes)
        self.graphs = captured.graphs
        plain = attribute(trace, captured.provenances, {"capability": [9, 0]}, eager_nodes=True)
        self.plain = with_layer_classes(plain, captured.provenances)
        self.stub = Counted(len(self.plain.window) // 2)
        monkeypatch.setattr(session, "collect", self.stub)
        monkeypatch.setattr(counting, "_on", lambda device: nullcontext())

    def call(self) -> None:
        with torch.no_grad():
            self.model(self.x)
        if self.draws:
            torch.rand(1)

    def counted(self, keys=known_counters.QUICK, replay="auto", deduplicate=None, plain=None) -> Profile:
        notes: list[str] = []
        found = counting.with_cupti(
            plain or self.plain,
            self.call,
            counting.Asked(keys, replay, deduplicate),
            torch.device("cpu"),
            (self.x,),
            self.graphs,
            notes,
        )
        self.notes = notes
        return found


@pytest.fixture
def study(store: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    return Study(store, monkeypatch)


def assert_times_are_untouched(found: Profile, plain: Profile) -> None:
    launch_record = {c.key for c in known_counters.COUNTERS if c.launch}
    columns = [name for name in KERNEL_COLUMNS if name not in launch_record]
    pd.testing.assert_frame_equal(found.kernels[columns], plain.kernels[columns])


def test_a_repeatable_call_is_measured_whole_by_application_replay(study: Study) -> None:
    found = study.counted()
    assert study.stub.options["replay"] == "application" and study.stub.options["gate"] is None
    assert study.stub.options["kernels"] == study.stub.all
    assert set(found.window["counters"]) == {"measured"}
    assert_times_are_untouched(found, study.plain)
    assert "application replay: one call changed neither" in study.notes[0]
    assert not any("asked for" in note for note in (*study.notes, *found.notes))
    chosen = known_counters.metric_names("GH100", known_counters.QUICK)
    assert study.stub.options["metrics"] == list(chosen)


def test_a_call_that_cannot_be_repeated_is_measured_a_launch_a_class_and_carried(study: Study) -> None:
    study.draws = True
    found = study.counted()
    assert study.stub.options["gate"].opened == study.stub.options["kernels"] < study.stub.all
    assert_times_are_untouched(found, study.plain)
    window = found.window
    assert set(window["counters"]) == {"measured", "carried"}
    twins = layer_classes.twins([provenance for _, provenance in study.graphs])
    value = "instructions"
    by_launch = window[window["iteration"] == 0].set_index(["graph", "launch"])
    assert len(twins) == len(by_launch) == study.stub.all
    representatives = [pair for pair, first in twins.items() if pair == first]
    assert list(by_launch.loc[representatives, "counters"]) == ["measured"] * len(representatives)
    # The stub numbers what it measured in launch order.
    measured = by_launch.loc[representatives, value].to_numpy()
    assert list(measured - measured[0]) == list(range(len(representatives)))
    for pair, first in twins.items():
        assert by_launch.loc[pair, value] == by_launch.loc[first, value]
        assert by_launch.loc[pair, "counters"] == ("measured" if pair == first else "carried")
    said = f"counters were taken of {len(representatives)} of {len(twins)} launches, one of each class of equal layers"
    assert study.notes[-1].startswith(f"{said} (3 layers, 1 class), which are ")
    assert "kernel replay: only a part of the launches is measured" in study.notes[0]
    assert found.nodes[value].notna().any()


def test_deduplication_can_be_asked_for_and_declined(study: Study) -> None:
    asked = study.counted(deduplicate=True)
    assert "carried" in set(asked.window["counters"]) and study.stub.options["gate"] is not None
    study.draws = True
    declined = study.counted(deduplicate=False)
    assert set(declined.window["counters"]) == {"measured"} and study.stub.options["replay"] == "kernel"


def test_launches_of_a_replayed_cuda_graph_are_not_waited_for(study: Study) -> None:
    """They run past the ranges that the gate listens to: everything is measured, and a wish for less is answered."""
    from dataclasses import replace

    study.draws = True
    replayed = replace(study.plain, kernels=study.plain.kernels.assign(method="fusion_map"))
    found = study.counted(plain=replayed)
    assert study.stub.options["gate"] is None and set(found.window["counters"]) == {"measured"}
    study.counted(plain=replayed, deduplicate=True)
    assert study.notes[0].startswith("not deduplicated: the launches in a replayed CUDA graph")


def test_where_most_time_is_outside_of_the_graphs_nothing_is_left_out(study: Study) -> None:
    from dataclasses import replace

    study.draws = True
    kernels = study.plain.kernels.copy()
    outside = kernels.index[kernels["iteration"] == 0][0]
    kernels.loc[outside, ["graph", "launch"]] = ""
    kernels.loc[outside, "duration_ns"] = int(kernels["duration_ns"].sum())
    found = study.counted(plain=replace(study.plain, kernels=kernels))
    assert study.stub.options["gate"] is None and "carried" not in set(found.window["counters"])


def test_counters_that_are_refused_leave_a_profile_of_times_with_the_remedy(study: Study, tmp_path: Path) -> None:
    remedy = "set NVreg_RestrictProfilingToAdminUsers=0"
    study.stub.error = CountersNotPermitted(f"no permission: {remedy}")
    found = study.counted()
    assert found is study.plain
    assert study.notes == [f"no hardware counters: no permission: {remedy}"]
    assert "dram_throughput" not in found.kernels and "dram_throughput" not in found.nodes
    found.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["kernels"]["columns"] == list(KERNEL_COLUMNS)


def test_a_chip_without_known_counters_leaves_a_profile_of_times(study: Study) -> None:
    from dataclasses import replace

    old = replace(study.plain, environment={"capability": [6, 1]})
    assert study.counted(plain=old) is old
    assert study.notes == ["no hardware counters: no counter names are known for compute capability 6.1"]


def test_what_the_launch_record_holds_needs_no_counters(study: Study) -> None:
    assert study.counted(["registers", "waves_per_sm"]) is study.plain
    assert study.stub.options == {} and study.notes == []


def test_what_the_function_raises_under_counters_passes_through(study: Study) -> None:
    from profiler_core.collect.inductor import _wrapper_call

    study.stub.error = ZeroDivisionError("in the model")
    code = _wrapper_call(study.graphs[0][0]).__code__
    with pytest.raises(ZeroDivisionError):
        study.counted(deduplicate=True)
    assert _wrapper_call(study.graphs[0][0]).__code__ is code
