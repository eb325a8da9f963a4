from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from profiler_core.collect import debug_folder
from profiler_core.collect.provenance import ProvenanceFormatError
from profiler_core.collect.torch_trace import read, records

# --- a log, written as torch writes it ----------------------------------------------------------------------

GRAPH = """class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "f32[4, 4][4, 1]cpu", arg1_1: "f32[4, 4][4, 1]cpu"):
        # File: /src/model.py:7 in forward, code: y = x @ w
        mm: "f32[4, 4][4, 1]cpu" = torch.ops.aten.mm.default(arg0_1, arg1_1);  arg0_1 = arg1_1 = None
        # No stacktrace found for following nodes
        relu: "f32[4, 4][4, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None
        return (relu,)
"""
CODE = """# AOT ID: ['0_inference']
cpp_fused_relu_0 = async_compile.cpp_pybinding([], r'''''')
def call(args):
    # Topologically Sorted Source Nodes: [y], Original ATen: [aten.mm]
    # [Provenance debug handles] extern_kernels.mm:1
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    # [Provenance debug handles] cpp_fused_relu_0:2
    cpp_fused_relu_0(buf0)
"""
MAPPING = {
    "cppCodeToPost": {"extern_kernels.mm:1": ["mm"], "cpp_fused_relu_0:2": ["relu"]},
    "postToPre": {"mm": ["y"], "relu": ["z"]},
    "version": 2.0,
}
TRACES = {"cpp_fused_relu_0:2": ['  File "/src/model.py", line 8, in forward\n    return relu(y)\n']}


def entry(header: dict[str, Any], payload: str | None = None, frame: str = "0/0", attempt: int = 0, **more: Any) -> str:
    if frame:
        first, second = frame.split("/")
        header = {**header, "frame_id": int(first), "frame_compile_id": int(second), "attempt": attempt, **more}
    if payload is not None:
        header["has_payload"] = hashlib.md5(payload.encode()).hexdigest()
    lines = "".join(f"\n\t{line}" for line in payload.split("\n")) if payload is not None else ""
    return f"V0101 12:00:00.000000 17 torch/_x.py:1] {json.dumps(header)}{lines}\n"


def artifact(name: str, data: Any, **where: Any) -> str:
    return entry({"artifact": {"name": name, "encoding": "json"}}, json.dumps(data), **where)


def compile_log(
    *, graph: str = GRAPH, code: str = CODE, mapping: Any = MAPPING, key: str = "fkey", **where: Any
) -> str:
    log = entry({"str": ["/src/model.py", 1]}, frame="")
    if graph:
        log += entry({"inductor_post_grad_graph": {}}, graph, **where)
    log += entry({"inductor_output_code": {"filename": "/tmp/other/machine.py"}}, code, **where)
    if mapping is not None:
        log += artifact("inductor_provenance_tracking_node_mappings", mapping, **where)
        log += artifact("inductor_provenance_tracking_kernel_stack_traces", TRACES, **where)
    return log + artifact("fx_graph_cache_miss", {"key": key}, **where)


@pytest.fixture
def log(tmp_path: Path):
    def write(text: str, name: str = "trace.log") -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


@pytest.mark.parametrize("name", ["trace.log", "trace.log.gz"])
def test_a_log_says_what_each_launch_computes_and_where_it_was_written(log, name: str) -> None:
    (provenance,) = read(log(compile_log(), name))
    assert (provenance.graph, provenance.cache_key, provenance.version) == ("0/0", "fkey", "2.0")
    assert [(x.key, x.nodes, x.extern) for x in provenance.launches] == [
        ("extern_kernels.mm:1", ("mm",), True),
        ("cpp_fused_relu_0:2", ("relu",), False),
    ]
    mm, relu = provenance.nodes["mm"], provenance.nodes["relu"]
    assert (mm.target, mm.shape, mm.dtype, mm.pre_grad) == ("aten.mm.default", (4, 4), "float32", ("y",))
    assert (mm.flops, mm.bytes) == (2.0 * 4 * 4 * 4, 3.0 * 64)
    assert (mm.file, mm.line, mm.source) == ("/src/model.py", 7, "y = x @ w")
    assert provenance.notes == ()
    # The graph has no line for it; Inductor's stack trace of the launch does, but its only neighbour decides first.
    assert relu.file == "/src/model.py"


def test_a_node_that_nothing_else_places_gets_the_line_of_its_launch(log) -> None:
    graph = GRAPH.replace("# File: /src/model.py:7 in forward, code: y = x @ w", "# No stacktrace found for x")
    (provenance,) = read(log(compile_log(graph=graph)))
    relu = provenance.nodes["relu"]
    assert (relu.file, relu.line, relu.source) == ("/src/model.py", 8, "return relu(y)")
    assert provenance.nodes["mm"].file == ""


