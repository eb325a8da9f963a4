"""Profiles of the ranks of one job as one profile, which names the slowest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiler_core.collect.provenance import Launch
from profiler_core.families import is_collective
from profiler_core.profiles import NODE_COLUMNS, Profile, frame
from profiler_core.quantities import duration

if TYPE_CHECKING:
    import pandas as pd

@dataclass(frozen=True)
class RankTimes:
    """One rank's call, ns: wall time, kernel time, that of collectives, and the part of it in which no other kernel of
    the rank ran. A rank that the others wait for has the longest time outside of collectives.
    """

    rank: int
    wall_ns: float
    kernel_ns: float
    collective_ns: float
    exposed_ns: float

    @property
    def own_ns(self) -> float:
        """Kernel time outside of collectives, which wait for other ranks."""
        return self.kernel_ns - self.collective_ns


def times(rank: int, profile: Profile) -> RankTimes:
    """The times of one rank's profile, per call."""
    window = profile.window
    moves = window["name"].map({name: is_collective(name) for name in window["name"].unique()}).astype(bool)
    collective = int(window.loc[moves, "duration_ns"].sum())
    exposed = _uncovered(window[moves], window[~moves])
    kernel = profile.total_ns / profile.iterations
    return RankTimes(rank, profile.wall_ns, kernel, collective / profile.iterations, exposed / profile.iterations)


def merge(profiles: Mapping[int, Profile] | Sequence[Profile]) -> Profile:
    """One profile of all ranks: by rank, or in a list, where each has the rank that its file named, else its place.
    ValueError where there is none, or where two have one rank.

    A call of each rank counts as a call: times per call are means over the ranks, and `profile.by("rank")` gives each
    rank's part. The wall time is the slowest rank's. The notes name the rank with the most kernel time outside of
    collectives (which wait for it), or, where no kernel times were taken, with the longest wall time. Clocks of
    different hosts are not compared: start times are each rank's own.
    """
    import pandas as pd

    if not profiles:
        raise ValueError("there is no profile to merge")
    if not isinstance(profiles, Mapping):
        named = [profile.environment.get("rank") for profile in profiles]
        places = [place if rank is None else int(rank) for place, rank in enumerate(named)]
        if len(set(places)) < len(places):
            raise ValueError(f"two of these profiles have one rank: {places}; give a dict of them by rank")
        profiles = dict(zip(places, profiles, strict=True))
    ranks = sorted(profiles)
    calls, tables = 0, []
    for rank in ranks:
        profile = profiles[rank]
        kernels = profile.kernels.copy()
        inside = kernels["iteration"] >= 0
        kernels.loc[inside, "iteration"] += calls
        kernels["rank"] = pd.Series(rank, index=kernels.index, dtype="int64")
        calls += profile.iterations
        tables.append(kernels)
    found = [times(rank, profiles[rank]) for rank in ranks]
    notes = [f"rank {rank}: {note}" for rank in ranks for note in profiles[rank].notes]
    launches: dict[tuple[str, str], Launch] = {}
    for rank in ranks:
        for launch in profiles[rank].launches:
            launches.setdefault((launch.graph, launch.key), launch)
    slow = slowest(found)
    shared: dict[str, Any] = dict(profiles[slow.rank].environment)
    return Profile(
        kernels=pd.concat(tables, ignore_index=True),
        nodes=_nodes(profiles, calls),
        environment={**shared, "ranks": [{"rank": rank, **profiles[rank].environment} for rank in ranks]},
        iterations=calls,
        wall_ns=max((one.wall_ns for one in found if not math.isnan(one.wall_ns)), default=math.nan),
        launches=tuple(launches.values()),
        notes=(_named(found, slow), *notes),
    )


def slowest(found: list[RankTimes]) -> RankTimes:
    """The rank that the others wait for."""

    def measure(one: RankTimes) -> tuple[float, float]:
        return one.own_ns, 0.0 if math.isnan(one.wall_ns) else one.wall_ns

    return max(found, key=measure)


def _named(found: list[RankTimes], slow: RankTimes) -> str:
    def spelt(one: RankTimes) -> str:
        text = duration(one.own_ns)
        if one.collective_ns:
            exposed = f"{duration(one.exposed_ns)} not overlapped"
            text += f" and {duration(one.collective_ns)} of collectives ({exposed})"
        return text

    others = "; ".join(f"rank {one.rank} {spelt(one)}" for one in found if one is not slow)
    return f"rank {slow.rank} is the slowest of {len(found)}: {spelt(slow)} of kernel time a call" + (
        f" ({others})" if others else ""
    )


def _nodes(profiles: Mapping[int, Profile], calls: int) -> pd.DataFrame:
    """Each node once, with its time in all ranks' calls."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    total = sum(profile.total_ns for profile in profiles.values())
    for rank in sorted(profiles):
        profile = profiles[rank]
        for row in profile.nodes.to_dict("records"):
            key = (str(row["graph"]), str(row["node"]))
            part = {name: row[name] * profile.iterations for name in ("time_ns", "group_time_ns", "kernels")}
            if key not in rows:
                rows[key] = {**{str(name): value for name, value in row.items()}, **part}
                continue
            known = rows[key]
            for name, value in part.items():
                known[name] += value
            known["window_ns"] += row["window_ns"]
            known["estimate"] = bool(known["estimate"] or row["estimate"])
    for known in rows.values():
        known["kernels"] = round(known["kernels"] / calls)
        known["time_ns"] /= calls
        known["group_time_ns"] /= calls
        known["share"] = known["window_ns"] / total if total else 0.0
    return frame(list(rows.values()), NODE_COLUMNS)


def _uncovered(collectives: pd.DataFrame, others: pd.DataFrame) -> int:
    """Time in which a collective ran and no other kernel of the process, ns."""
    return _length(_spans(collectives)) - _overlap(_spans(collectives), _spans(others))


def _spans(kernels: pd.DataFrame) -> list[tuple[int, int]]:
    """When at least one of the kernels ran, in order and apart."""
    joined: list[tuple[int, int]] = []
    starts = kernels["start_ns"].tolist()
    for start, took in sorted(zip(starts, kernels["duration_ns"].tolist(), strict=True)):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], start + took)
        else:
            joined.append((start, start + took))
    return joined


def _length(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def _overlap(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    total, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total
