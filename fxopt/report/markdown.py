"""A report, profile or diff as a pull request comment in GitHub's Markdown: short, with the details folded.

Names from elsewhere stand in code spans, and sentences have their marks escaped, so that neither breaks a table, names
a person or becomes a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fxopt.report.diff import Diff
from fxopt.report.measurements import OF_PROFILE, doubts, kernel_origin, out_of_time, uneven, wall_origin
from fxopt.report.model import GraphReport, Report
from fxopt.report.next_step import next_step
from fxopt.report.printing import shorten
from fxopt.report.subject import Part, parts
from fxopt.report.terminal import TOP, by_source_line, lacking, place, scientific, size
from fxopt.report.terminal_diff import HEADINGS, change, label_lines, named, summary, told
from profiler_core.quantities import duration, glued

if TYPE_CHECKING:
    from fxopt.labels import Label
    from fxopt.measure import PairedResult
    from fxopt.report.comparison import Comparison
    from profiler_core.profiles import Profile

__all__ = ["code", "escape", "render"]

MOST_GRAPHS = 6
"""Graphs that a comment tells of; one may hold 65,536 characters."""
_WIDTH = 72


def render(subject: Report | Profile | Diff) -> str:
    """The comment, which ends with a line end."""
    if isinstance(subject, Diff):
        blocks = list(_diff(subject))
    elif isinstance(subject, Report):
        blocks = list(_report(subject))
    else:
        (part,) = parts(subject)
        blocks = [f"### fxopt: profile on {code(_device(subject))}", *_where(part), *_limits(part), *_environment(part)]
    return "".join(
        part if part.startswith("`") else glued(part) for part in _CODE.split("\n\n".join(blocks) + "\n")
    )


_CODE = re.compile(r"(`+[^`]+`+)")


def code(name: str, width: int = _WIDTH) -> str:
    """A name as a code span, also for a cell of a table."""
    text = shorten(name, width).replace("|", "\\|")
    if not text.strip():
        return ""
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * (max(runs, default=0) + 1)
    return f"{fence} {text} {fence}" if runs else f"{fence}{text}{fence}"


def escape(sentence: str, width: int = 400) -> str:
    """A sentence, also for a cell of a table: no mark, mention, link or tag in it is one."""
    text = shorten(sentence, width).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text).replace("@", "&#64;")
    return text.replace("://", "&#58;//").replace("www.", "www&#46;")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table, the first `numbers` columns on the right."""
    rule = ["--:" if index < numbers else "---" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _folded(title: str, *blocks: str) -> str:
    return "\n\n".join([f"<details><summary>{title}</summary>", *blocks, "</details>"])


def _device(profile: Profile) -> str:
    return str(profile.environment.get("device_name") or profile.environment.get("device_type") or "an unknown device")


# ---- a report ----


def compared(found: Comparison) -> Iterable[str]:
    """What `fxopt bench` measured: a table, and what it says."""
    yield f"### fxopt: {found.ratio('Inductor', 'fxopt')} Inductor's speed, {found.ratio('eager', 'fxopt')} eager's"
    rows = [[time, name, eager, inductor] for name, time, eager, inductor in found.rows()]
    yield _table(("a call", "", "against eager", "against Inductor"), rows, 1)
    error = "" if found.error is None else f" Relative L2 distance of its output from eager's: {found.error:.1e}."
    yield f"{found.verdict}; on {code(found.device)}. Kept passes: {escape(found.kept)}.{error}"
    yield from _bullets(found.notes)


def _report(report: Report) -> Iterable[str]:
    if report.comparison is not None:
        yield from compared(report.comparison)
    if not report.graphs:
        yield "### fxopt: no graph reached it"
        yield "The model ran as it is; nothing was measured or changed."
    for part in parts(report)[:MOST_GRAPHS]:
        assert part.graph is not None
        yield f"### fxopt{f', {part.name}' if part.name else ''}: {_headline(part.graph)}"
        yield from _graph(part, part.graph)
    if len(report.graphs) > MOST_GRAPHS:
        yield f"and {len(report.graphs) - MOST_GRAPHS} more graphs"
    if report.eager_modules:
        left = (f"- {code(m.name)} ({code(m.type)}), {duration(m.time_ns)}" for m in report.eager_modules[:TOP])
        yield "Left to eager by Dynamo:\n\n" + "\n".join(left)
    yield from _bullets(report.messages)


def _headline(graph: GraphReport) -> str:
    if graph.decision != "candidate":
        return "Inductor's own code is kept"
    if graph.ratio is None:
        return "code from a plan is in use"
    return f"{_ratio(graph.ratio)} Inductor's speed"


def _ratio(paired: PairedResult) -> str:
    return f"{paired.ratio:.2f}x ({paired.low:.2f} to {paired.high:.2f})"


def _graph(part: Part, graph: GraphReport) -> Iterable[str]:
    rows = [
        _compared(f"wall time a call, {wall_origin(graph)}", graph.baseline_wall_ns, graph.kept_wall_ns),
        _compared(f"kernel time a call, {kernel_origin(graph)}", graph.baseline_kernel_ns, graph.kept_kernel_ns),
    ]
    if graph.verdict is not None:
        errors = [scientific(error) for error in (graph.verdict.baseline_rel_l2, graph.verdict.rel_l2)]
        rows.append(["relative L2 error against fp64", *errors, f"limit {scientific(graph.verdict.limit)}"])
    if graph.memory_bytes:
        rows.append(["memory held", "", f"+{size(graph.memory_bytes)}", ""])
    if graph.baseline_wall_ns is not None or graph.verdict is not None:
        yield _table(("", "Inductor", "kept", "change"), rows)
    yield from _bullets([line for line in (out_of_time(graph), *doubts(graph)) if line])
    if graph.ratio is not None:
        noise = f"{graph.ratio.pairs} interleaved pairs; the same code differs by {100 * graph.ratio.noise:.1f} %"
        yield f"95 % confidence interval, from {noise}." + "".join(f" Marked: {escape(m)}." for m in graph.ratio.marked)
    if graph.passes:
        yield f"Kept passes: {', '.join(code(name) for name in graph.passes)}."
    kept = [row for row in graph.ablation if row.outcome == "kept"][:TOP]
    if kept:
        worth = [
            [
                code(row.name),
                *(_ratio(t.wall) if t is not None and t.wall is not None else "" for t in (row.alone, row.removed)),
            ]
            for row in kept
        ]
        yield _table(("pass", "alone", "in the set"), worth)
    yield from _bullets(graph.messages)
    yield from _where(part)
    yield from _limits(part)
    if graph.candidates:
        tried = [[code(c.name), c.outcome, escape(c.reason, 160)] for c in graph.candidates[-2 * TOP :]]
        yield _folded(f"Candidates ({len(graph.candidates)})", _table(("candidate", "outcome", "reason"), tried))
    if graph.out_of_reach:
        lines = "\n".join(f"- {escape(line, 240)}" for line in graph.out_of_reach[: 2 * TOP])
        yield _folded(f"Out of reach ({len(graph.out_of_reach)})", lines)
    yield from _environment(part)


def _compared(what: str, before: float | None, after: float | None) -> list[str]:
    known = before is not None and after is not None
    return [what, duration(before), duration(after), change(before, after) if known else ""]  # type: ignore[arg-type]


def _bullets(lines: Sequence[str]) -> Iterable[str]:
    if lines:
        yield "\n".join(f"- {escape(line)}" for line in lines[:TOP])


# ---- a profile ----


def _where(part: Part) -> Iterable[str]:
    profile = part.profile
    if profile is None:
        return
    if not profile.total_ns:
        yield "No kernel ran in the measured calls."
        return
    if part.graph is None:
        wall = "" if profile.wall_ns != profile.wall_ns else f" in {duration(profile.wall_ns)} of wall time"
        yield (
            f"A call: {duration(profile.kernel_ns)} of kernels{wall}, {profile.attributed_share:.1%} of it attributed; "
            f"{profile.opaque_share:.1%} in kernels that a graph cannot look into."
        )
        yield from _bullets([line for line in (uneven(profile),) if line])
    lines = [
        [
            duration(row["time_ns"]),
            f"{row['share']:.1%}",
            code(place(str(row["file"]), int(row["line"]))),
            code(row["source"]),
        ]
        for row in by_source_line(profile.nodes).head(TOP).to_dict("records")
    ]
    kernels = [
        [duration(row["time_ns"]), f"{row['share']:.1%}", f"{row['kernels']:.3g}", code(str(row["name"]))]
        for row in profile.by("name").head(TOP).to_dict("records")
    ]
    when = "" if part.graph is None else f", {OF_PROFILE}: {duration(profile.kernel_ns)} of kernels in a call"
    where = f"Where the time goes, by source line{when}"
    yield _folded(where, _table(("time", "share", "at", "source line"), lines, 2))
    yield _folded("Kernels", _table(("time", "share", "a call", "kernel"), kernels, 3))
    if profile.notes:
        yield _folded("Notes on the measurement", *_bullets(profile.notes))


def _limits(part: Part) -> Iterable[str]:
    if part.profile is None and not part.labels:
        return
    axes: dict[str, list[Label]] = {}
    for label in sorted(part.labels, key=lambda label: -label.headroom_ns):
        axes.setdefault(label.axis.value, []).append(label)
    rows = [
        [code(axis), str(len(held)), duration(sum(label.headroom_ns for label in held)), escape(held[0].why, 200)]
        for axis, held in axes.items()
    ]
    found = _table(("limit", "places", "could save up to", "the largest"), rows) if rows else "No rule fired."
    steps = []
    if part.graph is None and part.profile is not None:  # of a report the candidates tell
        steps = [f"{axis}: {next_step(held[0], part.profile)}" for axis, held in axes.items()]
    said = _bullets([*steps, *lacking(part.missing)])
    yield _folded(f"What limits it: {', '.join(axes) or 'no rule fired'}", found, *said)


def _environment(part: Part) -> Iterable[str]:
    if part.profile is None:
        return
    held = part.profile.environment.items()
    rows = [[code(str(name)), code(str(value), 100)] for name, value in held if value not in (None, "", [], {})]
    if rows:
        yield _folded("Environment", _table(("", "value"), rows[:40]))


# ---- a diff ----


def _diff(diff: Diff) -> Iterable[str]:
    yield f"### fxopt: {summary(diff)}"
    if facts := [*told(diff), *diff.notes]:
        yield from _bullets(facts)
    unsure = False
    for name, title in HEADINGS.items():
        data = diff.tables[name]
        moved = data[data["change_ns"] != 0]
        if moved.empty:
            continue
        rows = []
        for row in moved.head(TOP).to_dict("records"):
            sure = "" if row["clear"] or not (row["before_ns"] and row["after_ns"]) else " ~"
            unsure |= bool(sure)
            times = duration(row["before_ns"]), duration(row["after_ns"])
            rows.append([*times, change(row["before_ns"], row["after_ns"]) + sure, code(named(name, row, _WIDTH))])
        table = _table(("before", "after", "change", ""), rows, 3)
        more = f"and {len(moved) - TOP} more" if len(moved) > TOP else ""
        body = [block for block in (table, more) if block]
        if name == "lines":
            yield "\n\n".join(body)
        else:
            yield _folded(title, *body)
    if len(diff.labels):
        yield _folded("What limits it", *_bullets(label_lines(diff)))
    if len(diff.environment):
        rows = [
            [code(str(row[name])) for name in ("name", "before", "after")]
            for row in diff.environment.to_dict("records")
        ]
        yield _folded("The environments differ", _table(("", "before", "after"), rows[:40]))
    if unsure:
        yield "`~`: no more than the calls of either side differ by, or measured once."
