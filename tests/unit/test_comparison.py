"""The comparison of all workloads and columns: what is built, how it is measured, what is kept and resumed."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from case_studies import columns, compare, comparison, floor, runner, workloads
from case_studies.comparison import How
from profiler_core.roofline import Ceilings

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
INFERENCE = [name for name, workload in workloads.COMPARED.items() if not workload.trains]
GPT2 = pytest.importorskip("transformers", reason="GPT-2 needs transformers: pip install 'fxopt[case-studies]'")
QUICK = How("cpu", small=True, rounds=6, windows=2, iterations=1, min_block_ns=1e5)
BASELINES = [("fp32", "eager_fp32"), ("fp32", "inductor_fp32"), ("tf32", "inductor_tf32"), ("bf16", "inductor_bf16")]


def small(name: str) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    model, x = workloads.build(name, CPU, small=True)
    return model, workloads.more_inputs(model, x, 2)


# ---- workloads ----


@pytest.mark.parametrize("name", INFERENCE)
def test_a_workload_gives_what_it_gives_in_fp64_and_the_same_whenever_it_is_called(name: str) -> None:
    model, inputs = small(name)
    exact = comparison.reference(model, inputs, trains=False)
    with torch.no_grad():
        outputs = [model(*args) for args in inputs]
        assert torch.equal(model(*inputs[0]), outputs[0])
    assert 0 < runner.errors(outputs, exact)[0] < 1e-6
    assert outputs[0].dtype is torch.float32 and not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", workloads.COMPARED)
def test_a_workload_is_one_graph_except_the_lstm_which_dynamo_leaves_to_eager(name: str, fresh_dynamo: None) -> None:
    model, inputs = small(name)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.set_grad_enabled(workloads.COMPARED[name].trains):
        torch.compile(model, backend=count)(*inputs[0])
    assert len(graphs) == (0 if name == "lstm" else 1)


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("sdpa", (8, 512, 512), 4 * 512 * 512 + 4 * 512),
        ("mlp", (256, 512), 2 * 512 * 2048 + 2 * 2048 * 2048 + 3 * 2048 + 512),
        ("embedding", (64, 128), 2 * 32000 * 512 + 2 * 512 + 2 * 512 * 2048 + 2048 + 512),
        ("conv_block", (16, 3, 64, 64), None),
        ("depthwise", (16, 32, 56, 56), None),
    ],
)
def test_sizes_are_those_of_the_baselines(name: str, shape: tuple[int, ...], weights: int | None) -> None:
    model, x = workloads.build(name, CPU)
    assert x.shape == shape and not model.training
    assert weights is None or sum(p.numel() for p in model.parameters()) == weights


def test_decoding_token_by_token_gives_what_the_whole_sequence_gives() -> None:
    decoder, (ids, _) = workloads.build("gpt2_decode_128", CPU, small=True)
    sequence = torch.randint(512, (1, 16))
    with torch.no_grad():
        steps = [decoder(sequence[:, i : i + 1], torch.tensor([i])) for i in range(16)]
        whole = decoder.gpt2(sequence, use_cache=False).last_hidden_state
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    assert ids.shape == (1, 1)


def test_a_training_step_moves_the_weights_and_its_check_does_not() -> None:
    model, inputs = small("gpt2_train")
    exact = comparison.reference(model, inputs, trains=True)
    step = columns.TrainingStep(model)
    before = copy.deepcopy(model.state_dict())
    outputs = [step.check(*args) for args in inputs]
    assert runner.errors(outputs, exact)[0] < 1e-5 and len(outputs[0]) == 1 + len(list(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(*inputs[0])
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


# ---- the floor ----

CEILINGS = Ceilings("made", 1e9, {"float32": 1e9, "float16": 9e9, "bfloat16": 8e9}, "2026-01-01")


def test_work_is_two_operations_a_weight_and_row_and_each_byte_once() -> None:
    model, inputs = small("mlp")
    found = floor.work(model, inputs[0], trains=False)
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert found.flops == 2 * 8 * products
    assert found.weight_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert found.other_bytes == 4 * 2 * 8 * 32


def test_a_recurrent_layer_multiplies_each_weight_once_a_step_and_an_embedding_reads_its_rows() -> None:
    model, inputs = small("lstm")
    weights = sum(p.numel() for p in model.lstm.parameters() if p.dim() == 2)
    assert floor.work(model, inputs[0], trains=False).flops == 2 * (2 * 8) * weights + 2 * 2 * 32 * 10
    model, inputs = small("embedding")
    rest = sum(p.numel() for name, p in model.named_parameters() if "table" not in name)
    assert floor.work(model, inputs[0], trains=False).weight_bytes == 4 * (rest + 2 * 8 * 32)


def test_the_floor_is_the_longer_of_arithmetic_and_traffic_on_the_unit_that_the_class_admits() -> None:
    busy, heavy = floor.Work(9e9, 0, 0), floor.Work(0, 4 * 10**9, 10**9)
    times = {p: floor.floor_ns(busy, CEILINGS, p) for p in ("fp32", "1.5e-5", "bf16")}
    assert times == pytest.approx({"fp32": 3e9, "1.5e-5": 3e9, "bf16": 9e9 / 8})
    assert floor.floor_ns(heavy, CEILINGS, "fp32") == pytest.approx(5e9)
    assert floor.floor_ns(heavy, CEILINGS, "bf16") == pytest.approx(3e9)


# ---- columns ----


def test_every_class_has_its_competition_and_max_autotune_comes_last() -> None:
    names = columns.names(["fp32", "1.5e-5"], ["kernel", "wall"])
    assert len(names) == len(set(names)) == 15
    assert {name for name in names if name[1].startswith("fxopt")} == {
        (precision, column) for precision in ("fp32", "1.5e-5") for column in ("fxopt", "fxopt_kernel")
    }
    assert [column for _, column in names[-3:]] == [f"max_autotune_{of}" for of in ("fp32", "tf32", "bf16")]


def test_columns_can_be_chosen_and_left_out_by_name() -> None:
    chosen = compare.choose("fp32", "wall", "fxopt,eager_fp32", typer.BadParameter)
    assert chosen == [("fp32", "eager_fp32"), ("fp32", "fxopt")]
    left = compare.choose("fp32", "wall", "-fxopt", typer.BadParameter)
    assert len(left) == 11 and not any(column == "fxopt" for _, column in left)
    rows = compare.choose("fp32,1.5e-5", "kernel,wall", "-fxopt@1.5e-5,fxopt,fxopt_kernel", typer.BadParameter)
    assert rows == [("fp32", "fxopt_kernel"), ("fp32", "fxopt"), ("1.5e-5", "fxopt_kernel")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fp7", "wall", ""), "fp7"),
        (("fp32", "speed", ""), "'speed' is none of kernel, wall"),
        (("fp32", "wall", "eager"), "'eager' is none of"),
    ],
)
def test_what_is_not_known_is_refused(arguments: tuple[str, str, str], says: str) -> None:
    with pytest.raises(typer.BadParameter, match=says):
        compare.choose(*arguments, typer.BadParameter)


@pytest.mark.parametrize("wrap", [columns.InBfloat16, columns.Autocast])
def test_a_bf16_column_takes_and_gives_fp32_and_rounds_to_bf16(wrap: type[nn.Module]) -> None:
    model, inputs = small("mlp")
    exact = comparison.reference(model, inputs, trains=False)
    with torch.no_grad():
        outputs = [wrap(copy.deepcopy(model))(*args) for args in inputs]
    assert all(out.dtype is torch.float32 for out in outputs)
    assert 1e-4 < runner.errors(outputs, exact)[0] < 3e-2


# ---- measuring a workload ----


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "bf16_units", lambda device: True)
        rows, evidence = comparison.compare_workload("mlp", BASELINES, QUICK, tmp_path_factory.mktemp("plans"))
    return {row["column"]: row for row in rows}, evidence


def test_each_column_has_times_with_intervals_an_error_and_ratios_to_inductor(measured: Any) -> None:
    rows, _ = measured
    for column in ("eager_fp32", "inductor_fp32", "inductor_bf16"):
        row = rows[column]
        for metric in ("kernel", "wall"):
            low, high = row[f"{metric}_interval"]
            assert 0 < low <= row[f"{metric}_us"] <= high
        assert len(row["wall_samples_us"]) == 6 and len(row["kernel_samples_us"]) == 2
        assert row["floor_us"] > 0 and row["objective"] is None and row["passes"] is None
    assert rows["inductor_fp32"]["wall_ratio"] == rows["inductor_fp32"]["kernel_ratio"] == 1.0
    assert rows["inductor_fp32"]["rel_l2_error"] < 1e-6 < rows["inductor_bf16"]["rel_l2_error"] < 3e-2


def test_a_column_of_another_device_is_a_row_that_says_why(measured: Any) -> None:
    row = measured[0]["inductor_tf32"]
    assert (row["status"], row["why"], row["wall_us"], row["rel_l2_error"]) == ("skipped", "CUDA only", None, None)


def test_the_evidence_says_what_was_run_and_for_how_long(measured: Any) -> None:
    _, evidence = measured
    assert evidence["workload"] == "mlp" and evidence["input_sets"] == 2 and evidence["reports"] == {}
    assert sum(evidence["seconds"].values()) <= evidence["total_seconds"] + 0.1
    json.dumps(evidence)


def test_the_evidence_has_the_kernels_of_each_column_whose_times_add_up_to_the_rows(measured: Any) -> None:
    rows, evidence = measured
    timed = {f"{row['column']} {row['precision']}": row for row in rows.values() if row["kernel_us"] is not None}
    assert set(evidence["kernels"]) == set(timed)
    for name, row in timed.items():
        found = evidence["kernels"][name]
        assert sum(us for *_, us in found) == pytest.approx(sum(row["kernel_samples_us"]) / 2, rel=0.5)
        assert round(sum(launches for _, launches, _ in found)) == row["kernels"]


def test_kernels_that_take_little_are_one_line() -> None:
    window = {f"kernel {n}": (2.0, 1e3 * (100 - n)) for n in range(comparison.KERNELS + 2)}
    found = comparison._by_kernel([window, window, {"kernel 0": (4.0, 3e5)}])
    assert found[0] == ["kernel 0", 2.0, 100.0] and len(found) == comparison.KERNELS + 1
    assert found[-1] == ["others", 4.0, 139.0]
    assert comparison._by_kernel([]) == []


def test_a_column_that_takes_too_long_is_ended_even_where_errors_are_caught() -> None:
    with pytest.raises(comparison.ColumnTimeout), comparison._at_most(0.05):
        while True:
            try:
                time.sleep(1)
            except Exception:
                continue


def test_a_ratio_is_that_of_the_rounds_and_needs_six_for_an_interval() -> None:
    assert comparison.paired_ratio([2.0, 4.0], [1.0, 1.0]) == (3.0, None)
    assert comparison.paired_ratio([2.0] * 6, [1.0] * 6) == (2.0, [2.0, 2.0])
    assert comparison.paired_ratio([], [1.0]) == (None, None)


def test_no_column_is_begun_once_the_workloads_time_is_spent(tmp_path: Path) -> None:
    rows, _ = comparison.compare_workload("mlp", BASELINES[:1], replace(QUICK, time_limit=1e-6), tmp_path)
    assert rows[0]["status"] == comparison.LATE and "were spent before it" in rows[0]["why"]


@pytest.mark.parametrize(("ablate", "limit"), [("", 10.0), ("fp32", 40.0)])
def test_a_column_whose_passes_are_ablated_has_more_time(ablate: str, limit: float, tmp_path: Path, monkeypatch):
    given = []

    @contextlib.contextmanager
    def at_most(seconds: float):
        given.append(seconds)
        raise comparison.ColumnTimeout
        yield

    monkeypatch.setattr(comparison, "_at_most", at_most)
    how = replace(QUICK, time_limit=1000.0, column_limit=10.0, ablate=ablate)
    rows, _ = comparison.compare_workload("mlp", [("fp32", "fxopt"), ("fp32", "fxopt_kernel")], how, tmp_path)
    assert given == [limit, 10.0]
    assert {row["status"] for row in rows} == {comparison.LATE} and "not built within 10 s" in rows[1]["why"]


# ---- keeping and resuming ----

WANTED = [("fp32", "eager_fp32")]
ROW = {"workload": "mlp", "precision": "fp32", "column": "eager_fp32", "status": "measured"}
EVIDENCE = {"clocks": {}, "environment": {}}


def test_a_workload_is_finished_when_all_its_rows_are_of_this_commit(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    store = compare.Store(path, {"commit": "a", "tree": "t"})
    assert not store.finished("mlp", WANTED)
    store.put("mlp", [ROW], EVIDENCE)
    store.put("sdpa", [{**ROW, "workload": "sdpa"}], EVIDENCE)
    again = compare.Store(path, {"commit": "a", "tree": "t"})
    assert again.finished("mlp", WANTED) and not again.finished("mlp", [*WANTED, ("fp32", "fxopt")])
    assert not compare.Store(path, {"commit": "b", "tree": "t"}).finished("mlp", WANTED)
    assert [row["workload"] for row in json.loads(path.read_text())] == ["sdpa", "mlp"]


def test_a_workload_is_not_finished_where_there_was_no_time_for_a_column(tmp_path: Path) -> None:
    store = compare.Store(tmp_path / "comparison.json", {"commit": "a", "tree": "t"})
    for status, finished in ((comparison.LATE, False), ("skipped", True), ("failed", True)):
        store.put("mlp", [{**ROW, "status": status}], EVIDENCE)
        assert store.finished("mlp", WANTED) is finished, status


def test_a_process_that_died_leaves_rows_that_say_so_and_is_measured_again(tmp_path: Path) -> None:
    rows, evidence = compare.run_workload("no such", WANTED, QUICK, tmp_path, None)
    assert evidence is None and rows[0]["status"] == "failed" and "exit code 1: KeyError" in rows[0]["why"]
    store = compare.Store(tmp_path / "comparison.json", {"commit": "a", "tree": "t"})
    store.put("mlp", [{**rows[0], "workload": "mlp"}], None)
    assert not store.finished("mlp", WANTED)


def test_the_measured_code_is_named_by_commit_and_digest() -> None:
    found = compare.source()
    assert found == compare.source() and len(found["tree"]) == 16 and found["commit"]


def test_all_workloads_are_tuned_first_and_what_was_tuned_is_not_tuned_again(tmp_path, monkeypatch) -> None:
    tuned: list[tuple[str, tuple[str, str]]] = []

    def process(workload, wanted, how, plan_dir, gpu, *, tune, limit):
        assert tune and gpu == "0"
        tuned.append((workload, *wanted))
        if workload == "sdpa":
            return None, "it died"
        return {"seconds": {}, "report": {"graphs": [{"source": "tuned", "at": len(tuned)}]}}, ""

    monkeypatch.setattr(compare, "in_process", process)
    wanted = [("bf16", "fxopt"), ("fp32", "eager_fp32"), ("fp32", "fxopt_kernel"), ("fp32", "fxopt")]

    def tune(commit: str = "a", **how: Any) -> dict[str, Any]:
        tuned.clear()
        given = compare.How("cuda", ablate="fp32", **how)
        stamp = {"commit": commit}
        found = compare.tune(["mlp", "sdpa"], wanted, given, tmp_path, ["0"], jobs=1, stamp=stamp, resume=True)
        return {name: {key: one["report"] for key, one in reports.items()} for name, reports in found.items()}

    first = tune()
    ours = [("fp32", "fxopt"), ("bf16", "fxopt"), ("fp32", "fxopt_kernel")]
    assert tuned == [(name, column) for column in ours for name in ("mlp", "sdpa")]  # what is ablated before the rest
    assert set(first["mlp"]) == {"fxopt fp32", "fxopt bf16", "fxopt_kernel fp32"} and first["sdpa"] == {}
    assert tune() == first and {name for name, _ in tuned} == {"sdpa"}
    assert tune(tuning_limit=7.0)["mlp"] and len(tuned) == 6
    assert tune("b", tuning_limit=7.0)["mlp"] and len(tuned) == 6


@pytest.mark.slow
@pytest.mark.parametrize("tune_jobs", [0, 2])
def test_the_command_measures_once_and_resumes(tmp_path: Path, tune_jobs: int) -> None:
    path = tmp_path / "comparison.json"
    command = [sys.executable, "-m", "case_studies.compare", "mlp", "--small", "--device", "cpu", "--resume"]
    command += [
        "--precisions",
        "fp32",
        "--objectives",
        "wall",
        "--columns",
        "eager_fp32,inductor_fp32,fxopt",
        "--rounds",
        "6",
        "--windows",
        "2",
        "--block-ms",
        "0.5",
        "--tuning-limit",
        "20",
        "--tune-jobs",
        str(tune_jobs),
        "--json",
        str(path),
    ]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr[-2000:]
    rows = {(row["workload"], row["column"]): row for row in json.loads(path.read_text())}
    assert len(rows) == 3
    ours, base = rows["mlp", "fxopt"], rows["mlp", "inductor_fp32"]
    assert ours["status"] == "measured", ours["why"]
    assert ours["rel_l2_error"] <= max(4 * base["rel_l2_error"], 9.5e-7) and ours["decision"] and ours["wall_ratio"]
    assert "mlp: finished at this commit" in second.stderr
    assert "| mlp | fp32 | fxopt |" in first.stdout
    environment = json.loads((tmp_path / "comparison_environment.json").read_text())
    assert environment["environment"]["device_type"] == "cpu" and set(environment["workloads"]) == {"mlp"}
    evidence = json.loads((tmp_path / "comparison_evidence" / "mlp.json").read_text())
    assert set(evidence["reports"]) == {"fxopt fp32"}
    (graph,) = evidence["reports"]["fxopt fp32"]["graphs"]
    assert graph["source"] == ("plan" if tune_jobs else "tuned")
    if tune_jobs:
        (tuned,) = evidence["tuned"]["fxopt fp32"]["report"]["graphs"]
        assert (tuned["source"], tuned["key"], tuned["decision"]) == ("tuned", graph["key"], graph["decision"])
