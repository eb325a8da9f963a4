"""Recurrent layers in Dynamo's graphs, and what Dynamo has left to eager. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch._dynamo.config
import torch._dynamo.exc
import torch._dynamo.utils
import torch._inductor.config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_config: Any = torch._dynamo.config
#: what Dynamo raises where it can neither trace a call nor leave it to eager
TRACE_FAILED: tuple[type[Exception], ...] = (
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.InternalTorchDynamoError,
)


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Within the block Dynamo traces nn.LSTM, GRU and RNN, as one call of torch's function each.

    A setting of the process, which Dynamo reads when it compiles a frame, as it may in any call; about 4 us.
    """
    before = _config.allow_rnn
    _config.allow_rnn = True
    try:
        yield
    finally:
        _config.allow_rnn = before


def left_to_eager() -> int:
    """How often Dynamo has broken a graph or given a frame up in this process, since its counters were last cleared."""
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()) + counters["frames"]["total"] - counters["frames"]["ok"]


class BeforeAutograd(CustomGraphPass):
    """A pass over Dynamo's graph, run by Inductor before AOTAutograd, after what a user has installed there.

    Subclasses say what it does, and in `uuid` what that depends on.
    """

    #: Inductor's option that holds it
    OPTION = "pre_grad_custom_pass"

    def __init__(self) -> None:
        from fxopt.torch_api import inductor  # heavy, and this module is imported with the passes

        self._installed = inductor.custom_passes(getattr(torch._inductor.config, self.OPTION))

    def __call__(self, graph: fx.Graph) -> None:
        from fxopt.torch_api import inductor

        for custom in self._installed:
            inductor.call_custom(custom, graph, None)
        self.rewrite(graph)

    def rewrite(self, graph: fx.Graph) -> None:
        raise NotImplementedError

    def key(self) -> str:
        raise NotImplementedError

    def uuid(self) -> Any:
        """None, which passes the caches by, where an installed pass has none."""
        others = [custom.uuid() if hasattr(custom, "uuid") else None for custom in self._installed]
        return None if None in others else hashlib.sha256(f"{others} {self.key()}".encode()).hexdigest()
