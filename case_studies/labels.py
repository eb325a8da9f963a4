"""Whether the labels are right, on kernels whose limit is known (case_studies/label_kernels.py).

    python -m case_studies.labels --json FILE [--set development|holdout|all] [--case NAME ...]
                                  [--save-profiles DIR | --from-profiles DIR] [--thresholds FILE] [--without-counters]

Measuring takes an NVIDIA GPU and Triton; saved profiles can be labelled anywhere. Exits with 1 where cases of the
holdout ran and fewer than 90 % of them are right.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from case_studies import show
from case_studies.label_kernels import Case, cases
from case_studies.runner import fp32_matmuls
from fxopt.labels import Axis, Label

if TYPE_CHECKING:
    import pandas as pd

    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

ENOUGH = 0.9
CEILINGS = "ceilings.json"
CLOCKS = ("sm_mhz", "sm_mhz_min", "sm_mhz_max", "drifted", "throttled")


@dataclass
class Outcome:
    """What became of a case. ``failed`` says why it has no labels; ``kernel`` is in question, "" for a graph."""

    case: Case
    labels: tuple[Label, ...] = ()
    failed: str = ""
    kernel: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def found(self) -> frozenset[Axis]:
        return frozenset(label.axis for label in self.labels)

    @property
    def right(self) -> bool:
        return not self.failed and self.case.expected <= self.found and not self.case.forbidden & self.found

    @property
    def why(self) -> str:
        """What is wrong, "" where nothing is."""
        if self.failed:
            return f"failed: {self.failed}"
        parts = {"lacks": self.case.expected - self.found, "must not be": self.case.forbidden & self.found}
        return "; ".join(f"{word} {_names(axes)}" for word, axes in parts.items() if axes)

    def to_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "set": case.set,
            "axis": case.axis.value if case.axis else None,
            "scope": case.scope,
            "note": case.note,
            "expected": _sorted(case.expected),
            "forbidden": _sorted(case.forbidden),
            "right": self.right,
            "why": self.why,
            "found": _sorted(self.found),
            "labels": [label.to_json() for label in self.labels],
            "kernel": self.kernel,
            "numbers": self.numbers,
            "notes": list(self.notes),
            "missing": list(self.missing),
        }


def measure(case: Case, device: torch.device, store: Path | None = None) -> Profile:
    """The profile of a case, with all counters, by application replay: a case does the same at every call."""
    from profiler_core import profile

    options: dict[str, Any] = {"counters": "full", "replay": "application", "device": device, "store": store}
    try:
        with torch.no_grad(), fp32_matmuls(tf32=case.tf32):
            return profile(case.build(device), warmup=2, **options)
    finally:
        torch.compiler.reset()
        gc.collect()


def judge(case: Case, profile: Profile, ceilings: Ceilings, thresholds: Mapping[str, float] | None = None) -> Outcome:
    """The labels of what is in question, the whole function or one kernel."""
    from fxopt.rules import label

    report = label(profile, ceilings, thresholds=thresholds)
    seen = profile.environment.get("clocks") or {}
    clocks = {name: seen[name] for name in CLOCKS if name in seen}
    numbers: dict[str, Any] = {"wall_ns": profile.wall_ns, "kernel_ns": profile.kernel_ns, "clocks": clocks}
    outcome = Outcome(case, numbers=numbers, notes=profile.notes)
    if case.scope == "graph":
        outcome.labels = tuple(found for found in report.labels if found.scope == "graph")
        outcome.missing = report.missing
        return outcome
    kernel = _in_question(profile, case.kernel)
    if kernel is None:
        ran = ", ".join(sorted({str(name)[:60] for name in profile.window["name"]})) or "none"
        outcome.failed = f"no kernel matches {case.kernel!r}; there were: {ran}" if case.kernel else "no kernel ran"
        return outcome
    place = ("group", kernel["launch"]) if kernel["launch"] else ("kernel", kernel["name"])
    outcome.labels = tuple(found for found in report.labels if (found.scope, found.launch) == place)
    outcome.missing = tuple(sentence for sentence in report.missing if str(place[1])[:40] in sentence)
    outcome.kernel = str(kernel["name"])
    outcome.numbers |= _numbers(kernel, profile)
    return outcome


def _in_question(profile: Profile, pattern: str) -> pd.Series | None:
    """The longest row of the kernel that matches and takes the largest time in all."""
    rows = profile.window[profile.window["kind"] == "kernel"]
    rows = rows[[bool(re.search(pattern, str(name))) for name in rows["name"]]]
    if rows.empty:
        return None
    place = rows["launch"].where(rows["launch"] != "", rows["name"])
    rows = rows[place == rows["duration_ns"].groupby(place).sum().idxmax()]
    return rows.loc[rows["duration_ns"].idxmax()]


def _numbers(kernel: pd.Series, profile: Profile) -> dict[str, Any]:
    """The launch record and counters of one kernel, and what is modelled of its launch."""
    from profiler_core.counters import FULL

    wanted = (
        "duration_ns", "grid", "block", "theoretical_occupancy", "occupancy_limiter", "launch", "top_operator",
        "family", "opaque", "counters", *FULL,
    )  # fmt: skip
    numbers = {name: _plain(kernel[name]) for name in wanted if name in kernel.index}
    groups = profile.groups()
    group = groups[(groups["graph"] == kernel["graph"]) & (groups["launch"] == kernel["launch"])]
    if kernel["launch"] and len(group):
        modelled = group.iloc[0]
        numbers |= {"modelled_flops": _plain(modelled["flops"]), "modelled_bytes": _plain(modelled["bytes"])}
        numbers["nodes"] = list(modelled["nodes"])
    return numbers


def _plain(value: Any) -> Any:
    """A value of a frame as JSON can hold it; what is missing is None."""
    import pandas as pd

    if isinstance(value, tuple):
        return list(value)
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, Any]]]:
    """Cases, how many are right, and the share, by set and then by the axis that they are made for ("negative" for
    none), and in "all"; beside them how often each axis was given in error or missed.
    """
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name in dict.fromkeys(outcome.case.set for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.case.set == name]
        rows = {}
        for axis in (*Axis, None):
            made = [outcome for outcome in mine if outcome.case.axis is axis]
            if made:
                rows[axis.value if axis else "negative"] = _count(made)
            if axis:
                asked = [o for o in mine if axis in o.case.expected | o.case.forbidden and not o.failed]
                errors = {
                    "missed": [o.case.name for o in asked if axis in o.case.expected - o.found],
                    "in_error": [o.case.name for o in asked if axis in o.case.forbidden & o.found],
                }
                rows.setdefault(axis.value, {"cases": 0, "right": 0, "share": None}).update(errors)
        result[name] = {**rows, "all": _count(mine)}
    return result


def _count(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    right = sum(outcome.right for outcome in outcomes)
    return {"cases": len(outcomes), "right": right, "share": right / len(outcomes)}


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether enough of the holdout is right, where there is one."""
    holdout = [outcome for outcome in outcomes if outcome.case.set == "holdout"]
    return not holdout or _count(holdout)["share"] >= ENOUGH


