"""Runs graph passes in Inductor's custom-pass slots, under invariants.

A pass runs on a copy of the graph. Only if the copy satisfies every invariant does it take the graph's place, so a
pass that raises, or breaks something, has changed nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.traceback import NodeSource, NodeSourceAction

import fxopt
from fxopt import fingerprints
from fxopt.bisect import Bisection
from fxopt.registry import (
    PROVENANCE_META,
    Candidate,
    ConfigPass,
    GraphPass,
    InvariantError,
    PassContext,
    PassReport,
    Stage,
)
from fxopt.torch_api import inductor, values
from fxopt.torch_api.inductor import CustomGraphPass, InferenceAwareGraphPass

if TYPE_CHECKING:
    from fxopt.dump import Dumper

__all__ = ["PROVENANCE_META", "SlotPass", "chain_uuid", "checked_candidate", "consider", "run_pass"]


#: meta that AOTAutograd divides a graph with gradients by, into forward and backward
_PARTITION_META = ("partitioner_tag", "recompute", "ac_graph_id")


def chain_uuid(passes: Sequence[GraphPass], context: PassContext, stage: Stage) -> str:
    """Digest of everything that decides what the passes do to a graph: their sources and options, their order, all that
    the context tells them, and what runs and checks them. Where measured choices are kept decides nothing: code made
    with an older choice is still right.
    """
    parts = {
        "stage": stage,
        "passes": [(p.name, p.fingerprint()) for p in passes],
        "context": replace(context, cache=None, labels=(), origins={}),
        # Hundreds of labels and thousands of names, which json writes in a tenth of the time.
        "labels": json.dumps([label.to_json() for label in context.labels], sort_keys=True, default=repr),
        "origins": json.dumps(dict(context.origins), sort_keys=True),
        "framework": [fxopt.__version__, _framework()],
    }
    return hashlib.sha256(fingerprints.canonical(parts).encode()).hexdigest()


def _framework() -> list[str]:
    modules = [__name__, "fxopt.registry", "fxopt.invariants", "fxopt.effects", "fxopt.torch_api.values"]
    modules += ["fxopt.torch_api.lowering", "fxopt.torch_api.tracing"]  # what one operator in the graph stands for
    return [fingerprints.module_digest(name) for name in modules]


class SlotPass(InferenceAwareGraphPass):
    """The passes of one stage as one Inductor custom pass, after whatever a user has already put in the slot.

    Inductor's slot has one owner in torch 2.11; so the user's pass is called first and its uuid is part of ours.
    Inductor calls it for the graph, and before that for each graph inside it (the branches of a condition): `reports`
    holds what the passes did in all of them together. With `record`, `entered` holds copies of the graph as each pass
    found it, by name, and under "" as the last one left it; it is empty where there were graphs inside.
    """

    def __init__(
        self,
        passes: Sequence[GraphPass],
        context: PassContext,
        stage: Stage,
        installed: Any = None,
        *,
        dumper: Dumper | None = None,
        bisection: Bisection | None = None,
        record: bool = False,
    ) -> None:
        self.passes = tuple(passes)
        self.context = context
        self.stage = stage
        self.installed = inductor.custom_passes(installed)
        self.dumper = dumper
        self.bisection = bisection
        self.reports: list[PassReport] = []
        self.record = record
        self.entered: dict[str, fx.Graph] = {}
        self._uuid = chain_uuid(passes, context, stage)

    @property
    def ran(self) -> bool:
        """Whether the passes ran; where a cache serves the code, they do not."""
        return bool(self.reports)

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        for other in self.installed:
            inductor.call_custom(other, graph, is_inference)
        reports: list[PassReport] = []
        entered: dict[str, fx.Graph] = {}
        for p in self.passes:
            if self.record and not self.ran:
                same = bool(reports) and not reports[-1].changed
                entered[p.name] = next(reversed(entered.values())) if same else _copy(graph)
            reports.append(run_pass(p, graph, self.context, self.dumper, self.bisection))
        self.entered = {**entered, "": _copy(graph)} if entered else {}
        self.reports = [_together(*pair) for pair in zip(self.reports, reports, strict=True)] if self.ran else reports

    def uuid(self) -> Any:
        """None, which makes Inductor skip its caches, where a user's pass has no uuid of its own."""
        others = []
        for other in self.installed:
            uuid = other.uuid() if isinstance(other, CustomGraphPass) else None
            if uuid is None:
                return None
            others.append(str(uuid))
        return f"fxopt:{self._uuid}:{fingerprints.canonical(others)}"


