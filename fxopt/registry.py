"""The pass contract, registration, and discovery.

A pass is a frozen dataclass whose fields are its options. It names the labels it answers and the stage it works
at, finds candidates (each accepted or refused with a reason), rewrites one at a time, and may state what must hold
afterwards. The manager does the rest: order, invariants, undoing, counting.

    @register
    @dataclass(frozen=True)
    class MyPass(GraphPass):
        name = "my_pass"
        answers = frozenset({Axis.MEMORY_BOUND})
        stage = Stage.JOINT

        def candidates(self, graph, context): ...
        def rewrite(self, graph, candidate, context): ...

Packages of passes are found through the entry point group `fxopt.passes`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fxopt.fingerprints import canonical, source_digest
from fxopt.report.restore import restore_fields

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import fx

    from fxopt.labels import Axis, Label
    from fxopt.precision import Budget, Precision

ENTRY_POINT_GROUP = "fxopt.passes"

#: meta that says where a node comes from; new nodes inherit it from the node they replace
PROVENANCE_META = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
    "custom",
    # of a backward node: where the forward node comes from that it is the gradient of
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
)


class Stage(str, Enum):
    """Where a pass works, in the order in which the stages run."""

    CONFIG = "config"  # what is compiled, and with which Inductor options
    JOINT = "joint"  # the graph after AOTAutograd, before Inductor's own passes
    POST_GRAD = "post_grad"  # the graph after Inductor's joint passes, before its post-grad passes
    RUNTIME = "runtime"  # the compiled callable

    @property
    def order(self) -> int:
        return list(Stage).index(self)


@dataclass(frozen=True)
class Candidate:
    """A place that a pass looked at: `target` names it; `refused` says why it was left alone ("" = accepted)."""

    target: str
    refused: str = ""


@dataclass(frozen=True)
class PassReport:
    """What one pass did in one compilation.

    matched: candidates accepted; rewritten: candidates that were rewritten, checked against the graph itself;
    refused: (target, reason) for each one left alone; changed: whether the graph, configuration or callable differs;
    error: why the pass was undone, "" if it was not. created, erased: nodes that the graph has and had; seconds: time
    that the pass took, with the checks. change: the graph before and after as a difference of lines
    (`fxopt.graph_text`), "" where no graph was changed.
    """

    name: str
    stage: str
    matched: int = 0
    rewritten: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    changed: bool = False
    error: str = ""
    created: int = 0
    erased: int = 0
    seconds: float = field(default=0.0, compare=False)
    change: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PassReport:
        """Reads what `to_json` gave. ValueError, naming the place, for anything else."""
        return restore_fields(PassReport, data, "pass report")


@dataclass(frozen=True)
class PassContext:
    """What a pass may know: the device, the precision asked for, the labels, and the measured graph's origins.

    `origins` maps each node of the measured post-grad graph to the pre-grad nodes that it comes from. `static` holds
    the positions of inputs that are parameters or buffers; `mutated` those of inputs that the graph writes to;
    `session` is true under `fxopt.optimize`, where weights may be held constant; `random` names nodes that draw
    random numbers; `dynamic` is true where a size is symbolic. `cache` is a folder in which a pass may keep what it
    measured on this device, shared by processes.
    """

    device: torch.device
    budget: Budget
    labels: tuple[Label, ...] = ()
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matrix_units: frozenset[str] = frozenset()
    static: frozenset[int] = frozenset()
    mutated: frozenset[int] = frozenset()
    random: tuple[str, ...] = ()
    dynamic: bool = False
    session: bool = False
    grad: bool = False
    cache: Path | None = None

    def labelled(self, axes: Iterable[Axis]) -> frozenset[str]:
        """Names of the post-grad nodes that carry one of `axes`."""
        wanted = frozenset(axes)
        return frozenset(name for label in self.labels if label.axis in wanted for name in label.nodes)

    def answers(self, node: fx.Node, axes: Iterable[Axis]) -> bool:
        """Whether `node`, at any stage, stands for a labelled post-grad node.

        By name, which joint and post-grad graphs share unless Inductor or a pass rewrote the node; then by the
        pre-grad nodes that both come from.
        """
        names = self.labelled(axes)
        if node.name in names:
            return True
        if node.name in self.origins:
            return False
        sources = node.meta.get("from_node", ())
        own = {source.name for source in sources}.union(*map(_origins, sources)) - {""}
        return bool(own) and any(own.intersection(self.origins.get(name, ())) for name in names)


def _origins(source: Any) -> Iterator[str]:
    """Names at the ends of one of torch's NodeSource chains, where the pre-grad nodes are."""
    earlier = getattr(source, "from_node", ())
    if not earlier:
        yield source.name
    for one in earlier:
        yield from _origins(one)


