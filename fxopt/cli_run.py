"""`fxopt profile`, `optimize` and `bench`: other people's programs, run in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxopt.cli_output import CliError
from fxopt.cli_show import (
    Wanted,
    busy,
    ceilings_here,
    option_values,
    present,
    program_command,
    shown_options,
    spelt,
    stdout_kept_for_the_result,
    warn,
)

if TYPE_CHECKING:
    import typer

    from fxopt.report.model import Report
    from fxopt.rerouted import Rerouted
    from fxopt.script import Outcome, Target


def quiet_kineto() -> None:
    """torch's profiler writes lines of its own to stderr unless this is set before torch is loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def add_commands(app: typer.Typer) -> None:
    import typer

    command = program_command()
    program = typer.Argument(
        None, help="A script, or package.module:function; with -m, the program's first argument.", metavar="PROGRAM"
    )
    arguments = typer.Argument(None, help="The program's arguments, after --.", metavar="ARGS")
    module_option = typer.Option(None, "-m", help="Run a module, as python -m does.", metavar="MODULE")
    html_option = typer.Option(None, "--html", help="Write one self-contained HTML page.", metavar="OUT")
    markdown_option = typer.Option(False, "--markdown", help="Print Markdown, for a pull request.")
    json_option = typer.Option(False, "--json", help="Print JSON; the program's own output goes to stderr.")
    quiet_option = typer.Option(False, "--quiet", "-q", help="No progress, no report on the terminal.")
    precision_option = typer.Option(
        None, "--precision", help="What a rewrite may cost: fp32 (default), tf32, bf16, or a number.", metavar="CLASS"
    )
    objective_option = typer.Option(
        None, "--objective", help="What decides: wall (default) or kernel time.", metavar="TIME"
    )
    time_limit_option = typer.Option(
        None, "--time-limit", help="Seconds of tuning a graph, 600 by default.", metavar="SECONDS"
    )
    options_option = typer.Option(
        None, "--option", "-o", help="Another option of fxopt's or Inductor's, key=value.", metavar="KEY=VALUE"
    )

    @app.command("profile", cls=command, short_help="Where a program's time goes, and what limits it.")
    def profile(
        program: str | None = program,
        arguments: list[str] | None = arguments,
        module: str | None = module_option,
        skip: int = typer.Option(3, "--skip", help="Calls of the model that are left out as warm-up.", min=0),
        calls: int = typer.Option(5, "--calls", help="Calls that are profiled after them.", min=1),
        whole: bool = typer.Option(False, "--whole", help="Profile everything, as one call. For short programs."),
        counters: str | None = typer.Option(
            None, "--counters", help="Of a function on a GPU: none, quick (default) or full.", metavar="SET"
        ),
        no_ceilings: bool = typer.Option(
            False, "--no-ceilings", help="Do not measure what the device can reach where that is not known."
        ),
        save: Path | None = typer.Option(None, "--save", help="Write the profile as JSON.", metavar="OUT"),
        html: Path | None = html_option,
        markdown: bool = markdown_option,
        as_json: bool = json_option,
        quiet: bool = quiet_option,
    ) -> None:
        """Where a program's time goes: by kernel, operator, FX node, module and source line, and what limited it.

        Runs the program as python would, to its end, and profiles some calls of its model in the middle: a call of the
        outermost nn.Module, or a step of the optimiser where there is one. The program needs no change, and may use
        torch.compile with any backend, or not at all.

        Example: fxopt profile train.py -- --epochs 1

        Example: fxopt profile -m package.train --html page.html -- --epochs 1

        Example: fxopt profile package.module:function

        A function is called without arguments; it does the work, or returns (model, inputs). The exit code is the
        program's own.

        Next: fxopt explain NODE profile.json, and fxopt optimize for what can be done.
        """
        wanted = Wanted(html, save, markdown, as_json, quiet)
        wanted.check()
        target = _target(program, arguments, module)
        raise typer.Exit(run_profile(target, wanted, skip, calls, whole, counters, no_ceilings))

    @app.command("optimize", cls=command, short_help="Run a program faster, and say what was done and gained.")
    def optimize(
        program: str | None = program,
        arguments: list[str] | None = arguments,
        module: str | None = module_option,
        precision: str | None = precision_option,
        objective: str | None = objective_option,
        time_limit: float | None = time_limit_option,
        options: list[str] | None = options_option,
        save: Path | None = typer.Option(None, "--save", help="Write the report as JSON.", metavar="OUT"),
        html: Path | None = html_option,
        markdown: bool = markdown_option,
        as_json: bool = json_option,
        quiet: bool = quiet_option,
    ) -> None:
        """Runs a program with its models on the backend profile_guided, and says what was found, done and gained.

        Where the program calls torch.compile, that backend takes Inductor's place; where it does not, its outermost
        modules are compiled. The first call of each graph is measured and tuned, which takes minutes for a large model;
        the decision is kept as a plan, with which later runs start. The program itself is not changed: the line to put
        into it is printed at the end.

        Example: fxopt optimize serve.py --precision bf16 --html report.html

        Example: fxopt optimize package.module:function --time-limit 120 -o pairs=10

        Of a function that returns (model, inputs) the weights are held constant as well, as fxopt.optimize does.

        Next: fxopt bench with the same program, for eager, Inductor and fxopt side by side.
        """
        wanted = Wanted(html, save, markdown, as_json, quiet)
        wanted.check()
        chosen = _options(options, precision, objective, time_limit)
        raise typer.Exit(run_optimize(_target(program, arguments, module), wanted, chosen))

    @app.command("bench", cls=command, short_help="Eager, Inductor and fxopt side by side in one run.")
    def bench(
        program: str | None = program,
        arguments: list[str] | None = arguments,
        module: str | None = module_option,
        precision: str | None = precision_option,
        objective: str | None = objective_option,
        time_limit: float | None = time_limit_option,
        options: list[str] | None = options_option,
        pairs: int = typer.Option(30, "--pairs", help="Pairs of timed blocks of each comparison.", min=6),
        as_json: bool = json_option,
        quiet: bool = quiet_option,
    ) -> None:
        """Eager, Inductor and fxopt side by side in one run: time of a call, ratios with intervals.

        Blocks of two versions alternate, so that a machine that gets slower slows both; the ratio is the median over
        the pairs, with a 95 % interval that assumes no distribution. fxopt follows its plan where there is one, and
        tunes first where there is none.

        Example: fxopt bench package.module:function

        Example: fxopt bench infer.py --pairs 50 -- --batch 8

        Of a script, the model that it calls most often is measured after the script has ended, on the inputs of that
        model's first call, without gradients.

        Next: fxopt optimize, for what was done to the model.
        """
        wanted = Wanted(as_json=as_json, quiet=quiet)
        chosen = _options(options, precision, objective, time_limit)
        raise typer.Exit(run_bench(_target(program, arguments, module), wanted, chosen, pairs))


