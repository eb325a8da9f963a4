"""The case studies' runner and the GPT-2 study, on a model small enough to compile in seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="the case studies need transformers: pip install 'fxopt[case-studies]'")

from case_studies import gpt2, runner, show
from case_studies.runner import Row, Variant
from fxopt.report.model import CandidateReport, GraphReport, Report

CPU = torch.device("cpu")
VOCABULARY = 512
ROOT = Path(__file__).parents[2]


def flags() -> dict[str, Any]:
    """torch's global settings that a measurement could leave changed."""
    backends = torch.backends
    newer = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    return {
        "fp32_precision": [setting.fp32_precision for setting in newer],
        "legacy": torch.get_float32_matmul_precision(),
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def small_model() -> torch.nn.Module:
    from transformers import GPT2Config

    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return gpt2.random_model(config)


@pytest.fixture(scope="module")
def study() -> gpt2.Study:
    return gpt2.Study(CPU, batch=2, seq=16, iterations=2, rounds=6)


@pytest.fixture(scope="module")
def measured(study: gpt2.Study) -> Any:
    """The study's baselines, measured once for this file, with torch's settings before and after."""
    before = flags()
    model = small_model()
    inputs = gpt2.make_inputs(study, VOCABULARY)
    expected = gpt2.reference(model, inputs)
    with pytest.MonkeyPatch.context() as patch:
        # Without bf16 units the rows would be skipped; at this size the emulation is fast enough.
        patch.setattr(runner, "bf16_units", lambda device: True)
        variants = gpt2.baselines(model, CPU)
    built = [runner.build_variant(variant, inputs, expected, CPU) for variant in variants]
    rows = runner.measure_built(built, inputs, CPU, rounds=6, iterations=2, min_block_ns=1e6)
    return SimpleNamespace(
        rows={row.name: row for row in rows}, built=built, inputs=inputs, before=before, after=flags()
    )


MEASURED = ("eager", "Inductor", "autocast bf16 + Inductor", "bf16 model + Inductor")


# ---- the rows ----


def test_every_baseline_is_a_row_and_those_of_another_device_say_why_they_were_skipped(measured: Any) -> None:
    assert [name for name, row in measured.rows.items() if row.status == "measured"] == list(MEASURED)
    skipped = {name: row.why for name, row in measured.rows.items() if row.status == "skipped"}
    assert skipped == {"Inductor TF32": "CUDA only", "bf16 model, reduce-overhead": "CUDA only"}


def test_fp32_rows_agree_with_fp64_to_fp32_rounding_and_bf16_rows_to_bf16_rounding(measured: Any) -> None:
    for name in ("eager", "Inductor"):
        assert 0.0 < measured.rows[name].rel_l2 < 1e-5
    for name in ("autocast bf16 + Inductor", "bf16 model + Inductor"):
        assert 1e-4 < measured.rows[name].rel_l2 < 5e-2


def test_each_variant_ran_code_of_its_own(measured: Any) -> None:
    errors = [measured.rows[name].rel_l2 for name in MEASURED]
    assert len(set(errors)) == len(errors), "two variants gave the same output to the last bit"
    modules = [gpt2.own_model(small_model(), name) for name in ("a", "b")]
    assert modules[0].forward.__func__.__code__ is not modules[1].forward.__func__.__code__


def test_times_and_counts_are_there_for_what_was_measured_and_for_nothing_else(measured: Any) -> None:
    for row in measured.rows.values():
        values = (row.kernel_ns, row.wall_ns, row.kernels, row.wall_speedup, row.kernel_speedup, row.max_abs)
        if row.status == "measured":
            assert all(value is not None and value > 0 for value in values), row
            assert row.rounds == 6 and row.calls_per_round >= 1
        else:
            assert all(value is None for value in values), row


def test_inductor_runs_fewer_kernels_than_eager_runs_operators(measured: Any) -> None:
    assert 0 < measured.rows["Inductor"].kernels < measured.rows["eager"].kernels


def test_eager_has_no_compile_time_and_the_compiled_ones_have(measured: Any) -> None:
    assert measured.rows["eager"].compile_seconds is None
    assert all(measured.rows[name].compile_seconds > 0 for name in MEASURED[1:])


def test_speedups_are_the_base_times_over_the_rows_own(measured: Any) -> None:
    base = measured.rows[runner.BASE]
    assert (base.kernel_speedup, base.wall_speedup) == (1.0, 1.0)
    for name in MEASURED:
        row = measured.rows[name]
        assert row.kernel_speedup == pytest.approx(base.kernel_ns / row.kernel_ns)
        assert row.wall_speedup_low <= row.wall_speedup <= row.wall_speedup_high


def test_measuring_leaves_torchs_global_settings_as_they_were(measured: Any) -> None:
    assert measured.after == measured.before


def test_variants_are_compiled_once_each_and_calling_them_in_turns_recompiles_nothing() -> None:
    compiled: list[str] = []

    def variant(name: str) -> Variant:
        def backend(graph: Any, example_inputs: Any) -> Any:
            compiled.append(name)
            return graph.forward

        return Variant(name, lambda: torch.compile(runner.with_own_forward(PlusOne, name)(), backend=backend))

    # More variants than Dynamo compiles for one code object (8): sharing one would leave the last eager.
    names = [f"variant {number}" for number in range(10)]
    rows = run_rows([variant(name) for name in names])
    assert compiled == names
    assert all(row.status == "measured" and row.rel_l2 == 0.0 for row in rows.values())


# ---- measuring ----


def run_rows(variants: list[Variant], **how: Any) -> dict[str, Row]:
    inputs = [(torch.full((4,), float(i)),) for i in range(3)]
    expected = [args[0].double() + 1 for args in inputs]
    how = {"rounds": 6, "iterations": 1, "min_block_ns": 1.0, **how}
    return {row.name: row for row in runner.measure_variants(variants, inputs, expected, CPU, **how)}


class PlusOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_variant_that_fails_to_build_is_a_row_that_says_how_and_the_others_are_measured() -> None:
    def broken() -> Any:
        raise RuntimeError("no compiler\nsecond line")

    rows = run_rows([Variant("broken", broken), Variant("Inductor", lambda: plus_one)])
    assert (rows["broken"].status, rows["broken"].why) == ("failed", "RuntimeError: no compiler")
    assert rows["Inductor"].status == "measured"


def test_outputs_of_another_shape_fail_rather_than_being_compared_by_broadcasting() -> None:
    rows = run_rows([Variant("wrong", lambda: lambda x: (x + 1)[:1])])
    assert rows["wrong"].status == "failed" and "shapes" in rows["wrong"].why


def test_an_output_that_only_the_first_input_gets_right_shows_in_the_error() -> None:
    rows = run_rows([Variant("stale", lambda: lambda x: torch.ones(4))])
    assert rows["stale"].rel_l2 > 0.1


def test_without_the_base_row_there_are_times_and_no_speedups() -> None:
    row = run_rows([Variant("alone", lambda: plus_one)])["alone"]
    assert row.wall_ns is not None and row.wall_speedup is None and row.kernel_speedup is None


def test_the_context_holds_while_building_and_calling_and_at_no_other_time() -> None:
    depth: list[int] = []
    seen: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        depth.append(1)
        yield
        depth.pop()

    def build() -> Any:
        seen.append("build" if depth else "build outside")
        return lambda x: (seen.append("call" if depth else "call outside"), x + 1)[1]

    def other(x: torch.Tensor) -> torch.Tensor:
        seen.append("leaked" if depth else "other")
        return x + 1

    run_rows([Variant("inside", build, context=context), Variant("Inductor", lambda: other)])
    assert set(seen) == {"build", "call", "other"} and not depth


def test_a_variant_that_takes_twice_as_long_is_seen_as_half_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"ns": 0}
    monkeypatch.setattr(runner.time, "perf_counter_ns", lambda: clock["ns"])

    def taking(ns: int) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            clock["ns"] += ns
            return x + 1

        return call

    rows = run_rows(
        [Variant("Inductor", lambda: taking(1000)), Variant("slow", lambda: taking(2000))],
        min_block_ns=4000.0,
    )
    assert rows["slow"].wall_speedup == pytest.approx(0.5)
    assert (rows["slow"].wall_ns, rows["slow"].calls_per_round) == (2000.0, 2)
    assert rows["Inductor"].calls_per_round == 4


