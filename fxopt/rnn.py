"""LSTM, GRU and RNN as one operator of a graph, `fxopt::rnn`, which calls torch's own function and so the library's.

Dynamo leaves `nn.LSTM`, `nn.GRU` and `nn.RNN` to eager, or, with `torch._dynamo.config.allow_rnn`, puts one call of
`torch.lstm` into its graph, which AOTAutograd then unrolls into products for every step. Rewritten to this operator
before that, the whole model is one graph, and the recurrent layers stay where eager has them: on cuDNN, or oneDNN.

`fxopt::rnn_pack` writes the weights into one piece of memory, in another dtype if asked for, which is folded where the
weights are frozen. cuDNN takes weights in one piece only, and copies any others on every call.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from profiler_core.profiles import Profile

#: torch's functions, as they stand in Dynamo's graphs, and what the operator calls them
FUNCTIONS: dict[Any, str] = {getattr(torch, mode): mode for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
#: what the operator may compute in: "" is what eager does with the dtypes that it is given
COMPUTE: dict[str, torch.dtype | None] = {"": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}

_LIBRARY = torch.library.Library("fxopt", "FRAGMENT")
_LIBRARY.define(
    "rnn(Tensor input, Tensor[] hx, Tensor[] weights, Tensor? flat, str mode, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first, str compute) -> Tensor[]"
)
_LIBRARY.define(
    "rnn_pack(Tensor[] weights, ScalarType dtype, str mode, bool has_biases, int num_layers, bool bidirectional) "
    "-> Tensor"
)


def _rnn(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    weights: list[torch.Tensor],
    flat: torch.Tensor | None,
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    compute: str,
) -> list[torch.Tensor]:
    """Output and last hidden state (and cell state) of layers in evaluation mode.

    flat: what `rnn_pack` made of `weights`, which are then looked at for their shapes alone. compute: "tf32" allows
    cuDNN TF32 in this call; the settings of the process are as they were afterwards.
    """
    if flat is not None:
        places = _places(_shapes(weights), flat.dtype, flat.device, mode, has_biases, num_layers, bidirectional)
        weights = [flat[at : at + w.numel()].view(w.size()) for w, at in zip(weights, places, strict=True)]
    state: Any = tuple(hx) if mode == "lstm" else hx[0]
    with _tf32() if compute == "tf32" else contextlib.nullcontext():
        outputs = getattr(torch, mode)(
            input, state, weights, has_biases, num_layers, 0.0, False, bidirectional, batch_first
        )
    out, *states = outputs
    # As cuDNN lays them out, whatever the library: what is compiled relies on it.
    out = out.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else out.contiguous()
    return [out, *(state.contiguous() for state in states)]


def _rnn_fake(
    input: Any,
    hx: list[Any],
    weights: list[Any],
    flat: Any,
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    compute: str,
) -> list[Any]:
    length, batch = (input.size(1), input.size(0)) if batch_first else (input.size(0), input.size(1))
    out = input.new_empty(length, batch, (2 if bidirectional else 1) * hx[0].size(2))
    return [out.transpose(0, 1) if batch_first else out, *(state.new_empty(state.size()) for state in hx)]


def _pack(
    weights: list[torch.Tensor], dtype: torch.dtype, mode: str, has_biases: bool, num_layers: int, bidirectional: bool
) -> torch.Tensor:
    """All `weights` in one piece of memory (one dimension), in the order that the library reads them."""
    device = weights[0].device
    places = _places(_shapes(weights), dtype, device, mode, has_biases, num_layers, bidirectional)
    flat = torch.zeros(_length(weights, has_biases), dtype=dtype, device=device)
    for weight, at in zip(weights, places, strict=True):
        flat[at : at + weight.numel()].copy_(weight.reshape(-1))
    return flat


def _pack_fake(
    weights: list[Any], dtype: torch.dtype, mode: str, has_biases: bool, num_layers: int, bidirectional: bool
) -> Any:
    return weights[0].new_empty(_length(weights, has_biases), dtype=dtype)


def _length(weights: Sequence[torch.Tensor], has_biases: bool) -> int:
    """Elements of the piece of memory: cuDNN has room in it for two biases a layer and direction, if only for zeros.

    On every device, for a fake tensor does not say which it is on.
    """
    room = 0 if has_biases else 2 * sum(w.shape[0] for w in weights[::2])
    return sum(w.numel() for w in weights) + room


_LIBRARY.impl("rnn", _rnn, "CompositeExplicitAutograd")
_LIBRARY.impl("rnn_pack", _pack, "CompositeExplicitAutograd")
# What FakeTensor asks as well; `register_fake` looks through all modules for the place of each call, for its messages.
_LIBRARY.impl("rnn", _rnn_fake, "Meta")
_LIBRARY.impl("rnn_pack", _pack_fake, "Meta")
RNN: Any = torch.ops.fxopt.rnn.default
PACK: Any = torch.ops.fxopt.rnn_pack.default


def _shapes(weights: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(w.size()) for w in weights)


@functools.lru_cache(maxsize=64)
def _places(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[int, ...]:
    """Where each weight begins in one piece of memory: as cuDNN says, and elsewhere one after the other.

    Asked once, of empty weights. RuntimeError where cuDNN wants gaps between them.
    """
    if device.type != "cuda":
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + torch.Size(shape).numel())
        return tuple(ends[:-1])
    from torch.backends.cudnn import rnn

    empty = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    of_a_layer = 4 if has_biases else 2
    # What nn.RNNBase.flatten_parameters calls; it moves the weights that it is given into one buffer.
    buffer = torch._cudnn_rnn_flatten_weight(
        empty,
        of_a_layer,
        shapes[0][1],
        rnn.get_cudnn_mode({"lstm": "LSTM", "gru": "GRU"}.get(mode, mode.upper())),
        shapes[1][1],
        0,
        num_layers,
        False,
        bidirectional,
    )
    if buffer.numel() != _length(empty, has_biases):
        raise RuntimeError(f"cuDNN wants {buffer.numel()} elements for what should take {_length(empty, has_biases)}")
    return tuple(int(w.storage_offset()) for w in empty)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    settings: Any = torch.backends.cudnn
    before, above = settings.rnn.fp32_precision, settings.fp32_precision
    if before == "tf32":
        yield
        return
    settings.rnn.fp32_precision = "tf32"
    try:
        yield
    finally:
        # A setting that follows the one above it reads as that one's; it goes on following.
        settings.rnn.fp32_precision = "none" if before == above else before


# ---------------------------------------------------------------- in Dynamo's graphs


def nodes(graph: fx.Graph) -> list[fx.Node]:
    """Recurrent layers: calls of torch's functions and of the operator."""
    return [node for node in graph.nodes if node.op == "call_function" and (node.target in FUNCTIONS or is_rnn(node))]


