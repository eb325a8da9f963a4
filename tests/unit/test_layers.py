from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from compiled_graphs import compile_with_provenance
from torch import nn

from profiler_core.collect import torch_trace
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.layers import UNEVEN, Layers, carry, find, saving, uneven

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(model: nn.Module, *inputs: torch.Tensor) -> Provenance:
    torch.manual_seed(0)
    return compile_with_provenance(model.eval(), inputs).provenance


def twins(layers: Layers) -> dict[str, str]:
    """The launches that are not measured, and those that stand for them."""
    return {key: other for key, other in layers.launch_representative.items() if key != other}


def kernel_of(key: str) -> str:
    return key.rpartition(":")[0]


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> Provenance:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=128, n_positions=64, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    torch._dynamo.reset()
    return compiled(transformers.GPT2Model(config), torch.zeros(2, 16, dtype=torch.int64))


def test_the_four_layers_of_gpt2_are_one_class(gpt2: Provenance) -> None:
    layers = find(gpt2)
    assert layers.found_by == "module path"
    (only,) = layers.classes
    assert only.members == ("h.0", "h.1", "h.2", "h.3")
    measured, launches = len(layers.representatives), len(gpt2.launches)
    assert layers.describe() == f"4 layers of 1 class: {measured} of {launches} launches stand for all"


def test_nodes_correspond_across_the_layers_of_gpt2(gpt2: Provenance) -> None:
    (only,) = find(gpt2).classes
    for names in zip(*only.nodes, strict=True):
        nodes = [gpt2.nodes[name] for name in names]
        assert len({(n.target, n.shape, n.stride, n.dtype) for n in nodes}) == 1
        assert [n.module_path.split(".")[1] for n in nodes] == ["0", "1", "2", "3"]
        assert len({n.module_path.removeprefix(f"h.{i}") for i, n in enumerate(nodes)}) == 1


def test_every_node_of_a_repeated_layer_has_its_class_and_no_other_node_has_one(gpt2: Provenance) -> None:
    layers = find(gpt2)
    inside = {name for name, node in gpt2.nodes.items() if node.module_path.startswith("h.")}
    assert set(layers.node_class) == inside and set(layers.node_class.values()) == {"layer0"}


def test_each_matrix_product_of_gpt2_is_measured_once_and_carried_to_the_three_other_layers(gpt2: Provenance) -> None:
    layers = find(gpt2)
    products = [key for key in layers.launch_representative if kernel_of(key) == "extern_kernels.addmm"]
    assert len(products) == 16
    assert [layers.launch_representative[key] for key in products] == products[:4] * 4


def test_what_fuses_across_the_border_of_the_first_and_last_layer_is_measured(gpt2: Provenance) -> None:
    layers = find(gpt2)
    first, last = gpt2.launches[0].key, gpt2.launches[-1].key
    assert "embedding" in first and {first, last} <= set(layers.representatives)


def test_twins_run_the_same_kernel_on_operands_of_the_same_shape(gpt2: Provenance) -> None:
    pairs = twins(find(gpt2))
    assert pairs
    for key, other in pairs.items():
        mine, theirs = gpt2.launch(key), gpt2.launch(other)
        assert mine is not None and theirs is not None
        assert mine.kernel == theirs.kernel
        assert gpt2.nodes[mine.nodes[-1]].shape == gpt2.nodes[theirs.nodes[-1]].shape


def test_without_module_paths_the_repeats_of_the_launches_tell_the_layers(gpt2: Provenance) -> None:
    bare = replace(gpt2, nodes={name: replace(node, module_path="") for name, node in gpt2.nodes.items()})
    layers, by_path = find(bare), twins(find(gpt2))
    assert layers.found_by == "launches"
    (only,) = layers.classes
    assert len(only.members) == 3 and only.members[-1] == "launches 29-36"  # the mask is made amid the first layer
    # Only the representative differs: it cannot be in the first layer.
    for key, other in twins(layers).items():
        assert by_path[key] in (other, by_path.get(other))


# -- other models -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def test_a_residual_network_has_a_class_per_stage() -> None:
    model = nn.Sequential(
        nn.Sequential(Residual(8), Residual(8)),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.Sequential(Residual(16), Residual(16), Residual(16)),
    )
    layers = find(compiled(model, torch.randn(1, 8, 13, 13)))
    assert [item.members for item in layers.classes] == [("0.0", "0.1"), ("2.0", "2.1", "2.2")]
    assert layers.describe().startswith("5 layers of 2 classes: ")
    assert all(kernel_of(key) == kernel_of(other) for key, other in twins(layers).items()) and twins(layers)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, inner), act(), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_layers_of_other_operators_or_other_shapes_are_no_class() -> None:
    model = nn.Sequential(Layer(16, 32, nn.ReLU), Layer(16, 32, nn.Tanh), Layer(16, 48, nn.ReLU))
    provenance = compiled(model, torch.randn(4, 16))
    layers = find(provenance)
    assert layers.classes == () and layers.node_class == {} and twins(layers) == {}
    assert layers.describe() == f"no repeated layers: all {len(provenance.launches)} launches differ"


