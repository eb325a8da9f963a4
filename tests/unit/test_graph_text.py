from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_graphs import Mlp, compile_with_provenance
from torch import nn

from profiler_core.collect.assemble import assemble
from profiler_core.collect.graph_text import Printed, add_unknown, parse
from profiler_core.collect.provenance import NodeInfo


def nodes_of(printed: Printed) -> dict[str, NodeInfo]:
    return assemble({"cppCodeToPost": {}}, printed.graph, "").nodes


class Outputs(nn.Module):
    """Two outputs of one operator, a buffer, a view of a view, an integer and a boolean, sizes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.randn(16))
        self.lin = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.sort(x, dim=-1)
        rows = x.shape[0] * 2
        folded = self.lin(values).repeat(2, 1).view(rows, 4, 2).transpose(1, 2)
        return torch.where(x > self.table, values, -x), indices, torch.softmax(folded, -1), values.new_zeros(rows)


@pytest.fixture(scope="module", params=["mlp", "outputs", "dynamic"])
def graph(request: pytest.FixtureRequest) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    if request.param == "mlp":
        return compile_with_provenance(Mlp().eval(), [torch.randn(8, 32)], force_disable_caches=True).gm
    x = torch.randn(6, 16)
    if request.param == "dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    return compile_with_provenance(Outputs().eval(), [x], force_disable_caches=True).gm


def live_nodes(gm: torch.fx.GraphModule) -> dict[str, NodeInfo]:
    """What the live graph says, as far as its text can say it: no module paths, -1 for a symbolic size."""
    live = assemble({"cppCodeToPost": {}}, gm.graph, "").nodes
    plain = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        info = live[node.name].at(("", "", *live[node.name].location[2:]))
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            value = value[0]
        if isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
            info = replace(
                info,
                shape=tuple(size if isinstance(size, int) else -1 for size in value.shape),
                stride=tuple(step if isinstance(step, int) else -1 for step in value.stride()),
            )
        plain[node.name] = info
    return plain


def test_a_printed_graph_reads_back_as_the_live_one(graph: torch.fx.GraphModule) -> None:
    printed = parse(graph.print_readable(print_output=False, include_stride=True, include_device=True))
    assert printed.unread == ()
    live, read = live_nodes(graph), nodes_of(printed)
    assert list(read) == list(live)
    for name, info in live.items():
        got = read[name]
        if -1 in (info.shape or ()) or any(-1 in (live[i].shape or ()) for i in info.inputs):
            got, info = replace(got, flops=None, bytes=None), replace(info, flops=None, bytes=None)
        assert got == info


def test_without_strides_and_devices_sizes_and_costs_are_the_same(graph: torch.fx.GraphModule) -> None:
    printed = parse(graph.print_readable(print_output=False))
    live, read = live_nodes(graph), nodes_of(printed)
    for name, info in live.items():
        assert (read[name].shape, read[name].dtype, read[name].target) == (info.shape, info.dtype, info.target)
        assert read[name].stride is None and read[name].device is None
        if -1 not in (info.shape or ()) and not any(-1 in (live[i].shape or ()) for i in info.inputs):
            assert (read[name].flops, read[name].bytes) == (info.flops, info.bytes)


TEXT = """
class GraphModule(torch.nn.Module):
    def forward(
        self,
        s0: "Sym(s0)",  # PlainAOTInput(idx=0)
        x: "f32[s0, 64][64, 1]cuda:0",  # PlainAOTInput(idx=1)
        y: "bf16[4, 8][8, 1]cuda:1",
        L_z_: "f32[4][1]cpu",
    ):
        z = L_z_
        # File: /a/b.py:12 in forward, code: q = x.reshape(a, "b: c")
        mul: "Sym(2*s0)" = s0 * 2;  s0 = None
        view: "f32[2*s0, 32][32, 1]cuda:0" = torch.ops.aten.reshape.default(x, [mul, 32]);  x = mul = None

        # No stacktrace found for following nodes
        _tensor_constant0: "i64[3]cpu" = self._tensor_constant0;  _tensor_constant0 = None
        fused: "bf16[4, 8][8, 1]cuda:1" = torch.ops.nobody.has_this.default(y, 1.5, torch.float32, [inf, None])

        # Annotation: {'stage': 1} File: /a/c d.py:3 in <lambda>, code: return f(y)
        topk = torch.ops.aten.topk.default(y, 2)
        getitem_1: "i64[4, 2][2, 1]cuda:1" = topk[1];  topk = None
        this is not a statement
        return (view, fused, getitem_1)

    class inner(torch.nn.Module):
        def forward(self, other: "f32[1]"):
            return (other,)
