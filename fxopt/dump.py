"""The graph before and after each pass, as files to be read in an editor (`FXOPT_DUMP=dir`).

    0001.<graph>.<stage>.<pass>.before.py     what the pass was given, and its options and labels
    0001.<graph>.<stage>.<pass>.after.py      what it made, and its report
    0001.<graph>.<stage>.<pass>.undone.py     in place of that, where it failed: why, and what it made
    0002.<graph>.<stage>.<pass>.txt           config and runtime passes, which change no graph

Numbers count over the process, and go on after those that are in the directory. Several processes may write to one.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxopt.registry import Pass, PassContext, PassReport
from profiler_core.quantities import duration

__all__ = ["Dump", "Dumper"]

_lock = threading.Lock()
_last: dict[Path, int] = {}  # the last number of each directory
_failed: set[Path] = set()  # directories that were warned of


@dataclass(frozen=True)
class Dumper:
    """Writes the dumps of one graph, named `graph`, to `directory`.

    A directory that cannot be written to costs one warning, and nothing else.
    """

    directory: Path
    graph: str = "graph"

    def begin(self, p: Pass, graph: fx.Graph, context: PassContext) -> Dump:
        """Write the graph that `p` is about to be given."""
        text = f"{_header(p, context)}\n{_code(graph)}"
        return Dump(self, p, context, self._claim(f"{self.graph}.{p.stage.value}.{p.name}", ".before.py", text))

    def note(self, p: Pass, context: PassContext, report: PassReport, configuration: Any = None) -> None:
        """Write what a config or runtime pass did."""
        lines = [_header(p, context), _outcome(report)]
        if configuration is not None:
            lines.append(f"# Inductor options: {dict(configuration.patches)}")
            lines.append(f"# inputs held constant: {sorted(configuration.freeze)}")
        self._claim(f"{self.graph}.{p.stage.value}.{p.name}", ".txt", "\n".join(lines) + "\n")

    def _claim(self, name: str, ending: str, text: str) -> Path | None:
        """Write a file of the next number that nobody has; its path without `ending`."""
        name = re.sub(r"[^\w.-]", "_", name)
        try:
            with _lock:
                self.directory.mkdir(parents=True, exist_ok=True)
                if self.directory not in _last:
                    taken = (re.match(r"\d+", path.name) for path in self.directory.iterdir())
                    _last[self.directory] = max((int(match[0]) for match in taken if match), default=0)
                while True:
                    _last[self.directory] += 1
                    number = f"{_last[self.directory]:04d}"
                    if next(self.directory.glob(f"{number}.*"), None) is not None:
                        continue  # another process has come here first
                    stem = self.directory / f"{number}.{name}"
                    try:
                        with Path(f"{stem}{ending}").open("x", encoding="utf-8") as file:
                            file.write(text)
                    except FileExistsError:
                        continue
                    return stem
        except OSError as error:
            self._warn(error)
            return None

    def _warn(self, error: OSError) -> None:
        if self.directory not in _failed:
            _failed.add(self.directory)
            warnings.warn(f"fxopt: no dumps in {self.directory}: {error.strerror or error}", stacklevel=2)


@dataclass(frozen=True)
class Dump:
    """The dump of one run of one pass, of which the graph before is written."""

    dumper: Dumper
    p: Pass
    context: PassContext
    stem: Path | None

    def end(self, report: PassReport, graph: fx.Graph) -> None:
        """Write what came of it; `graph` is what the pass made, kept or not."""
        if self.stem is None:
            return
        ending, error = ".after.py", ""
        if report.error:
            ending, error = ".undone.py", _comment(f"UNDONE: {report.error}") + "\n"
        try:
            Path(f"{self.stem}{ending}").write_text(
                f"{error}{_header(self.p, self.context)}\n{_outcome(report)}\n{_code(graph)}", encoding="utf-8"
            )
        except OSError as problem:
            self.dumper._warn(problem)


def _header(p: Pass, context: PassContext) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in p.options().items())
    lines = [f"pass {p.name}({options}), stage {p.stage.value}, on {context.device}"]
    for label in context.labels:
        if label.axis in p.answers:
            where = ", ".join(label.nodes) or label.launch or label.scope
            lines.append(f"label {label.axis.value} on {where}, headroom {duration(label.headroom_ns)}: {label.why}")
    return "\n".join(map(_comment, lines))


def _outcome(report: PassReport) -> str:
    lines = [
        f"{report.matched} matched, {report.rewritten} rewritten, {report.created} nodes created, "
        f"{report.erased} erased, {duration(1e9 * report.seconds)}"
    ]
    lines += [f"refused {target}: {reason}" for target, reason in report.refused]
    return "\n".join(map(_comment, lines))


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())


def _code(graph: fx.Graph) -> str:
    """The graph as Python, with the type, shape and strides of each value, and the bodies of its operators."""
    try:
        # A copy, for generating code looks at the module that owns the graph, and may leave marks on nodes.
        copied = copy.deepcopy(graph)
        copied.owning_module = graph.owning_module
        code = copied.python_code("self", verbose=True, include_stride=True, include_device=True).src.strip() + "\n"
        for node in graph.find_nodes(op="get_attr"):
            body = getattr(graph.owning_module, str(node.target), None)
            if isinstance(body, fx.GraphModule):
                shown = body.print_readable(print_output=False, include_stride=True, include_device=True)
                code += f"\n\n# self.{node.target}\n{shown}"
        return code
    except Exception as error:  # a dump must not cost anybody their model
        return f"# the graph cannot be shown as code: {error}\n# " + "\n# ".join(str(graph).splitlines()) + "\n"
