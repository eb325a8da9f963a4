"""Compiles small models as tests need them: to Dynamo's graph, or by Inductor with provenance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from profiler_core.collect.inductor import Provenance, from_compiled


@dataclass
class Compiled:
    call: Callable[..., Any]
    graph: Any  # CompiledFxGraph
    gm: torch.fx.GraphModule
    provenance: Provenance


def compile_with_provenance(
    model: nn.Module, inputs: Sequence[Any], store: Path | None = None, **patches: Any
) -> Compiled:
    """torch.compile with provenance tracking; config patches come in as keywords, "." spelt as "__"."""
    seen: dict[str, Any] = {}
    config = {"trace.provenance_tracking_level": 1, **{k.replace("__", "."): v for k, v in patches.items()}}

    def inner(gm: torch.fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Any:
        graph = compile_fx_inner(gm, example, **kwargs)
        seen.update(graph=graph, gm=gm, provenance=from_compiled(graph, gm, store))
        return graph

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        return compile_fx(gm, example, inner_compile=inner, config_patches=config)

    # A hit in AOTAutograd's cache never calls inner_compile.
    with (
        torch.no_grad(),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(prepare_freezing=bool(patches.get("freezing"))),
    ):
        call = torch.compile(model, backend=backend)
        call(*inputs)
    return Compiled(call, seen["graph"], seen["gm"], seen["provenance"])


def dynamo_graph(fn: Callable[..., Any], *inputs: Any) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend, and what it takes: parameters and inputs."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, arguments: Sequence[Any]) -> Any:
        seen[:] = gm, list(arguments)
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend)(*inputs)
    return seen[0], seen[1]


class Mlp(nn.Module):
    """Two library calls and two generated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(self.down(self.norm(self.up(x)))) + x


class Renamed(nn.Module):
    """The same operators as :class:`Mlp` under other names and lines."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.middle = nn.LayerNorm(64)
        self.last = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x))
        return torch.nn.functional.relu(self.last(hidden)) + x


class Counter(nn.Module):
    """Changes one of its inputs."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1.0)
        return torch.sin(x) @ state
