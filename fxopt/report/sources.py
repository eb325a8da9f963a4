"""Reports and profiles from files, and to them: what `fxopt report`, `explain` and `diff` are given."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxopt.report.model import CandidateReport, GraphReport, Report

if TYPE_CHECKING:
    from fxopt.plan import Plan
    from profiler_core.profiles import Profile

__all__ = ["ReportFileError", "from_plan", "read", "write"]


class ReportFileError(ValueError):
    """A file that holds no report, profile or plan; the message names the file, the place and the remedy."""


_PLAN_FILE = re.compile(r"[0-9a-f]{64}\.json")  # as the plan store names them
_AGAIN = "write it again, or read it with the version of fxopt that wrote it"
_TRACES = {
    "kineto": "a trace of torch.profiler",
    "nsys": "a recording of nsys",
    "counters": "counters of ncu",
    "provenance": "Inductor's provenance",
}


def read(path: str | os.PathLike[str]) -> Report | Profile:
    """What a file holds: a report (`write`, the option `report`), a profile (`Profile.save`, or the folder of
    `Profile.to_parquet`), or a plan of the plan store, of which `from_plan` makes a report. JSON may be gzipped.

    Raises ReportFileError.
    """
    from profiler_core.profiles import Profile, ProfileFormatError

    path = Path(path)
    try:
        if (path / "kernels.parquet").exists():
            return Profile.from_parquet(path)
        data = _json(path)
        if {"schema_version", "graphs"} <= data.keys():
            return Report.from_json(data)
        if {"schema_version", "kernels", "nodes"} <= data.keys():
            return Profile.from_json(data)
        if "key" in data and "decision" in data:
            return _plan(data, path)
    except ProfileFormatError as error:
        text = str(error)
        raise ReportFileError(text if text.startswith(str(path)) else f"{path}: {text}; {_AGAIN}") from error
    except ReportFileError as error:
        if not _PLAN_FILE.fullmatch(path.name):
            raise
        remedy = f"`fxopt plans remove {path.name[:12]}` deletes a broken plan, and tuning writes a new one"
        raise ReportFileError(f"{error}; {remedy}") from error
    except ValueError as error:
        raise ReportFileError(f"{path}: {error}; {_AGAIN}") from error
    if "traceEvents" in data:
        raise ReportFileError(_trace(path, "kineto"))
    held = ", ".join(map(repr, list(data)[:6])) or "nothing"
    raise ReportFileError(
        f"{path}: no report, profile or plan of fxopt: its JSON object holds {held:.200}. A report is what the option "
        "`report` or `fxopt optimize --save` writes, a profile what `fxopt profile --save` or Profile.save does"
    )


def write(subject: Report | Profile, path: str | os.PathLike[str]) -> None:
    """Write a report or a profile as JSON, atomically; the folder is made. Raises OSError."""
    from profiler_core.files import write_atomically

    write_atomically(Path(path), json.dumps(subject.to_json(), allow_nan=False))


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ReportFileError, which says what else the file is."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ReportFileError(f"{path}: there is no such file; check the path") from None
    except IsADirectoryError:
        raise ReportFileError(
            f"{path}: a folder; give the file in it that is meant, or use `fxopt load {path}` for a folder of traces"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ReportFileError(f"{path}: cannot be read ({error}); check the path and its permissions") from error
    if not raw.strip():
        raise ReportFileError(f"{path}: the file is empty; write it again")
    try:
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
        data = json.loads(text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReportFileError(f"{path}: the gzip archive is cut short or damaged ({error}); write it again") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and text.lstrip()[:1] in ("{", "["):
            ends = not text.rstrip().endswith(("}", "]"))
            what = "the file is cut short" if ends else "not JSON"
            place = f"line {error.lineno}, column {error.colno}"
            raise ReportFileError(f"{path}: {place}: {what} ({error.msg}); write it again") from error
        raise ReportFileError(_foreign(path, raw, error)) from error
    if not isinstance(data, dict):
        if isinstance(data, list) and data and isinstance(data[0], dict) and "ph" in data[0]:  # a trace's older form
            raise ReportFileError(_trace(path, "kineto"))
        raise ReportFileError(
            f"{path}: no report, profile or plan of fxopt: those are JSON objects, and this is a {type(data).__name__}"
        )
    return data


def _foreign(path: Path, raw: bytes, error: Exception) -> str:
    """Says what a file that is not JSON is, and what reads it."""
    from profiler_core.loading import sort_of

    head = raw[:512].lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return f"{path}: an HTML page, which a browser opens; give the JSON file that it was made from"
    try:
        kind = "" if head.startswith((b"{", b"[")) else sort_of(path)
    except (ValueError, OSError):
        kind = ""
    if kind in _TRACES:
        return _trace(path, kind)
    return f"{path}: not JSON ({error}): give a report, a profile or a plan that fxopt wrote"


def _trace(path: Path, kind: str) -> str:
    return f"{path}: {_TRACES[kind]}, no report: `fxopt load {path}` (profiler_core.load) makes a profile of such files"


def _plan(data: dict[str, Any], path: Path) -> Report:
    from fxopt.plan import PlanStoreError, parse_plan

    try:
        return from_plan(parse_plan(json.dumps(data).encode(), str(data["key"]), str(path)), path)
    except PlanStoreError as error:
        raise ReportFileError(f"{error}") from error


def from_plan(plan: Plan, path: str | os.PathLike[str] = "") -> Report:
    """The report that a plan can give: what was decided and why, with the labels and every candidate, but without the
    profile, of which it holds the totals. ValueError, naming the place, for evidence that is not what fxopt writes.
    """
    from fxopt.ablation import AblationRow
    from fxopt.labels import Label
    from fxopt.measure import PairedResult
    from fxopt.report.model import classes
    from fxopt.report.restore import restore
    from fxopt.verify import Verdict

    names, totals = classes(), plan.profile

    def total(name: str) -> float | None:
        found: float | None = restore(float | None, totals.get(name), f"profile.{name}")
        return found

    graph = GraphReport(
        key=plan.key,
        decision=plan.decision,
        source="plan",
        labels=restore(list[Label], [*plan.labels, *plan.to_come], "labels"),
        candidates=restore(list[CandidateReport], plan.reports, "reports", names),
        out_of_reach=list(plan.out_of_reach),
        baseline_wall_ns=total("wall_ns"),
        kept_wall_ns=total("kept_wall_ns"),
        baseline_kernel_ns=total("kernel_ns"),
        kept_kernel_ns=total("kept_kernel_ns"),
        ratio=restore(PairedResult | None, plan.paired, "paired"),
        verdict=restore(Verdict | None, plan.verdict, "verdict"),
        seconds={"tuning": plan.tuning_seconds},
        plan_path=os.fspath(path),
        frozen=plan.freeze,
        memory_bytes=plan.memory_bytes,
        calls_to_pay=plan.calls_to_pay,
        floor_ns=total("floor_ns"),
        floor_flops=total("floor_flops"),
        floor_bytes=total("floor_bytes"),
        ablation=restore(list[AblationRow], plan.ablation, "ablation"),
    )
    return Report([graph], [f"from the plan of {plan.created}, which holds the totals of the profile, not the profile"])