def _target(program: str | None, arguments: list[str] | None, module: str | None) -> Target:
    import typer

    from fxopt.script import Target, TargetError

    rest = list(arguments or ())
    if module is not None:
        return Target.of(module, [*([program] if program is not None else []), *rest], module=True)
    if program is None:
        raise typer.BadParameter("no program was given: a script, -m MODULE, or package.module:function")
    try:
        return Target.of(program, rest)
    except TargetError as error:
        raise CliError(str(error)) from None


def _options(
    given: list[str] | None, precision: str | None, objective: str | None, time_limit: float | None
) -> dict[str, Any]:
    """Checked now: a backend that is handed a bad option runs plain Inductor. Raises OptionError."""
    chosen = option_values(given or (), precision=precision, objective=objective, time_limit=time_limit)
    from fxopt.options import split_options
    from fxopt.torch_api import inductor

    quiet_kineto()
    split_options(None, chosen, inductor.config_keys(), inductor.list_modes())
    return chosen


def run_profile(
    target: Target, wanted: Wanted, skip: int, calls: int, whole: bool, counters: str | None, no_ceilings: bool = False
) -> int:
    """The exit code: the program's own where it has one, 1 where nothing was recorded."""
    quiet_kineto()
    from fxopt.script import Outcome, TargetError, run_profiled
    from profiler_core.collect.conflicts import ProfilerError
    from profiler_core.program import NothingRecorded

    wanted.say(f"running {target.command}")
    outcome = Outcome()
    try:
        with stdout_kept_for_the_result(wanted):
            profile, outcome = run_profiled(target, skip=skip, calls=calls, whole=whole, counters=counters)
    except NothingRecorded as error:
        outcome = getattr(error, "outcome", outcome)
        if not outcome.code:
            print_problem(str(error), outcome)
        else:
            print_problem("the program ended before anything could be profiled", outcome)
        return outcome.code or 1
    except (TargetError, ProfilerError, ValueError) as error:
        raise CliError(str(error)) from error
    if outcome.code:
        wanted.say(f"the program ended with exit code {outcome.code}; what follows was profiled before")
    present(profile, wanted, **({} if no_ceilings else _known(profile, wanted)))
    wanted.say(f"what can be done about it:  fxopt optimize {target.ours}")
    return outcome.code


