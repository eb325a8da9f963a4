"""`fxopt.optimize(model, inputs)`: what a torch.compile backend cannot reach, because it does not own the model.

Here: weights held constant. The session watches them, and folds anew when they change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
    address before a call (about 0.2 us each) and folds anew after a change. Writing into memory through `.data`
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
        self._watched: list[tuple[Any, str, Any, int, int]] = []
        self._compile()
        self.train(model.training)

    def _compile(self) -> None:
        self._backend = Backend(self._mode, self._options, session=True, on_report=self._note)
        # A fresh backend object makes Dynamo compile anew; plans make that cheap.
        self._run = torch.compile(self.model, backend=self._backend)
        self._watched = []

    def _note(self, report: GraphReport) -> None:
        self.report.graphs.append(report)
        if report.frozen and self._check_weights:
            self._watched = _watch(self.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            return self.model(*args, **kwargs)
        if self._watched and _changed(self._watched):
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


def _watch(model: nn.Module) -> list[tuple[Any, str, Any, int, int]]:
    watched: list[tuple[Any, str, Any, int, int]] = []
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    # Inference tensors have no version; they cannot be written to outside inference mode either.
                    watched.append(
                        (table, name, tensor, -1 if tensor.is_inference() else tensor._version, _address(tensor))
                    )
    return watched


def _changed(watched: Sequence[tuple[Any, str, Any, int, int]]) -> bool:
    for table, name, tensor, version, address in watched:
        if table.get(name) is not tensor or (version >= 0 and tensor._version != version):
            return True
        if _address(tensor) != address:
            return True
    return False


def _address(tensor: torch.Tensor) -> int:
    """Where the data lies: assigning to `.data` moves it and leaves the version as it was."""
    return tensor.data_ptr()


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