def run_pass(
    p: GraphPass,
    graph: fx.Graph,
    context: PassContext,
    dumper: Dumper | None = None,
    bisection: Bisection | None = None,
) -> PassReport:
    """Run one pass on `graph`, in place, if a trial on a copy holds every invariant. Never raises for the pass.

    A pass that fails leaves the graph, and the attributes of the module that owns it, as they were. dumper: where the
    graph before and after is written; bisection: counts the candidates, and may deny some.
    """
    started = time.perf_counter()
    dump = dumper.begin(p, graph, context) if dumper is not None else None
    attempt = _Attempt(p, graph, context, bisection)
    if inductor.observe(graph.owning_module, p.name, attempt.run) is None:
        attempt.report = replace(
            attempt.report, refused=(("graph", "torch._inductor.config.disabled_passes names this pass"),)
        )
    report = replace(attempt.report, seconds=time.perf_counter() - started)
    if dump is not None:
        dump.end(report, attempt.trial if report.error else graph)
    return report


class _Attempt:
    """One run of one pass: on a copy of the graph, which takes its place if it holds every invariant."""

    def __init__(self, p: GraphPass, graph: fx.Graph, context: PassContext, bisection: Bisection | None) -> None:
        self.p = p
        self.graph = graph
        self.context = context
        self.bisection = bisection
        self.trial = graph
        self.report = PassReport(p.name, p.stage.value)
        self._seen: list[tuple[Any, ...]] = []  # the trial's nodes and calls as they were last
        self._at = ""  # the node that is being rewritten

    def run(self) -> bool:
        """True. What happened is in `report`, and after an error the graph that was refused in `trial`."""
        held = _Attributes(self.graph.owning_module)
        taken = False
        try:
            self.trial = _copy(self.graph)
            rewritten = self._rewrite(self._candidates())
            if rewritten:
                self._check()
            if written := held.written():
                raise InvariantError(written)
            if rewritten:
                self._take(rewritten)
                taken = True
        except Exception as error:
            written = held.written()
            also = f"; {written}" if written and written != str(error) else ""
            self.report = replace(self.report, error=f"{type(error).__name__}: {error}{self._where(error)}{also}")
        finally:
            if not taken:  # whatever ends the pass, Ctrl-C included
                held.restore()
        return True

    def _where(self, error: Exception) -> str:
        """Of an error that the pass raised itself: at which node, and in which line of whose file."""
        if isinstance(error, InvariantError):  # says which node and which rule
            return ""
        last = traceback.extract_tb(error.__traceback__)[-1]
        node = f"rewriting {self._at}, " if self._at else ""
        return f" ({node}{Path(last.filename).name}:{last.lineno})"

    def _candidates(self) -> list[Candidate]:
        self._seen = _snapshot(self.trial)
        found = [checked_candidate(c) for c in self.p.candidates(self.trial, self.context)]
        if _snapshot(self.trial) != self._seen:
            raise InvariantError("candidates() changed the graph, which is for rewrite() to do")
        accepted = list({c.target: c for c in found if not c.refused}.values())  # each once
        refused = tuple((c.target, c.refused) for c in found if c.refused)
        self.report = replace(self.report, matched=len(accepted), refused=refused)
        return accepted

    def _rewrite(self, accepted: Sequence[Candidate]) -> int:
        """Rewrite each accepted candidate; returns how many changed the graph."""
        names = {node.name for node in self.graph.nodes}
        rewritten = 0
        for candidate in accepted:
            node = next((n for n in self.trial.nodes if n.name == candidate.target), None)
            if node is not None:
                if self.bisection is None or self.bisection.take(self.p.name, candidate.target):
                    rewritten += self._change(node)
                else:
                    self._leave(candidate, self.bisection.reason)
            elif candidate.target in names:
                self._leave(candidate, "an earlier rewrite of this pass took it away")
            else:
                raise InvariantError(f"candidate {candidate.target} is not in the graph")
        if self.report.matched:
            from fxopt import invariants  # not needed where a cache serves the code

            self._change(None)
            invariants.lint(self.trial)
            self.trial.eliminate_dead_code()
            if rewritten == 0 or _text(self.trial) == _text(self.graph):
                raise InvariantError(f"{self.report.matched} candidates accepted, but the graph is as it was")
        return rewritten

    def _leave(self, candidate: Candidate, reason: str) -> None:
        refused = (*self.report.refused, (candidate.target, reason))
        self.report = replace(self.report, matched=self.report.matched - 1, refused=refused)

    def _change(self, node: fx.Node | None) -> bool:
        """Rewrite the candidate at `node`, or finish where that is None; whether the graph changed."""
        known = {call[0] for call in self._seen}
        own = [] if node is None else [_provenance(node, self.p.name)]
        if node is None:
            self.p.finish(self.trial, self.context)
        else:
            self._at = node.name
            self.p.rewrite(self.trial, node, self.context)
            self._at = ""
        made = [n for n in self.trial.nodes if n not in known]
        for new in made:
            new.meta = _own(new.meta)  # which a pass may have shared with a node that stays
            around = [_provenance(n, self.p.name) for n in (*new.all_input_nodes, *new.users)]
            # The first of which something is known beyond its name; but what it was made from is the candidate.
            found = max([*own, *around], key=lambda provenance: len(provenance) > 1, default={})
            if own:
                found = {**found, "from_node": own[0]["from_node"]}
            for key, value in found.items():
                new.meta.setdefault(key, value)
            # torch's observer names no source for a node that replaces none.
            if found and not any(source.name for source in new.meta["from_node"]):
                new.meta["from_node"] = found["from_node"]
        values.fill(self.trial, made)
        before, self._seen = self._seen, _snapshot(self.trial)
        return self._seen != before

    def _check(self) -> None:
        from fxopt import invariants

        invariants.check(self.graph, self.trial)
        checked = _snapshot(self.trial)
        self.p.ensures(self.trial, self.context)
        if _snapshot(self.trial) != checked:
            raise InvariantError("ensures() changed the graph, which is for rewrite() and finish() to do")

    def _take(self, rewritten: int) -> None:
        from fxopt import graph_text

        old, new = ({node.name for node in graph.nodes} for graph in (self.graph, self.trial))
        self.report = replace(
            self.report,
            rewritten=rewritten,
            changed=True,
            created=len(new - old),
            erased=len(old - new),
            change=graph_text.change(self.graph, self.trial),
        )
        inductor.replace_nodes(self.graph, self.trial)