def _sorted(axes: frozenset[Axis]) -> list[str]:
    return sorted(axis.value for axis in axes)


def _names(axes: frozenset[Axis]) -> str:
    return ", ".join(_sorted(axes))


# --- screen and command line ----------------------------------------------------------------------------------------


def _table(outcomes: Sequence[Outcome]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("case", "made for", "labels found", ""):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        axis = outcome.case.axis.value if outcome.case.axis else "negative"
        verdict = Text("right", style="green") if outcome.right else Text(outcome.why, style="red")
        table.add_row(Text(outcome.case.name), axis, ", ".join(label.axis.value for label in outcome.labels), verdict)
    return table


def _summary_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{title} set", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("made for")
    for column in ("kernels", "right", "share", "missed", "in error"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        errors = (str(len(row[key])) if key in row else "" for key in ("missed", "in_error"))
        table.add_row(name, str(row["cases"]), str(row["right"]), share, *errors)
    return table


def chosen(which: str, names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of a set, or those named. Raises ValueError, naming what there is."""
    found = cases(which)
    unknown = [name for name in names if name not in {case.name for case in found}]
    if unknown:
        known = ", ".join(case.name for case in found) or "none"
        raise ValueError(f"no case {', '.join(map(repr, unknown))} in this set; there are {known}")
    return tuple(case for case in found if not names or case.name in names)


def _outcome(
    case: Case,
    device: torch.device | None,
    ceilings: Ceilings,
    thresholds: Mapping[str, float],
    saved: Path | None,
    store: Path | None,
    counted: bool = True,
) -> Outcome:
    """Measures the case, or reads the profile in ``saved`` where there is no device. What goes wrong is its outcome."""
    from profiler_core.profiles import Profile

    path = saved / f"{case.name}.json" if saved else None
    try:
        if device is None:
            assert path is not None
            profile = Profile.load(path)
        else:
            profile = measure(case, device, store)
            if path is not None:
                profile.save(path)
        return judge(case, profile if counted else without_counters(profile), ceilings, thresholds)
    except Exception as error:  # whatever it is, the other cases go on
        reason = str(error).strip().partition("\n")[0]
        return Outcome(case, failed=f"{type(error).__name__}: {reason}"[:400])


def without_counters(profile: Profile) -> Profile:
    """The profile as it would be where counters may not be read."""
    from profiler_core.counters import COUNTERS

    read = [counter.key for counter in COUNTERS if not counter.launch]
    return replace(profile, kernels=profile.kernels.drop(columns=[*read, "counters"], errors="ignore"))


def _environment(device: torch.device | None, folder: Path | None, selected: Sequence[Case]) -> dict[str, Any]:
    """Of the device, or what the first saved profile says that it was taken on."""
    from profiler_core.environment import environment
    from profiler_core.profiles import Profile

    if device is not None:
        return environment(device)
    for case in selected:
        with suppress(OSError, ValueError):
            return Profile.load(folder / f"{case.name}.json").environment  # type: ignore[operator]
    return {}


def run(
    selected: Sequence[Case],
    device: torch.device | None,
    ceilings: Ceilings,
    *,
    thresholds: Mapping[str, float],
    saved: Path | None,
    path: Path | None,
    screen: Any,
    store: Path | None = None,
    counted: bool = True,
) -> list[Outcome]:
    """All cases, the document at ``path`` written after each, so that what is done is not lost."""
    document: dict[str, Any] = {
        "command": show.command_line("case_studies.labels"),
        "environment": _environment(device, saved, selected),
        "ceilings": ceilings.to_json(),
        "thresholds": dict(thresholds),
    }
    outcomes: list[Outcome] = []
    for case in selected:
        outcomes.append(_outcome(case, device, ceilings, thresholds, saved, store, counted))
        screen.print(f"{len(outcomes)}/{len(selected)} {case.name}: {outcomes[-1].why or 'right'}", markup=False)
        if path is not None:
            results = {outcome.case.name: outcome.to_json() for outcome in outcomes}
            show.write_json(path, {**document, "summary": summary(outcomes), "cases": results})
    return outcomes


def main() -> None:
    import typer

    def labels(
        json_path: Path = typer.Option(None, "--json", help="Write the result here."),
        which: str = typer.Option("all", "--set", help="development, holdout or all."),
        case: list[str] = typer.Option([], help="Only this case; may be given several times."),
        save_profiles: Path = typer.Option(None, help="Keep each case's profile in this folder."),
        from_profiles: Path = typer.Option(None, help="Measure nothing: label the profiles kept in this folder."),
        thresholds: Path = typer.Option(None, help="Thresholds over the defaults, a TOML file."),
        without_counters: bool = typer.Option(False, help="Label as where counters may not be read."),
    ) -> None:
        from fxopt.options import OptionError, resolve_options
        from profiler_core.roofline import Ceilings, ceilings

        if save_profiles and from_profiles:
            raise typer.BadParameter(
                "--save-profiles and --from-profiles exclude each other: one measures, one does not"
            )
        try:
            selected = chosen(which, case)
            given = {"thresholds": thresholds} if thresholds else {}
            limits = dict(resolve_options(given, environ={}).thresholds)
        except (ValueError, OptionError) as error:
            raise typer.BadParameter(str(error)) from error
        screen, folder, device = show.console(), save_profiles or from_profiles, None
        if from_profiles is not None:
            try:
                known = Ceilings.from_json(json.loads((from_profiles / CEILINGS).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise typer.BadParameter(f"{from_profiles / CEILINGS}: {error}") from error
        else:
            if not torch.cuda.is_available():
                raise typer.BadParameter(
                    "torch finds no GPU: use --from-profiles with profiles from a machine with one"
                )
            device = torch.device("cuda", torch.cuda.current_device())
            known = ceilings(device, None)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / CEILINGS).write_text(json.dumps(known.to_json(), indent=1), encoding="utf-8")
        outcomes = run(
            selected,
            device,
            known,
            thresholds=limits,
            saved=folder,
            path=json_path,
            screen=screen,
            counted=not without_counters,
        )
        screen.print(_table(outcomes))
        for name, rows in summary(outcomes).items():
            screen.print(_summary_table(name, rows))
        if not passed(outcomes):
            raise typer.Exit(1)

    typer.run(labels)


if __name__ == "__main__":
    main()
