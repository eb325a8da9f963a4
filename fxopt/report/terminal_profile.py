"""A profile as text: how long, where the time goes, by kernel, what limits it, and what to know about the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxopt.report import terminal
from fxopt.report.measurements import uneven
from fxopt.report.printing import cells, heading, say, shorten, table
from fxopt.report.subject import labelled
from fxopt.report.terminal import TOP, place
from profiler_core.quantities import duration

if TYPE_CHECKING:
    from rich.console import Console

    from fxopt.labels import Label
    from profiler_core.profiles import Profile


def render_profile(profile: Profile, console: Console, labels: Sequence[Label] | None = None) -> None:
    device = profile.environment.get("device_name") or profile.environment.get("device_type") or "an unknown device"
    calls = f"{profile.iterations} measured call{'s' if profile.iterations != 1 else ''}"
    say(console, f"Profile of {calls} on {device}: {len(profile.window)} kernels", "bold")
    if not profile.total_ns:
        say(console, "No kernel ran in the measured calls.", indent=2)
        _notes(profile, console)
        return
    wall = "" if profile.wall_ns != profile.wall_ns else f" in {duration(profile.wall_ns)} of wall time"
    elsewhere = profile.attributed_share - profile.graph_share
    say(
        console,
        f"A call: {duration(profile.kernel_ns)} of kernels{wall}. Of the kernel time {profile.attributed_share:.1%} is "
        f"attributed ({profile.graph_share:.1%} to FX nodes, {elsewhere:.1%} to operators outside of graphs); "
        f"{profile.opaque_share:.1%} is in kernels that a graph cannot look into.",
        indent=2,
    )
    if doubt := uneven(profile):
        say(console, f"! {doubt}", indent=2)
    if len(profile.groups()):
        terminal._profile(profile, console, "FX nodes" if elsewhere < 5e-4 else "FX nodes and operators")
    else:
        _operators(profile, console)
    _kernels(profile, console)
    terminal._labels(labelled(profile, None, labels), console)
    _notes(profile, console)


def _operators(profile: Profile, console: Console) -> None:
    """Where nothing was compiled: operators, and the lines that call them."""
    heading(console, f"Where the time goes: by operator ({duration(profile.kernel_ns)} of kernels in a call)")
    nodes = profile.nodes[profile.nodes["time_ns"] > 0].sort_values("time_ns", ascending=False, kind="stable")
    width = max(30, console.width - 46)
    rows = table("time", "share", "operator", "at", numbers=2)
    for row in nodes.head(TOP).to_dict("records"):
        at = str(row["module_path"] or "") or place(str(row["file"] or ""), int(row["line"]), 24)
        time, share = duration(row["time_ns"]), f"{100 * row['share']:.1f} %"
        rows.add_row(*cells(time, share, shorten(str(row["target"] or row["node"]), width), shorten(at, 24)))
    console.print(rows)
    lines = terminal.by_source_line(nodes)
    if not (lines["file"] != "").any():
        return
    rows = table("time", "share", "source line", "at", numbers=2)
    for row in lines.head(TOP).to_dict("records"):
        source = " ".join(str(row["source"]).split()) or "(no source line known)"
        at = place(str(row["file"]), int(row["line"]), 24)
        rows.add_row(*cells(duration(row["time_ns"]), f"{100 * row['share']:.1f} %", shorten(source, width), at))
    console.print(rows)


def _kernels(profile: Profile, console: Console) -> None:
    heading(console, "Kernels")
    width = max(30, console.width - 46)
    rows = table("time", "share", "a call", "kernel", "kind", numbers=3)
    family = dict(zip(profile.window["name"], profile.window["family"], strict=True))
    found = profile.by("name")
    for row in found.head(TOP).to_dict("records"):
        time, share = duration(row["time_ns"]), f"{100 * row['share']:.1f} %"
        name = shorten(str(row["name"]), width - 2)
        rows.add_row(*cells(time, share, f"{row['kernels']:.3g}", name, shorten(str(family[row["name"]]), 14)))
    console.print(rows)
    if len(found) > TOP:
        rest = found.iloc[TOP:]
        say(console, f"and {len(rest)} more, {duration(rest['time_ns'].sum())} together", indent=2)


def _notes(profile: Profile, console: Console) -> None:
    if profile.notes:
        heading(console, "Notes")
        for note in profile.notes:
            say(console, f"- {shorten(note, 400)}", indent=2)
