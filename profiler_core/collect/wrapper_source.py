"""Reads and rewrites the Python wrapper code that Inductor generates: where each kernel is launched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from profiler_core.range_names import launch_name

RANGE_GLOBAL = "_fxopt_launch_range"

_COMMENT = re.compile(r"^\s*(?:#|//) \[Provenance debug handles\] (?P<kernel>.+):(?P<handle>\d+)\s*$")
_SOURCE_NODES = re.compile(r"^\s*(?:#|//) Topologically Sorted Source Nodes: \[(?P<names>[^\]]*)\]")
_FRAGMENT = re.compile(r"^#\s+%(?P<node>\w+) : .*= call_function\[")
_DEFINITION = re.compile(r"^(?P<kernel>\w+) = async_compile\.")


@dataclass(frozen=True)
class Site:
    """A provenance comment: the launch that follows it is ``kernel`` under debug ``handle``; ``line`` is
    1-based.
    """

    kernel: str
    handle: int
    line: int

    @property
    def key(self) -> str:
        return f"{self.kernel}:{self.handle}"


def launch_sites(source: str) -> list[Site]:
    """Every ``[Provenance debug handles]`` comment of a wrapper, in order of the text, which is launch
    order.
    """
    sites = []
    for number, text in enumerate(source.splitlines(), start=1):
        match = _COMMENT.match(text)
        if match:
            sites.append(Site(match["kernel"], int(match["handle"]), number))
    return sites


def generated_kernels(source: str) -> set[str]:
    """Names of the kernels whose code Inductor wrote into this wrapper (as against calls into a library)."""
    names = set(re.findall(r"^(\w+) = async_compile\.", source, re.MULTILINE))
    return names | set(re.findall(r"^(\w+) = MultiKernelCall", source, re.MULTILINE))


def described_nodes(source: str) -> dict[str, list[str]]:
    """The nodes of each generated kernel, by its name, from the ``Graph fragment`` comments before its definition.

    Several launches may share one kernel; the comment is then about the first of them only.
    """
    nodes: dict[str, list[str]] = {}
    current: list[str] = []
    for line in source.splitlines():
        if line.startswith("# Graph fragment:"):
            current = []
        elif match := _FRAGMENT.match(line):
            current.append(match["node"])
        elif match := _DEFINITION.match(line):
            nodes[match["kernel"]], current = current, []
    return {kernel: names for kernel, names in nodes.items() if names}


def source_nodes(source: str) -> dict[str, list[str]]:
    """By launch key, the names in the ``Topologically Sorted Source Nodes`` comment of the launch: pre-grad nodes, and
    post-grad ones for what has no pre-grad origin, as in a backward graph.
    """
    names: dict[str, list[str]] = {}
    current: list[str] = []
    for line in source.splitlines():
        if match := _SOURCE_NODES.match(line):
            current = [name for name in match["names"].split(", ") if name]
        elif match := _COMMENT.match(line):
            names[f"{match['kernel']}:{match['handle']}"], current = current, []
    return names


@dataclass(frozen=True)
class Rewritten:
    """One function of the wrapper with ranges around its launches. ``line`` is where its ``def`` stands."""

    name: str
    owner: str  # the class that holds it, "" at module level
    line: int
    code: CodeType
    wrapped: tuple[str, ...]


def with_ranges(source: str, filename: str, tag: str = "") -> list[Rewritten]:
    """Put ``with <RANGE_GLOBAL>("fxopt::kernel:handle"):`` around every launch that a provenance comment
    announces; with a ``tag``, the name ends in ``@tag``.

    Returns the rewritten functions, compiled but not run. Raises SyntaxError where ``source`` is not Python.
    """
    sites = launch_sites(source)
    if not sites:
        return []
    tree = ast.parse(source)
    done: list[tuple[str, str, int, tuple[str, ...]]] = []
    for owner, function in _functions(tree):
        inside = [s for s in sites if function.lineno <= s.line <= (function.end_lineno or 0)]
        if inside:
            wrapped = [site.key for site, stop in _spans(inside, function) if _wrap(function.body, site, stop, tag)]
            done.append((function.name, owner, function.lineno, tuple(wrapped)))
    ast.fix_missing_locations(tree)
    module = compile(tree, filename, "exec")  # only compiled: running it would load every kernel again
    return [
        Rewritten(name, owner, line, _find_code(module, [owner, name] if owner else [name], line), wrapped)
        for name, owner, line, wrapped in done
        if wrapped
    ]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for item in tree.body:
        if isinstance(item, ast.FunctionDef):
            yield "", item
        elif isinstance(item, ast.ClassDef):
            for member in item.body:
                if isinstance(member, ast.FunctionDef):
                    yield item.name, member


def _spans(sites: list[Site], function: ast.FunctionDef) -> list[tuple[Site, int]]:
    """Each site with the line before which its launch must stand: the next site, or the function's end."""
    end = (function.end_lineno or 0) + 1
    return list(zip(sites, [*(s.line for s in sites[1:]), end], strict=True))


def _wrap(body: list[ast.stmt], site: Site, stop: int, tag: str) -> bool:
    """Wrap the launch of ``site`` in ``body`` or a block inside it; False where there is nothing to wrap."""
    for statement in body:
        if statement.lineno < site.line <= (statement.end_lineno or 0):
            for inner in _blocks(statement):
                inside = inner and inner[0].lineno <= stop and (inner[-1].end_lineno or 0) > site.line
                if inside and _wrap(inner, site, stop, tag):
                    return True
    indices = [i for i, statement in enumerate(body) if site.line < statement.lineno < stop]
    if not indices:
        return False
    launches = [i for i in indices if _calls(body[i], site.kernel)]
    if launches:
        first = last = launches[0]
    else:
        # The launch is spelt in a way unknown here: take all that stands before the next launch, without
        # the releases of buffers at either end.
        work = [i for i in indices if not isinstance(body[i], (ast.Delete, ast.Return, ast.Pass))]
        if not work:
            return False
        first, last = work[0], work[-1]
    inner = body[first : last + 1]
    call = ast.Call(ast.Name(RANGE_GLOBAL, ast.Load()), [ast.Constant(launch_name(site.kernel, site.handle, tag))], [])
    block = ast.With(items=[ast.withitem(context_expr=call, optional_vars=None)], body=inner)
    ast.copy_location(block, inner[0])
    block.end_lineno = inner[-1].end_lineno
    body[first : last + 1] = [block]
    return True


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list):
            yield block


def _calls(statement: ast.stmt, kernel: str) -> bool:
    names = {kernel, f"{kernel}.run"}
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) in names for n in ast.walk(statement))


def _find_code(code: CodeType, path: list[str], line: int) -> CodeType:
    """The code object at ``path``; of several definitions of one name, the one whose ``def`` is at
    ``line``.
    """
    candidates = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == path[0]]
    if len(path) > 1:
        for candidate in candidates:
            try:
                return _find_code(candidate, path[1:], line)
            except LookupError:
                continue
    else:
        for candidate in candidates:
            if candidate.co_firstlineno == line:
                return candidate
    raise LookupError(f"no function {'.'.join(path)} at line {line}")