def test_inputs_rotate_and_the_monitor_is_sampled_between_blocks() -> None:
    values: list[float] = []
    monitor = SimpleNamespace(samples=0)
    monitor.sample = lambda: setattr(monitor, "samples", monitor.samples + 1)

    def call(x: torch.Tensor) -> torch.Tensor:
        values.append(x[0].item())
        return x + 1

    run_rows([Variant("Inductor", lambda: call), Variant("b", lambda: plus_one)], rounds=7, monitor=monitor)
    assert monitor.samples == 14
    assert set(values) == {0.0, 1.0, 2.0}


def test_a_profiler_that_is_refused_costs_the_kernel_column_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from profiler_core.collect import kineto

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(kineto, "kernel_time", refused)
    row = run_rows([Variant("Inductor", lambda: plus_one)])["Inductor"]
    assert row.status == "measured" and row.wall_ns is not None and row.kernel_ns is None
    assert "CUPTI is taken" in row.why


def test_a_callable_with_a_check_is_compared_by_that_and_timed_by_its_calls() -> None:
    class Step:
        calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x

        def check(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    step, inputs = Step(), [(torch.ones(2),), (torch.zeros(2),)]
    built = runner.build_variant(Variant("step", lambda: step), inputs, [x + 1 for (x,) in inputs], CPU)
    assert built.row.rel_l2 == 0.0 and step.calls == 0
    calls = runner.time_in_turns([built], inputs, CPU, rounds=3, min_block_ns=1e4)
    assert len(built.walls_ns) == 3 and step.calls >= 3 * (1 + calls["step"])


# ---- errors and settings ----


def test_the_error_is_the_norm_of_the_difference_over_the_norm_of_the_reference_over_all_outputs() -> None:
    outputs = [torch.tensor([3.0, 4.0]), {"y": [torch.tensor([1.0])]}]
    right = [torch.tensor([3.0, 0.0]), {"y": [torch.tensor([4.0])]}]
    rel_l2, max_abs = runner.errors(outputs, right)
    assert rel_l2 == pytest.approx(math.sqrt((16 + 9) / (9 + 16)))
    assert max_abs == 4.0


@pytest.mark.parametrize("order", [[float("nan"), 1.0], [1.0, float("nan")]])
def test_a_nan_shows_in_both_errors_wherever_it_is(order: list[float]) -> None:
    outputs = [torch.tensor([value]) for value in order]
    rel_l2, max_abs = runner.errors(outputs, [torch.ones(1), torch.ones(1)])
    assert math.isnan(rel_l2) and math.isnan(max_abs)


def test_the_error_against_a_reference_of_zeros_is_zero_or_infinite() -> None:
    zero = [torch.zeros(2)]
    assert runner.errors(zero, zero)[0] == 0.0
    assert runner.errors([torch.ones(2)], zero)[0] == math.inf


@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
@pytest.mark.parametrize("tf32", [True, False])
def test_fp32_matmuls_sets_tf32_and_puts_every_setting_back_even_after_an_error(legacy: str, tf32: bool) -> None:
    original = flags()
    newer = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    try:
        if legacy != "highest":
            torch.set_float32_matmul_precision(legacy)
        before = flags()
        with pytest.raises(KeyError), runner.fp32_matmuls(tf32=tf32):
            assert torch.backends.cuda.matmul.allow_tf32 is tf32
            assert torch.backends.cudnn.allow_tf32 is tf32
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
            raise KeyError
        assert flags() == before
    finally:
        torch.set_float32_matmul_precision(original["legacy"])
        for setting, value in zip(newer, (original["fp32_precision"][3], original["fp32_precision"][0]), strict=True):
            setting.fp32_precision = value
    assert flags() == original


# ---- showing and keeping ----


def a_row(name: str, **changes: Any) -> Row:
    values: dict[str, Any] = dict(
        status="measured", kernel_ns=5e7, wall_ns=1e8, rel_l2=1e-6, max_abs=1e-5,
        kernel_speedup=1.0, wall_speedup=1.0,
        wall_speedup_low=0.99, wall_speedup_high=1.01, compile_seconds=47.0,
        kernels=100, rounds=6, calls_per_round=1,
    )  # fmt: skip
    return Row(name, **{**values, **changes})


def shown(renderable: Any, width: int = 80) -> str:
    import io

    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_the_table_fits_80_columns_and_says_of_each_row_what_was_measured_or_why_not() -> None:
    rows = [
        a_row("Inductor"),
        a_row("bf16 model, reduce-overhead [x]", wall_speedup=123.4, kernel_speedup=56.7, compile_seconds=321.0),
        Row("Inductor TF32", "skipped", "CUDA only"),
        Row("eager", "failed", "RuntimeError: [bold]"),
    ]
    text = shown(show.tabulate(rows, CPU, title="GPT-2"))
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    assert "50.0 ms 100 ms 1.0e-06 1.00 1.00 47 s 100" in words
    assert "Inductor TF32: skipped, CUDA only" in words and "eager: failed, RuntimeError: [bold]" in words
    assert "\N{HORIZONTAL ELLIPSIS}" not in text, "a value was cut"


def test_a_speedup_with_a_wide_interval_is_pointed_out() -> None:
    sure, unsure = a_row("Inductor"), a_row("eager", wall_speedup_low=0.5, wall_speedup_high=2.0)
    text = " ".join(shown(show.tabulate([sure, unsure], CPU)).split())
    assert "eager: wall x is uncertain, 0.50 to 2.00" in text and "Inductor: wall x" not in text


def test_the_compile_budget_adds_up_to_the_total() -> None:
    text = shown(show.budget_table({"compiling": 40.0, "measuring": 15.0}, 60.0))
    assert [line.split()[-2] for line in text.splitlines() if line.endswith("s ")] == [
        "40.0",
        "15.0",
        "5.00",
        "60.0",
    ]


def test_json_holds_every_field_of_a_row_and_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    show.write_json(path, {"rows": [a_row("eager", rel_l2=float("nan"))], "device": CPU})
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["schema_version"] == show.SCHEMA_VERSION and document["date"].endswith("+00:00")
    assert tuple(document["rows"][0]) == runner.ROW_FIELDS
    assert document["rows"][0]["rel_l2"] is None and document["device"] == "cpu"


# ---- GPT-2 ----


def test_the_same_seed_gives_the_same_weights_and_torchs_own_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, second = small_model(), small_model()
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not first.training


def test_the_inputs_are_several_different_sets_within_the_vocabulary(study: gpt2.Study) -> None:
    inputs = [args[0] for args in gpt2.make_inputs(study, VOCABULARY)]
    assert {tuple(ids.shape) for ids in inputs} == {(2, 16)}
    assert all(ids.min() >= 0 and ids.max() < VOCABULARY for ids in inputs)
    assert not any(torch.equal(inputs[0], ids) for ids in inputs[1:])


class NotCached:
    """A model class whose weights are in no cache; remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def from_pretrained(self, name: str, **options: Any) -> Any:
        self.calls.append(options)
        raise OSError("not in the cache")


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(gpt2, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    model_class = NotCached()
    model, why = gpt2._pretrained(model_class)
    assert model is None and "HF_HUB_OFFLINE" in why
    assert [options["local_files_only"] for options in model_class.calls] == [True]


def test_a_hub_that_does_not_answer_means_random_weights_and_the_origin_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(gpt2, "_hub_answers", lambda: False)
    model_class = NotCached()
    model, why = gpt2._pretrained(model_class)
    assert model is None and "cannot be reached" in why and len(model_class.calls) == 1


def test_an_endpoint_that_refuses_connections_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert gpt2._hub_answers() is False


def test_without_transformers_the_error_is_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["gpt2", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        gpt2.main()
    assert stop.value.code == 1
    assert "pip install 'fxopt[case-studies]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "cpu, cuda or auto"),
        (["--via", "magic"], "optimize or backend"),
        (["--precision", "fp7"], "bf16"),
        (["--layers", "13"], "12"),
        (["--seq", "4096"], "1024"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_allowed(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2", *arguments])
    with pytest.raises(SystemExit) as stop:
        gpt2.main()
    assert stop.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2", "--device", "cuda"])
    with pytest.raises(SystemExit) as stop:
        gpt2.main()
    assert stop.value.code == 2
    assert "--device cpu" in " ".join(capsys.readouterr().err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


def a_report() -> Report:
    graph = GraphReport(
        key="abc", decision="candidate", source="tuned", seconds={"baseline_compile": 0.5, "measuring": 0.25}
    )
    graph.candidates = [CandidateReport("freeze_weights", ["freeze_weights"], outcome="kept")]
    return Report([graph])


@pytest.mark.parametrize(
    ("low", "ratio", "high", "says"),
    [
        (1.3, 1.4, 1.5, "1.40 times as fast as default Inductor"),
        (0.9, 1.1, 1.2, "as fast as default Inductor, within the noise"),
        (0.7, 0.8, 0.9, "slower than default Inductor"),
    ],
)
def test_the_last_sentence_claims_no_more_than_the_interval_allows(
    low: float, ratio: float, high: float, says: str, study: gpt2.Study
) -> None:
    ours = a_row("fxopt fp32", wall_speedup=ratio, wall_speedup_low=low, wall_speedup_high=high, rel_l2=2e-6)
    sentence = show.conclude([a_row("Inductor"), ours], "fxopt fp32", "GPT-2", a_report())
    assert says in sentence
    assert "2.0e-06 against fp64 (Inductor: 1.0e-06)" in sentence


def test_the_last_sentence_names_a_faster_row_of_the_others(study: gpt2.Study) -> None:
    rows = [a_row("Inductor"), a_row("bf16 model + Inductor", wall_ns=1e6, rel_l2=8e-3), a_row("fxopt fp32")]
    assert "the fastest of the others is bf16 model + Inductor, 1.00 ms at an error of 8.0e-03" in show.conclude(
        rows, "fxopt fp32", "GPT-2", a_report()
    )


def test_the_last_sentence_says_that_the_baseline_was_kept(study: gpt2.Study) -> None:
    report = a_report()
    report.graphs[0].decision = "baseline"
    assert "it kept plain Inductor" in show.conclude(
        [a_row("Inductor"), a_row("fxopt fp32")], "fxopt fp32", "GPT-2", report
    )


def test_the_last_sentence_of_a_run_in_which_fxopt_failed_says_how(study: gpt2.Study) -> None:
    rows = [a_row("Inductor"), Row("fxopt fp32", "failed", "RuntimeError: broken")]
    assert show.conclude(rows, "fxopt fp32", "GPT-2", None) == "fxopt fp32 failed: RuntimeError: broken"


def test_the_study_prints_report_table_budget_and_result_and_gives_the_whole_document(
    study: gpt2.Study, measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With baselines that are compiled already and a report made here: what `run` itself does."""
    import io

    def ready(model: Any, device: Any) -> list[Variant]:
        return [Variant(b.variant.name, lambda b=b: b.call, b.call is not None, b.variant.why) for b in measured.built]

    def optimized(model: Any, study: Any, ids: Any, keep_report: Any, plan_dir: Any) -> Variant:
        def build() -> Any:
            keep_report(a_report())
            return next(b.call for b in measured.built if b.variant.name == "Inductor")

        return Variant(gpt2.fxopt_name(study), build)

    monkeypatch.setattr(gpt2, "baselines", ready)
    monkeypatch.setattr(gpt2, "fxopt_variant", optimized)
    out = io.StringIO()
    before = flags()
    watch = runner.Stopwatch()
    result = gpt2.run(study, small_model(), "random weights", Console(file=out, width=80), watch)
    assert flags() == before
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    order = [
        "random weights",
        "Graph 1 of 1",
        "Measured in this run",
        "Compile budget",
        "fxopt fp32 runs GPT-2",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert text.rstrip().endswith(".")
    assert {"fxopt: baseline compile", "fxopt: measuring", "table: compiling", "table: measuring"} <= set(
        result["seconds"]
    )
    assert sum(result["seconds"].values()) <= result["total_seconds"] + 1.0

    path = tmp_path / "gpt2.json"
    show.write_json(path, {"command": show.command_line("case_studies.gpt2"), **result})
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document) == {
        "schema_version", "date", "command", "case", "environment", "workload", "clocks", "rows", "fxopt",
        "seconds",
        "total_seconds", "result",
    }  # fmt: skip
    assert document["workload"] == {
        **asdict(study), "device": "cpu", "layers": 2, "weights": "random weights", "dtype": "float32"
    }  # fmt: skip
    assert [row["name"] for row in document["rows"]] == [*measured.rows, "fxopt fp32"]
    assert document["fxopt"]["graphs"][0]["decision"] == "candidate"
    assert document["environment"]["torch"] == torch.__version__


def test_importing_the_study_loads_neither_transformers_nor_the_printing_libraries() -> None:
    code = (
        "import sys, case_studies.gpt2\n"
        "names = ('transformers', 'pandas', 'rich', 'typer', 'fxopt.session')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("via", ["optimize", "backend"])
def test_the_command_runs_from_start_to_end(via: str, tmp_path: Path) -> None:
    if via == "backend" and not entry_points(group="torch_dynamo_backends", name="profile_guided"):
        pytest.skip("fxopt is not installed, so torch.compile cannot find its backend: pip install -e .")
    path = tmp_path / "gpt2.json"
    command = [sys.executable, "-m", "case_studies.gpt2", "--device", "cpu", "--layers", "1", "--seq", "16"]
    command += ["--rounds", "6", "--iterations", "2", "--tune-again", "--via", via, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Compile budget" in done.stdout and "fxopt fp32" in done.stdout
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in document["rows"]}
    ours = next(row for name, row in rows.items() if name.startswith("fxopt"))
    assert ours["status"] == "measured"
    assert ours["rel_l2"] <= 4 * rows["Inductor"]["rel_l2"]
    assert document["fxopt"]["graphs"]