def checked_candidate(candidate: Any) -> Candidate:
    """`candidate`, if it is one; InvariantError says what a pass's candidates() gave instead."""
    if not isinstance(candidate, Candidate):
        raise InvariantError(f"candidates() gave {candidate!r} ({type(candidate).__name__}): give a Candidate")
    target: Any = candidate.target
    if isinstance(target, fx.Node):
        raise InvariantError(f"candidates() gave Candidate(<Node {target.name}>): give node.name")
    if not isinstance(target, str):
        raise InvariantError(f"candidates() gave Candidate({target!r}): `target` is a name")
    if not isinstance(candidate.refused, str):
        raise InvariantError(
            f'candidates() gave Candidate({target!r}, refused={candidate.refused!r}): `refused` is the reason, or ""'
        )
    return candidate


def consider(
    p: ConfigPass, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
) -> tuple[list[int], PassReport]:
    """Positions of the inputs that a config pass accepts, each once, and the report so far. Raises what the pass does,
    and InvariantError for what is no candidate.
    """
    found = [(position, checked_candidate(c)) for position, c in p.candidates(gm, inputs, context)]
    accepted = list(dict.fromkeys(position for position, candidate in found if not candidate.refused))
    refused = tuple((c.target, c.refused) for _, c in found if c.refused)
    return accepted, PassReport(p.name, p.stage.value, matched=len(accepted), refused=refused)