def test_two_compiles_with_the_same_kernel_names_are_kept_apart(log) -> None:
    renamed = GRAPH.replace("mm", "mm_7").replace("aten.mm_7", "aten.mm")
    mapping = {**MAPPING, "cppCodeToPost": {"extern_kernels.mm:1": ["mm_7"], "cpp_fused_relu_0:2": ["relu"]}}
    text = compile_log() + compile_log(graph=renamed, mapping=mapping, frame="0/1", key="other")
    first, second = read(log(text))
    assert [(p.graph, p.cache_key, p.launches[0].key, p.launches[0].nodes) for p in (first, second)] == [
        ("0/0", "fkey", "extern_kernels.mm:1", ("mm",)),
        ("0/1", "other", "extern_kernels.mm:1", ("mm_7",)),
    ]


def test_of_a_restarted_compile_the_last_attempt_counts(log) -> None:
    text = compile_log(key="first") + compile_log(key="last", attempt=1)
    assert [p.cache_key for p in read(log(text))] == ["last"]


def test_forward_and_backward_of_one_compile_are_two_graphs(log) -> None:
    text = compile_log(code=CODE.replace("inference", "forward")) + compile_log(
        code=CODE.replace("inference", "backward")
    )
    assert [p.graph for p in read(log(text))] == ["0/0", "0/0 backward"]


def test_two_graphs_of_one_kind_in_one_compile_are_numbered(log) -> None:
    assert [p.graph for p in read(log(compile_log() + compile_log()))] == ["0/0", "0/0 #2"]


def test_compiled_autograd_is_part_of_the_compile_id(log) -> None:
    (provenance,) = read(log(compile_log(compiled_autograd_id=3)))
    assert provenance.graph == "!3/0/0"


def test_a_version_less_mapping_is_dealt_out_by_order(log) -> None:
    mapping = {"cppCodeToPost": {"extern_kernels.mm": ["mm"], "cpp_fused_relu_0": ["mm", "relu"]}, "postToPre": {}}
    (provenance,) = read(log(compile_log(mapping=mapping)))
    assert provenance.version == "1"
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]


def test_launches_of_another_graph_in_the_mapping_are_left_out(log) -> None:
    mapping = {**MAPPING, "cppCodeToPost": {**MAPPING["cppCodeToPost"], "cpp_fused_gelu_5:9": ["gelu"]}}  # type: ignore[dict-item]
    (provenance,) = read(log(compile_log(mapping=mapping)))
    assert "gelu" not in provenance.nodes and provenance.notes == ()


def test_the_aot_graph_stands_in_for_a_missing_post_grad_graph(log) -> None:
    aot = GRAPH.replace("relu:", "relu_of_aot:").replace("(relu,)", "(relu_of_aot,)")
    text = entry({"aot_inference_graph": {}}, aot) + compile_log(graph="")
    (provenance,) = read(log(text))
    assert provenance.nodes["mm"].shape == (4, 4)
    assert (provenance.nodes["relu"].target, provenance.nodes["relu"].shape) == ("", None)
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]
    assert any("AOT graph" in note for note in provenance.notes)
    assert any("1 nodes of the mapping" in note and "relu" in note for note in provenance.notes)


def test_without_any_graph_the_names_remain(log) -> None:
    (provenance,) = read(log(compile_log(graph="")))
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]
    assert provenance.launches[0].flops is None
    assert any("no printed post-grad graph" in note for note in provenance.notes)


def test_a_cache_hit_without_a_mapping_says_so(log) -> None:
    served = compile_log(mapping=None).replace("fx_graph_cache_miss", "fx_graph_cache_hit")
    (provenance,) = read(log(served))
    assert any("cache served" in note and "INDUCTOR_PROVENANCE=1" in note for note in provenance.notes)
    # The comments still decide the library call, and do not decide the C++ kernel.
    assert [x.nodes for x in provenance.launches] == [("mm",), ()]
    assert any("do not decide" in note and "cpp_fused_relu_0:2" in note for note in provenance.notes)


