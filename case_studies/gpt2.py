"""GPT-2 small from Hugging Face: where the time goes, what fxopt does about it, and how that compares.

    python -m case_studies.gpt2 [--device cpu|cuda] [--precision fp32|tf32|bf16] [--json FILE] ...  (--help)

The model is GPT2Model, inference, dropout off, last hidden state. Everything in the table is measured in
this run.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from case_studies import runner, show
from case_studies.runner import Variant

HUB_NAME = "openai-community/gpt2"
HUB_SECONDS = 4.0
"""How long to wait for a sign of life from the hub before going on with random weights."""
REMEDY = "The GPT-2 case study needs Hugging Face transformers: pip install 'fxopt[case-studies]'"
INPUT_SETS = 4
SEED = 0


class LastHidden(torch.nn.Module):
    """GPT2Model as a function of ids (batch, sequence) alone, giving (batch, sequence, hidden)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).last_hidden_state


@dataclass(frozen=True)
class Study:
    """What to run. `precision` is a class of fxopt's or a relative L2 budget; `via` how fxopt is reached."""

    device: torch.device
    batch: int
    seq: int
    precision: str | float = "fp32"
    via: str = "optimize"
    tune_again: bool = False
    iterations: int = 5
    rounds: int = 15


class MissingDependency(RuntimeError):
    """transformers is not installed; the message says how to get it."""


# ---- model and inputs ----


def load_model(layers: int | None = None) -> tuple[Any, str]:
    """GPT2Model in fp32 and eval mode on the CPU, and a sentence on where its weights are from.

    Weights from the local hub cache, else from the hub if it answers within seconds (never when
    HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set), else random ones from a fixed seed, with GPT-2's own
    initialisation. `layers` keeps the first so many. Raises MissingDependency without transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(REMEDY) from error
    model, origin = _pretrained(transformers.GPT2Model)
    if model is None:
        make_config: Any = transformers.GPT2Config
        config = make_config(attn_implementation="sdpa", use_cache=False)
        model, origin = random_model(config), f"random weights (seed {SEED}): {origin}"
    if layers is not None:
        model.h = model.h[:layers]
        model.config.n_layer = layers
    return model.eval().float(), origin


def random_model(config: Any) -> torch.nn.Module:
    """GPT2Model with `config` and random weights from a fixed seed; torch's own generator is left as it
    was.
    """
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return transformers.GPT2Model(config).eval()


def _pretrained(model_class: Any) -> tuple[Any, str]:
    """The model with the hub's weights, or None with the reason."""
    load = partial(model_class.from_pretrained, HUB_NAME, attn_implementation="sdpa", use_cache=False)
    try:
        return load(local_files_only=True), f"{HUB_NAME} weights from the local Hugging Face cache"
    except (OSError, ValueError):
        pass  # not in the cache
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on"):
            return None, f"{name} is set, and the weights are not in the local cache"
    if not _hub_answers():
        return None, f"the Hugging Face hub cannot be reached (tried for {HUB_SECONDS:.0f} s at most)"
    try:
        return load(), f"{HUB_NAME} weights from the Hugging Face hub"
    except Exception as error:  # the hub's client raises many kinds; any of them means random weights
        return None, f"loading from the hub failed ({type(error).__name__})"


def _hub_answers() -> bool:
    """One request, in a thread: a name server that is silent ignores socket time-outs."""
    answers: list[bool] = []

    def ask() -> None:
        from urllib.request import Request, urlopen

        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        try:
            request = Request(f"{endpoint}/{HUB_NAME}/resolve/main/config.json", method="HEAD")
            with urlopen(request, timeout=HUB_SECONDS) as response:
                answers.append(response.status < 400)
        except (OSError, ValueError):
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return bool(answers and answers[0])


def make_inputs(study: Study, vocabulary: int, sets: int = INPUT_SETS) -> list[tuple[torch.Tensor]]:
    """`sets` inputs: ids (batch, seq), int64, on the device, from a fixed seed."""
    generator = torch.Generator().manual_seed(SEED + 1)
    shape = (study.batch, study.seq)
    return [(torch.randint(0, vocabulary, shape, generator=generator).to(study.device),) for _ in range(sets)]