def is_rnn(node: fx.Node) -> bool:
    return node.target is RNN


def refusal(node: fx.Node) -> str:
    """Why a call of torch's function cannot be the operator, "" where it can or is."""
    if is_rnn(node):
        return ""
    if node.kwargs or len(node.args) != 9:
        return "it is not called as nn.RNNBase does"
    if not isinstance(node.args[2], (list, tuple)):
        return "its input is a packed sequence"
    if node.args[6]:
        return "it is in training mode"
    names = {getattr(n.target, "__name__", "") for n in node.graph.nodes if n.op == "call_function"}
    if "_enter_autocast" in names or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return "autocast is on"
    if torch.is_grad_enabled() or any(
        n.target is torch._C._set_grad_enabled and n.args[0] for n in node.graph.nodes if n.op == "call_function"
    ):
        return "gradients are on"
    return ""


def on_library(node: fx.Node) -> bool:
    """Whether AOTAutograd leaves the layer on the library's kernels, or the operator does.

    On a CPU its decomposition of `torch.lstm` calls oneDNN once a layer, as eager does. Eager does not where there is
    nothing to compute, of which oneDNN's kernel ends the process (division by zero): the operator is torch's function.
    """
    if is_rnn(node):
        return True
    input, states, weights = (node.args[i] for i in range(3))
    tensors = [n.meta.get("example_value") for n in (input, *_listed(states), *_listed(weights))]
    if not all(isinstance(t, torch.Tensor) and _has_elements(t) for t in tensors):
        return False
    return (
        FUNCTIONS[node.target] == "lstm"
        and torch.backends.mkldnn.is_available()
        and all(t.device.type == "cpu" for t in tensors)
        and {t.dtype for t in tensors} <= {torch.float32, torch.bfloat16}
        and tensors[1].size(2) == tensors[2].size(2)
    )