def test_an_empty_mapping_is_made_up_for_by_the_comments_only_where_they_are_certain(log) -> None:
    graph = GRAPH.replace(
        "        return",
        '        mm_1: "f32[4, 4][4, 1]cpu" = torch.ops.aten.mm.default(arg0_1, relu)\n'
        '        mm_2: "f32[4, 4][4, 1]cpu" = torch.ops.aten.mm.default(arg0_1, arg1_1)\n        return',
    )
    more = (
        "    # Topologically Sorted Source Nodes: [{}], Original ATen: [aten.mm]\n    # [Provenance debug handles] {}\n"
    )
    code = (
        CODE.replace("cpp_fused_relu_0 =", "# Graph fragment:\n#   %arg0 : Tensor = PlaceHolder[target=arg0]\n"
        "#   %relu : Tensor \"f32[4]\" = call_function[target=torch.ops.aten.relu](args = (%mm,))\ncpp_fused_relu_0 =")
        .replace("Source Nodes: [y]", "Source Nodes: [mm]")
        + more.format("relu", "extern_kernels.mm:3") + more.format("somewhere", "extern_kernels.mm:4")
    )  # fmt: skip
    (provenance,) = read(log(compile_log(graph=graph, code=code, mapping={"version": 2.0})))
    assert provenance.version == "comments"
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",), ("mm_1",), ()]


# --- damage -------------------------------------------------------------------------------------------------


def test_a_log_without_provenance_is_refused_with_the_remedy(log) -> None:
    bare = re.sub(r"\t    # (Topologically|\[Prov).*\n", "", compile_log(mapping=None))
    with pytest.raises(ProvenanceFormatError, match="INDUCTOR_PROVENANCE=1"):
        read(log(bare))


def test_a_log_without_compiled_code_is_refused(log) -> None:
    with pytest.raises(ProvenanceFormatError, match="inductor_output_code"):
        read(log(entry({"chromium_event": {}}, "{}", frame="")))


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n'])
def test_a_file_of_another_kind_is_refused(log, text: str) -> None:
    with pytest.raises(ProvenanceFormatError, match="TORCH_TRACE"):
        read(log(text))


def test_a_header_that_is_not_json_costs_one_record(log) -> None:
    text = compile_log().replace('{"inductor_post_grad_graph": {}', '{"inductor_post_grad_graph": {', 1)
    (provenance,) = read(log(text))
    assert any(note.startswith("line 2: the header is not JSON") for note in provenance.notes)
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]


def test_a_payload_that_was_changed_is_noted(log) -> None:
    (provenance,) = read(log(compile_log().replace("aten.relu.default", "aten.tanh.default")))
    assert any("inductor_post_grad_graph" in note and "MD5" in note for note in provenance.notes)
    assert provenance.nodes["relu"].target == "aten.tanh.default"


def test_a_mapping_that_is_not_json_is_left_out_and_named(log) -> None:
    broken = compile_log().replace('\t{"cppCodeToPost"', '\t{cppCodeToPost"')
    (provenance,) = read(log(broken))
    assert any("inductor_provenance_tracking_node_mappings is not a JSON object" in n for n in provenance.notes)


def test_a_mapping_of_another_shape_is_refused_by_field(log) -> None:
    with pytest.raises(ProvenanceFormatError, match="cppCodeToPost"):
        read(log(compile_log(mapping={"cppCodeToPost": {"extern_kernels.mm:1": "mm"}})))


def test_a_truncated_file_keeps_what_is_complete(log) -> None:
    text = compile_log() + compile_log(frame="0/1")
    whole = read(log(text))
    second = len(compile_log())
    header = text.index("V0101", text.index("inductor_post_grad", second))  # of the second output code
    for end, note in ((header - 40, "breaks off"), (header + 20, "only the beginning"), (header + 70, "breaks off")):
        cut = read(log(text[:end]))
        assert [p.launches for p in cut] == [p.launches for p in whole[:1]]
        assert any(note in text for text in cut[0].notes)