"""


def test_the_parts_of_a_printed_graph() -> None:
    printed = parse(TEXT)
    assert [TEXT.splitlines()[line - 1].strip() for line in printed.unread] == ["this is not a statement"]
    nodes = nodes_of(printed)
    assert list(nodes) == ["s0", "x", "y", "z", "mul", "view", "_tensor_constant0", "fused", "topk", "getitem_1"]
    assert (nodes["x"].op, nodes["x"].shape, nodes["x"].stride) == ("placeholder", (-1, 64), (64, 1))
    assert (nodes["y"].dtype, nodes["y"].device) == ("bfloat16", "cuda:1")
    assert (nodes["mul"].target, nodes["mul"].inputs, nodes["mul"].shape) == ("mul", ("s0",), None)
    assert (nodes["view"].file, nodes["view"].line) == ("/a/b.py", 12)
    assert nodes["view"].source == 'q = x.reshape(a, "b: c")'
    assert (nodes["view"].shape, nodes["view"].bytes) == ((-1, 32), 0.0)
    constant = nodes["_tensor_constant0"]
    assert (constant.op, constant.static, constant.shape, constant.dtype) == ("get_attr", True, (3,), "int64")
    assert (nodes["fused"].target, nodes["fused"].inputs) == ("nobody.has_this.default", ("y",))
    assert (nodes["fused"].flops, nodes["fused"].bytes) == (None, 2.0 * 4 * 8 * 2)
    assert (nodes["topk"].file, nodes["topk"].line, nodes["topk"].source) == ("/a/c d.py", 3, "return f(y)")
    # Its first output is not used, so nothing says what it is.
    assert (nodes["topk"].shape, nodes["getitem_1"].dtype) == (None, "int64")
    assert nodes["getitem_1"].target == "getitem" and nodes["getitem_1"].bytes == 0.0


def test_a_node_without_a_stacktrace_does_not_inherit_the_one_above() -> None:
    text = TEXT.replace("# Annotation: {'stage': 1} File", "# Nothing")
    assert nodes_of(parse(text))["fused"].file == ""


@pytest.mark.parametrize("text", ["", "class A:\n    pass\n", "\tnot a graph ) (\n"])
def test_text_without_a_graph_has_no_nodes(text: str) -> None:
    assert nodes_of(parse(text)) == {}


def test_half_a_graph_gives_the_nodes_before_the_break() -> None:
    whole = nodes_of(parse(TEXT))
    half = parse(TEXT[: TEXT.index("torch.ops.nobody")])
    assert len(half.unread) == 1
    assert list(nodes_of(half)) == list(whole)[:7]


def test_nothing_in_the_text_is_run(tmp_path) -> None:
    mark = tmp_path / "ran"
    text = f'class A:\n    def forward(self, x: "f32[1]"):\n        y = open({str(mark)!r}, "w")\n        return y\n'
    (_, node) = nodes_of(parse(text)).values()
    assert node.target == "open" and not mark.exists()


def test_names_that_a_graph_lacks_are_added_as_unknown() -> None:
    printed = parse(TEXT)
    add_unknown(printed.graph, ["view", "mm_3", "mm_3"])
    nodes = nodes_of(printed)
    assert list(nodes)[-1] == "mm_3" and len(nodes) == 11
    assert (nodes["mm_3"].target, nodes["mm_3"].shape, nodes["mm_3"].bytes) == ("", None, None)


HUGE = ["9" * digits for digits in (20, 30, 5000)]
KINDS = ["f32[2, {0}][1, 2]", "f32[2, 3][{0}, 1]", "f32[{0}]", "Sym({0})"]


@pytest.mark.parametrize("annotation", [f"f32[{10**17}, {10**17}]", *(k.format(h) for k in KINDS for h in HUGE)])
def test_sizes_that_no_tensor_has_give_a_node_without_a_value(annotation: str) -> None:
    text = f'class A:\n    def forward(self, x: "{annotation}", y: "f32[2]"):\n        return x\n'
    x, y = parse(text).graph.nodes
    assert x.meta.get("val") is None and y.meta["val"].shape == (2,)
    assert list(nodes_of(parse(text))) == ["x", "y"]
