"""Reads the folders that ``TORCH_COMPILE_DEBUG=1`` leaves, and the same files lying about under other names.

A compile is a set of files of one folder whose names begin alike:

    model__0_inference_0.0/output_code.py, fx_graph_transformed.py, inductor_provenance_tracking_node_mappings.json
    run7_inductor_output_code_3.txt, run7_inductor_post_grad_graph_2.txt, run7_inductor_provenance_tracking_...json

Paths inside the files belong to the machine that wrote them: they are kept as text and never opened.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profiler_core.collect.provenance import ProvenanceFormatError
from profiler_core.collect.recorded import REMEDY, Recorded, Texts, record

# What a file is, by its name after the common beginning. Of two for one role the first listed is taken.
_ROLES = (
    ("mapping", r"inductor_provenance_tracking_node_mappings(_\d+)?\.json"),
    ("kernels", r"inductor_triton_kernel_to_post_grad_nodes(_\d+)?\.json"),
    ("stack_traces", r"inductor_provenance_tracking_kernel_stack_traces(_\d+)?\.json"),
    ("source", r"(inductor_)?output_code\w*\.(py|txt)"),
    ("post_grad", r"(fx_graph_transformed\.py|(inductor_post_grad_graph|after_post_grad_graph)(_\d+)?\.txt)"),
    ("earlier", r"(fx_graph_readable\.py|(before_post_grad_graph|aot_(inference|forward|backward)_graph)(_\d+)?\.txt)"),
)
_PATTERNS = [(role, re.compile(rf"(?P<set>.*?)_?{pattern}")) for role, pattern in _ROLES]


def read(folder: str | Path) -> list[Recorded]:
    """The provenance of every compile below ``folder``, ordered by path.

    ``graph`` is the name of the compile's folder or what its files' names begin with: debug folders hold no compile
    ids. Missing and unreadable pieces are in the notes. Raises :class:`ProvenanceFormatError` where there is no
    compile, or where all of them ran without provenance.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ProvenanceFormatError(f"{folder}: not a folder; give the torch_compile_debug folder or one inside it")
    made: list[Recorded] = []
    tracked = False
    taken: Counter[str] = Counter()
    for (parent, name), files in sorted(_sets(folder.rglob("*")).items()):
        notes: list[str] = []
        texts = _texts(files, notes)
        tracked |= texts.tracked
        graph = name or parent.name
        taken[graph] += 1
        graph = graph if taken[graph] == 1 else f"{graph} #{taken[graph]}"
        made.append(record(texts, graph=graph, path=str(parent), notes=notes))
    if not made:
        raise ProvenanceFormatError(
            f"{folder}: no output_code.py and no inductor_provenance_tracking_node_mappings.json in it or below: "
            "TORCH_COMPILE_DEBUG=1 INDUCTOR_PROVENANCE=1 writes both where something is compiled, not loaded from a "
            "cache"
        )
    if not tracked:
        raise ProvenanceFormatError(f"{folder}: {len(made)} graphs, all compiled without provenance: {REMEDY}")
    return made


def _sets(paths: Iterable[Path]) -> dict[tuple[Path, str], dict[str, Path]]:
    """Files by role, for each compile; a graph alone is not one."""
    sets: dict[tuple[Path, str], dict[str, Path]] = {}
    for path in sorted(paths):
        for role, pattern in _PATTERNS:
            if match := pattern.fullmatch(path.name):
                sets.setdefault((path.parent, match["set"]), {}).setdefault(role, path)
                break
    return {key: files for key, files in sets.items() if not files.keys().isdisjoint({"mapping", "kernels", "source"})}


def _texts(files: dict[str, Path], notes: list[str]) -> Texts:
    mapping = _object(files.get("mapping"), notes)
    if mapping is None and (kernels := _object(files.get("kernels"), notes)) is not None:
        mapping = {"cppCodeToPost": kernels}  # what torch wrote before it wrote the node mappings
    graph = files.get("post_grad", files.get("earlier"))
    return Texts(
        source=_text(files.get("source"), notes),
        graph=_text(graph, notes),
        mapping=mapping,
        stack_traces=_object(files.get("stack_traces"), notes),
        is_post_grad="post_grad" in files,
    )


def _text(path: Path | None, notes: list[str]) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return ""


def _object(path: Path | None, notes: list[str]) -> dict[str, Any] | None:
    text = _text(path, notes)
    if path is None or not text:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        notes.append(f"{path.name} is not JSON ({error}); it is left out")
        return None
    if not isinstance(data, dict):
        notes.append(f"{path.name} holds no JSON object; it is left out")
        return None
    return data
