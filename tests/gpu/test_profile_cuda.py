"""profile() on an NVIDIA GPU: every kernel attributed and counted, whatever way it is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import profiler_core
from profiler_core import counters
from profiler_core.collect import compile_capture
from profiler_core.collect.cupti import session
from profiler_core.collect.cupti.library import CountersNotPermitted
from profiler_core.counters import QUICK, UnknownChip, chip_of
from profiler_core.profiles import Profile

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
WIDTH, LENGTH = 256, 64


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.before, self.after, self.heads = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x)), approximate="tanh"))


class Gpt(nn.Module):
    """The structure of GPT-2: two embeddings, equal blocks, a norm."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.norm(x)


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    compile_capture.forget_compiled_code()
    yield
    compile_capture.forget_compiled_code()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provenance")


@pytest.fixture
def take(store: Path) -> Callable[..., Profile]:
    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Profile:
        found = profiler_core.profile(fn, *args, **{"iterations": 3, "counters": "none", "store": store, **options})
        print("\n".join(found.notes))
        assert found.attributed_ns + found.unattributed_ns == found.total_ns > 0
        return found

    return run


@pytest.fixture(scope="module")
def counting() -> None:
    try:
        chip = chip_of(torch.cuda.get_device_capability(DEVICE))
        x = torch.ones(8, device=DEVICE)
        session.collect(lambda: x + 1, counters.metric_names(chip, ["gpu_time"]), replay="application")
    except (UnknownChip, CountersNotPermitted) as error:
        pytest.skip(str(error))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(512, (4, LENGTH), device=DEVICE)


@pytest.fixture
def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt().to(DEVICE)


def of_kernels(profile: Profile) -> Any:
    """The rows of the window that are kernels: copies and fills have no counters."""
    return profile.window[profile.window["kind"] == "kernel"]


def test_every_kernel_of_a_transformer_is_attributed_and_counted(take, gpt, ids, counting) -> None:
    with torch.no_grad():
        profile = take(torch.compile(gpt.eval()), ids, counters="quick")
    assert profile.attributed_share == 1.0, profile.unattributed()
    assert set(profile.nodes["kind"]) == {"node"} and set(profile.window["method"]) == {"correlation"}
    rows = of_kernels(profile)
    assert set(rows["counters"]) == {"measured"}
    measured = [key for key in QUICK if key in rows and key not in ("l1_hit_rate", "l2_hit_rate")]
    assert rows[measured].notna().all(axis=None) and (rows["instructions"] > 0).all()
    assert (rows["registers"] > 0).all() and rows["theoretical_occupancy"].between(0, 100, inclusive="right").all()
    assert any("application replay: one call changed neither" in note for note in profile.notes)
    assert any("4 layers of 1 class" in note for note in profile.notes)
    by_call = rows.groupby("iteration")["instructions"].sum()
    assert by_call.nunique() == 1, "every call has the counters of the one that was counted"


def test_all_twenty_counters_are_there(take, gpt, ids, counting) -> None:
    with torch.no_grad():
        rows = of_kernels(take(torch.compile(gpt.eval()), ids, counters="full"))
    assert set(counters.FULL) <= set(rows.columns) and len(counters.FULL) == 20
    assert set(rows["counters"]) == {"measured"}