def reference(model: torch.nn.Module, inputs: Sequence[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """Outputs of the model in fp64, eager."""
    exact = LastHidden(copy.deepcopy(model).double())
    with torch.no_grad():
        return [exact(*args) for args in inputs]


# ---- variants ----


def own_model(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """A copy of the model in a wrapper with a code object of its own (see runner)."""
    return runner.with_own_forward(LastHidden, name)(copy.deepcopy(model)).eval()


def baselines(model: torch.nn.Module, device: torch.device) -> list[Variant]:
    """The rows that fxopt is compared with. fp32 `model` on `device`; each variant copies it when it is
    built.
    """
    cuda = device.type == "cuda"
    bf16 = runner.bf16_units(device)
    no_bf16 = "" if bf16 else "this device has no bf16 matrix units"
    only_cuda = "CUDA only"

    def eager() -> Callable[..., Any]:
        return own_model(model, "eager")

    def inductor(name: str, half: bool = False, **compile_options: Any) -> Callable[..., Any]:
        net = own_model(model, name)
        # mode and options exclude each other; only CUDA has rows with a mode, and it needs no options.
        compile_options = compile_options or {"options": runner.kernel_events(device)}
        return torch.compile(net.bfloat16() if half else net, **compile_options)

    def autocast() -> Callable[..., Any]:
        compiled = inductor("autocast_bf16")

        def call(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return compiled(ids)

        return call

    def graphed() -> Callable[..., Any]:
        return inductor("bf16_reduce_overhead", half=True, mode="reduce-overhead")

    plain = partial(runner.fp32_matmuls, tf32=False) if cuda else nullcontext
    tf32 = partial(runner.fp32_matmuls, tf32=True)
    rows = [
        Variant("eager", eager, context=plain, compiles=False),
        Variant(runner.BASE, partial(inductor, "inductor"), context=plain),
        Variant("autocast bf16 + Inductor", autocast, bf16, no_bf16, plain),
        Variant("bf16 model + Inductor", partial(inductor, "bf16_model", half=True), bf16, no_bf16, plain),
    ]
    if cuda:
        rows.insert(2, Variant("Inductor TF32", partial(inductor, "inductor_tf32"), context=tf32))
        rows.append(Variant("bf16 model, reduce-overhead", graphed, bf16, no_bf16, plain))
    else:
        rows.insert(2, Variant("Inductor TF32", partial(inductor, "inductor_tf32"), False, only_cuda))
        rows.append(Variant("bf16 model, reduce-overhead", graphed, False, only_cuda))
    return rows


def fxopt_variant(
    model: torch.nn.Module,
    study: Study,
    ids: torch.Tensor,
    keep_report: Callable[[Any], None],
    plan_dir: Path | None,
) -> Variant:
    """fxopt's row. `keep_report` is given the report once it is built."""
    options: dict[str, Any] = {"precision": study.precision, "iterations": study.iterations}
    options |= runner.kernel_events(study.device)
    if plan_dir is not None:
        options["plan_dir"] = str(plan_dir)

    def build() -> Callable[..., Any]:
        import fxopt

        net = own_model(model, "fxopt")
        if study.via == "backend":
            compiled = torch.compile(net, backend="profile_guided", options=options)
            compiled(ids)  # compiles and tunes; the report exists only then
            keep_report(fxopt.last_report())
            return compiled
        optimized = fxopt.optimize(net, (ids,), **options)
        keep_report(optimized.report)
        return optimized

    plain = partial(runner.fp32_matmuls, tf32=False) if study.device.type == "cuda" else nullcontext
    return Variant(fxopt_name(study), build, context=plain)


def fxopt_name(study: Study) -> str:
    return f"fxopt {study.precision}" + (" (backend)" if study.via == "backend" else "")


# ---- the study ----


def run(study: Study, model: Any, origin: str, screen: Any, watch: runner.Stopwatch) -> dict[str, Any]:
    """Do the study and print it on `screen`; the result as a JSON-able document without command line and
    date.
    """
    from rich.text import Text

    from fxopt.report import terminal
    from profiler_core.clocks import ClockMonitor
    from profiler_core.environment import environment

    device = study.device
    surroundings = environment(device)
    layers = len(model.h)
    size = f"{layers} layer{'s' * (layers != 1)}, batch {study.batch}, sequence {study.seq}"
    screen.print(Text(f"GPT-2, {size}, {origin}", style="bold"))
    screen.print(Text(show.environment_line(surroundings)))
    with watch.phase("model and fp64 reference"):
        model = model.to(device)
        inputs = make_inputs(study, model.config.vocab_size)
        expected = reference(model, inputs)
    reports: list[Any] = []
    with ExitStack() as stack:
        fresh = Path(stack.enter_context(tempfile.TemporaryDirectory())) if study.tune_again else None
        monitor = stack.enter_context(ClockMonitor(device))
        _progress(screen, f"fxopt ({study.precision}, through {study.via}): compiling, measuring, tuning")
        with watch.phase("fxopt"):
            variant = fxopt_variant(model, study, inputs[0][0], reports.append, fresh)
            built = [runner.build_variant(variant, inputs, expected, device)]
        report = reports[0] if reports else None
        if report is not None:
            screen.print()
            terminal.render(report, screen)
            screen.print()
        for other in baselines(model, device):
            if other.available:
                _progress(screen, f"{other.name}: {'compiling' if other.compiles else 'running'}")
            with watch.phase("table: compiling"):
                built.append(runner.build_variant(other, inputs, expected, device))
        built = [*built[1:], built[0]]
        _progress(screen, "measuring all of them in turns")
        with watch.phase("table: measuring"):
            how: dict[str, Any] = {"rounds": study.rounds, "iterations": study.iterations, "monitor": monitor}
            rows = runner.measure_built(built, inputs, device, **how)
        clocks = monitor.summary()
    screen.print()
    screen.print(show.tabulate(rows, device, title="Measured in this run, in turns"))
    if clocks.get("samples"):
        seen = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in clocks.items())
        screen.print(Text(f"Clocks while measuring: {seen}"))
    elif device.type == "cuda":
        screen.print(Text(f"Clocks were not read: {clocks.get('unavailable', 'no samples')}"))
    phases, total = show.budget(watch, report), watch.total
    screen.print(show.budget_table(phases, total))
    sentence = show.conclude(rows, fxopt_name(study), "GPT-2", report)
    screen.print(Text(sentence, style="bold"))
    return {
        "case": "gpt2",
        "environment": surroundings,
        "workload": {
            **asdict(study),
            "device": str(device),
            "layers": layers,
            "weights": origin,
            "dtype": "float32",
        },
        "clocks": clocks,
        "rows": rows,
        "fxopt": None if report is None else report.to_json(),
        "seconds": phases,
        "total_seconds": total,
        "result": sentence,
    }


def _progress(screen: Any, text: str) -> None:
    from rich.text import Text

    screen.print(Text(f"... {text}"))


# ---- command line ----


def main() -> None:
    import typer

    def gpt2(
        device: str = typer.Option("auto", help="cpu, cuda, or auto: cuda where there is one."),
        precision: str = typer.Option("fp32", help="fp32, tf32, bf16, or a relative L2 error such as 1e-3."),
        batch: int = typer.Option(0, min=0, help="0: 1 on the CPU, 4 on CUDA."),
        seq: int = typer.Option(0, min=0, max=1024, help="Sequence length. 0: 64 on the CPU, 128 on CUDA."),
        json: Path = typer.Option(None, help="Write everything measured to this file."),
        layers: int = typer.Option(12, min=1, max=12, help="Keep the first layers only, for a quick run."),
        tune_again: bool = typer.Option(False, "--tune-again", help="Use no plan of an earlier run, and keep none."),
        via: str = typer.Option("optimize", help="optimize (fxopt.optimize) or backend (torch.compile)."),
        iterations: int = typer.Option(5, min=1, help="Profiled calls, for kernel times."),
        rounds: int = typer.Option(15, min=6, help="Rounds of the wall-time comparison."),
    ) -> None:
        """Measure GPT-2 small under eager mode, Inductor's variants and fxopt."""
        watch = runner.Stopwatch()
        place = _device(device, typer.BadParameter)
        if via not in ("optimize", "backend"):
            raise typer.BadParameter(f"--via is optimize or backend, not {via!r}")
        cuda = place.type == "cuda"
        study = Study(
            device=place,
            batch=batch or (4 if cuda else 1),
            seq=seq or (128 if cuda else 64),
            precision=_precision(precision, typer.BadParameter),
            via=via,
            tune_again=tune_again,
            iterations=iterations,
            rounds=rounds,
        )
        try:
            with watch.phase("loading the model"):
                model, origin = load_model(None if layers == 12 else layers)
        except MissingDependency as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        screen = show.console()
        result = run(study, model, origin, screen, watch)
        if json is not None:
            show.write_json(json, {"command": show.command_line("case_studies.gpt2"), **result})
            screen.print(f"written: {json}", markup=False)
        if any(row.status == "failed" for row in result["rows"]):
            raise typer.Exit(1)

    typer.run(gpt2)


def _device(name: str, bad: Callable[[str], Exception]) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")
    if name not in ("cpu", "cuda"):
        raise bad(f"--device is cpu, cuda or auto, not {name!r}")
    if name == "cuda" and not available:
        raise bad("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _precision(value: str, bad: Callable[[str], Exception]) -> str | float:
    from fxopt.verify import parse_precision

    try:
        number: str | float = float(value)
    except ValueError:
        number = value
    try:
        parse_precision(number)
    except ValueError as error:
        raise bad(f"--precision: {error}") from error
    return number


if __name__ == "__main__":
    main()
