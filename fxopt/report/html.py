"""A report as one HTML file that needs nothing else: no network, no server, no other file.

The page holds the data and plotly.js as gzip in base64, which no name from a trace can break out of; its scripts unpack
them and put every name into the document as text. A Content-Security-Policy admits the page's own scripts by their
hashes, and no request of any kind.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html as escaping
import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxopt.labels import Label
    from fxopt.report.diff import Diff
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

SCRIPTS = (
    "base.js",
    "model.js",
    "table.js",
    "plots.js",
    "details.js",
    "sections.js",
    "changes.js",
    "differences.js",
    "main.js",
)
"""In the order in which the page runs them: one script, for the policy admits it by one hash."""
_PARTS = resources.files("fxopt.report.page")


def write(subject: Any, path: str | os.PathLike[str], *, title: str | None = None, **known: Any) -> Path:
    """Write the page of a Report, a Profile or a Diff to `path`, atomically; see `page`."""
    from profiler_core.files import write_atomically

    target = Path(path)
    write_atomically(target, page(subject, title=title, **known))
    return target


def page(
    subject: Any,
    *,
    title: str | None = None,
    labels: Sequence[Label] | None = None,
    ceilings: Ceilings | None = None,
) -> str:
    """The page as text, ASCII but for what page.html and page.css hold.

    subject: a `fxopt.report.model.Report`, a `profiler_core.Profile` or a `fxopt.report.diff.Diff`. labels, ceilings:
    of a bare Profile, by default those that `fxopt.report.subject.labelled` finds. TypeError for any other subject.
    """
    from fxopt.report.diff import Diff
    from fxopt.report.model import Report
    from profiler_core.profiles import Profile

    if isinstance(subject, Report):
        data = _report(subject)
    elif isinstance(subject, Profile):
        data = _profile(subject, labels, ceilings)
    elif isinstance(subject, Diff):
        data = _diff(subject)
    else:
        raise TypeError(f"a page is written of a Report, a Profile or a Diff, not of {type(subject).__name__}")
    data["title"] = title or _title(data)
    return _assemble(data)


def _assemble(data: dict[str, Any]) -> str:
    plotly, packed = packed_plotly()
    script = "\n".join(_part(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(plotly)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    parts = {
        "POLICY": policy,
        "TITLE": escaping.escape(str(data["title"])).encode("utf-8", "replace").decode(),
        "STYLE": _part("page.css"),
        "DATA": _packed(text),
        "PLOTLY": packed,
        "SCRIPT": script,
    }
    return re.sub(r"@([A-Z]+)@", lambda place: parts[place[1]], _part("page.html"))


@lru_cache(maxsize=1)
def packed_plotly() -> tuple[str, str]:
    """plotly.js, and as the page holds it."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs()
    return source, _packed(source)


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(script: str) -> str:
    """As a Content-Security-Policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


# ---- data ----


def _report(report: Any) -> dict[str, Any]:
    from fxopt.report.model import to_plain
    from fxopt.report.page import words
    from fxopt.report.page.data import Texts, graph_data

    texts, compared = Texts(), report.comparison
    graphs = []
    for index, graph in enumerate(report.graphs):
        graphs.append(
            _shared(graph.profile, texts)
            | {
                "name": f"Graph {index + 1} of {len(report.graphs)}",
                "summary": words.summary(graph.profile, graph.labels, graph, compared),
                "descriptions": words.descriptions(words.passes_named(graph.candidates)),
                "report": graph_data(graph),
                "ceilings": to_plain(graph.ceilings),
                "labels": to_plain(list(graph.labels)),
                "missing": list(graph.missing),
            }
        )
    return _page("report", graphs, texts) | {
        "messages": list(report.messages),
        "eager": to_plain(report.eager_modules),
        "comparison": to_plain(compared),
    }


def _profile(profile: Profile, labels: Sequence[Label] | None, ceilings: Ceilings | None) -> dict[str, Any]:
    from fxopt.report.model import to_plain
    from fxopt.report.next_step import next_step
    from fxopt.report.page import words
    from fxopt.report.page.data import Texts
    from fxopt.report.subject import labelled

    texts, part = Texts(), labelled(profile, ceilings, labels)
    kinds = {(label.axis, label.scope): label for label in part.labels}
    told = {kind: next_step(label, profile) for kind, label in kinds.items()}
    graph = _shared(profile, texts) | {
        "name": "Profile",
        "summary": words.summary(profile, part.labels),
        "descriptions": {},
        "report": None,
        "ceilings": to_plain(part.ceilings),
        "labels": [{**to_plain(label), "next": told[label.axis, label.scope]} for label in part.labels],
        "missing": list(part.missing),
    }
    return _page("profile", [graph], texts) | {"messages": [], "eager": [], "comparison": None}


def _diff(diff: Diff) -> dict[str, Any]:
    from fxopt.report.page.compared import diff_data
    from fxopt.report.page.data import Texts

    texts = Texts()
    return _page("diff", [diff_data(diff, texts)], texts) | {"messages": [], "eager": [], "comparison": None}


def _shared(profile: Profile | None, texts: Any) -> dict[str, Any]:
    from fxopt.report.page.data import profile_data

    if profile is None:
        return {"profile": None, "sources": {}}
    return {"profile": profile_data(profile, texts), "sources": profile.source_lines()}


def _page(kind: str, graphs: list[dict[str, Any]], texts: Any) -> dict[str, Any]:
    from datetime import datetime, timezone

    from fxopt.report.page import words

    return {
        "kind": kind,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "graphs": graphs,
        "axes": {axis: {"what": what, "answer": answer} for axis, (what, answer) in words.AXES.items()},
        "kinds": words.KINDS,
        **texts.to_json(),
    }


def _title(data: dict[str, Any]) -> str:
    profiles = [graph["profile"] for graph in data["graphs"] if graph.get("profile")]
    device = str(profiles[0]["environment"].get("device_name") or "") if profiles else ""
    what = {"report": "Tuning report", "profile": "Profile", "diff": "Comparison"}[data["kind"]]
    return f"{what} · {device}" if device else what
