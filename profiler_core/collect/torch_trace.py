"""Reads the logs that torch writes into the folder named by ``TORCH_TRACE`` (``.log`` or ``.log.gz``).

A record is a line with a glog prefix and a JSON header, and, where the header has ``has_payload`` (the MD5 of the
payload), payload lines that each begin with a tab:

    V1129 16:53:29.059000 446 torch/_inductor/graph.py:2575] {"inductor_output_code": {...}, "frame_id": 0, ...}
    \t# AOT ID: ['0_inference']

One process writes one file; ranks have files of their own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler_core.collect.provenance import ProvenanceFormatError
from profiler_core.collect.recorded import REMEDY, Recorded, Texts, record

_PREFIX = re.compile(r"^[VDIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<where>\S+)\] (?P<header>\{.*)$")
_CONTEXT = {
    "rank", "compiled_autograd_id", "frame_id", "frame_compile_id", "attempt", "severity", "timestamp", "pathname",
    "thread", "subgraph_name", "has_payload", "stack",
}  # fmt: skip
_AOT_GRAPHS = {"aot_inference_graph", "aot_forward_graph", "aot_backward_graph"}
_CACHE_EVENTS = ("fx_graph_cache_hit", "fx_graph_cache_miss", "fx_graph_cache_bypass")
_MAPPING = "inductor_provenance_tracking_node_mappings"
_STACK_TRACES = "inductor_provenance_tracking_kernel_stack_traces"
_WANTED = {"inductor_post_grad_graph", "inductor_output_code", _MAPPING, _STACK_TRACES, *_CACHE_EVENTS}


@dataclass(frozen=True)
class Record:
    """``kind`` is the key of the header that is not context ("artifact", "inductor_output_code", ...) and ``name`` an
    artifact's name. ``line`` is the 1-based line of the header. ``damage`` says in what way the record is not as it
    was written, "" where it is whole: "stray" (a line that is no record), "header" (not JSON), "hash" (the payload
    has another MD5), "cut" (not whole, at the end of a truncated file).
    """

    kind: str
    name: str
    header: dict[str, Any]
    payload: str | None
    line: int
    damage: str


def records(path: str | Path) -> Iterator[Record]:
    """Every record of a log, in order.

    A truncated file ends early, with a last record of kind "" and damage "cut" that says nothing else. Raises
    :class:`ProvenanceFormatError` where the file is not a log at all, OSError where it cannot be read.
    """
    header, payload, begin = "", [], 0
    cut = False
    seen = False
    lines = _lines(Path(path))
    for number, line in enumerate(lines, start=1):
        if line is None:
            cut = True
            continue
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        if match := _PREFIX.match(line):
            if header:
                yield _record(header, payload, begin)
            header, payload, begin, seen = match["header"], [], number, True
        elif line.strip() and seen:
            yield Record("", "", {}, None, number, "stray")
        elif line.strip():
            raise ProvenanceFormatError(
                f"{path}, line {number}: this is not a TORCH_TRACE log: expected a line such as "
                f"'V0101 12:00:00.000000 1 torch/_dynamo/x.py:1] {{...}}', got {line[:60]!r}"
            )
    if header:
        last = _record(header, payload, begin)
        # The last record of a cut file may be half a header or half a payload.
        yield replace(last, damage="cut") if last.damage else last
    if cut:
        yield Record("", "", {}, None, begin, "cut")
    if not seen:
        raise ProvenanceFormatError(f"{path}: no record of a TORCH_TRACE log in it")


def _lines(path: Path) -> Iterator[str | None]:
    """The lines without their ends; None at last where a gzip stream breaks off."""
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
        try:
            for line in file:
                yield line.removesuffix("\n")
        except (EOFError, zlib.error):
            yield None
        except gzip.BadGzipFile as error:
            raise ProvenanceFormatError(f"{path}: not a gzip file, or damaged: {error}") from error


def _record(header: str, payload: list[str], line: int) -> Record:
    text = "\n".join(payload) if payload else None
    try:
        fields = json.loads(header)
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        return Record("", "", {}, text, line, "header")
    kind = next((key for key in fields if key not in _CONTEXT), "")
    inner = fields.get(kind)
    name = str(inner.get("name", "")) if kind == "artifact" and isinstance(inner, dict) else ""
    damage = ""
    if (expected := fields.get("has_payload")) is not None:
        digest = hashlib.md5((text or "").encode(), usedforsecurity=False).hexdigest()
        damage = "" if digest == expected else "hash"
    return Record(kind, name, fields, text, line, damage)


@dataclass
class _Graph:
    """What the log says of one output code."""

    texts: Texts = field(default_factory=Texts)
    cache_key: str = ""
    cache: str = ""  # "hit", "miss", "bypass"
    notes: list[str] = field(default_factory=list)


@dataclass
class _Compile:
    """One attempt at one compile id: its graphs in the order of the log, and the printed graphs since the last."""

    attempt: int
    graphs: list[_Graph] = field(default_factory=list)
    post_grad: str = ""
    aot: dict[str, str] = field(default_factory=dict)


def read(path: str | Path) -> list[Recorded]:
    """The provenance of every graph that has output code in the log, in its order.

    ``graph`` is the compile id ("0/0", "0/0 backward"; "!1/0/0" under compiled autograd 1), with "#2" and so on where
    one compile has several of the kind. Of a compile that Dynamo restarted, the last attempt counts. Damaged records
    and missing parts are in the notes.

    Raises :class:`ProvenanceFormatError` where the file is not such a log, where it holds no output code, or where
    all of it was compiled without provenance.
    """
    compiles: dict[str, _Compile] = {}
    damaged: list[str] = []
    for item in records(path):
        if item.damage:
            damaged.append(_damage(item))
        if item.kind and item.damage != "cut":
            _take(item, compiles)
    made: list[Recorded] = []
    tracked = False
    taken: Counter[str] = Counter()
    for compile_id, compiled in compiles.items():
        for graph in compiled.graphs:
            texts = _with_aot(graph.texts, compiled)
            tracked |= texts.tracked
            notes = [*damaged, *graph.notes]
            if graph.cache == "hit" and not texts.mapping:
                notes.append(f"Inductor's cache served the code and the log has no node mapping for it: {REMEDY}")
            name = f"{compile_id} backward" if texts.backward else compile_id
            taken[name] += 1
            name = name if taken[name] == 1 else f"{name} #{taken[name]}"
            made.append(record(texts, graph=name, cache_key=graph.cache_key, path=str(path), notes=notes))
    if not made:
        why = f" ({'; '.join(damaged[:3])})" if damaged else ""
        raise ProvenanceFormatError(
            f"{path}: no inductor_output_code in the log{why}: was anything compiled with the inductor backend?"
        )
    if not tracked:
        raise ProvenanceFormatError(f"{path}: {len(made)} graphs, all compiled without provenance: {REMEDY}")
    return made


def _damage(item: Record) -> str:
    what = item.name or item.kind
    if item.damage == "stray":
        return f"line {item.line}: not a record, or only the beginning of one; it is left out"
    if item.damage == "header":
        return f"line {item.line}: the header is not JSON; the record is left out"
    if item.damage == "hash":
        return f"line {item.line}: the payload of {what} is not what was written (its MD5 differs)"
    return f"the file breaks off after line {item.line}: what follows is missing"


def _compile_id(header: dict[str, Any]) -> str:
    """As torch spells it: ``frame/compile``, after ``!id`` under compiled autograd; "" outside every compile."""
    parts = [header.get("frame_id"), header.get("frame_compile_id")]
    frame = "/".join(str(part) for part in parts if part is not None)
    autograd = header.get("compiled_autograd_id")
    return frame if autograd is None else f"!{autograd}" + (f"/{frame}" if frame else "")


def _take(item: Record, compiles: dict[str, _Compile]) -> None:
    kind = item.name or item.kind
    if kind not in _AOT_GRAPHS and kind not in _WANTED:
        return
    key, attempt = _compile_id(item.header), int(item.header.get("attempt") or 0)
    compiled = compiles.setdefault(key, _Compile(attempt))
    if attempt > compiled.attempt:
        compiled = compiles[key] = _Compile(attempt)
    elif attempt < compiled.attempt:
        return
    text = item.payload or ""
    if kind in _AOT_GRAPHS:
        compiled.aot[kind] = text
    elif kind == "inductor_post_grad_graph":
        compiled.post_grad = text
    elif kind == "inductor_output_code":
        compiled.graphs.append(_Graph(Texts(source=text, graph=compiled.post_grad)))
        compiled.post_grad = ""
    elif compiled.graphs:
        _describe(compiled.graphs[-1], kind, item)


def _describe(graph: _Graph, kind: str, item: Record) -> None:
    """Add what is logged after a graph's output code."""
    try:
        data = json.loads(item.payload or "")
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        graph.notes.append(f"line {item.line}: {kind} is not a JSON object; it is left out")
    elif kind == _MAPPING:
        graph.texts = replace(graph.texts, mapping=data)
    elif kind == _STACK_TRACES:
        graph.texts = replace(graph.texts, stack_traces=data)
    else:
        graph.cache = kind.rpartition("_")[2]
        graph.cache_key = str(data.get("key") or "")


def _with_aot(texts: Texts, compiled: _Compile) -> Texts:
    if texts.graph:
        return texts
    wanted = ("aot_backward_graph",) if texts.backward else ("aot_inference_graph", "aot_forward_graph")
    text = next((compiled.aot[kind] for kind in wanted if kind in compiled.aot), "")
    return replace(texts, graph=text, is_post_grad=False)
