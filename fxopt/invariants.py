"""What must hold of a graph after any pass, whatever the pass does. Checked by the manager after each one.

A rule is checked on the graph itself, never on what a pass says of it: values are recomputed, and aliasing, writes and
random draws are read off the operators' schemas. What a graph cannot tell, such as numbers, is left to verification.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from fxopt import effects
from fxopt.effects import Effects
from fxopt.registry import PROVENANCE_META, InvariantError
from fxopt.torch_api import values
from fxopt.torch_api.inductor import lowers

__all__ = ["PROVENANCE_META", "RULES", "check", "lint"]

#: Every rule by name.
RULES: dict[str, str] = {
    "lint": "the graph is well-formed: each node comes before its users, and each attribute is there",
    "inputs": "inputs keep their names and their order",
    "constants": "the pass itself writes to no tensor that the graph's module holds",
    "mutation": "the same nodes write to the same memory in the same order, and each read stays on its side of a write",
    "rng": "random draws keep order, distribution, shape, dtype and device, and reach the same users",
    "lowering": "a new operator is one that Inductor compiles at this stage",
    "values": "each value can be recomputed on fake tensors",
    "outputs": "as many outputs, each of the same kind, type, shape, strides and device",
    "aliasing": "an output is a view of the same input, and shares memory with the same outputs",
    "provenance": "each node says where it comes from, if nodes did before",
}


def check(before: fx.Graph, after: fx.Graph) -> None:
    """Raise InvariantError, naming the rule and the node, unless `after` keeps every rule against `before`.

    `before` is not changed. In `after`, which has the names of `before` for the nodes that are still there,
    `meta["val"]` is set to what was recomputed.
    """
    lint(after)
    _inputs(before, after)
    old, new = effects.analyse(before), effects.analyse(after)
    _writes(old, new)
    _tokens(after)
    _draws(old, new)
    _lowering(before, after)
    try:
        values.recompute(before, after)
    except values.CannotEvaluate as error:
        raise _broken("values", error.node, f"{error.node.target} cannot be evaluated: {error}") from error
    for a, b in zip(old.draws, new.draws, strict=True):
        _same_value("rng", b, "a random draw", a.meta.get("val"), b.meta.get("val"), strides=False)
    _outputs(before, after)
    new = effects.analyse(after)  # once more, for with values it is known whether a reshape is a view
    _reads(old, new)
    _aliasing(before, after, old.memory, new.memory)
    _provenance(before, after)


#: What to do about a call of something else.
_WRITE_AN_OPERATOR = "write graph.call_function with an overload of an operator, such as torch.ops.aten.sin.default"


def _broken(rule: str, where: fx.Node | str, what: str) -> InvariantError:
    return InvariantError(f"{rule}: {where}: {what}")


def lint(graph: fx.Graph) -> None:
    """The first of the rules, which must hold before dead code can be told."""
    try:
        graph.lint()
        if next(iter(reversed(graph.nodes)), None) is not graph.output_node():
            raise ValueError("its output is not its last node")
    except Exception as error:
        # torch adds the whole graph to what it says.
        raise _broken("lint", "graph", f"it no longer lints: {str(error).partition(chr(10))[0]}") from error


def _inputs(before: fx.Graph, after: fx.Graph) -> None:
    old, new = ([n.name for n in g.nodes if n.op == "placeholder"] for g in (before, after))
    if old != new:
        changed = next((a or b for a, b in zip_longest(old, new) if a != b), "")
        raise _broken("inputs", str(changed), f"the inputs {_list(old)} became {_list(new)}")


def _lowering(before: fx.Graph, after: fx.Graph) -> None:
    known = {(n.op, n.target) for n in before.nodes}
    for node in after.nodes:
        if (node.op, node.target) in known or not node.op.startswith("call_"):
            continue
        if node.op != "call_function":
            what = f"Inductor does not compile a {node.op} ({node.target}); {_WRITE_AN_OPERATOR}"
        elif lowers(node.target):
            continue
        elif isinstance(node.target, torch._ops.OpOverload):
            what = (
                f"{node.target} is decomposed before this stage, and Inductor has no lowering for one that a pass puts "
                "here; write what it decomposes into"
            )
        else:
            # A packet of overloads has the name of one in C++; a function's repr is an address.
            packet = isinstance(node.target, torch._ops.OpOverloadPacket)
            name = str(node.target) if packet else getattr(node.target, "__name__", str(node.target))
            what = f"{name} is no operator that Inductor compiles; {_WRITE_AN_OPERATOR}"
        raise _broken("lowering", node, what)


def _writes(old: Effects, new: Effects) -> None:
    def described(found: Effects) -> list[tuple[str, str]]:
        return [(str(n.target), _list(sorted(t))) for n, t in zip(found.acts, found.targets, strict=True)]

    one, other = described(old), described(new)
    if one == other:
        return
    place = next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)
    nodes = [found.acts[place] for found in (new, old) if place < len(found.acts)]
    was, now = (
        f"{listed[place][0]} on {listed[place][1]}" if place < len(listed) else "nothing" for listed in (one, other)
    )
    raise _broken(
        "mutation",
        nodes[-1] if len(other) < len(one) else nodes[0],
        f"what writes to memory, or has another effect, changed: {len(one)} nodes became {len(other)}, and number "
        f"{place} was {was}, and is {now}",
    )


def _tokens(after: fx.Graph) -> None:
    for node in filter(effects.is_token, after.nodes):
        for user in node.users:
            if user.op != "output" and str(user.target) not in ("with_effects", "prims._sink_tokens.default"):
                raise _broken("mutation", user, f"it takes {node}, which has no numbers: it keeps effects in order")


def _reads(old: Effects, new: Effects) -> None:
    """What each value has read of memory that is written to, and which random numbers it rests on."""
    if not old.acts and not old.draws:
        return
    anywhere = frozenset().union(*old.depends.values(), *old.returned)
    by_name = {n.name: found for n, found in old.depends.items()}
    pairs: list[tuple[fx.Node | str, Any, Any]] = [
        (n, by_name[n.name], found) for n, found in new.depends.items() if n.name in by_name
    ]
    pairs += [(b, old.depends[a], new.depends[b]) for a, b in zip(old.acts, new.acts, strict=True)]
    pairs += [(f"output {i}", *both) for i, both in enumerate(zip(old.returned, new.returned, strict=False))]
    for where, was, now in pairs:
        if was == now:
            continue
        for place in sorted({token[1] for token in was | now if token[0] == "read"}):
            one, other = (sorted(t[2] for t in found if t[:2] == ("read", place)) for found in (was, now))
            # A pass may batch what was read apart, or drop what is not needed; then only a new kind of read is wrong.
            wrong = other != one if one and other else any(("read", place, n) not in anywhere for n in other)
            if wrong:
                raise _broken(
                    "mutation",
                    where,
                    f"it read {place} after {_times(one)} to it, and now does after {_times(other)}",
                )
        drawn, draws = ({t for t in found if t[0] != "read"} for found in (was, now))
        if drawn - draws and draws - drawn:
            raise _broken(
                "rng",
                where,
                f"it rested on the random draws {_numbers(drawn, old)}, and now does on {_numbers(draws, new)}",
            )


def _draws(old: Effects, new: Effects) -> None:
    one, other = ([str(n.target) for n in found.draws] for found in (old, new))
    if one != other:
        place = next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)
        found = [effect.draws[place] for effect in (new, old) if place < len(effect.draws)]
        was, now = (targets[place] if place < len(targets) else "nothing" for targets in (one, other))
        raise _broken(
            "rng",
            found[0],
            f"what draws random numbers changed: {len(one)} nodes became {len(other)}, and number {place} was {was}, "
            f"and is {now}",
        )
    names = [{n.name for n in found.draws} for found in (old, new)]
    order = [[n.name for n in found.draws if n.name in names[0] & names[1]] for found in (old, new)]
    for a, b in zip(*order, strict=True):
        if a != b:
            raise _broken("rng", b, f"it drew after {a}, and now draws before it")
    for a, b in zip(old.draws, new.draws, strict=True):
        was, now = (str(fx.node.map_arg((n.args, n.kwargs), lambda _: "a tensor")) for n in (a, b))
        if was != now:
            raise _broken("rng", b, f"its distribution {was} became {now}")


def _outputs(before: fx.Graph, after: fx.Graph) -> None:
    old, new = effects.outputs(before), effects.outputs(after)
    if len(old) != len(new):
        raise _broken("outputs", "output", f"{len(old)} outputs became {len(new)}")
    for index, (a, b) in enumerate(zip(old, new, strict=True)):
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            if isinstance(a, fx.Node) or isinstance(b, fx.Node) or not values.equal(a, b):
                raise _broken("outputs", f"output {index}", f"{a} became {b}")
        else:
            _same_value("outputs", f"output {index} ({b.name})", "", a.meta.get("val"), b.meta.get("val"))


def _same_value(rule: str, where: fx.Node | str, what: str, old: Any, new: Any, strides: bool = True) -> None:
    if old is None:  # a graph without values
        return
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        if type(old) is not type(new) or not (isinstance(old, (list, tuple)) or values.equal(old, new)):
            raise _broken(rule, where, f"its value {old} became {new}")
        if isinstance(old, (list, tuple)):
            for a, b in zip(old, new, strict=True):
                _same_value(rule, where, what, a, b, strides)
        return
    aspects: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("dtype", (old.dtype,), (new.dtype,)),
        ("shape", old.shape, new.shape),
        ("device", (old.device,), (new.device,)),
        ("layout", (old.layout,), (new.layout,)),
    ]
    if strides and old.layout == new.layout == torch.strided and len(old.shape) == len(new.shape):
        # Of a dimension of size 1 the stride means nothing, and operators differ in it.
        long = [n for n, size in enumerate(old.shape) if not values.equal(size, 1)]
        aspects.append(("stride", [old.stride(n) for n in long], [new.stride(n) for n in long]))
    for aspect, x, y in aspects:
        if len(x) != len(y) or not all(map(values.equal, x, y)):
            one, other = (str(v[0]) if aspect in ("dtype", "device", "layout") else str(tuple(v)) for v in (x, y))
            raise _broken(rule, where, f"{what + ': ' if what else ''}{aspect} {one} became {other}")


def _aliasing(before: fx.Graph, after: fx.Graph, old: effects.Memory, new: effects.Memory) -> None:
    inputs = {n.name for n in before.nodes if n.op == "placeholder"}
    leaves = [effects.outputs(g) for g in (before, after)]
    places = [
        [where[leaf] if _is_tensor(leaf) else frozenset() for leaf in leaf_list]
        for where, leaf_list in zip((old, new), leaves, strict=True)
    ]
    first: list[dict[str, int]] = [{}, {}]  # the first output in each memory, before and after
    for index, both in enumerate(zip(*places, strict=True)):
        was, now = (sorted(p for p in found if p in inputs or p.startswith("self.")) for found in both)
        where = f"output {index} ({leaves[1][index]})"
        if was != now:
            raise _broken("aliasing", where, f"it was {_views(was)}, and is {_views(now)}")
        shared = [
            sorted({seen.setdefault(place, index) for place in found} - {index})
            for seen, found in zip(first, both, strict=True)
        ]
        if shared[0] != shared[1]:
            lost = shared[0] or shared[1]
            state = "no longer does" if shared[0] else "now shares it"
            how = (
                f"it shared memory with output {lost[0]}, and {state}"
                if shared[0]
                else (f"it had memory of its own, and now shares it with output {lost[0]}")
            )
            raise _broken("aliasing", where, how)
        a, b = (found[index] for found in leaves)
        if (was or shared[0]) and isinstance(a, fx.Node) and isinstance(b, fx.Node):
            one, other = (getattr(n.meta.get("val"), "storage_offset", lambda: None)() for n in (a, b))
            if not values.equal(one, other):
                raise _broken("aliasing", where, f"its offset in shared memory, {one}, became {other}")


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), (torch.Tensor, type(None)))


def _provenance(before: fx.Graph, after: fx.Graph) -> None:
    def told(node: fx.Node) -> bool:
        return any(node.meta.get(key) is not None for key in PROVENANCE_META)

    old = {n.name: told(n) for n in before.nodes if n.op == "call_function"}
    if not any(old.values()):
        return
    for node in after.nodes:
        if node.op == "call_function" and not told(node) and old.get(node.name, True):
            raise _broken(
                "provenance", node, f"nothing says where it comes from any more (one of {', '.join(PROVENANCE_META)})"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _views(places: Sequence[str]) -> str:
    return f"a view of {', '.join(places)}" if places else "memory of its own"


def _times(writes: Sequence[int]) -> str:
    return " and ".join(f"{n} write{'s' * (n != 1)}" for n in writes) or "no write"


def _numbers(tokens: Iterable[tuple[Any, ...]], found: Effects) -> str:
    return ", ".join(sorted(found.draws[value].name if kind == "draw" else f"seed {value}" for kind, value in tokens))
