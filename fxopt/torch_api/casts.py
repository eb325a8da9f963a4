"""Dynamo's graph with its inputs cast to a narrower type, and its outputs back."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxopt.torch_api.dynamo import copy_graph, outside_tracing, placeholders, storage_of, symbolic, value_of


def cast_inputs(gm: fx.GraphModule, dtypes: Mapping[int, torch.dtype]) -> None:
    """Cast the inputs at these positions before anything reads them, and fp32 outputs back, in place.

    A finite number beyond the narrower type's largest becomes that. `gm` must be a copy of Dynamo's graph.
    """
    graph, nodes = gm.graph, placeholders(gm)
    returned = graph.output_node().all_input_nodes
    fp32 = [node for node in returned if getattr(value_of(node), "dtype", None) == torch.float32]
    convert = torch.ops.prims.convert_element_type.default
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for position, dtype in dtypes.items():
        source = nodes[position]
        readers = list(source.users)
        with graph.inserting_before(first):
            cast = graph.call_function(convert, (source, dtype))
            # Of a mask of float32's least number -Inf would be left, and NaN of a row of them.
            most = torch.finfo(dtype).max
            held = graph.call_function(torch.clamp, (cast, -most, most))
            infinite = graph.call_function(torch.isinf, (source,))
            cast = graph.call_function(torch.where, (infinite, cast, held))
        for reader in readers:
            reader.replace_input_with(source, cast)
    output = graph.output_node()
    memory = Counter(storage_of(node) for node in fp32)
    wide: dict[fx.Node, fx.Node] = {}
    for node in fp32:
        if node.op != "get_attr":  # which nobody has cast
            with graph.inserting_before(output):
                output.replace_input_with(node, _widened(graph, node, wide, memory[storage_of(node)] > 1))
    gm.recompile()


def _widened(graph: fx.Graph, node: fx.Node, wide: dict[fx.Node, fx.Node], shares: bool) -> fx.Node:
    """`node` in fp32, with the strides that it has, and in one memory with the outputs that it shares memory with.

    A cast makes a dense tensor of what is a part of one, as the last rows of logits are. Cast is then what it is a part
    of, once for all such outputs (`wide`), and of that the same part is given.
    """
    base = node
    while (shares or not _dense(value_of(base))) and base.args and isinstance(base.args[0], fx.Node):
        source = base.args[0]
        if storage_of(base) is None or storage_of(base) != storage_of(source) or source.op == "placeholder":
            break
        base = source
    part, whole = value_of(node), value_of(base)
    again = base is not node and _dense(whole)
    cast = base if again else node
    if cast not in wide:
        wide[cast] = graph.call_function(torch.ops.prims.convert_element_type.default, (cast, torch.float32))
    same = part.shape == whole.shape and part.stride() == whole.stride()
    if not again or (same and part.storage_offset() == whole.storage_offset()):
        return wide[cast]
    offset = part.storage_offset() - whole.storage_offset()
    # Not the views themselves: of what they leave out Inductor would make nothing, and so another layout.
    return graph.call_function(torch.as_strided, (wide[cast], tuple(part.shape), part.stride(), offset))


def _dense(value: Any) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps; also where its sizes do not tell."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        return True
    step = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != step:
            return value.numel() == 0
        step *= size
    return True


#: operators that take floating-point tensors of one type alone; of fake tensors they do not ask for it
_OF_ONE_TYPE = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution", "lerp"),
        *("index_put", "index_put_", "index_copy", "index_add", "scatter", "scatter_add", "scatter_reduce"),
        *("masked_scatter", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_fused_attention_overrideable", "rnn", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    }
)


class _OneType(TorchDispatchMode):
    """Raises RuntimeError where an operator meets two types of which it takes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _OF_ONE_TYPE:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            met = sorted({str(x.dtype).removeprefix("torch.") for x in given})
            if len(met) > 1:
                raise RuntimeError(f"{func.overloadpacket.__name__} of {' and '.join(met)}")
        return func(*args, **(kwargs or {}))


def uncastable(gm: fx.GraphModule, dtypes: Mapping[int, torch.dtype]) -> str:
    """Why the graph does not run with its inputs cast as by `cast_inputs`: what it makes itself may be of a type that
    does not go with theirs. "" where it runs, and where shapes are symbolic or values unknown, so that nobody can say.
    """
    values = [value_of(node) for node in placeholders(gm)]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes or symbolic(values, gm):
        return ""
    cast = copy_graph(gm)
    cast_inputs(cast, dtypes)
    with outside_tracing(), modes[0], torch.no_grad(), _OneType():
        fresh = [value.clone() if isinstance(value, FakeTensor) else value for value in values]
        try:
            cast(*fresh)
        except Exception as error:
            with contextlib.suppress(Exception):  # then the types are not what is wrong
                gm(*fresh)
                return str(error).partition("\n")[0]
    return ""
