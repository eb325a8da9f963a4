"""What Inductor compiles while capturing is kept with its provenance, on whatever thread, and nothing stays patched."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx

from profiler_core.collect import compile_capture
from profiler_core.collect.compile_capture import Captured, capturing
from profiler_core.collect.provenance import Provenance


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    compile_capture.forget_compiled_code()
    yield
    compile_capture.forget_compiled_code()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provenance")


X = torch.ones(4, 8)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 3


def empty(graph: str, key: str = "") -> Provenance:
    return Provenance("2.0", (), {}, "", graph=graph, cache_key=key)


def served() -> int:
    """Hits in Inductor's cache so far."""
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


# --- names -----------------------------------------------------------------------------------------------------------


def test_every_graph_has_a_name_of_its_own() -> None:
    captured = Captured()
    names = [captured.add(object(), empty(graph)).graph for graph in ("0/0", "0/0", "", "", "0/0", "0/0 backward")]
    assert names == ["0/0", "0/0 #2", "graph 2", "graph 3", "0/0 #3", "0/0 backward"]
    assert [p.graph for p in captured.provenances] == names


def test_of_graphs_of_the_same_code_those_were_called_whose_launches_have_ranges() -> None:
    captured = Captured()
    for graph, key in (("a", "k"), ("b", "k"), ("c", "k"), ("d", "other"), ("e", "not called")):
        captured.add(object(), empty(graph, key))

    def called(*tags: str) -> list[str]:
        return [p.graph for p in captured.called({"k", "other", "unheard of"}, set(tags))]

    assert called("a", "c", "d") == ["a", "c", "d"]
    assert called("b") == ["b", "d"]
    assert called() == ["c", "d"]  # nothing tells them apart: the one compiled last stands for all


# --- capturing -------------------------------------------------------------------------------------------------------


def test_a_compile_is_captured_and_the_compiler_is_put_back(store: Path) -> None:
    inner = compile_fx._compile_fx_inner
    compiled = torch.compile(scaled)
    with capturing(store) as captured:
        assert compile_fx._compile_fx_inner is not inner
        result = compiled(X)
    assert compile_fx._compile_fx_inner is inner and torch.equal(result, scaled(X))
    ((graph, provenance),) = captured.graphs
    assert provenance.graph == "0/0" and provenance.cache_key == graph._fx_graph_cache_key
    assert captured.missing == [] and [launch.nodes for launch in provenance.launches] == [("relu", "mul")]
    assert [p.graph for p in captured.called({provenance.cache_key}, set())] == ["0/0"]


def test_settings_are_put_back_also_after_an_error(store: Path) -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    def settings() -> tuple[Any, ...]:
        return (
            inductor_config.get_config_copy(),
            functorch_config.get_config_copy(),
            torch.compiler.config.get_config_copy(),  # type: ignore[attr-defined]
            compile_fx._compile_fx_inner,
        )

    before = settings()
    with pytest.raises(KeyError), capturing(store):
        torch.compile(scaled)(X)
        raise KeyError
    assert settings() == before
    with capturing(store), capturing(store, caches=False):
        pass
    assert settings() == before


def test_a_failing_compile_raises_what_it_raises_without_capturing(store: Path, monkeypatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("in Inductor")

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", broken)
    with pytest.raises(Exception, match="in Inductor"), capturing(store):
        torch.compile(scaled)(X)
    assert compile_fx._compile_fx_inner is broken


def test_a_graph_without_work_is_no_graph(store: Path) -> None:
    compiled = torch.compile(lambda x: x.view(-1))
    with capturing(store) as captured:
        compiled(X)
    assert captured.missing == [] and all(not p.launches for p in captured.provenances)


def test_a_graph_that_lives_is_known_to_the_next_capture_and_a_dead_one_is_not(store: Path) -> None:
    compiled = torch.compile(scaled)
    with capturing(store) as first:
        compiled(X)
    with capturing(store) as again:
        compiled(X)
    assert [p.graph for p in again.provenances] == ["0/0"] and again.graphs[0][0] is first.graphs[0][0]
    del first, again, compiled
    torch._dynamo.reset()
    gc.collect()
    with capturing(store) as later:
        pass
    assert later.graphs == []


def test_a_backward_graph_compiled_on_another_thread_has_its_provenance(store: Path) -> None:
    """As autograd's thread compiles it on a GPU; settings are of a thread in newer torch."""
    weight = torch.ones(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x, w: torch.tanh(x @ w).sum())
    with capturing(store) as captured:
        loss = compiled(X, weight)
        assert [p.graph for p in captured.provenances] == ["0/0"]
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert weight.grad is not None and captured.missing == []
    backward = captured.provenances[1]
    assert backward.graph == "0/0 backward" and backward.launches
    assert all(launch.nodes for launch in backward.launches)


# --- Inductor's cache ------------------------------------------------------------------------------------------------


def compile_and_count_hits(store: Path | None, **options: Any) -> tuple[Provenance, int]:
    torch._dynamo.reset()
    before = served()
    with capturing(store, **options) as captured:
        torch.compile(scaled)(X)
    assert captured.missing == []
    return captured.provenances[-1], served() - before


def test_the_cache_serves_only_what_was_compiled_with_the_same_store(tmp_path: Path) -> None:
    plain = torch.compile(scaled)
    plain(X)
    first, hits = compile_and_count_hits(tmp_path / "a")
    assert hits == 0, "compiled without provenance, or with another store"
    again, hits = compile_and_count_hits(tmp_path / "a")
    assert hits == 1 and again.launches == first.launches and again.nodes.keys() == first.nodes.keys()
    assert compile_and_count_hits(tmp_path / "b")[1] == 0
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    assert compile_and_count_hits(tmp_path / "a")[1] == 0, "the store was emptied"


@pytest.mark.parametrize("options", [{"store": None}, {"store": Path("a"), "caches": False}], ids=["no store", "past"])
def test_without_a_store_or_past_the_caches_nothing_is_served(tmp_path: Path, monkeypatch, options) -> None:
    monkeypatch.chdir(tmp_path)
    assert [compile_and_count_hits(**options)[1] for _ in range(2)] == [0, 0]
    assert compile_and_count_hits(**options)[0].cache_key, "its calls can be told from others all the same"


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [compile_and_count_hits(tmp_path / "file" / "store")[1] for _ in range(2)] == [0, 0]


def test_the_users_own_tag_stays_part_of_the_keys(store: Path) -> None:
    config: Any = torch.compiler.config
    keys = []
    for tag in ("", "mine"):
        with config.patch(cache_key_tag=tag):
            keys.append(compile_and_count_hits(store)[0].cache_key)
    assert keys[0] != keys[1]


def test_what_is_not_cached_gets_a_name_by_which_its_calls_are_known(store: Path) -> None:
    import torch._inductor.config as inductor_config

    with inductor_config.patch(force_disable_caches=True), capturing(store) as captured:
        torch.compile(scaled)(X)
        torch.compile(lambda x: torch.relu(x) * 3)(X)
    keys = [p.cache_key for p in captured.provenances]
    assert len(set(keys)) == 2 and all(key.startswith("uncached-") for key in keys)
    assert [graph._fx_graph_cache_key for graph, _ in captured.graphs] == keys
    assert not list(store.glob("uncached-*"))