@dataclass(frozen=True)
class Configuration:
    """What a config pass asks for: Inductor options, positions of inputs to hold constant, and the types by position
    that fp32 inputs are cast to, with fp32 outputs cast back.
    """

    patches: Mapping[str, Any] = field(default_factory=dict)
    freeze: frozenset[int] = frozenset()
    compute: Mapping[int, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """Base of all passes. Subclasses are frozen dataclasses; their fields are their options.

    name: unique. answers: axes of the labels it consumes. stage: see `Stage`. precision: class that it needs.
    after / before: names of passes it must follow or precede. enables: names of passes that may pay only together
    with this one, so that it stays in the trial although it is no faster. needs: names of passes that it cannot do
    without, which join its trial. conflicts: names of passes that answer the same thing on the same nodes, never in one
    trial with it, whichever of the two says so. last: whether it is tried after all others, for it compiles long.
    devices: types of device it is for; elsewhere it is not mentioned. gradients: whether it is also right in a graph
    with gradients, where the joint stage has forward and backward in one graph, the post-grad stage sees each of them,
    and any value may be read by the backward.
    """

    name: ClassVar[str] = ""
    answers: ClassVar[frozenset[Axis]] = frozenset()
    stage: ClassVar[Stage]
    precision: ClassVar[Precision]
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    enables: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    last: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    gradients: ClassVar[bool] = False

    def concerns(self, context: PassContext) -> bool:
        """Whether the graph has what the pass is about; where not, no report mentions it."""
        return True

    def applicable(self, context: PassContext) -> str:
        """Why the pass cannot be used on this graph at all, "" if it can."""
        return ""

    def variants(self, context: PassContext) -> Sequence[Pass]:
        """Instances of this pass with other options to try, the best guess first. Each is a trial of its own, and at
        most one of them is in use. Must be of this very class."""
        return (self,)

    def options(self) -> dict[str, Any]:
        """The pass's options and their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def fingerprint(self) -> str:
        """Digest of the source, with what it imports from its own package, and of the options: an edited pass is
        another pass. RegistryError for an option that is not written alike in every process.
        """
        options = {}
        for name, value in self.options().items():
            try:
                options[name] = canonical(value)
            except Exception as error:
                raise RegistryError(
                    f"{type(self).__qualname__}: the option `{name}` cannot be part of a key: {error}; give it a "
                    "__repr__ without an address, or pass a name instead"
                ) from error
        return hashlib.sha256(f"{source_digest(type(self))} {canonical(options)}".encode()).hexdigest()


class GraphPass(Pass):
    """A pass over an fx.Graph, at the joint or post-grad stage."""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        """Every place that the pass considers, accepted or refused with a reason. Must not change the graph."""
        raise NotImplementedError

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        """Rewrite the accepted candidate at `node`. New nodes get `meta["val"]` and provenance from the manager."""
        raise NotImplementedError

    def finish(self, graph: fx.Graph, context: PassContext) -> None:
        """Tidy up after the last rewrite (dead code is removed by the manager)."""

    def ensures(self, graph: fx.Graph, context: PassContext) -> None:
        """Raise InvariantError if something that the pass promises does not hold."""


class ConfigPass(Pass):
    """A pass that changes what is compiled or how, rather than a node."""

    def candidates(
        self, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
    ) -> Iterable[tuple[int, Candidate]]:
        """(input position, candidate) for each place considered."""
        raise NotImplementedError

    def configure(self, accepted: Sequence[int], context: PassContext) -> Configuration:
        """The configuration that answers the accepted candidates."""
        raise NotImplementedError

    def took_effect(self, compiled: Any, accepted: Sequence[int], context: PassContext) -> int:
        """How many of the accepted candidates show in the compiled code. Counts, never what was asked for."""
        raise NotImplementedError


class RuntimePass(Pass):
    """A pass over the compiled callable.

    Positions (`inputs`, `context.static`, `compiled.mutated`) are in the callable's own argument order.
    """

    def compiling(self) -> AbstractContextManager[None]:
        """What the code is compiled in, as far as Inductor reads it then: a setting that `wrap` holds during calls."""
        return nullcontext()

    def refuse(self, compiled: Any, inputs: Sequence[Any], context: PassContext) -> str:
        """Why the compiled code cannot be wrapped, "" if it can."""
        return ""

    def wrap(
        self, fn: Callable[..., Any], inputs: Sequence[Any], compiled: Any, context: PassContext
    ) -> Callable[..., Any]:
        """A callable that does what `fn` does."""
        raise NotImplementedError

    def wrap_backward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same around the compiled backward of a graph with gradients, for passes that say `gradients`."""
        raise NotImplementedError


class InvariantError(RuntimeError):
    """A pass broke what must hold; the message names the node and the rule."""


class RegistryError(ValueError):
    """A pass cannot be registered or found; the message names it and the remedy."""


_registered: dict[str, type[Pass]] = {}
P = TypeVar("P", bound=type[Pass])


def register(cls: P) -> P:
    """Class decorator: make a pass known by its name. Registering the same class again is harmless."""
    from fxopt import declarations  # which knows the kinds of passes from here

    declarations.check(cls)
    other = _registered.get(cls.name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RegistryError(
            f"two passes are named {cls.name!r}: {other.__module__}.{other.__qualname__} and "
            f"{cls.__module__}.{cls.__qualname__}; rename one"
        )
    declarations.make(cls)
    _registered[cls.name] = cls
    return cls


def unregister(name: str) -> None:
    """Forget a pass registered by decorator (for tests and notebooks)."""
    _registered.pop(name, None)


def discover() -> dict[str, type[Pass]]:
    """All passes by name: those registered and those of the entry point group `fxopt.passes`.

    What counts is the name that the class declares, not that of the entry point. An entry point that fails to load, or
    whose pass has the name of another one, is skipped with a warning that names it: one broken package must not take
    the others away.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(point.load())
        except Exception as error:
            package = f" of {point.dist.name}" if point.dist is not None else ""
            warnings.warn(
                f"fxopt: the pass {point.name!r} ({point.value}{package}) cannot be loaded: {error}", stacklevel=2
            )
    return dict(_registered)


def _known(names: Collection[str]) -> dict[str, type[Pass]]:
    """Passes by name, all of `names` among them that there are.

    Of the entry points only those of these names are loaded where each gives the pass of its name, for a new process
    that uses a plan of one pass waits for all that it imports; all of them, as by `discover`, where one does not.
    """
    if not names:
        return {}
    points = [point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name in names]
    try:
        for point in points:
            register(point.load())
    except Exception:
        return discover()  # which says what is wrong with it
    return dict(_registered) if _registered.keys() >= set(names) else discover()


def missing(names: Sequence[str]) -> list[str]:
    """Those of the names that no pass has which is registered by now."""
    known = _known(names)
    return [name for name in names if name not in known]


def select(names: Sequence[str] | None, disable: Sequence[str]) -> list[Pass]:
    """Instances of the chosen passes, in an order that keeps stages and declared constraints.

    One that cannot be made, or has no fingerprint, is left out with a warning.
    """
    asked = (*(names or ()), *disable)
    known = discover() if names is None else _known(asked)
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise RegistryError(f"no pass is named {name!r}; {hint}known passes: {', '.join(sorted(known))}")
    chosen = [name for name in (names if names is not None else sorted(known)) if name not in set(disable)]
    made = []
    for name in chosen:
        try:
            p = known[name]()
            p.fingerprint()
        except Exception as error:
            warnings.warn(f"fxopt: the pass {name!r} is left out: {type(error).__name__}: {error}", stacklevel=2)
        else:
            made.append(p)
    return order(made)


def inapplicable(p: Pass, context: PassContext) -> str:
    """Why `p` cannot be used, "" if it can; an error that it raises over the question is a reason as well."""
    try:
        reason = p.applicable(context)
    except Exception as error:
        return f"its applicable() raised {type(error).__name__}: {error}"
    if not reason and context.grad and not p.gradients:
        return "gradients are on: this pass rewrites inference graphs only"
    return reason


def concerned(p: Pass, context: PassContext) -> bool:
    """Whether the graph has what `p` is about; one that raises over the question is asked whether it is applicable."""
    try:
        return p.concerns(context)
    except Exception:
        return True


def only_wraps(p: Pass) -> bool:
    """Whether `p` leaves what is compiled alone, and only wraps it."""
    return isinstance(p, RuntimePass) and type(p).compiling is RuntimePass.compiling


def in_conflict(one: Pass, other: Pass) -> bool:
    """Whether the two must not be in one trial, whichever of them says so."""
    return other.name in one.conflicts or one.name in other.conflicts


def spelled(p: Pass) -> str:
    """The pass's name, with the options that are not its defaults."""
    usual = type(p)().options()
    other = [f"{name}={value}" for name, value in p.options().items() if value != usual[name]]
    return f"{p.name}[{', '.join(other)}]" if other else p.name


def variants(p: Pass, context: PassContext) -> list[Pass]:
    """What `p` proposes to try: instances of its own class, each once, the best guess first.

    RegistryError for anything else.
    """
    found: dict[str, Pass] = {}
    for one in p.variants(context):
        if type(one) is not type(p):
            raise RegistryError(f"{p.name}: variants() gave {one!r}; give instances of {type(p).__qualname__}")
        found.setdefault(one.fingerprint(), one)
    if not found:
        raise RegistryError(f"{p.name}: variants() gave nothing; give (self,) where there is nothing to choose")
    return list(found.values())


def order(passes: Sequence[Pass]) -> list[Pass]:
    """Sort by stage, then by the `after`/`before` constraints, then by name; a cycle is an error that names it."""
    by_name = {p.name: p for p in passes}
    follows: dict[str, set[str]] = {name: set() for name in by_name}
    for p in passes:
        follows[p.name].update(other for other in p.after if other in by_name)
        for other in p.before:
            if other in by_name:
                follows[other].add(p.name)
    for p in passes:
        for other in follows[p.name]:
            if by_name[other].stage.order > p.stage.order:
                raise RegistryError(
                    f"{p.name} (stage {p.stage.value}) must come after {other} (stage {by_name[other].stage.value}), "
                    "which runs later; change the constraint or the stage"
                )
    done: list[str] = []
    left = sorted(by_name, key=lambda name: (by_name[name].stage.order, name))
    while left:
        ready = next((name for name in left if follows[name] <= set(done)), None)
        if ready is None:
            raise RegistryError(
                f"the order constraints of these passes form a cycle: {_cycle(follows, left)} (each must come after "
                "the next); take one of these constraints out"
            )
        left.remove(ready)
        done.append(ready)
    return [by_name[name] for name in done]


def _cycle(follows: Mapping[str, set[str]], left: Sequence[str]) -> str:
    path = [left[0]]
    while True:
        following = next(name for name in sorted(follows[path[-1]]) if name in left)
        if following in path:
            return " -> ".join([*path[path.index(following) :], following])
        path.append(following)