def no_candidates(p: GraphPass, graph: fx.Graph, context: PassContext) -> str:
    """Why `p` would leave `graph` as it is: its first refusal, or that it has no candidate; "" where it accepts one.
    Raises what the pass does.
    """
    refused = ""
    for candidate in map(checked_candidate, p.candidates(graph, context)):
        if not candidate.refused:
            return ""
        refused = refused or candidate.refused
    return refused or "no candidate"


def _provenance(node: fx.Node, pass_name: str) -> dict[str, Any]:
    """What a node that a pass makes from `node` inherits: all that is known of `node`, and that it comes from it."""
    found = {key: node.meta[key] for key in (*PROVENANCE_META, *_PARTITION_META) if node.meta.get(key) is not None}
    return {**found, "from_node": [NodeSource(node, pass_name, NodeSourceAction.CREATE)]}


class _Attributes:
    """All that a graph's module and the modules inside it hold, to be put back if a pass is undone.

    The tensors are not copied, for they may be large: that one was written to in place is only told, by its version.
    """

    def __init__(self, module: Any) -> None:
        inside = list(module.named_modules()) if isinstance(module, torch.nn.Module) else []
        self._dicts = [(held, dict(held)) for _, m in inside for held in (vars(m), *_plain_dicts(vars(m)))]
        self._versions = [
            (f"{prefix}.{name}" if prefix else name, value, value._version)
            for prefix, m in inside
            for held in (vars(m), m._parameters, m._buffers)
            for name, value in held.items()
            if isinstance(value, torch.Tensor) and not value.is_inference()  # which has no version
        ]

    def written(self) -> str:
        """Says which tensor was written to since, "" if none was."""
        names = [name for name, value, version in self._versions if value._version != version]
        if not names:
            return ""
        return (
            f"constants: {names[0]}: the pass changed the constant {', '.join(names)} in place, which cannot be "
            "undone; register a new tensor under another name"
        )

    def restore(self) -> None:
        for now, held in self._dicts:
            now.clear()
            now.update(held)


def _plain_dicts(held: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for value in held.values() if type(value) in (dict, OrderedDict)]


def _copy(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names; values and provenance are shared, but not the lists that hold them."""
    with warnings.catch_warnings():
        # torch's own, of the tree of inputs that a graph holds: nothing that a user could mend
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        copied = copy.deepcopy(graph)
    copied.owning_module = graph.owning_module
    for node in copied.nodes:
        node.meta = _own(node.meta)
    return copied


def _own(meta: dict[str, Any]) -> dict[str, Any]:
    """A copy of a node's meta, and of the lists and dicts in it."""
    return {key: copy.copy(value) if type(value) in (list, dict) else value for key, value in meta.items()}


def _snapshot(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def _text(graph: fx.Graph) -> str:
    """The graph with nodes numbered in order: names differ where one of two equal graphs has a longer history."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def spell(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda n: number[n]))

    return "\n".join(
        f"{number[n]} {n.op} {n.target if n.op != 'output' else ''} {spell(n.args)} {spell(n.kwargs)}"
        for n in graph.nodes
    )


def _together(first: PassReport, second: PassReport) -> PassReport:
    """What one pass did in two graphs of one compilation."""
    return PassReport(
        first.name,
        first.stage,
        matched=first.matched + second.matched,
        rewritten=first.rewritten + second.rewritten,
        refused=first.refused + second.refused,
        changed=first.changed or second.changed,
        error="; ".join(filter(None, (first.error, second.error))),
        created=first.created + second.created,
        erased=first.erased + second.erased,
        seconds=first.seconds + second.seconds,
        change="\n".join(filter(None, (first.change, second.change))),
    )