@pytest.fixture
def step(gpt: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    loss = torch.compile(lambda: gpt.train()(ids).square().mean())
    return lambda: loss().backward()


def test_a_training_step_is_counted_by_kernel_replay(take, step, counting) -> None:
    profile = take(step, counters=["gpu_time", "instructions"], deduplicate=False)
    assert profile.attributed_share == 1.0, profile.unattributed()
    graphs = set(profile.window["graph"]) - {""}
    assert any(graph.endswith(" backward") for graph in graphs) and len(graphs) == 2
    assert set(of_kernels(profile)["counters"]) == {"measured"}
    assert any("kernel replay: it accumulates a gradient" in note for note in profile.notes)


def test_deduplicated_each_class_is_counted_once_and_carried(take, step, counting) -> None:
    """Of launches on the autograd thread, too. Kernels outside of the graphs have none then."""
    profile = take(step, counters=["gpu_time", "instructions"], deduplicate=True)
    rows = of_kernels(profile)
    inside = rows[rows["launch"] != ""]
    assert set(inside["counters"]) == {"measured", "carried"}
    assert set(rows.loc[rows["launch"] == "", "counters"]) <= {""}
    assert inside["instructions"].notna().all() and (inside["instructions"] > 0).all()
    forward, backward = (
        {*inside.loc[inside["graph"].str.endswith("backward") == b, "counters"]} for b in (False, True)
    )
    assert forward >= {"measured"} and backward >= {"measured"}
    assert any("one of each class of equal layers" in note for note in profile.notes)
    # What was carried is what would have been measured: equal kernels on equal shapes run as many instructions.
    whole = of_kernels(take(step, counters=["instructions"], deduplicate=False))
    assert list(whole["name"]) == list(rows["name"])
    ours, theirs = inside["instructions"].sum(), whole.loc[whole["launch"] != "", "instructions"].sum()
    assert ours == pytest.approx(theirs, rel=0.05)


def test_the_kernels_of_a_replayed_cuda_graph_are_attributed(take, gpt, ids) -> None:
    with torch.no_grad():
        compiled = torch.compile(gpt.eval(), mode="reduce-overhead")
        profile = take(compiled, ids, warmup=5)
        result = compiled(ids).clone()
        expected = gpt(ids)
    assert profile.attributed_share >= 0.99, profile.unattributed()
    assert "fusion_map" in set(profile.window["method"])
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_a_replayed_cuda_graph_is_counted_or_a_note_says_why_not(take, gpt, ids, counting) -> None:
    with torch.no_grad():
        profile = take(
            torch.compile(gpt.eval(), mode="reduce-overhead"), ids, warmup=5, counters="quick", deduplicate=True
        )
    assert any(note.startswith("not deduplicated: ") for note in profile.notes)
    kernels = of_kernels(profile)
    counted = "counters" in kernels and (kernels["counters"] != "").all()
    assert counted or any("counters" in note for note in profile.notes), profile.notes


def test_without_counters_there_are_none(take, gpt, ids) -> None:
    with torch.no_grad():
        profile = take(torch.compile(gpt.eval()), ids)
    assert "counters" not in profile.kernels and "dram_throughput" not in profile.kernels
    assert not any("counters" in note for note in profile.notes)


def test_counters_that_are_refused_leave_the_times_and_the_remedy(take, gpt, ids, monkeypatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise CountersNotPermitted("set NVreg_RestrictProfilingToAdminUsers=0")

    monkeypatch.setattr(session, "collect", refused)
    with torch.no_grad():
        profile = take(torch.compile(gpt.eval()), ids, counters="quick")
    assert profile.attributed_share == 1.0 and "dram_throughput" not in profile.kernels
    assert any("no hardware counters: set NVreg_RestrictProfilingToAdminUsers=0" in note for note in profile.notes)


def test_an_lstm_is_its_operator_with_its_full_time(take, counting) -> None:
    model, x = nn.LSTM(128, 128, 2, batch_first=True).to(DEVICE).eval(), torch.randn(8, 32, 128, device=DEVICE)
    with torch.no_grad():
        profile = take(torch.compile(model), x, counters="quick")
    assert profile.operator_share == profile.attributed_share == 1.0
    assert set(profile.nodes["kind"]) == {"operator"} and profile.opaque_share > 0.5
    assert any("Inductor compiled no graph" in note for note in profile.notes)
    assert set(of_kernels(profile)["counters"]) == {"measured"}


def test_two_compiles_for_two_shapes_are_kept_apart(take) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE)
    compiled = torch.compile(lambda x: torch.relu(x @ weight).softmax(-1))
    small, large = torch.randn(64, WIDTH, device=DEVICE), torch.randn(256, WIDTH, device=DEVICE)

    def both() -> None:
        compiled(small)
        compiled(large)

    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        profile = take(both)
    assert profile.attributed_share == 1.0
    launches = profile.window.groupby("graph")["launch"].agg(set)
    assert set(launches.index) == {"0/0", "0/1"} and launches["0/0"] == launches["0/1"]


def test_the_device_is_found_in_what_a_function_uses(take, gpt, ids) -> None:
    with torch.no_grad():
        profile = take(lambda: gpt(ids))
    assert set(profile.window["device"]) == {"cuda:0"} and profile.attributed_share == 1.0


def test_nothing_is_left_on(take, gpt, ids, counting) -> None:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    state, on_cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    with torch.no_grad():
        compiled = torch.compile(gpt.eval())
        first = take(compiled, ids, counters="quick")
        again = take(compiled, ids, counters="quick")
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(torch.get_rng_state(), on_cpu)
    assert list(first.window["name"]) == list(again.window["name"])
    assert set(of_kernels(again)["counters"]) == {"measured"}
