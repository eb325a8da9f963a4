"""What each part of an optimised model's call costs on the CPU, whatever the GPU does meanwhile.

    python tests/benchmarks/call_overhead.py                       # microseconds a call of each part
    python tests/benchmarks/call_overhead.py --against ../before   # beside another checkout, in turns, and the ratio

Needs no GPU. CUDA graphs have a stand-in that replays nothing, and streams have one, so that the times are of Python
alone: what the driver needs for a copy, a launch and the current stream comes on top. "bare" is the same work without
the part: the function that folded code calls, the copies of a replay, the callable that Dynamo makes of a model. The
folded weights of "far" are of a layout that is not sampled, as weights on a GPU are not between two looks a second
apart.

Each time is the fastest of ROUNDS rounds, and of `--turns` processes, as a busy neighbour only ever adds time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROUNDS, CALLS = 60, 200
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--turns", type=int, default=3, help="processes for each checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # one turn of this checkout
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measured()))
        return
    here = Path(__file__).resolve().parents[2]
    trees = [here, *([arguments.against.resolve()] if arguments.against else [])]
    best: list[dict[str, list[float]]] = [{} for _ in trees]
    for _ in range(arguments.turns):
        for found, tree in zip(best, trees, strict=True):
            for part, times in turn(tree).items():
                found[part] = list(map(min, times, found.get(part, times)))
    show(best)
    if arguments.json:
        arguments.json.write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")


def turn(tree: Path) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--alone"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if Path(found.pop("from")) != tree:
        raise RuntimeError(f"fxopt was not imported from {tree}")
    return {part: list(times) for part, times in found.items()}


def show(best: list[dict[str, list[float]]]) -> None:
    heads = ["bare", "with it", "adds"] + (["before", "added", "ratio", "of added"] if best[1:] else [])
    print(f"{'us a call':34}" + "".join(f"{head:>10}" for head in heads))
    for part, (bare, whole) in best[0].items():
        row = [bare, whole, whole - bare]
        if best[1:]:
            bare_before, before = best[1][part]
            row += [before, before - bare_before, whole / before, (whole - bare) / (before - bare_before)]
        print(f"{part:34}" + "".join(f"{value:10.2f}" for value in row))


def measured() -> dict[str, Any]:
    """By part, microseconds a call of the bare work and of the part around it."""
    import fxopt

    gc.disable()
    found: dict[str, Any] = {"from": str(Path(fxopt.__file__).parents[1])}
    with torch.no_grad(), captures():
        for count in (6, 148):
            for near in (True, False):
                bare, code = folded(count, near)
                found[f"{count} folded weights, {'near' if near else 'far'}"] = [best(bare), best(code)]
        for name, copied, fixed in (("1 input", 1, 0), ("1 input, 148 fixed", 1, 148), ("3 inputs", 3, 0)):
            bare, replay = replayed(copied, fixed)
            found[f"replay of {name}"] = [best(bare), best(replay)]
        for name, replays in (("module", False), ("module, 6 folded weights, replay", True)):
            bare, model = optimized(replays)
            found[name] = [best(bare), best(model)]
    return found


def best(call: Callable[[], Any]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter_ns() - start) / CALLS / 1e3)
    return least


def weights(count: int, near: bool) -> list[nn.Parameter]:
    made = torch.randn(count, 4, 8)
    return [nn.Parameter(weight.clone() if near else weight.clone()[:, ::2]) for weight in made]


def folded(count: int, near: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from fxopt.frozen import FrozenCode

    x, held = torch.randn(4, 8), weights(count, near)
    args = (*held, x)
    code = FrozenCode(lambda x: x, [count], dict(enumerate(held)))
    return (lambda: (lambda x: x)(x)), lambda: code(*args)


class Graph:
    """A captured graph that replays nothing."""

    def replay(self) -> None: ...

    def pool(self) -> None: ...


class Stream:
    def wait_stream(self, other: Any) -> None: ...


@contextlib.contextmanager
def captures() -> Iterator[None]:
    """torch.cuda's graphs and streams, as far as a capture and a replay on the CPU ask for them."""
    import passes.cuda_graphs

    stream = Stream()
    stand_ins = {
        "Stream": Stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": lambda *args, **kwargs: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(
            mock.patch.object(passes.cuda_graphs, "cublas_workspaces_of_a_capture", contextlib.nullcontext)
        )
        if hasattr(passes.cuda_graphs, "current_stream_address"):
            stack.enter_context(mock.patch.object(passes.cuda_graphs, "current_stream_address", lambda index: 0))
        yield


def replay_of(fn: Callable[..., Any], static: frozenset[int]) -> Callable[..., Any]:
    from passes.cuda_graphs import GraphReplay

    return GraphReplay(fn, static=static, device=CPU, warmup=1)


def replayed(copied: int, fixed: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = [torch.randn(4, 8) for _ in range(fixed)]
    inputs = [torch.randn(4, 8) for _ in range(copied)]
    kept = [x.clone() for x in inputs]
    replay = replay_of(lambda *args: [x + 1 for x in args[fixed:]], frozenset(range(fixed)))
    args = (*held, *inputs)
    replay(*args)

    def bare() -> Any:
        if copied > 1:
            torch._foreach_copy_(kept, inputs)
            torch._foreach_copy_([torch.empty_like(x) for x in kept], kept)
        else:
            kept[0].copy_(inputs[0])
            kept[0].clone()

    return bare, lambda: replay(*args)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterList(weights(6, near=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(weight.sum() for weight in self.held)


class Backend:
    """In the place of fxopt's own, which would tune: the graph becomes code that gives its input back."""

    calls, refused = 1, ""
    replays = False

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, gm: Any, inputs: Any) -> Callable[..., Any]:
        from fxopt.frozen import FrozenCode

        frozen = {i: value for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
        (x,) = set(range(len(inputs))) - set(frozen)
        if not self.replays:
            return lambda *args: (args[x],)
        return FrozenCode(replay_of(lambda x: [x + 1], frozenset()), [x], frozen)


def optimized(replays: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A module of `fxopt.optimize`, and what it is made around: Dynamo's callable, or a replay's copies."""
    from fxopt import session

    torch._dynamo.reset()
    x = torch.randn(4, 8)
    with mock.patch.object(session, "SessionBackend", Backend), mock.patch.object(Backend, "replays", replays):
        model = session.optimize(Sum().eval(), x)
    if replays:
        return replayed(1, 0)[0], lambda: model(x)
    inner = model._compiled.forward
    return lambda: inner(x), lambda: model(x)


if __name__ == "__main__":
    main()
