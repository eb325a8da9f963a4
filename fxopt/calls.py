"""The calls of one graph that are measured and verified: on copies, each from the same values, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxopt import training, verify
from fxopt.torch_api import dynamo
from fxopt.training import Gradients
from profiler_core import exclusive


class Calls:
    """How the code of a graph is called while it is tuned.

    gm: Dynamo's graph. real: its inputs with concrete values. static: numbers of the inputs that are parameters or
    buffers. mutated: of those that a call writes to. wanted: of those that a gradient is wanted for. count: how many
    sets of fresh inputs there are beside the caller's.

    held: inputs that all calls share. arguments: what a measured call is given (with cotangents once `with_backward`
    has drawn them). gradients: None while a call is the forward alone.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        real: Sequence[Any],
        *,
        static: frozenset[int],
        mutated: frozenset[int],
        wanted: tuple[int, ...],
        device: torch.device,
        count: int,
    ) -> None:
        self.gm, self.real, self.wanted, self.device, self.count = gm, real, wanted, device, count
        # Parameters and buffers are shared by every measured call, except those that a call would change, and those in
        # whose memory it writes to something else: of one memory there is one copy, or none.
        self.held, self.mutated = static - dynamo.beside(real, mutated), mutated
        self.arguments: Sequence[Any] = real
        self.gradients: Gradients | None = None
        self._before = verify.clone_inputs(real, self.held) if mutated else []
        self._sets: list[list[Any]] = []
        self._states: list[list[Any]] = []  # what each of the sets starts from where the graph writes

    def with_backward(self, fn: Callable[..., Any]) -> str:
        """From now on a measured call runs the backward as well, from fixed cotangents drawn for the outputs of `fn`.

        Returns what a call then is, in words; "" where no gradient is wanted, and a call stays as it is.
        """
        if not self.wanted:
            return ""
        with self.running(), torch.enable_grad():
            outputs = list(fn(*verify.clone_inputs(self.real, self.held)))
            leading = training.differentiable(outputs)
            drawn = training.cotangents([outputs[position] for position in leading])
        self.gradients = Gradients(self.wanted, leading, len(self.real))
        self.arguments = [*self.real, *drawn]
        return f"a call is forward and backward: {self.gradients.describe()}"

    def whole(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with its backward, where a call has one."""
        return fn if self.gradients is None else self.gradients.of(fn)

    def steady(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The whole call of `fn`, with the inputs that it writes to put back before, so that every call does the same.

        A counter that indexes a cache would otherwise run past its end.
        """
        call = self.whole(fn)
        if not self.mutated:
            return call

        def restored(*args: Any) -> Any:
            self._put_back(args, self._before)
            return call(*args)

        return restored

    def input_sets(self, fn: Callable[..., Any]) -> list[list[Any]]:
        """The caller's inputs and fresh ones like them; all copies, for a graph may write to them.

        Where it does, the fresh ones hold what a call of `fn`, the baseline's code, leaves there: what is 0 at first is
        0 in whatever order, and code that ignores it would look right. Integers stay: a cache has an end.
        """
        # An index must stay in its table: integers are only moved around where any of them may stand anywhere.
        kept = self.held | dynamo.fixed_integers(self.gm, self.real)
        sets = [verify.clone_inputs(self.arguments, self.held) for _ in range(self.count + 1)]
        fresh = [verify.fresh_inputs(own, kept, seed) for seed, own in enumerate(sets[1:], 1)]
        if self.mutated:
            with self.running():
                for inputs in fresh:
                    called = verify.clone_inputs(inputs, self.held)
                    self.whole(fn)(*called)
                    self._put_back(inputs, [value if _continuous(value) else None for value in called])
        self._sets = [sets[0], *fresh]
        begun = [
            [value.clone() if number in self.mutated else None for number, value in enumerate(inputs)]
            for inputs in fresh
        ]
        self._states = [self._before, *begun]
        return self._sets

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What code runs in that is measured: alone on the device, outside of tracing, the random state put back."""
        devices = [self.device] if self.device.type == "cuda" else []
        # What is measured waits for what others measure on the device, and holds it against them.
        with exclusive.measuring(self.device), dynamo.outside_tracing(), torch.random.fork_rng(devices=devices):
            for inputs, state in zip(self._sets, self._states, strict=True):  # whatever was measured on them
                self._put_back(inputs, state)
            yield

    def _put_back(self, args: Sequence[Any], state: Sequence[Any]) -> None:
        """Give the inputs that the graph writes to the values of `state`, but where that is None."""
        for position in sorted(self.mutated):
            if state[position] is not None:
                args[position].copy_(state[position])


def _continuous(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
