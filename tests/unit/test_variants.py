"""Timing the variants of Inductor's kernels with their launches queued: which kernels, when, and what is left alone."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_graphs import dynamo_graph
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fxopt.torch_api import inductor, variants


class Kernel(CachingAutotuner):
    """What Inductor times, but for a kernel and a GPU."""

    def __init__(self, device: str = "cuda") -> None:
        self.device_props: Any = SimpleNamespace(type=device)

    def time(self, launcher: Any) -> float:
        return variants._bench(self, Kernel.inductors_bench, launcher)

    def inductors_bench(self, launcher: Any) -> float:
        return triton_heuristics.benchmarker.benchmark(fn=launcher, device=self.device_props.type)


class Gpu:
    """Time on a GPU that waits, then runs what is queued: `takes` ms a launch, which costs the CPU `launch` ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float, launch: float, wait: float = 1.0) -> None:
        self.takes, self.launch, self.ms_per_cycle = takes, launch, wait / variants.CYCLES
        self.cpu = self.gpu = 0.0
        self.launches = 0
        self.waits: list[int] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.gpu = max(gpu.gpu, gpu.cpu)

            def synchronize(self) -> None:
                gpu.cpu = max(gpu.cpu, gpu.gpu)

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(variants.time, "perf_counter", lambda: self.cpu / 1e3)

    def sleep(self, cycles: int) -> None:
        self.waits.append(cycles)
        self.gpu = max(self.gpu, self.cpu) + cycles * self.ms_per_cycle

    def __call__(self) -> None:
        self.launches += 1
        self.cpu += self.launch
        self.gpu = max(self.gpu, self.cpu) + self.takes


class Inductors:
    """Inductor's benchmarker, which finds the same for everything."""

    def __init__(self, finds: float) -> None:
        self.finds = finds

    def benchmark(self, fn: Any, *args: Any, **kwargs: Any) -> float:
        return self.finds


def test_a_kernel_shorter_than_its_launch_is_timed_and_not_the_launch(monkeypatch):
    gpu = Gpu(monkeypatch, takes=0.006, launch=0.02)
    assert variants.back_to_back(gpu, 0.02) == pytest.approx(0.006)
    assert gpu.launches == variants.ROUNDS * variants.LAUNCHES and set(gpu.waits) == {variants.CYCLES}


