"""`fxopt.optimize(model, inputs)`: what a torch.compile backend cannot reach, because it does not own the model.

Here: weights held constant. The session watches them, and folds anew when they change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fxopt.backend import Backend
from fxopt.report.model import GraphReport, Report
from fxopt.tuner import FxoptWarning


class OptimizedModule(nn.Module):
    """A model with its optimised code. Calls run under `torch.no_grad()`.

    `report` tells what was done. In training mode (`model.train()`) the original model runs, with gradients.
    State dicts are the original model's. `check_weights` (default on) compares each parameter's identity, version and
    address before a call (see `Weights`) and folds anew after a change. Writing into memory through `.data`
    (`p.data.add_(1)`), which torch does not count, is not seen.
    """

    def __init__(
        self, model: nn.Module, mode: str | None, options: Mapping[str, Any], check_weights: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.report = Report()
        self._mode, self._options = mode, dict(options)
        self._check_weights = check_weights
        self._watched: Weights | None = None
        self._compile()
        self.train(model.training)

    def _compile(self) -> None:
        self._backend = Backend(self._mode, self._options, session=True, on_report=self._note)
        # A fresh backend object makes Dynamo compile anew; plans make that cheap.
        self._run = torch.compile(self.model, backend=self._backend)
        self._watched = None

    def _note(self, report: GraphReport) -> None:
        self.report.graphs.append(report)
        if report.frozen and self._check_weights:
            self._watched = Weights(self.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            return self.model(*args, **kwargs)
        if self._watched is not None and self._watched.changed():
            self._compile()
        with torch.no_grad():
            return self._run(*args, **kwargs)

    def train(self, mode: bool = True) -> OptimizedModule:
        super().train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


class Weights:
    """A model's modules, parameters and buffers as they are now, to be compared with later.

    Compares identity, version and address: replacing one changes the first, writing to it the second, and
    assigning to its `.data` the third. About 0.15 us a tensor, in loops that stay inside the interpreter's own C code.
    """

    def __init__(self, model: nn.Module) -> None:
        own: list[Any] = [
            t for module in model.modules() for t in (module._parameters, module._buffers, module._modules)
        ]
        slots = [(table, name, value) for table in own for name, value in table.items() if value is not None]
        self._tables: list[Any] = [table for table, _, _ in slots]
        self._names = [name for _, name, _ in slots]
        self._values = [value for _, _, value in slots]
        self._tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        # Inference tensors have no version; they cannot be written to outside inference mode either.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = self._read_versions()
        # Only a strided tensor has an address.
        self._strided = [tensor for tensor in self._tensors if tensor.layout is torch.strided]
        self._addresses = self._read_addresses()

    def _read_versions(self) -> list[int]:
        return list(map(attrgetter("_version"), self._versioned))

    def _read_addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._strided))

    def changed(self) -> bool:
        same = all(map(is_, map(dict.get, self._tables, self._names), self._values))
        return not (same and self._read_versions() == self._versions and self._read_addresses() == self._addresses)


def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    *,
    mode: str | None = None,
    check_weights: bool = True,
    **options: Any,
) -> OptimizedModule:
    """Tune `model` on `example_inputs` and return a callable module that runs the result.

    example_inputs: a tuple or list of positional arguments, a dict of keyword arguments, or a single tensor.
    options: fxopt's options and Inductor's, as for the backend (Inductor's dotted names through a dict:
    `**{"triton.cudagraphs": False}`). `freeze=False` leaves the weights alone. An unknown one raises UnknownOption.

    The model must be in evaluation mode: `model.eval()`. Raises ValueError otherwise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fxopt.optimize takes an nn.Module, not {type(model).__name__}")
    if model.training:
        raise ValueError("fxopt.optimize is for inference: call model.eval() first")
    options.setdefault("freeze", True)
    optimized = OptimizedModule(model, mode, options, check_weights)
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        kwargs = example_inputs
    else:
        args = tuple(example_inputs)
    optimized(*args, **kwargs)
    if optimized._backend.calls == 0:
        message = (
            "no graph of this model reached the compiler, so it runs as before: Dynamo left it to eager (nn.LSTM, GRU "
            "and RNN are, by default). TORCH_LOGS=graph_breaks says where"
        )
        optimized.report.messages.append(message)
        warnings.warn(f"fxopt: {message}", FxoptWarning, stacklevel=2)
    return optimized
