"""What a report says of its own times: which measurement each comes from, where two of them contradict each other, and
whether the time limit ended the tuning.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from profiler_core.quantities import duration

if TYPE_CHECKING:
    from fxopt.report.model import GraphReport
    from profiler_core.profiles import Profile

__all__ = ["OF_PROFILE", "contradiction", "doubts", "kernel_origin", "out_of_time", "uneven", "wall_origin"]

OF_PROFILE = "from the profile before any change"
_IN_TURNS = "both timed in turns, at the end of tuning"
_NOT_TRIED = re.compile(r"(?P<name>.*): not tried, the time limit of (?P<limit>.+ s) is spent")
_NOT_REMOVED = re.compile(r"the time limit of (?P<limit>.+ s) is spent: whether (?P<name>\S+) is still of use")
_MOST_NAMES = 4
_UNEVEN = 0.05  # where no comparison has measured the noise


def wall_origin(graph: GraphReport) -> str:
    """Where and when the graph's two wall times were measured; "" where they were not."""
    if graph.baseline_wall_ns is None:
        return ""
    return _IN_TURNS if graph.decision == "candidate" else OF_PROFILE


def kernel_origin(graph: GraphReport) -> str:
    """The same of its two kernel times."""
    if graph.baseline_kernel_ns is None:
        return ""
    if graph.decision != "candidate":
        return OF_PROFILE
    return _IN_TURNS if graph.kernel_ratio is not None else "each from a recording of its own, while tuning"


def contradiction(graph: GraphReport) -> str:
    """One sentence where the profile and the comparison, which both measured the baseline, differ by more than the
    noise that the comparison found; else "".
    """
    profile, ratio = graph.profile, graph.ratio
    if profile is None or ratio is None or graph.decision != "candidate":
        return ""
    times = [
        f"{what}{duration(first)} in the profile and {duration(later)} {when}"
        for what, first, later, when in (
            ("", profile.wall_ns, graph.baseline_wall_ns, "in the comparison with the kept code"),
            ("its kernels ", profile.kernel_ns, graph.baseline_kernel_ns, "while tuning"),
        )
        if first and later and max(first / later, later / first) > 1 + ratio.noise
    ]
    if not times:
        return ""
    return (
        f"A call of torch.compile's own code was measured twice, with results further apart than the noise of "
        f"{100 * ratio.noise:.1f} %: {', '.join(times)}; it was not as busy each time, so measure again on a quiet "
        "machine, or with `fxopt bench PROGRAM`, which times eager, Inductor and fxopt in turns."
    )


def uneven(profile: Profile, noise: float = _UNEVEN) -> str:
    """One sentence where the median of the profiled calls, which totals give, and the mean, which tables add up to,
    differ by more than the noise; else "".
    """
    median, mean = profile.kernel_ns, profile.total_ns / max(profile.iterations, 1)
    if not (median > 0 and mean > 0) or max(median / mean, mean / median) <= 1 + noise:
        return ""
    return (
        f"The {profile.iterations} calls of the profile did not take equally long: kernels take {duration(median)} of "
        f"a call by the median, and {duration(mean)} by the mean, which the times of kernels and nodes add up to; "
        "something else ran meanwhile, so profile again on a quiet machine."
    )


def doubts(graph: GraphReport) -> list[str]:
    """What to know before any of the times is believed, a sentence each."""
    noise = graph.ratio.noise if graph.ratio is not None else _UNEVEN
    calls = uneven(graph.profile, noise) if graph.profile is not None else ""
    return [line for line in (contradiction(graph), calls) if line]


def out_of_time(graph: GraphReport) -> str:
    """What the time limit left untried, the option that raises it, and how long tuning took; "" where nothing."""
    found = [match for line in graph.out_of_reach if (match := _NOT_TRIED.fullmatch(line))]
    found += [match for line in graph.messages if (match := _NOT_REMOVED.match(line))]
    if not found:
        return ""
    names = list(dict.fromkeys(match["name"] for match in found))
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    what = f"before {shown} could be tried" if graph.candidates else f"before anything was tried (next: {shown})"
    spent = sum(graph.seconds.values()) if graph.source == "tuned" else graph.seconds.get("tuning", 0.0)
    took = f" Tuning took {duration(1e9 * spent)}." if spent else ""
    again = f", once `fxopt plans remove {graph.key[:12]}` has removed the plan" if graph.source == "plan" else ""
    return (
        f"The time limit of {found[0]['limit']} was spent {what}; `--time-limit SECONDS`, the option time_limit, "
        f"raises it{again}.{took}"
    )
