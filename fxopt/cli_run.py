"""`fxopt profile`, `optimize` and `bench`: other people's programs, run in this process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.cli_output import CliError, Interrupted, WrongCommand, did_you_mean
from fxopt.cli_parameters import Program, Tuning, grouped
from fxopt.cli_show import (
    Savable,
    Wanted,
    busy,
    ceilings_here,
    files_of,
    present,
    program_command,
    shown_options,
    spelt,
    stdout_kept_for_the_result,
    warn,
)

if TYPE_CHECKING:
    from fxopt.named_passes import NamedPasses
    from fxopt.report.model import GraphReport, Report
    from fxopt.rerouted import Rerouted
    from fxopt.script import Outcome, Target, Work


def quiet_kineto() -> None:
    """torch's profiler writes lines of its own to stderr unless this is set before torch is loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def add_commands(app: typer.Typer) -> None:
    command = program_command()

    @app.command("profile", cls=command, short_help="Where a program's time goes, and what limits it.")
    @grouped
    def profile(
        program: Program,
        skip: int = typer.Option(3, "--skip", help="Calls of the model left out as warm-up.", min=0, metavar="N"),
        calls: int = typer.Option(5, "--calls", help="Calls that are profiled after them.", min=1, metavar="N"),
        whole: bool = typer.Option(False, "--whole", help="Profile everything, as one call. For short programs."),
        counters: str | None = typer.Option(
            None, "--counters", help="Of a function on a GPU: none, quick (default) or full.", metavar="SET"
        ),
        no_ceilings: bool = typer.Option(
            False, "--no-ceilings", help="Do not measure what the device can reach where that is not known."
        ),
        *,
        wanted: Savable,
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

        Next: with --save profile.json, fxopt explain NODE profile.json; and fxopt optimize for what can be done.
        """
        wanted.check()
        check_counters(counters)
        raise typer.Exit(run_profile(program.target(), wanted, skip, calls, whole, counters, no_ceilings))

    @app.command("optimize", cls=command, short_help="Run a program faster, and say what was done and gained.")
    @grouped
    def optimize(program: Program, tuning: Tuning, wanted: Savable) -> None:
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
        wanted.check()
        chosen = tuning.options()
        raise typer.Exit(run_optimize(program.target(), wanted, chosen))

    @app.command("bench", cls=command, short_help="Eager, Inductor and fxopt side by side in one run.")
    @grouped
    def bench(
        program: Program,
        tuning: Tuning,
        pairs: Annotated[
            int, typer.Option("--pairs", help="Pairs of timed blocks of each comparison.", min=6, metavar="N")
        ] = 30,
        *,
        wanted: Savable,
    ) -> None:
        """Eager, Inductor and fxopt side by side in one run: time of a call, ratios with intervals.

        Blocks of two versions alternate, so that a machine that gets slower slows both; the ratio is the median over
        the pairs, with a 95 % interval that assumes no distribution. fxopt follows its plan where there is one, and
        tunes first where there is none. With --precision bf16 the model under torch's autocast is timed as well.

        Example: fxopt bench package.module:function

        Example: fxopt bench infer.py --pairs 50 --html page.html -- --batch 8

        Of a script, the model that it calls most often is measured after the script has ended, on the inputs of that
        model's first call, without gradients.

        Next: fxopt optimize, for what was done to the model.
        """
        wanted.check()
        chosen = tuning.options()
        raise typer.Exit(run_bench(program.target(), wanted, chosen, pairs))


def check_counters(wanted: str | None) -> None:
    """Raises WrongCommand for what is no set of counters: a script and a CPU have none, and would not say so."""
    from profiler_core.counting import COUNTER_SETS

    if wanted is not None and wanted not in COUNTER_SETS:
        near = did_you_mean(wanted, COUNTER_SETS)
        raise WrongCommand(f"--counters {wanted}: no set of counters; there are {', '.join(COUNTER_SETS)}{near}")


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
    except KeyboardInterrupt:
        raise Interrupted("nothing was profiled, and nothing is left behind") from None
    except NothingRecorded as error:
        outcome = getattr(error, "outcome", outcome)
        if outcome.interrupted:
            raise Interrupted("nothing was profiled, and nothing is left behind") from None
        if not outcome.code:
            print_problem(str(error), outcome)
        else:
            print_problem("the program ended before anything could be profiled", outcome)
        return outcome.code or 1
    except (TargetError, ProfilerError) as error:
        raise _told(error) from error
    except Exception as error:
        return _failed(target, error)
    if outcome.code:
        wanted.say(f"the program ended with exit code {outcome.code}; what follows was profiled before")
    present(profile, wanted, **({} if no_ceilings else _known(profile, wanted)))
    if outcome.interrupted:
        raise Interrupted(f"what was profiled before is {_where(wanted)}")
    wanted.say(f"what can be done about it:  fxopt optimize {target.ours}")
    return outcome.code


def _where(wanted: Wanted) -> str:
    """Where the result of a command that was interrupted is, after `present`."""
    files = [str(path) for path in (wanted.save, wanted.html) if path is not None]
    return f"kept in {' and '.join(files)}" if files else "all that is shown; no file was written"


def _plans(graphs: Sequence[GraphReport]) -> str:
    """What a command that was interrupted leaves behind: the decisions that were written before."""
    kept = len({graph.plan_path for graph in graphs if graph.plan_path and graph.source == "tuned"})
    if not kept:
        return "no graph was decided, and nothing is left behind"
    return f"{kept} graph{'s were' if kept > 1 else ' was'} decided before, and the plan{'s' * (kept > 1)} kept"


def _told(error: Exception) -> CliError:
    from fxopt.script import WrongFunction

    return (WrongCommand if isinstance(error, WrongFunction) else CliError)(str(error))


def _failed(target: Target, error: Exception) -> int:
    """The exit code of a function whose own call fails; its traceback is told as Python tells it."""
    from fxopt.script import Outcome, print_error, raised_in_fxopt

    if target.kind != "function" or raised_in_fxopt(error):
        raise error
    print_error(error)
    print_problem(f"the call of {target.name} failed, as told above", Outcome())
    return 1


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
    from fxopt.script import Outcome, TargetError, WrongFunction, as_main, run, work_of

    passes = _named_passes(target, options)
    wanted.say(f"running {target.command}; the first call of each graph is measured and tuned")
    outcome, state = Outcome(), None
    running = {"verbose": not wanted.quiet, **options}
    with collect_reports() as graphs:
        try:
            with stdout_kept_for_the_result(wanted):
                if target.kind == "function":
                    with as_main(target):
                        work = work_of(target, passes.check)
                        report, line, state = _optimized_function(work, options, running)
                    if state is not None and not (report.graphs or state.calls or state.compiled):
                        raise WrongFunction(work.refusal.format("called no nn.Module and no torch.compile"))
                else:
                    with rerouted(running, passes.before_a_call) as state:
                        outcome = run(target)
                    if passes.refused:
                        _tell_nothing_at_the_end()
                    if passes.refused or outcome.error is None:
                        passes.after()
                    report, line = Report(graphs=graphs), _line(state, options)
        except TargetError as error:
            _tell_nothing_at_the_end()
            raise _told(error) from error
        except KeyboardInterrupt:
            raise Interrupted(_plans(graphs)) from None
        except Exception as error:
            return _failed(target, error)
    if state is not None:
        report.messages += state.left
    if outcome.interrupted and not report.graphs:
        raise Interrupted(_plans(graphs))
    if not report.graphs:
        _tell_nothing_at_the_end()
        failed = "nothing was optimised: the program's own error, above, came before a graph was compiled"
        print_problem(_no_graph(state) if outcome.error is None else failed, outcome)
        return outcome.code or 1
    if outcome.code:
        wanted.say(f"the program ended with exit code {outcome.code}; what follows was decided before")
    present(report, wanted)
    if outcome.interrupted:
        raise Interrupted(_plans(graphs))
    decided = [graph for graph in report.graphs if graph.source in ("tuned", "plan")]
    for path in dict.fromkeys(graph.plan_path for graph in decided if graph.plan_path):
        wanted.say(f"plan: {path}")
    if any(graph.decision == "candidate" for graph in report.graphs):
        wanted.say(f"to have it in the program:  {line}")
    else:
        wanted.say("nothing to put into the program: no graph got code that is better than Inductor's own")
    return outcome.code


def _tell_nothing_at_the_end() -> None:
    """The backend would tell once more, as the process ends, why no graph reached it."""
    from fxopt.backend import no_graph_reached

    atexit.unregister(no_graph_reached)


def _named_passes(target: Target, options: dict[str, Any]) -> NamedPasses:
    """The passes that the options name. Of a script it is said now what would be refused at its first call."""
    from fxopt.named_passes import NamedPasses

    passes = NamedPasses.of(options)
    if target.kind != "function" and (problem := passes.problem()):
        stop = "" if problem.endswith("?") else "."
        warn(f"{problem}{stop} The program may register one of this name, and is run up to its model")
    return passes


def _optimized_function(
    work: Work, options: dict[str, Any], running: dict[str, Any]
) -> tuple[Report, str, Rerouted | None]:
    """The report, the line for the program, and what became of the modules of a function that does the work.

    ``running``: the options with those that are for this run alone.
    """
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
        if fast._untimed:  # what Dynamo left to eager: in the next call, of which this is the only one
            try:
                fast(*work.args, **work.kwargs)
            except Exception as error:
                fast.report.messages.append(f"what is left to eager was not timed: {type(error).__name__}: {error}")
        return fast.report, f"model = fxopt.optimize(model, inputs{given})", None
    with collect_reports() as graphs, rerouted(running) as state:
        work.call()
    return Report(graphs=graphs), _line(state, options), state


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
    from fxopt.options import OptionError
    from fxopt.report import markdown
    from fxopt.report.comparison import text
    from fxopt.report.model import collect_reports
    from fxopt.script import Outcome, TargetError, WrongFunction, as_main, work_of

    outcome = Outcome()
    passes = _named_passes(target, options)
    with collect_reports() as graphs:
        try:
            with stdout_kept_for_the_result(wanted):
                if target.kind == "function":
                    with as_main(target):
                        work = work_of(target, passes.check)
                else:
                    wanted.say(f"running {target.command} for its model and inputs")
                    work, outcome = bench.work_of_program(target, passes.before_a_call)
                    passes.after()
                with busy(wanted, "measuring eager, Inductor and fxopt in turns"):
                    report = bench.measure(work, options, pairs=pairs)
        except WrongFunction as error:
            _tell_nothing_at_the_end()
            raise _told(error) from error
        except (TargetError, bench.NothingToMeasure) as error:
            if passes.refused:  # so that the call was never made
                raise OptionError(passes.refused) from None
            raise _told(error) from error
        except KeyboardInterrupt:
            raise Interrupted(_plans(graphs)) from None
        except Exception as error:
            return _failed(target, error)
    found = report.comparison
    assert found is not None
    for note in found.notes:
        warn(note)
    with files_of(report, wanted):
        if wanted.as_json:
            print_pairs(found.to_json(), True)
        elif wanted.markdown:
            print("\n\n".join(markdown.compared(found)))
        elif not wanted.quiet:
            print(text(found))
    return outcome.code