def print_problem(text: str, outcome: Outcome) -> None:
    import sys

    ended = f" (the program ended with exit code {outcome.code})" if outcome.code else ""
    print(f"fxopt: error: {text}{ended}", file=sys.stderr)


def _known(profile: Any, wanted: Wanted) -> dict[str, Any]:
    """What the page of a bare profile is to know; measured as well for the terminal, which looks for what is kept."""
    if wanted.quiet and wanted.html is None and not wanted.markdown:
        return {}
    return {"ceilings": ceilings_here(profile, wanted)}


def run_optimize(target: Target, wanted: Wanted, options: dict[str, Any]) -> int:
    """The exit code: the program's own where it has one, 1 where no graph reached the backend."""
    quiet_kineto()
    from fxopt.report.model import Report, collect_reports
    from fxopt.rerouted import rerouted
    from fxopt.script import Outcome, TargetError, as_main, run, work_of

    wanted.say(f"running {target.command}; the first call of each graph is measured and tuned")
    outcome, state = Outcome(), None
    running = {"verbose": not wanted.quiet, **options}
    try:
        with stdout_kept_for_the_result(wanted):
            if target.kind == "function":
                with as_main(target):
                    report, line = _optimized_function(work_of(target), options, running)
            else:
                with collect_reports() as graphs, rerouted(running) as state:
                    outcome = run(target)
                report, line = Report(graphs=graphs), _line(state, options)
    except TargetError as error:
        raise CliError(str(error)) from error
    if state is not None:
        report.messages += state.left
    if not report.graphs:
        print_problem(_no_graph(state), outcome)
        return outcome.code or 1
    if outcome.code:
        wanted.say(f"the program ended with exit code {outcome.code}; what follows was decided before")
    present(report, wanted)
    for path in dict.fromkeys(graph.plan_path for graph in report.graphs if graph.plan_path):
        wanted.say(f"plan: {path}")
    wanted.say(f"to have it in the program:  {line}")
    return outcome.code


def _optimized_function(work: Any, options: dict[str, Any], running: dict[str, Any]) -> tuple[Report, str]:
    """``running``: the options with those that are for this run alone."""
    import fxopt
    from fxopt.report.model import Report, collect_reports
    from fxopt.rerouted import rerouted

    given = "".join(f", {name}={spelt(value)}" for name, value in options.items())
    if work.model is not None:
        if work.model.training:
            raise CliError(
                "the model is in training mode, and fxopt.optimize is for inference: call model.eval() first"
            )
        fast = fxopt.optimize(work.model, work.kwargs or work.args, **running)
        return fast.report, f"model = fxopt.optimize(model, inputs{given})"
    with collect_reports() as graphs, rerouted(running) as state:
        work.call()
    return Report(graphs=graphs), _line(state, options)


def _line(state: Rerouted, options: dict[str, Any]) -> str:
    given = f", options={shown_options(options)}" if options else ""
    if state.compiled:
        return f'torch.compile(..., backend="profile_guided"{given})'
    return f'model = torch.compile(model, backend="profile_guided"{given})'


def _no_graph(state: Rerouted | None) -> str:
    if state is not None and not state.calls and not state.compiled:
        return (
            "nothing was optimised: the program called no nn.Module and no torch.compile in this process (processes "
            "that it starts are not seen). Give a function: package.module:function"
        )
    left = f" ({'; '.join(state.left)})" if state is not None and state.left else ""
    return (
        f"nothing was optimised: no graph reached the backend{left}. Either no compiled model was called, or Dynamo "
        "left it to eager: TORCH_LOGS=graph_breaks says where"
    )


def run_bench(target: Target, wanted: Wanted, options: dict[str, Any], pairs: int) -> int:
    """The exit code. Raises CliError where there is nothing to measure."""
    quiet_kineto()
    from fxopt import bench
    from fxopt.cli_output import pairs as print_pairs
    from fxopt.script import Outcome, TargetError, as_main, work_of

    outcome = Outcome()
    try:
        with stdout_kept_for_the_result(wanted):
            if target.kind == "function":
                with as_main(target):
                    work = work_of(target)
            else:
                wanted.say(f"running {target.command} for its model and inputs")
                work, outcome = bench.work_of_program(target)
            with busy(wanted, "measuring eager, Inductor and fxopt in turns"):
                found = bench.measure(work, options, pairs=pairs)
    except (TargetError, bench.NothingToMeasure) as error:
        raise CliError(str(error)) from error
    for note in found.notes:
        warn(note)
    if wanted.as_json:
        print_pairs(found.to_json(), True)
    else:
        print(bench.table(found))
    return outcome.code
