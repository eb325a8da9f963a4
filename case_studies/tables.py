"""The tables of README.md, results/README.md and docs/case_studies.md, made from results/*/comparison.json.

    python -m case_studies.tables            write the tables between the marker comments
    python -m case_studies.tables --stale    exit with 1 where a page is not what the results say
    python -m case_studies.tables --check    what the project claims, each as PASS or FAIL with its figures

A marker is ``<!-- table: results/h200/comparison.json summary -->`` and ends at ``<!-- end of table -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from case_studies.columns import BASE, CLASSES
from case_studies.comparison import paired_ratio

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "results/README.md", "docs/case_studies.md")
MARKER = re.compile(r"(<!-- table: (\S+) (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
METRICS = ("kernel", "wall")
Row = dict[str, Any]


# ---- picking rows ----


def load(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def find(rows: Iterable[Row], workload: str, precision: str, column: str) -> Row | None:
    """The row, if it was measured."""
    for row in rows:
        if (row["workload"], row["precision"], row["column"]) == (workload, precision, column):
            return row if row["wall_us"] is not None else None
    return None


def ours(rows: Sequence[Row], workload: str, precision: str, metric: str) -> Row | None:
    """fxopt's row for a metric: the one tuned for it, else the one there is."""
    for column in ("fxopt", "fxopt_kernel") if metric == "wall" else ("fxopt_kernel", "fxopt"):
        row = find(rows, workload, precision, column)
        if row is not None and row[f"{metric}_us"] is not None:
            return row
    return None


def competitors(rows: Iterable[Row], workload: str, precision: str) -> list[Row]:
    """Measured columns of others that are at least as accurate as asked for: those of the class and of the classes
    above it; for an error budget, those whose error keeps it.
    """
    found = [row for row in rows if row["workload"] == workload and not row["column"].startswith("fxopt")]
    found = [row for row in found if row["wall_us"] is not None]
    if precision in CLASSES:
        allowed = CLASSES[: CLASSES.index(precision) + 1]
        return [row for row in found if row["precision"] in allowed]
    return [row for row in found if row["rel_l2_error"] is not None and row["rel_l2_error"] <= float(precision)]


def best(rows: Sequence[Row], workload: str, precision: str, metric: str) -> Row | None:
    """The fastest of the competitors."""
    timed = [row for row in competitors(rows, workload, precision) if row[f"{metric}_us"] is not None]
    return min(timed, key=lambda row: row[f"{metric}_us"], default=None)


def ratio(base: Row, row: Row, metric: str) -> tuple[float | None, list[float] | None]:
    """(median, 95 % interval) of base time / row time over the rounds of both; above 1 `row` is faster."""
    return paired_ratio(base[f"{metric}_samples_us"], row[f"{metric}_samples_us"])


def error_limit(rows: Sequence[Row], workload: str, precision: str) -> float | None:
    """The error that the class allows, from Inductor fp32's own."""
    from fxopt.verify import parse_precision

    base = find(rows, workload, "fp32", BASE)
    if base is None or base["rel_l2_error"] is None:
        return None
    return parse_precision(precision).limit(base["rel_l2_error"])


def pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(workload, precision) that fxopt has a row for, in the file's order."""
    return list(dict.fromkeys((r["workload"], r["precision"]) for r in rows if r["column"].startswith("fxopt")))


# ---- markdown ----


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [list(head), ["---"] * len(head), *(list(line) for line in lines)]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in cells) + "\n"


def summary(rows: Sequence[Row], folder: Path | None = None) -> str:
    """For each workload and class: the best of the others, fxopt, and the ratio with its interval."""
    head = ["workload", "class"]
    for metric in METRICS:
        head += [f"best other, {metric}", f"fxopt, {metric}", "x (95 %)"]
    lines = []
    for workload, precision in pairs(rows):
        line = [workload, precision]
        row = None
        for metric in METRICS:
            row, other = ours(rows, workload, precision, metric), best(rows, workload, precision, metric)
            named = "-" if other is None else f"{other['column']} {time(other[f'{metric}_us'])}"
            line += [named, "-" if row is None else time(row[f"{metric}_us"])]
            line.append("-" if row is None or other is None else speedup(*ratio(other, row, metric)))
        error = None if row is None else row["rel_l2_error"]
        line += [scientific(error), scientific(error_limit(rows, workload, precision))]
        lines.append(line)
    return table([*head, "error", "allowed"], lines)


def gaps(rows: Sequence[Row], folder: Path | None = None) -> str:
    """The floor (FLOPs and bytes over measured ceilings), and how far Inductor fp32 and fxopt are above it."""
    lines = []
    for workload, precision in pairs(rows):
        base, row = find(rows, workload, "fp32", BASE), ours(rows, workload, precision, "kernel")
        floor = next((r["floor_us"] for r in (row, base) if r is not None), None)
        line = [workload, precision, time(floor)]
        for one in (base, row):
            known = one is not None and one["kernel_us"] is not None and floor
            line.append(f"{time(one['kernel_us'])}, {one['kernel_us'] / floor:.1f}x" if known and one else "-")
        lines.append(line)
    return table(["workload", "class", "floor", f"{BASE}, kernel", "fxopt, kernel"], lines)