def test_the_wait_grows_until_all_launches_are_queued_before_it_ends(monkeypatch):
    gpu = Gpu(monkeypatch, takes=0.006, launch=0.09)  # 3.6 ms for 40 launches
    assert variants.back_to_back(gpu, 0.09) == pytest.approx(0.006)
    assert [cycles // variants.CYCLES for cycles in gpu.waits] == [1, 2] + [4] * variants.ROUNDS


def test_launches_that_cannot_be_queued_give_no_time(monkeypatch):
    gpu = Gpu(monkeypatch, takes=0.006, launch=2.0)
    assert variants.back_to_back(gpu, 0.02) is None
    assert gpu.waits == [variants.CYCLES << n for n in range(variants.LONGER + 1)]


def test_few_launches_of_a_longer_kernel_are_timed(monkeypatch):
    gpu = Gpu(monkeypatch, takes=0.2, launch=0.02)
    assert variants.back_to_back(gpu, 0.2) == pytest.approx(0.2)
    assert gpu.launches == variants.ROUNDS * 20


@pytest.mark.parametrize(
    ("inductors", "wanted"),
    [(0.02, 0.006), (0.005, 0.005), (variants.LONG_MS * 2, variants.LONG_MS * 2), (math.inf, math.inf)],
)
def test_what_a_marked_kernel_finds(monkeypatch, inductors, wanted):
    gpu = Gpu(monkeypatch, takes=0.006, launch=0.02)
    finds(monkeypatch, inductors)
    assert marked().time(gpu) == pytest.approx(wanted)
    assert Kernel().time(gpu) == inductors, "another kernel"


def test_where_it_cannot_be_timed_inductors_time_stands(monkeypatch):
    Gpu(monkeypatch, takes=0.006, launch=0.02)

    def broken() -> None:
        raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    finds(monkeypatch, 0.02)
    assert marked().time(broken) == 0.02


def test_what_inductor_raises_is_raised_and_nothing_is_left_behind(monkeypatch):
    class Failing(Inductors):
        def benchmark(self, fn: Any, *args: Any, **kwargs: Any) -> float:
            raise RuntimeError("out of resources")

    monkeypatch.setattr(triton_heuristics, "benchmarker", variants._Benchmarker(Failing(0.0)))
    with pytest.raises(RuntimeError, match="out of resources"):
        marked().time(lambda: None)
    assert not variants._timing.get()


def test_threads_do_not_change_how_another_times(monkeypatch):
    gpu = Gpu(monkeypatch, takes=0.006, launch=0.02)
    finds(monkeypatch, 0.02)
    inside, done, found = threading.Event(), threading.Event(), []

    def launcher() -> None:
        inside.set()
        assert done.wait(60)

    def inductors() -> None:
        assert inside.wait(60)
        found.extend([Kernel().time(gpu), marked().time(gpu)])
        done.set()

    thread = threading.Thread(target=inductors)
    thread.start()
    marked().time(launcher)
    thread.join()
    assert found == [0.02, pytest.approx(0.006)]


def finds(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    monkeypatch.setattr(triton_heuristics, "benchmarker", variants._Benchmarker(Inductors(milliseconds)))


def marked() -> Kernel:
    kernel = Kernel()
    variants._mark(module_of(kernel), [])
    return kernel


def test_only_gpu_kernels_of_code_loaded_meanwhile_are_marked(monkeypatch, tmp_path):
    """Code of the same path is loaded once, and belongs to who loaded it first."""
    kernels = {"before": Kernel(), "other": Kernel(), "meanwhile": Kernel(), "after": Kernel(), "on_cpu": Kernel("cpu")}
    monkeypatch.setattr(PyCodeCache, "modules", [])
    monkeypatch.setattr(PyCodeCache, "modules_no_attr", {})

    def load(name: str) -> None:
        path = tmp_path / f"{name}.py"
        path.write_text("")
        attrs = None if name == "before" else {name: kernels[name]}
        PyCodeCache.load_by_key_path(f"key_{name}", str(path), attrs=attrs)

    load("before")
    vars(PyCodeCache.modules[0])["kernel"] = kernels["before"]
    with variants.timed_back_to_back():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, "other").result()
        load("before")
        load("meanwhile")
        load("on_cpu")
    load("after")
    assert [name for name, kernel in kernels.items() if kernel in variants._marked] == ["meanwhile"]


def test_a_kernel_that_loaded_code_has_is_not_marked_for_new_code_that_has_it_too():
    old, new = Kernel(), Kernel()
    variants._mark(module_of(old, new), [module_of(old)])
    assert new in variants._marked and old not in variants._marked


def test_inductor_is_watched_once_and_asked_by_its_own_names():
    with variants.timed_back_to_back(), variants.timed_back_to_back():
        pass
    assert PyCodeCache.load_by_key_path.__name__ == "load_by_key_path"
    assert isinstance(triton_heuristics.benchmarker, variants._Benchmarker)
    assert not isinstance(triton_heuristics.benchmarker.inner, variants._Benchmarker)
    assert triton_heuristics.benchmarker.benchmark_cpu == triton_heuristics.benchmarker.inner.benchmark_cpu
    bench: Any = CachingAutotuner.bench
    assert bench.__name__ == "bench" and not hasattr(bench.__wrapped__, "__wrapped__")


def test_a_kernel_that_is_marked_is_written_to_a_cache_as_any_other():
    kernel = marked()
    assert "bench" not in vars(kernel)
    alive = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("caches", [True, False])
def test_a_compilation_loads_its_code_where_it_is_watched(monkeypatch, caches):
    seen: list[ModuleType] = []
    monkeypatch.setattr(variants, "_mark", lambda module, before: seen.append(module))
    with torch.no_grad():
        gm, inputs = dynamo_graph(lambda x: torch.relu(x) * 3 + 1, torch.randn(5, 7))
        inductor.compile_graph(gm, inputs, patches={}, caches=False)
        assert not seen
        inductor.compile_graph(gm, inputs, patches={}, caches=caches, back_to_back=True)
    assert any(hasattr(module, "call") for module in seen)


def module_of(*kernels: Kernel) -> ModuleType:
    module = ModuleType("generated")
    for number, kernel in enumerate(kernels):
        setattr(module, f"triton_{number}", kernel)
    return module