def test_a_module_called_three_times_gives_three_layers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer(16, 32, nn.Tanh)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return x

    layers = find(compiled(Shared(), torch.randn(4, 16)))
    (only,) = layers.classes
    assert only.members == ("blocks.0 call 1", "blocks.0 call 2", "blocks.0 call 3")
    assert len(layers.representatives) * 3 == len(layers.launch_representative)


def test_layers_inside_unequal_layers_are_found() -> None:
    model = nn.Sequential(
        nn.Sequential(Layer(16, 32, nn.Tanh), Layer(16, 32, nn.Tanh), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 4))
    )
    (only,) = find(compiled(model, torch.randn(4, 16))).classes
    assert only.members == ("0.0", "0.1")


def test_library_calls_with_other_arguments_are_no_twins() -> None:
    """The graphs of the layers look the same: a dilation changes no shape where the padding grows with it."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=d, dilation=d) for d in (1, 2, 1)))
    provenance = compiled(model, torch.randn(1, 4, 16, 16))
    layers = find(provenance)
    convolutions = [launch.key for launch in provenance.launches if launch.extern]
    assert [item.members for item in layers.classes] == [("0", "1", "2")] and len(convolutions) == 3
    one, two, three = (layers.launch_representative[key] for key in convolutions)
    assert one == three == convolutions[0] and two == convolutions[1]


def test_library_calls_have_no_twins_without_the_wrapper_code() -> None:
    provenance = compiled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    extern = {launch.key for launch in provenance.launches if launch.extern}
    assert extern & set(twins(find(provenance)))
    assert not extern & set(twins(find(replace(provenance, source_code=""))))


@pytest.mark.parametrize("folder", ["h200_graph", "h200_dynamic"])
def test_the_two_blocks_of_a_recorded_gpu_compile_are_found_without_module_paths(shared: Path, folder: str) -> None:
    for provenance in torch_trace.read(shared / "captures" / folder / "torch_trace.log.gz"):
        layers = find(provenance)
        (only,) = layers.classes
        assert only.members == ("launches 2-9", "launches 10-16") and len(layers.launch_representative) == 17
        products = [launch.key for launch in provenance.launches if "mm" in launch.kernel and launch.extern]
        assert [layers.launch_representative[key] for key in products] == products[:4] * 2
        for key, other in twins(layers).items():
            assert kernel_of(key) == kernel_of(other)


def test_a_generated_kernel_launched_for_another_size_is_no_twin() -> None:
    provenance = compiled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    tanh = [launch.key for launch in provenance.launches if not launch.extern]
    assert twins(find(provenance))[tanh[1]] == tanh[0]
    # as under dynamic shapes, where the size is an argument
    name = kernel_of(tanh[1])
    head, call, tail = provenance.source_code.rpartition(f"{name}(")
    changed = replace(provenance, source_code=f"{head}{call}128, {tail}")
    assert tanh[1] not in twins(find(changed))


# -- repeats of launches ----------------------------------------------------------------------------------------------


def sequence(kernels: str) -> Provenance:
    """A graph without module paths: a letter a launch, each on a 4x4 tensor made from the one before."""
    nodes = {"x": NodeInfo("x", "placeholder", "x", (4, 4), (4, 1), "float32", "cpu")}
    launches = []
    for i, kernel in enumerate(kernels):
        name = f"n{i}"
        before = f"n{i - 1}" if i else "x"
        nodes[name] = NodeInfo(
            name, "call_function", f"aten.{kernel}", (4, 4), (4, 1), "float32", "cpu", inputs=(before,)
        )
        launches.append(Launch(f"triton_poi_fused_{kernel}_0", i, (name,), extern=False))
    return Provenance("2.0", tuple(launches), nodes, "")


@pytest.mark.parametrize(
    ("kernels", "members"),
    [
        ("eabcabcabcz", ["launches 2-4", "launches 5-7", "launches 8-10"]),
        ("abab", ["launches 1-2", "launches 3-4"]),
        ("abxba", []),
        # the last of two layers ends without what the next one fuses: of four launches one may be missing
        ("eabcdabcz", ["launches 2-5", "launches 6-8"]),
        ("eabcabz", []),
        ("aaaa", []),  # one launch over and over is no layer
        ("", []),
        ("a", []),
    ],
)
def test_the_shortest_part_that_repeats_is_a_layer(kernels: str, members: list[str]) -> None:
    assert [m for item in find(sequence(kernels)).classes for m in item.members] == members


def test_two_stages_of_different_layers_are_two_classes() -> None:
    layers = find(sequence("ababababcdecde"))
    assert [len(item.members) for item in layers.classes] == [4, 2]
    assert layers.describe() == "6 layers of 2 classes: 5 of 14 launches stand for all"


def test_a_part_of_a_layer_at_the_end_has_twins_but_is_no_layer() -> None:
    layers = find(sequence("abcabcab"))
    assert [item.members for item in layers.classes] == [("launches 1-3", "launches 4-6")]
    assert len(layers.representatives) == 3


def test_parts_that_could_be_cut_in_two_ways_are_refused_and_said() -> None:
    layers = find(sequence("abaababab"))  # aba aba or ab ab ab
    assert layers.classes == () and twins(layers) == {}
    assert layers.notes == ("launches 4-9 repeat in parts of 2 and, as well, of 3 launches: no layers taken there",)


# -- counters and the saving ------------------------------------------------------------------------------------------


@pytest.fixture
def two_layers() -> tuple[Layers, list[str]]:
    layers = find(sequence("eabab"))
    keys = list(layers.launch_representative)
    assert twins(layers) == {keys[3]: keys[1], keys[4]: keys[2]}
    return layers, keys


def test_counters_are_carried_to_twins_and_durations_are_not(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (e, a, b, a2, b2) = two_layers
    measured = pd.DataFrame(
        {"duration_ns": [9.0, 5.0, 7.0], "dram_bytes": [1.0, 2.0, math.nan], "sm_pct": [10.0, 20.0, 30.0]},
        index=[e, a, b],
    )
    frame = carry(measured, layers, {e: 9, a: 5, b: 7, a2: 5 * UNEVEN * 1.01, b2: 7})
    assert list(frame.index) == [e, a, b, a2, b2]
    assert list(frame["counters"]) == ["measured"] * 3 + ["carried"] * 2
    assert list(frame["counters_confidence"]) == ["high"] * 3 + ["medium", "high"]
    assert frame.loc[a2, ["dram_bytes", "sm_pct"]].tolist() == [2.0, 20.0]
    assert math.isnan(frame.loc[b2, "dram_bytes"]) and frame.loc[b2, "sm_pct"] == 30.0
    assert frame.loc[[a2, b2], "duration_ns"].isna().all()


def test_a_twin_with_values_of_its_own_keeps_them(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (_, a, _, a2, _) = two_layers
    frame = carry(pd.DataFrame({"sm_pct": [20.0, 21.0]}, index=[a, a2]), layers)
    assert frame.loc[a2].tolist() == [21.0, "measured", "high"]


def test_launches_without_a_measured_representative_stay_empty(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (e, _, _, a2, _) = two_layers
    frame = carry(pd.DataFrame({"sm_pct": [1.0, 2.0]}, index=[e, "a kernel outside the graph"]), layers)
    assert frame.loc[a2, "counters"] == "" and math.isnan(frame.loc[a2, "sm_pct"])
    assert frame.loc["a kernel outside the graph"].tolist() == [2.0, "measured", "high"]


def test_carrying_without_durations_to_compare_has_medium_confidence(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (_, a, _, a2, _) = two_layers
    assert carry(pd.DataFrame({"sm_pct": [20.0]}, index=[a]), layers).loc[a2, "counters_confidence"] == "medium"


def test_several_rows_of_one_launch_are_refused_by_name(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (_, a, *_) = two_layers
    with pytest.raises(ValueError, match=f"{a} has several rows"):
        carry(pd.DataFrame({"sm_pct": [1.0, 2.0]}, index=[a, a]), layers)


def test_twins_of_uneven_duration_are_reported_with_their_ratio(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (e, a, b, a2, b2) = two_layers
    assert uneven(layers, {e: 1.0, a: 4.0, b: 5.0, a2: 8.0, b2: 5.5}) == {a2: 2.0}
    assert uneven(layers, {a: 4.0}) == {}
    assert uneven(layers, {b: 0.0, b2: 1.0}) == {b2: math.inf}


def test_the_saving_counts_launches_time_and_overhead(two_layers: tuple[Layers, list[str]]) -> None:
    layers, (e, a, b, a2, b2) = two_layers
    durations = {e: 2.0, a: 4.0, b: 4.0, a2: 5.0, b2: 5.0}
    found = saving(layers, durations)
    assert (found.layers, found.classes, found.launches, found.representatives) == (2, 1, 5, 3)
    assert found.share == pytest.approx(0.5) and found.factor == pytest.approx(2.0)
    # where the overhead outweighs the kernels, launches count
    assert saving(layers, durations, overhead_ns=1e9).factor == pytest.approx(5 / 3)
    with pytest.raises(ValueError, match="no duration for 1 of 5"):
        saving(layers, {key: 1.0 for key in (e, a, b, a2)})
