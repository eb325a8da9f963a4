from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_torch_trace import CODE, GRAPH, MAPPING, TRACES

from profiler_core.collect.debug_folder import read
from profiler_core.collect.provenance import ProvenanceFormatError

NODE_MAPPINGS = "inductor_provenance_tracking_node_mappings.json"


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A debug folder as TORCH_COMPILE_DEBUG=1 leaves it: without strides, devices, and the mapping's version."""
    folder = tmp_path / "torch_compile_debug" / "run_1" / "torchinductor" / "model__0_inference_0.0"
    folder.mkdir(parents=True)
    (folder / "output_code.py").write_text(CODE)
    (folder / "fx_graph_transformed.py").write_text(GRAPH.replace("[4, 1]cpu", ""))
    (folder / "fx_graph_readable.py").write_text("class A:\n    def forward(self):\n        return ()\n")
    (folder / NODE_MAPPINGS).write_text(json.dumps({key: MAPPING[key] for key in ("cppCodeToPost", "postToPre")}))
    (folder / "ir_post_fusion.txt").write_text("op0: SchedulerNode")
    return folder


def test_every_compile_below_a_folder_is_found(compiled: Path, tmp_path: Path) -> None:
    second = compiled.with_name("model__1_inference_1.1")
    second.mkdir()
    for path in compiled.iterdir():
        (second / path.name).write_text(path.read_text())
    found = read(tmp_path)
    assert [p.graph for p in found] == ["model__0_inference_0.0", "model__1_inference_1.1"]
    for provenance in found:
        assert (provenance.version, provenance.notes) == ("2.0", ())
        assert [x.nodes for x in provenance.launches] == [("mm",), ("relu",)]
        assert (provenance.nodes["mm"].shape, provenance.nodes["mm"].device) == ((4, 4), None)
        assert provenance.launches[0].flops == 2.0 * 4 * 4 * 4 and provenance.launches[0].bytes == 3.0 * 64
    assert found[0].path == str(compiled)


def test_equal_names_in_two_runs_get_numbers(compiled: Path, tmp_path: Path) -> None:
    again = tmp_path / "torch_compile_debug" / "run_2" / compiled.name
    again.mkdir(parents=True)
    (again / NODE_MAPPINGS).write_text(json.dumps(MAPPING))
    assert [p.graph for p in read(tmp_path)] == [compiled.name, f"{compiled.name} #2"]


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        (["output_code.py"], "no output code"),
        (["fx_graph_transformed.py", "fx_graph_readable.py"], "no printed post-grad graph"),
        (["fx_graph_transformed.py"], "AOT graph"),
        ([NODE_MAPPINGS], "no node mapping"),
    ],
)
def test_a_missing_file_costs_what_only_it_knew(compiled: Path, missing: list[str], note: str) -> None:
    for name in missing:
        (compiled / name).unlink()
    (provenance,) = read(compiled)
    assert any(note in text for text in provenance.notes)
    assert provenance.launches[0].nodes == ("mm",) if missing != [NODE_MAPPINGS] else provenance.launches
    assert [x.key for x in provenance.launches] == ["extern_kernels.mm:1", "cpp_fused_relu_0:2"]


def test_a_damaged_mapping_is_named_and_the_comments_are_read(compiled: Path) -> None:
    (compiled / NODE_MAPPINGS).write_text('{"cppCodeToPost": {"extern')
    (provenance,) = read(compiled)
    assert any(NODE_MAPPINGS in note and "not JSON" in note for note in provenance.notes)
    assert any("do not decide" in note for note in provenance.notes)


def test_a_compile_without_provenance_is_refused_with_the_remedy(compiled: Path) -> None:
    (compiled / NODE_MAPPINGS).unlink()
    (compiled / "output_code.py").write_text("\n".join(t for t in CODE.splitlines() if "[Provenance" not in t))
    with pytest.raises(ProvenanceFormatError, match="INDUCTOR_PROVENANCE=1"):
        read(compiled)


def test_a_folder_without_a_compile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fx_graph_readable.py").write_text("")
    with pytest.raises(ProvenanceFormatError, match=r"no output_code\.py"):
        read(tmp_path)
    with pytest.raises(ProvenanceFormatError, match="not a folder"):
        read(tmp_path / "fx_graph_readable.py")


def test_files_with_a_common_beginning_are_one_compile(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}_inductor_output_code_3.txt").write_text(CODE)
        (tmp_path / f"{name}_inductor_post_grad_graph_2.txt").write_text(GRAPH)
        (tmp_path / f"{name}_inductor_provenance_tracking_node_mappings_4.json").write_text(json.dumps(MAPPING))
        traces = tmp_path / f"{name}_inductor_provenance_tracking_kernel_stack_traces_5.json"
        traces.write_text(json.dumps(TRACES))
    found = read(tmp_path)
    assert [(p.graph, [x.nodes for x in p.launches], p.notes) for p in found] == [
        ("a", [("mm",), ("relu",)], ()),
        ("b", [("mm",), ("relu",)], ()),
    ]


def test_both_forms_of_the_public_mappings_say_the_same_of_the_same_model(shared: Path) -> None:
    first, second = read(shared / "corpus" / "inductor")
    assert (first.graph, first.version) == ("extracted_jit_cuda_v1", "1")
    assert (second.graph, second.version) == ("extracted_jit_debug_handle_v2", "2.0")
    assert [x.key for x in second.launches] == [
        "triton_poi_fused_addmm_relu_sigmoid_threshold_backward_0:1",
        "triton_poi_fused_mul_1:2",
        "triton_poi_fused_addmm_gelu_2:3",
        "extern_kernels.mm:4",
        "extern_kernels.mm:5",
    ]
    extra = ("le",)  # v2 is a training graph, which also saves a mask
    assert [x.nodes for x in second.launches] == [
        first.launches[0].nodes + extra,
        *(x.nodes for x in first.launches[1:]),
    ]
    assert [x.nodes for x in first.launches if x.extern] == [("mm_default_1",), ("mm_default",)]
    assert [x.flops for x in first.launches if x.extern] == [2.0 * 8 * 10 * 16, 2.0 * 10 * 20 * 30]
    for provenance in (first, second):
        assert all(n.line for n in provenance.nodes.values() if n.op == "call_function")
    # No line in the graph, but the same pre-grad node as one that has a line.
    assert (first.nodes["mm_default_1"].line, first.nodes["mm_default_1"].pre_grad) == (29, ("x",))
