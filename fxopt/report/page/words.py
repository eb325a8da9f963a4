"""The first screen in plain words: how long, where the time goes, what limits it, what was done, at what error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxopt.report.measurements import OF_PROFILE, contradiction, doubts, kernel_origin, out_of_time, uneven, wall_origin
from fxopt.report.terminal import scientific, size
from profiler_core.quantities import duration

if TYPE_CHECKING:
    from fxopt.labels import Label
    from fxopt.report.comparison import Comparison
    from fxopt.report.model import CandidateReport, GraphReport
    from profiler_core.profiles import Profile

SHOWN = 5
"""Rows below an answer; the sections further down hold all of them."""

KINDS = {
    "gemm": "matrix products",
    "gemv": "matrix-vector products",
    "blas": "other linear algebra",
    "convolution": "convolutions",
    "attention": "attention",
    "rnn": "recurrent layers",
    "collective": "communication between devices",
    "pointwise": "element-wise operations",
    "reduction": "reductions (sums, norms, softmax)",
    "normalization": "normalisation",
    "softmax": "softmax",
    "pooling": "pooling",
    "dropout": "dropout",
    "layout": "changes of memory layout",
    "sort": "sorting, scans and selection",
    "fft": "Fourier transforms",
    "sparse": "sparse operations",
    "solver": "linear solvers",
    "random": "random numbers",
    "memcpy": "copies",
    "memset": "filling memory",
    "operator": "other operators on the CPU",
    "custom": "custom kernels",
    "other": "other kernels",
    "": "kernels of unknown kind",
}
_OF_OPERATORS = (
    (re.compile(r"attention|sdpa"), "attention"),
    (re.compile(r"conv"), "convolution"),
    (re.compile(r"(add)?(mm|bmm|baddbmm|mv|matmul|linear|dot)($|\b|_)"), "gemm"),
    (re.compile(r"lstm|gru|rnn"), "rnn"),
    (re.compile(r"embedding|index|gather|scatter"), "sort"),
    (re.compile(r"norm"), "normalization"),
    (re.compile(r"softmax"), "softmax"),
    (re.compile(r"pool"), "pooling"),
    (re.compile(r"copy|clone|contiguous|_to$"), "layout"),
)

AXES: dict[str, tuple[str, str]] = {
    "launch_bound": (
        "the device waits until the CPU has launched the next kernel",
        "CUDA graphs; fewer, larger kernels",
    ),
    "memory_bound": ("the bandwidth of device memory", "fusion, narrower types, fewer passes over the data"),
    "l2_bound": ("the bandwidth of the L2 cache", "tiling for L1 and shared memory"),
    "compute_bound": ("arithmetic: its units are busy", "other algorithms, matrix units, less work"),
    "tensor_core_idle": (
        "matrix products that do not use the matrix units (tensor cores), which are faster",
        "narrower operands, or operands split into several narrow ones",
    ),
    "latency_bound": ("waiting: no unit of the device is busy", "more parallel work, fewer dependent steps"),
    "occupancy_limited": (
        "too few warps at a time on each multiprocessor",
        "fewer registers, less shared memory, other blocks",
    ),
    "wave_starved": ("too few blocks to fill the device", "another division of the work, persistent kernels"),
    "register_spill": (
        "values that do not fit into registers go through memory",
        "smaller tiles, fewer values alive at once",
    ),
    "divergent": ("threads of a warp take different ways", "sorted or padded work"),
    "excess_traffic": ("more bytes move than the operators need", "other layouts, tiling"),
    "layout_conversion": ("data only change their order in memory", "one layout for producer and consumer"),
    "cast_traffic": ("data only change their type", "a cast inside its neighbour, folded weights"),
    "opaque_library": (
        "a library's kernel, whose inside the graph does not show",
        "no pass: it is named so that nobody looks for the time elsewhere",
    ),
}
"""Axis -> (what limits, what answers it), as docs/labels.md has them."""


def kind_of(family: str, operator: str) -> str:
    """What kind of work a kernel does: its family, and of an operator on the CPU what its name says."""
    if family in ("operator", ""):
        name = operator.rpartition("::")[2].lower()
        return next((kind for pattern, kind in _OF_OPERATORS if pattern.search(name)), family)
    return family


def summary(
    profile: Profile | None,
    labels: Sequence[Label],
    graph: GraphReport | None = None,
    compared: Comparison | None = None,
) -> dict[str, Any]:
    """headline, detail, alerts, and answers: question, answer, rows (text, value, share of the whole or None).

    graph: of a tuning run; None for a profile by itself. compared: by `fxopt bench`, the whole work.
    """
    time = _time(profile, graph) if compared is None else _compared(compared)
    answers = [time, _where(profile, graph is not None), _limits(profile, labels)]
    if graph is not None:
        answers += [_done(graph), _error(graph)]
    headline, detail = _headline(profile, graph) if compared is None else _bench_headline(compared)
    alerts = [uneven(profile)] if profile is not None and graph is None else []
    noted = [] if compared is None else compared.notes
    if graph is not None:
        # The comparison is the remedy of a contradiction.
        told = [line for line in doubts(graph) if compared is None or line != contradiction(graph)]
        alerts = [line.replace("`", "") for line in (out_of_time(graph), *told)]
        if graph.source == "tuned" and graph.seconds:
            detail += f" Tuning took {duration(1e9 * sum(graph.seconds.values()))}."
    found = [answer for answer in answers if answer]
    return {"headline": headline, "detail": detail.strip(), "alerts": [*filter(None, alerts), *noted], "answers": found}


def _row(text: str, value: str = "", share: float | None = None, note: str = "", source: str = "") -> dict[str, Any]:
    return {"text": text, "value": value, "share": share, "note": note, "source": source}


def _answer(question: str, answer: str, rows: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"question": question, "answer": answer, "rows": list(rows)}


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _headline(profile: Profile | None, graph: GraphReport | None) -> tuple[str, str]:
    if graph is None:
        if profile is None or not profile.total_ns:
            return "No kernel ran in the measured calls.", ""
        calls = _counted(profile.iterations, "measured call")
        if profile.wall_ns != profile.wall_ns:
            return f"One call spends {duration(profile.kernel_ns)} in kernels.", f"From {calls}. {_NO_WALL}"
        wall, kernel = duration(profile.wall_ns), duration(profile.kernel_ns)
        if profile.kernel_ns < profile.wall_ns:
            took = f"One call takes {wall}, of which {kernel} are spent in kernels."
        else:
            took = f"One call takes {wall}, and kernels run all that time."
        return took, f"From {calls}. Nothing was changed: this is a profile."
    ratio = graph.ratio
    if graph.decision == "candidate" and ratio is not None:
        took = f"{duration(graph.kept_wall_ns)} instead of {duration(graph.baseline_wall_ns)}"
        detail = (
            f"95 % confidence interval {ratio.low:.2f} to {ratio.high:.2f}, from {_counted(ratio.pairs, 'pair')} of "
            "measurements, one of each code in turn. The same code timed twice differs by "
            f"{100 * ratio.noise:.1f} % here."
        )
        if graph.source == "plan":
            detail += " That was measured when the plan was made, and nothing in this process."
        return f"One call takes {took}: {ratio.ratio:.2f} times as fast as torch.compile by itself.", detail
    if graph.decision == "candidate":
        return "The code that an earlier run chose is in use.", _SOURCES.get(graph.source, "")
    if graph.source == "tuned":
        tried = _counted(len(graph.candidates), "candidate")
        wall = f" One call takes {duration(graph.baseline_wall_ns)}." if graph.baseline_wall_ns else ""
        return (
            f"Nothing was changed: torch.compile's own code is kept.{wall}",
            f"Tried: {tried}. None is both right and faster beyond doubt."
            if graph.candidates
            else ""
            if out_of_time(graph)
            else "No rewrite applies here.",
        )
    return "torch.compile's own code runs.", _SOURCES.get(graph.source, "")


_NO_WALL = "The file does not say how long a call takes from start to end."
_SOURCES = {
    "plan": "The decision comes from a plan on disk; nothing was measured in this process.",
    "apply": "The mode 'apply' uses plans and never measures; there is no plan for this graph.",
    "skipped": "Nothing that fxopt measures; the messages below say why.",
    "fallback": "Something failed on the way; the messages below say what.",
}


def _time(profile: Profile | None, graph: GraphReport | None) -> dict[str, Any] | None:
    question = "How long does one call take?"
    ran = profile is not None and bool(profile.total_ns)
    rows = _before_and_now(graph) if graph is not None else []
    if not ran:
        return _answer(question, "Wall time is what a caller waits.", rows) if rows else None
    assert profile is not None
    wall, kernel = profile.wall_ns, profile.kernel_ns
    if graph is not None and graph.baseline_wall_ns and graph.baseline_kernel_ns:
        wall, kernel = graph.baseline_wall_ns, graph.baseline_kernel_ns  # what the rows below show, timed in turns
    if wall != wall:
        return _answer(
            question, f"{duration(kernel)} of kernel time. How long the whole call takes was not recorded.", rows
        )
    if kernel < wall:
        part = f"kernels, the programs that the device runs, take {percent(kernel / wall)} of a call; "
        part += "the rest is launches, Python and waiting."
    else:
        part = "kernels overlap with each other, or the profiler slowed them: they sum up to more than a call."
    if rows:
        return _answer(question, f"Before any change, {part}", rows)
    rows = [
        _row("whole call", duration(wall), 1.0, "", "measured"),
        _row("kernels", duration(kernel), min(1.0, kernel / wall), "", "measured"),
    ]
    return _answer(question, _capital(part), rows)


def _bench_headline(compared: Comparison) -> tuple[str, str]:
    times, pair = compared.times, compared.results["Inductor", "fxopt"]
    took = f"One call takes {duration(times['fxopt'])} with fxopt, {duration(times['Inductor'])} with Inductor and "
    return f"{took}{duration(times['eager'])} in eager mode.", (
        f"Timed in turns by fxopt bench, {_counted(pair.pairs, 'pair')} each, with 95 % confidence intervals. "
        f"{compared.verdict}."
    )


def _compared(compared: Comparison) -> dict[str, Any]:
    whole = max(compared.times.values())
    rows = []
    for name, _, eager, inductor in compared.rows():
        told = [f"{ratio} the speed of {of}" for ratio, of in ((eager, "eager"), (inductor, "Inductor")) if ratio]
        time = compared.times[name]
        rows.append(_row(name, duration(time), time / whole, "; ".join(told), "measured"))
    return _answer("How long does one call take?", "All were timed in turns, in one process.", rows)


def _before_and_now(graph: GraphReport) -> list[dict[str, Any]]:
    wall, kernels = wall_origin(graph), kernel_origin(graph)
    times = [
        ("before (torch.compile)", graph.baseline_wall_ns, "", "measured"),
        ("now", graph.kept_wall_ns, wall, "measured"),
        ("kernels before", graph.baseline_kernel_ns, "", "measured"),
        ("kernels now", graph.kept_kernel_ns, kernels, "measured"),
        ("least possible, by the roofline", graph.floor_ns, "", "modelled"),
    ]
    if graph.decision != "candidate":
        times = [
            ("whole call", graph.baseline_wall_ns, wall, "measured"),
            ("kernels", graph.baseline_kernel_ns, kernels, "measured"),
            times[4],
        ]
    known = [(text, ns, note, source) for text, ns, note, source in times if ns]
    whole = max((ns for _, ns, *_ in known), default=0.0)
    return [_row(text, duration(ns), ns / whole, note, source) for text, ns, note, source in known if ns]


def _where(profile: Profile | None, before: bool = False) -> dict[str, Any] | None:
    """before: the profile is of code that was changed after it."""
    if profile is None or not profile.total_ns:
        return None
    sums: dict[str, int] = {}
    window = profile.window
    for family, operator, time in zip(
        window["family"], window["operator"], window["duration_ns"].tolist(), strict=True
    ):
        kind = kind_of(str(family), str(operator))
        sums[kind] = sums.get(kind, 0) + time
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    total, calls = profile.total_ns, max(profile.iterations, 1)
    rows = [_row(KINDS.get(k, k), duration(t / calls), t / total, "", "measured") for k, t in ranked[:SHOWN]]
    if rest := sum(time for _, time in ranked[SHOWN:]):
        rows.append(_row("everything else", duration(rest / calls), rest / total, "", "measured"))
    first, time = ranked[0]
    text = f"{percent(time / total)} of the kernel time goes into {KINDS.get(first, first)}."
    if before:
        text = f"{duration(profile.kernel_ns)} of kernels a call, {OF_PROFILE}: {text}"
    text += f" {percent(profile.attributed_share)} of it could be traced to operators of the model"
    text += "." if profile.unattributed_ns else ", nothing is left over."
    return _answer("Where does the time go?", text, rows)


def _limits(profile: Profile | None, labels: Sequence[Label]) -> dict[str, Any] | None:
    question = "What limits it?"
    if not labels:
        if profile is None:
            return None
        return _answer(question, "No rule found a limit.")
    sums: dict[str, tuple[float, int]] = {}
    for label in labels:
        time, count = sums.get(label.axis.value, (0.0, 0))
        sums[label.axis.value] = time + label.headroom_ns, count + 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    whole = _call_ns(profile)
    rows = []
    for axis, (time, count) in ranked[:SHOWN]:
        what = AXES.get(axis, (axis, ""))[0]
        places = "the graph as a whole" if axis == "launch_bound" else _counted(count, "place")
        share = min(1.0, time / whole) if whole else None
        rows.append(_row(_capital(what), f"up to {duration(time)}", share, f"{axis}, {places}", "modelled"))
    axis, (time, _) = ranked[0]
    text = (
        f"Most of all: {AXES.get(axis, (axis, ''))[0]}. Removing that limit could save up to {duration(time)} a call. "
    )
    text += "Limits overlap, so what they could save does not add up." if len(ranked) > 1 else ""
    return _answer(question, text.strip(), rows)


def _call_ns(profile: Profile | None) -> float:
    if profile is None or not profile.total_ns:
        return 0.0
    return profile.kernel_ns if profile.wall_ns != profile.wall_ns else max(profile.wall_ns, profile.kernel_ns)


def _done(graph: GraphReport) -> dict[str, Any]:
    question = "What was done, and what did it gain?"
    failed = sum(candidate.outcome == "failed" for candidate in graph.candidates)
    if graph.decision != "candidate":
        if not graph.candidates:
            return _answer(question, "Nothing was tried.")
        text = f"Compiled and compared: {_counted(len(graph.candidates), 'candidate')}; none was kept."
        rows = [_row(c.subject or c.name, c.outcome, None, c.reason) for c in graph.candidates[:SHOWN]]
        return _answer(question, text + (f" {failed} could not be built." if failed else ""), rows)
    sentences = descriptions(graph.passes)
    worth = {row.name: row for row in graph.ablation}
    rows = []
    for name in graph.passes:
        row = worth.get(name)
        gain = row.removed.wall if row is not None and row.removed is not None else None
        value, source = (f"{gain.ratio:.2f}×", "measured") if gain else ("", "")
        rows.append(_row(sentences.get(name, name), value, None, name, source))
    text = f"Kept: {_counted(len(rows), 'rewrite')}. Compiled, checked and timed on the way: "
    text += f"{_counted(len(graph.candidates), 'candidate')}."
    if graph.ablation:
        text += " The factor beside each is what is lost without it."
    if graph.memory_bytes:
        text += f" It costs {size(graph.memory_bytes)} of memory."
    if graph.calls_to_pay is not None:
        text += f" Tuning pays for itself after {graph.calls_to_pay:,.0f} calls."
    return _answer(question, text, rows)


def _error(graph: GraphReport) -> dict[str, Any] | None:
    verdict = graph.verdict
    question = "At what error?"
    if verdict is None:
        return (
            _answer(question, "Unchanged: the code is torch.compile's own.") if graph.decision != "candidate" else None
        )
    good = "within what was asked for" if verdict.ok else f"REFUSED: {verdict.reason}"
    text = (
        f"The largest relative error of an output is {scientific(verdict.rel_l2)}, against a run of the same graph in "
        f"64-bit arithmetic; {scientific(verdict.limit)} is allowed: {good}. "
        f"Sets of inputs checked: {verdict.checked}."
    )
    rows = [
        _row("error of torch.compile's code", scientific(verdict.baseline_rel_l2), None, "", "measured"),
        _row("error of the kept code", scientific(verdict.rel_l2), None, "", "measured"),
        _row("allowed", scientific(verdict.limit)),
    ]
    if verdict.top1 is not None:
        rows.append(_row("same most likely class (top-1)", percent(verdict.top1), None, "", "measured"))
    return _answer(question, text, rows)


def descriptions(passes: Sequence[str]) -> dict[str, str]:
    """Pass -> the first line of its documentation, for those that are installed."""
    import inspect

    from fxopt.registry import discover

    try:
        known = discover()
    except Exception:  # a package of passes that does not import must not keep a report from being written
        return {}
    documented = {name: inspect.getdoc(known[name]) or "" for name in passes if name in known}
    return {name: text.partition("\n")[0] for name, text in documented.items() if text}


def passes_named(candidates: Iterable[CandidateReport]) -> list[str]:
    return sorted({name for candidate in candidates for name in candidate.passes})


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