def columns(rows: Sequence[Row], folder: Path | None = None) -> str:
    """Everything that was measured; x is against Inductor fp32."""
    head = [
        "workload",
        "class",
        "column",
        "kernel",
        "x (95 %)",
        "wall",
        "x (95 %)",
        "error",
        "compile",
        "passes or why",
    ]
    lines = []
    for row in rows:
        said = ", ".join(row.get("passes") or []) or row.get("why") or ""
        if row.get("objective") and not row.get("passes"):
            said = ": ".join(text for text in (row["decision"], said) if text)
        seconds = row.get("compile_seconds")
        line = [row["workload"], row["precision"], row["column"]]
        for metric in METRICS:
            line.append(interval(row[f"{metric}_us"], row[f"{metric}_interval"]))
            line.append(speedup(row.get(f"{metric}_ratio"), row.get(f"{metric}_ratio_interval")))
        lines.append([*line, scientific(row["rel_l2_error"]), "-" if seconds is None else f"{seconds:.0f} s", said])
    return table(head, lines)


def ablation(rows: Sequence[Row], folder: Path | None) -> str:
    """Each pass that was kept, alone and removed, as the tuner measured it again; each other one with its reason."""
    lines = []
    for workload, column, graph in graphs(rows, folder):
        for one in graph.get("ablation") or _not_ablated(graph):
            line = [workload, column, one["name"], one["outcome"]]
            for how in ("alone", "removed"):
                for metric in METRICS:
                    timed = (one.get(how) or {}).get(metric)
                    line.append("-" if timed is None else speedup(timed["ratio"], [timed["low"], timed["high"]]))
            lines.append([*line, one["reason"]])
    head = [
        "workload",
        "column",
        "pass",
        "outcome",
        "alone, kernel x",
        "alone, wall x",
        "adds, kernel x",
        "adds, wall x",
    ]
    return table([*head, "reason"], lines)


def _not_ablated(graph: Row) -> list[Row]:
    """What a report without ablation says of each trial and of each pass out of reach."""
    found = [{"name": t["name"], "outcome": t["outcome"], "reason": t["reason"]} for t in graph.get("candidates") or []]
    for text in graph.get("out_of_reach") or []:
        name, _, reason = text.partition(": ")
        found.append({"name": name, "outcome": "out of reach", "reason": reason})
    return found


def graphs(rows: Sequence[Row], folder: Path | None) -> list[tuple[str, str, Row]]:
    """(workload, column, graph report) of all evidence files beside the rows. Where columns were tuned beforehand it is
    the report of that, for a plan knows of no trials.
    """
    found = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        path = (folder or Path()) / "comparison_evidence" / f"{workload}.json"
        if folder is not None and path.exists():
            evidence = json.loads(path.read_text(encoding="utf-8"))
            tuned = {name: one["report"] for name, one in evidence.get("tuned", {}).items()}
            reports = {name: tuned.get(name, report) for name, report in evidence["reports"].items()}
            found += [(workload, name, graph) for name, report in reports.items() for graph in report["graphs"]]
    return found


def sweep(rows: Sequence[Row], folder: Path | None = None) -> str:
    """split_sweep.json: the largest errors over all K of each kind of input."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        line = [kind, f"{min(r['k'] for r in mine)} to {max(r['k'] for r in mine)}"]
        for method in ("cublas_fp32", "split", "tf32"):
            worst = [r[method]["max_error"] for r in mine if r[method]["max_error"] is not None]
            line.append(scientific(max(worst, default=None)))
        line.append("as in fp32" if all(r["split"]["placed"] for r in mine) else "not as in fp32")
        lines.append(line)
    return table(["input", "K", "cuBLAS fp32", "split", "TF32", "NaN and Inf"], lines)


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function for function in (summary, gaps, columns, ablation, sweep)
}


def markdown(rows: Sequence[Row]) -> str:
    """What a run prints."""
    return f"{columns(rows)}\n{summary(rows)}\n{gaps(rows)}"


def time(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f} us" if us >= 99.5 else f"{us:.1f} us"


def interval(us: float | None, bounds: Sequence[float] | None) -> str:
    return time(us) if us is None or bounds is None else f"{time(us)} ({bounds[0]:.1f}-{bounds[1]:.1f})"


def speedup(value: float | None, bounds: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if bounds is None else f"{value:.2f} ({bounds[0]:.2f}-{bounds[1]:.2f})"


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


# ---- pages ----


def filled(text: str, root: Path = ROOT) -> str:
    """The page with each table made anew from the file that its marker names."""

    def fill(match: re.Match[str]) -> str:
        path = root / match[2]
        if not path.exists():
            return f"{match[1]}Not measured yet.\n{match[4]}"
        return f"{match[1]}\n{TABLES[match[3]](load(path), path.parent)}\n{match[4]}"

    return MARKER.sub(fill, text)


def stale(root: Path = ROOT) -> list[str]:
    """Pages that are not what the results say."""
    pages = [(name, root / name) for name in PAGES if (root / name).exists()]
    return [name for name, path in pages if filled(text := path.read_text(encoding="utf-8"), root) != text]


def main() -> None:
    import typer

    def run(
        only_stale: bool = typer.Option(False, "--stale", help="Write nothing; fail where a page is out of step."),
        check: bool = typer.Option(False, "--check", help="Write nothing; print each claim as PASS or FAIL."),
    ) -> None:
        """Make the tables of the pages from results/*/comparison.json."""
        if check:
            from case_studies import must_show

            claims = must_show.claims(ROOT / "results")
            for claim in claims:
                print(claim)
            raise typer.Exit(int(any(claim.passed is False for claim in claims)))
        names = stale()
        for name in names:
            if not only_stale:
                path = ROOT / name
                path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{name}: " + ("out of step with the results" if only_stale else "written"))
        raise typer.Exit(int(only_stale and bool(names)))

    typer.run(run)


if __name__ == "__main__":
    main()