def test_a_truncated_gzip_keeps_what_is_complete(log, tmp_path: Path) -> None:
    noise = "".join(entry({"chromium_event": {}}, hashlib.sha512(bytes([i])).hexdigest(), frame="") for i in range(200))
    data = gzip.compress((compile_log() + noise).encode())
    path = tmp_path / "cut.log.gz"
    path.write_bytes(data[: len(data) * 3 // 4])
    (provenance,) = read(path)
    assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]
    assert any("breaks off" in note for note in provenance.notes)


def test_a_file_that_is_no_gzip_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.log.gz"
    path.write_bytes(b"plain text")
    with pytest.raises(ProvenanceFormatError, match=r"x\.log\.gz"):
        read(path)


# --- real files ---------------------------------------------------------------------------------------------


def expected_values(shared: Path, name: str) -> str:
    readme = (shared / "corpus" / "README.md").read_text(encoding="utf-8")
    return readme[readme.index(f"### {name}") :].split("\n### ")[0]


@pytest.mark.parametrize(
    ("name", "damaged"), [("torch_trace_simple.log", 0), ("torch_trace_simple_corrupted_json.log", 1)]
)
def test_the_records_of_a_public_log_are_the_expected_ones(shared: Path, name: str, damaged: int) -> None:
    path = shared / "corpus" / "inductor" / name
    text = expected_values(shared, name)
    found = list(records(path))
    kinds = json.loads(text[text.index('"entry_kinds": ') + 15 : text.index(', "artifacts"')])
    artifacts = json.loads(text[text.index('"artifacts": ') + 13 : text.index(', "payload_md5_ok"')])
    numbers = {key: int(re.search(rf'"{key}": (\d+)', text)[1]) for key in  # type: ignore[index]
               ("entries", "bad_json_headers", "payload_md5_ok", "payload_md5_mismatch")}  # fmt: skip
    with_payload = [item for item in found if "has_payload" in item.header]
    got = {
        "entries": len(found),
        "bad_json_headers": sum(item.damage == "header" for item in found),
        "payload_md5_ok": sum(not item.damage for item in with_payload),
        "payload_md5_mismatch": sum(item.damage == "hash" for item in with_payload),
    }
    assert got == numbers and got["payload_md5_mismatch"] == damaged
    assert Counter(item.kind for item in found) == kinds
    assert Counter(item.name for item in found if item.name) == artifacts
    ids = {
        (i.header["frame_id"], i.header["frame_compile_id"], i.header["attempt"])
        for i in found
        if "frame_id" in i.header
    }
    assert f'"compile_ids": {json.dumps(sorted(map(str, ids)))}' in text
    (code,) = [item for item in found if item.kind == "inductor_output_code"]
    assert f'"bytes": {len((code.payload or "").encode())},' in text
    with pytest.raises(ProvenanceFormatError, match="1 graphs, all compiled without provenance"):
        read(path)


def test_the_captured_compile_has_a_node_with_a_line_for_every_launch(shared: Path) -> None:
    (provenance,) = read(shared / "captures" / "h200_graph" / "torch_trace.log.gz")
    assert (provenance.graph, provenance.version, provenance.notes) == ("0/0", "2.0", ())
    assert provenance.cache_key == "fdow5fxmrk4xxi4ssnh37lp7wwk3lfgfryix63lv66dj7t3mhaf7"
    assert len(provenance.launches) == 17
    assert all(launch.nodes and launch.flops and launch.bytes for launch in provenance.launches)
    operators = [n for n in provenance.nodes.values() if n.op == "call_function"]
    assert all(n.file == "model/cap2.py" and n.line for n in operators)
    products = [n.name for n in operators if n.target in ("aten.mm.default", "aten.addmm.default")]
    assert sorted(n for x in provenance.launches if "mm" in x.kernel and x.extern for n in x.nodes) == sorted(products)


def test_the_two_captured_dynamic_compiles_are_kept_apart(shared: Path) -> None:
    first, second = read(shared / "captures" / "h200_dynamic" / "torch_trace.log.gz")
    assert (first.graph, second.graph) == ("0/0", "0/1")
    assert first.cache_key != second.cache_key
    assert {x.key for x in first.launches} & {x.key for x in second.launches}
    assert first.launches[0].nodes != second.launches[0].nodes
    assert first.nodes["addmm"].shape == (-1, 768)


# --- what the torch at hand writes ---------------------------------------------------------------------------

SCRIPT = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return torch.relu(self.down(self.norm(self.up(x)))) + x

torch.compile(Model())(torch.randn(8, 32)).sum().backward()
"""


def test_log_and_debug_folder_of_this_torch_tell_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = {
        "TORCH_TRACE": str(tmp_path / "trace"),
        "TORCH_COMPILE_DEBUG": "1",
        "INDUCTOR_PROVENANCE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env={**os.environ, **settings}, check=True)
    (path,) = (tmp_path / "trace").glob("*.log")
    forward, backward = read(path)
    assert (forward.graph, backward.graph) == ("0/0", "0/0 backward")
    assert forward.cache_key and backward.cache_key and forward.notes == ()
    assert all(launch.nodes for launch in forward.launches)
    assert {n.file for n in forward.nodes.values() if n.op == "call_function"} == {str(script)}
    assert all(launch.nodes for launch in backward.launches if launch.extern)
    assert backward.version == "comments" and any("comments" in note for note in backward.notes)
    folders = {p.graph.split("_")[3]: p for p in debug_folder.read(tmp_path / "torch_compile_debug")}
    for logged, found in ((forward, folders["forward"]), (backward, folders["backward"])):
        assert [(x.key, x.nodes, x.flops) for x in found.launches] == [
            (x.key, x.nodes, x.flops) for x in logged.launches
        ]
        assert found.version == logged.version
