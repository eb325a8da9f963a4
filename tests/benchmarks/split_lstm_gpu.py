"""LSTM layers on a GPU: cuDNN in fp32 and TF32, and split products: all steps in one launch, and a launch a step.

    python tests/benchmarks/split_lstm_gpu.py --json results/h200/split_lstm.json

Each way is captured in a CUDA graph, and their replays are timed in turns: microseconds a call, the median of ROUNDS,
and the ratio to cuDNN's fp32 of the same rounds. Weights are split before. Errors are relative L2 norms against fp64.
"eager" is cuDNN's fp32 call as a user makes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

ROUNDS, CALLS = 15, 10
#: batch, steps, inputs and units, layers
SHAPES = ((32, 128, 512, 2), (8, 64, 256, 1), (128, 64, 1024, 1), (1, 128, 512, 1))


def configurations(batch: int, hidden: int) -> list[Any]:
    """The kernel's own choice first, and what else may be faster."""
    from passes.kernels.lstm_steps import Config, choose

    own = choose(batch, hidden, torch.cuda.get_device_properties(0).multi_processor_count)
    found = [own]
    for units in (4, 8, 16):
        for depth, stages in ((64, 4), (64, 8), (128, 4)):
            for warps in (4, 8):
                one = Config(own.rows, units, depth, stages, warps)
                memory = (one.rows + 4 * units) * depth * 4 * stages
                if hidden % depth == 0 and memory <= 227 * 1024 and one != own:
                    found.append(one)
    if torch.cuda.get_device_capability()[0] >= 9:
        found += [replace(one, early=True) for one in found]
    return found


def split_way(layer: nn.LSTM, state: Any, tile: Any, config: Any, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Gives the output by split products, with a configuration in place of the steps' kernel's own choice.

    config: None for what the operator does by itself.
    """
    from passes import split_rnn
    from passes.kernels import launch, lstm_steps
    from passes.split_products import split

    weights = [w.detach() for w in layer._flat_weights]
    parts = {w.data_ptr(): split(w) for w in weights if w.dim() == 2}
    stacked: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def once(weights: Any, constant: bool) -> list[torch.Tensor]:
        """What a frozen graph has folded."""
        key = tuple(w.data_ptr() for w in weights)
        if key not in stacked:
            stacked[key] = [torch.stack(planes) for planes in zip(*(parts[at] for at in key), strict=True)]
        return stacked[key]

    given = (state, weights, layer.bias, layer.num_layers, layer.batch_first, tile, True)

    def run() -> torch.Tensor:
        with (
            mock.patch.object(launch, "has_hopper", launch.has_hopper if config is None else lambda device: False),
            mock.patch.object(lstm_steps, "choose", lambda *sizes: config),
            mock.patch.object(split_rnn, "_split", lambda weight, constant: parts[weight.data_ptr()]),
            mock.patch.object(split_rnn, "_stacked", once),
        ):
            return split_rnn.split_lstm(x, *given)[0]

    return run


def captured(fn: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph.replay, out


def seconds(fn: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS


def measured(batch: int, steps: int, width: int, layers: int, tune: bool) -> list[dict[str, Any]]:
    from case_studies.runner import fp32_matmuls
    from passes.kernels import launch, lstm_persistent, tiling

    torch.manual_seed(0)
    layer = nn.LSTM(width, width, layers, batch_first=True).cuda().eval()
    x = torch.randn(batch, steps, width, device="cuda")
    state = [torch.zeros(layers, batch, width, device="cuda") for _ in range(2)]
    exact = nn.LSTM(width, width, layers, batch_first=True).cuda().double()
    exact.load_state_dict(layer.state_dict())
    right = exact(x.double())[0]
    product = tiling.Product(batch * steps, 4 * width, width, bias=True)
    tile = tiling.choices_in(None).tile(product, x.device)[0]
    ways: dict[str, Callable[[], torch.Tensor]] = {"cudnn fp32": lambda: layer(x)[0]}
    if launch.has_hopper(x.device) and lstm_persistent.rows_of(batch, width, layers, launch.multiprocessors(x.device)):
        ways["split, all steps in one launch"] = split_way(layer, state, tile, None, x)
    for config in configurations(batch, width)[: None if tune else 1]:
        ways[f"split {config}"] = split_way(layer, state, tile, config, x)
    found: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {}
    with fp32_matmuls(tf32=True):
        found["cudnn tf32"] = captured(lambda: layer(x)[0])
    with fp32_matmuls(tf32=False):
        found |= {name: captured(way) for name, way in ways.items()}
        found["eager"] = (lambda: layer(x), layer(x)[0])
        times: dict[str, list[float]] = {name: [] for name in found}
        for number in range(ROUNDS):
            names = list(found)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name][0]()
                times[name].append(seconds(found[name][0]))
    base = times["cudnn fp32"]
    return [
        {
            "batch": batch, "steps": steps, "width": width, "layers": layers, "way": name,
            "microseconds": statistics.median(mine) * 1e6,
            "ratio": statistics.median(b / m for b, m in zip(base, mine, strict=True)),
            "error": ((found[name][1].double() - right).norm() / right.norm()).item(),
        }
        for name, mine in times.items()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="every configuration, not the kernel's own choice alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 1
    rows = []
    with torch.no_grad():
        for shape in SHAPES:
            for row in measured(*shape, tune=given.tune):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.json:
        from profiler_core.environment import environment
        from profiler_core.files import write_atomically

        data = {"environment": environment(torch.device("cuda", 0)), "command": " ".join(sys.argv), "rows": rows}
        write_atomically(given.json, json.dumps(data, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