def _has_elements(fake: Any) -> bool:
    """Whether no call comes with a size 0 of this tensor, as far as is known of symbolic sizes: most begin at 2."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return all(statically_known_true(size > 0) for size in fake.size())


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def arguments(node: fx.Node) -> list[Any]:
    """The operator's arguments, without `compute`, for a node that `refusal` does not refuse."""
    if is_rnn(node):
        return list(node.args[:-1])
    input, hx, weights, has_biases, num_layers, _, _, bidirectional, batch_first = node.args
    own = (_listed(hx), _listed(weights))
    return [input, *own, None, FUNCTIONS[node.target], has_biases, num_layers, bidirectional, batch_first]


def projects(args: Sequence[Any]) -> bool:
    """Whether a layer of these `arguments` projects its hidden state, and so has another weight for each direction."""
    _, _, weights, _, _, has_biases, num_layers, bidirectional, _ = args
    return len(weights) != num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2)


def value(node: fx.Node) -> Any:
    """The fake value of a node, of Dynamo's graphs or AOTAutograd's."""
    return node.meta.get("example_value", node.meta.get("val"))


def inherit(new: fx.Node, old: fx.Node) -> None:
    """Give the node in the place of `old` what Dynamo knows of that one."""
    for key in ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in old.meta:
            new.meta[key] = old.meta[key]


def rewrite(node: fx.Node, compute: str = "", pack: bool = False) -> fx.Node:
    """Put the operator in the place of `node`. pack: the weights go into one piece of memory, as for fp16 and bf16."""
    graph, dtype, args = node.graph, COMPUTE[compute], arguments(node)
    with graph.inserting_before(node):
        if dtype is not None or pack:
            own = _dtype(args[2][0])
            args[3] = graph.call_function(PACK, (args[2], dtype or own, *args[4:8]))
        if dtype is not None:
            args[0] = _narrow(graph, args[0], dtype)
            args[1] = [_narrow(graph, state, dtype) for state in args[1]]
        # Named after torch's function, which is how labels and the report tell of it.
        new = graph.create_node("call_function", RNN, (*args, compute), name=args[4])
    inherit(new, node)
    for user in list(node.users):
        user.replace_input_with(node, new)
        if dtype is not None:
            with graph.inserting_after(user):
                wide = graph.call_method("to", (user, _dtype(user)))
            user.replace_all_uses_with(wide)
            wide.update_arg(0, user)
    graph.erase_node(node)
    return new


def _dtype(node: fx.Node) -> torch.dtype:
    known = value(node)
    return known.dtype if isinstance(known, torch.Tensor) else torch.float32


def _narrow(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`value` in `dtype`; what is finite stays so, and saturates a gate as well at fp16's largest number."""
    if dtype is torch.float16:
        most = torch.finfo(dtype).max
        clamped = graph.call_function(torch.clamp, (value, -most, most))
        value = graph.call_function(torch.where, (graph.call_function(torch.isinf, (value,)), value, clamped))
    return graph.call_method("to", (value, dtype))


def to_operators(gm: fx.GraphModule) -> tuple[int, list[str]]:
    """Keep every recurrent layer of Dynamo's graph on the library's kernels, by the operator where need be, or none.

    Returns how many there are, and why they were left alone, "NAME: REASON" each.
    """
    found = nodes(gm.graph)
    refused = [f"{node.name}: {why}" for node in found if (why := refusal(node))]
    if found and not refused:
        for node in found:
            if not on_library(node):
                rewrite(node)
        gm.recompile()
    return len(found), refused


def describe(layers: int, profile: Profile | None) -> str:
    """What was done about `layers` recurrent layers, and the share of the kernels that stays a black box."""
    text = (
        f"structural fix: {layers} recurrent module(s), which Dynamo leaves to eager, are in the graph, each on the "
        "library's kernels"
    )
    if profile is None or not profile.kernel_ns:
        return text
    kernels = profile.kernels
    mine = kernels["nodes"].map(
        lambda names: any(re.fullmatch(r"(rnn|mkldnn_rnn_layer)(_\d+)?", name) for name in names)
    )
    black = kernels["opaque"].astype(bool) | mine
    share = float(kernels.loc[black, "duration_ns"].sum()) / float(kernels["duration_ns"].sum())
    return f"{text}; {share:.0%} of the kernel time is spent in there, a black box to every other pass"
