"""`fxopt.optimize(model, inputs)`: what a torch.compile backend cannot reach, because it does not own the model.

Here: weights held constant. The session watches them, and folds anew when they change. And recurrent layers, which
Dynamo leaves to eager: they become one operator each (`fxopt.rnn`), so that the model is one graph.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from fxopt import eager_modules, rnn, samples
from fxopt.backend import Backend
from fxopt.frozen import FrozenCode
from fxopt.report.model import GraphReport, Report
from fxopt.torch_api import dynamo
from fxopt.torch_api import rnn as tracing
from fxopt.torch_api.calls import callable_of, set_grad_enabled, transformed
from fxopt.tuner import FxoptWarning
from fxopt.warning import warn

#: after this many changes of the weights they are no longer folded: each fold compiles, and Dynamo stops at eight
MOST_FOLDS = 4
#: the buffer that a batch normalisation in training mode counts its updates in
_COUNTER = "num_batches_tracked"
_counter, _version = itemgetter(_COUNTER), attrgetter("_version")
#: held where weights are folded anew: of several threads that saw the same change one does so. Not the module's own,
#: which could not be copied with it.
_folding = threading.Lock()
#: code with folded weights by the backend that made it; not in the backend, whose copies have code of their own
_code: weakref.WeakKeyDictionary[Backend, list[FrozenCode]] = weakref.WeakKeyDictionary()


class SessionBackend(Backend):
    """The backend under `fxopt.optimize`, which gets recurrent layers to see.

    refused: why a graph was left to eager for the sake of one of them. stale: why folded weights are no longer the
    model's, once a call has found that, and the number of the newest graph of which it has.
    """

    refused: str = ""
    stale: tuple[int, str] = 0, ""

    def _run(self, gm: fx.GraphModule, inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
        layers, refused = rnn.to_operators(gm)
        if refused:
            self.refused = refused[0]
            report.source = "skipped"
            report.messages.append(f"a graph is left to eager, for the sake of recurrent layers in it: {refused[0]}")
            eager: Callable[..., Any] = gm.forward
            return eager
        fn = super()._run(gm, inputs, report)
        if layers:
            report.messages.append(rnn.describe(layers, report.profile))
        if isinstance(fn, FrozenCode):
            fn.otherwise = self._as_captured(dynamo.captured(gm))
            _code.setdefault(self, []).append(fn)
        return fn

    def let_go(self) -> None:
        """Free what was folded. Dynamo keeps code for good, though a backend that is gone is never asked for again."""
        for code in _code.pop(self, ()):
            code.let_go()

    def _as_captured(self, captured: fx.GraphModule) -> Callable[..., Any]:
        number = self.calls

        def run(reason: str, *args: Any) -> Any:
            self.stale = max(self.stale, (number, reason))
            return captured(*args)

        return run


class OptimizedModule(nn.Module):
    """A model with its optimised code. Calls run under `torch.no_grad()`.

    `report` tells what was done. In training mode (`model.train()`) the original model runs, with gradients; and
    torch.export gets the original model, and a warning that says so.
    State dicts are the original model's. Before each call every folded weight's identity, version, address and
    gradient are compared (`fxopt.frozen`). Where one has changed, the graph that it was folded into runs as it was
    captured, and for the next call the weights are folded anew. Compared as well are the counters of batch
    normalisations, whose statistics training mode updates without torch's counting it. Writing into memory through
    `.data` (`p.data.add_(1)`), which torch does not count either, is seen by samples of the elements (`fxopt.samples`):
    on a CPU before the next call where it concerns all weights; elsewhere, and where it concerns few of them, within a
    second, or before the first call after `train()` or `eval()`; what is written to few elements of a weight may stay
    unseen. `check_weights=False` leaves all but the identity out.
    """

    def __init__(
        self, model: nn.Module, mode: str | None, options: Mapping[str, Any], check_weights: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.report = Report()
        self._mode, self._options = mode, dict(options)
        self._check_weights = check_weights
        self._folds = 0
        self._untimed = False  # whether what is left to eager is to be timed in the next call
        self._told_of_gradients = False
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
        # The modules' own dicts, for load_state_dict(assign=True) puts other tensors into them.
        # A ScriptModule's are behind a wrapper, and never folded.
        buffers = [m._buffers for m in model.modules() if isinstance(m._buffers, dict)]
        self._counting = [held for held in buffers if held.get(_COUNTER) is not None]
        self.register_load_state_dict_post_hook(_under_the_models_names)
        self._compile()
        self.train(model.training)

    def _compile(self) -> None:
        if backend := self.__dict__.get("_backend"):
            backend.let_go()
        self._backend = SessionBackend(
            self._mode,
            self._options,
            session=True,
            on_report=self.report.graphs.append,
            check_weights=self._check_weights,
        )
        # A fresh backend object makes Dynamo compile anew; plans make that cheap. Not an attribute by assignment: the
        # compiled form is a module too, and would be registered beside the model.
        self.__dict__["_compiled"] = dynamo.compile_apart(self.model, self._backend)
        weakref.finalize(self, self._backend.let_go).atexit = False
        self._counted = self._count_updates()

    def _count_updates(self) -> list[int] | None:
        """The state of all batch normalisations' counters, None where nothing rests on it."""
        if not (self._counting and self._check_weights and self._options.get("freeze")):
            return None
        return self._read_counters()

    def _read_counters(self) -> list[int]:
        # The versions: a number of batches would have to be fetched from the device.
        try:
            return list(map(_version, map(_counter, self._counting)))
        except (KeyError, AttributeError, RuntimeError):  # some are gone, or inference tensors, which have none
            pass
        counters = [held.get(_COUNTER) for held in self._counting]
        return [-1 if counter is None or counter.is_inference() else counter._version for counter in counters]

    def _tell_of_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Warns once of a call whose input asks for a gradient. That parameters do says nothing: they nearly all do."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._told_of_gradients = True
                warn(
                    "an input requires a gradient, but an optimised model in eval mode runs without: nothing reaches "
                    "it through this model; train() brings the original model back, and torch.no_grad() ends this "
                    "warning"
                )
                return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            _warn_of_export()
            return self.model(*args, **kwargs)
        own = self.__dict__  # where a module finds its attributes, after a search; and each call looks at many
        model = own["_modules"]["model"]
        if model.training:
            return model(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._apart(*args, **kwargs)
        if forward_ad._current_level >= 0 or transformed() is not None:
            warn(
                "forward-mode derivatives and torch.func's transforms pass through no compiled code: the original "
                "model runs in its place"
            )
            return model(*args, **kwargs)
        if own["_untimed"] and sys.getprofile() is None:  # of the caller's own profiler nothing is taken
            return self._time(args, kwargs)
        gradients = torch.is_grad_enabled()
        if gradients and not own["_told_of_gradients"]:
            self._tell_of_gradients(args, kwargs)
        if own["_counted"] is not None and self._read_counters() != self._counted:
            counted = "the statistics of a batch normalisation have changed"
            self._fold_again(counted, shared=False, backend=own["_backend"])
        backend = own["_backend"]
        compiled_before = backend.calls
        call = callable_of(own["_compiled"])
        try:
            set_grad_enabled(False)
            try:
                if not own["_recurrent"]:
                    result = call(*args, **kwargs)
                else:
                    with tracing.traced():
                        result = call(*args, **kwargs)
            finally:
                set_grad_enabled(gradients)
                if backend.stale[0]:
                    number, why = backend.stale
                    # Code made in this very call, and already called with other weights: modules share it.
                    self._fold_again(why, shared=number > compiled_before, backend=backend)
            if backend.refused and self._recurrent:
                # Without the layers that cannot be had the rest is compiled, from the next call on.
                self._recurrent = False
                self._compile()
            return result
        except tracing.TRACE_FAILED as error:
            # Packed sequences, of which Dynamo knows no fake form in torch 2.11.
            if not self._recurrent:
                raise
            before = self._backend, self.__dict__["_compiled"]
            self._recurrent = False
            self._compile()
            try:
                result = self.forward(*args, **kwargs)
            except Exception:
                # Not for want of tracing: the call is wrong, and the code for right ones stays.
                self._backend, self.__dict__["_compiled"] = before
                self._recurrent = True
                raise
            self.report.messages.append(f"recurrent layers are left to eager, as Dynamo cannot trace them: {error}")
            return result

    def _time(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of the caller's, in which what Dynamo left to eager is timed. One of fxopt's own would repeat whatever
        the model does besides computing, which cannot all be taken back."""
        self._untimed = False
        backend, compiled = self._backend, self._backend.calls
        result, found = eager_modules.timed(self.model, lambda: self.forward(*args, **kwargs), (args, kwargs))
        if self._backend is backend and backend.calls == compiled:
            self.report.eager_modules = found
        else:  # for the most part it was compiling that took the time
            self._untimed = True
        return result

    @torch.compiler.disable(reason="fxopt.optimize has made code of this module")
    def _apart(self, *args: Any, **kwargs: Any) -> Any:
        """A call out of a graph that torch.compile makes around this module, and breaks here. (In torch 2.11 Dynamo
        takes every graph for an exported one, and gets the original model.)"""
        return self.forward(*args, **kwargs)

    def _fold_again(self, reason: str, shared: bool, backend: SessionBackend) -> None:
        """Has the next call fold anew, unless another thread has, after the same change of what `backend` folded."""
        with _folding:
            if self._backend is not backend:
                return
            self._folds += 1
            if shared or self._folds > MOST_FOLDS:
                why = "several modules share one compiled function" if shared else f"they changed {self._folds} times"
                message = f"weights are no longer folded into the code: {why} ({reason})"
                self.report.messages.append(message)
                warnings.warn(f"fxopt: {message}", FxoptWarning, stacklevel=3)
                self._options["freeze"] = False
            self._compile()

    def train(self, mode: bool = True) -> OptimizedModule:
        super().train(mode)
        samples.look_again()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.model.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        # Versions of the modules, by their names here, where a parent's load_state_dict looks for them.
        metadata = getattr(found, "_metadata", {})
        own = [name for name in metadata if f"{name}.".startswith(prefix)]
        for name in own:
            metadata[f"{prefix}model.{name[len(prefix) :]}".removesuffix(".")] = metadata[name]
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """What a parent's load_state_dict calls, which comes with the original model's names, before it goes on to
        the modules within under theirs."""
        if not hasattr(self.model, "model"):  # else the names are the original model's own
            held = {key: key.replace(f"{prefix}model.", prefix, 1) for key in state_dict}
            for key, name in held.items():
                if key.startswith(f"{prefix}model."):  # as named_parameters gives them
                    state_dict[name] = state_dict.pop(key)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}model.{key[len(prefix) :]}"] = state_dict.pop(key)
        self.__dict__["_loaded_under"] = prefix
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


def _under_the_models_names(optimized: OptimizedModule, keys: Any) -> None:
    """What a parent's load_state_dict misses or does not know, as the state dict has it."""
    prefix = optimized.__dict__.pop("_loaded_under", "")
    for names in keys:
        names[:] = [name.replace(f"{prefix}model.", prefix, 1) if name.startswith(prefix) else name for name in names]


@torch.compiler.assume_constant_result
def _warn_of_export() -> None:
    warnings.warn(
        "fxopt: torch.export takes the original model; what fxopt decided is no part of the program. A plan holds for "
        "graphs that torch.compile traces, and is verified as they are compiled here: AOTInductor compiles an exported "
        "program by itself. Export the model that was given to fxopt.optimize, which is `.model` of the result",
        FxoptWarning,
        stacklevel=2,
    )


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
    left = tracing.left_to_eager()
    optimized(*args, **kwargs)
    if optimized._backend.calls == 0 or tracing.left_to_eager() > left:
        optimized._untimed = True
    if optimized._backend.calls == 0:
        message = (
            "no graph of this model reached the compiler, so it runs as before: Dynamo left it to eager (as it does "
            "what torch.compiler.disable marks, a class compiled more often than its recompile limit, or a model that "
            "it left to eager earlier in this process: call torch._dynamo.reset() before fxopt.optimize). "
            "TORCH_LOGS=graph_breaks says where"
        )
        optimized.report.messages.append(message)
        warnings.warn(f"fxopt: {message}", FxoptWarning, stacklevel=2)
    return optimized
