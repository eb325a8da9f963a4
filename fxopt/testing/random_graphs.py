"""A Hypothesis strategy for small random graphs that any pass must leave equivalent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx, nn

from fxopt.testing.capturing import STATIC_INPUTS, placeholders
from fxopt.testing.drafting import Draft, Value
from fxopt.testing.operators import FAMILIES, Builder
from fxopt.testing.printing import text
from fxopt.torch_api import tracing

__all__ = ["RandomGraph", "graphs"]

aten: Any = torch.ops.aten
#: one in so many graphs is taken where the strategy may choose; the first choice, and the simplest, is without
_SYMBOLIC_ONE_IN, _WRITES_ONE_IN = 5, 6
_GROWN = 3  # by how much a symbolic size is larger in the second set of inputs


class RandomGraph:
    """A graph, the inputs to run it on, and how it came about.

    module: a GraphModule with a value (fake tensor) on every node, functional but for writes into inputs at the end.
    static: positions of the inputs that are parameters. families: of the operators, in order.
    """

    def __init__(
        self, module: fx.GraphModule, highs: Mapping[str, int], sizes: Mapping[str, int], families: Sequence[str]
    ) -> None:
        self.module = module
        self.families = tuple(families)
        self._highs = dict(highs)
        self._sizes = dict(sizes)
        self._parameters: dict[str, torch.Tensor] = {}

    @property
    def static(self) -> frozenset[int]:
        return self.module.meta[STATIC_INPUTS]

    @property
    def dynamic(self) -> bool:
        """Whether any size is symbolic."""
        return bool(self._sizes)

    def inputs(self, seed: int = 0) -> list[Any]:
        """Real inputs in the order of the placeholders, with the strides and offsets of their fake values.

        Floats are uniform in [-1, 1). Parameters are the same tensors in every call. Symbolic sizes are larger where
        the seed is odd.
        """
        sizes = {name: size + (_GROWN if seed % 2 else 0) for name, size in self._sizes.items()}
        generator = torch.Generator().manual_seed(seed)
        values: list[Any] = []
        for index, node in enumerate(placeholders(self.module)):
            fake = node.meta["val"]
            if not isinstance(fake, torch.Tensor):
                values.append(tracing.substituted(fake, sizes))
            elif index not in self.static:
                values.append(_real(fake, sizes, generator, self._highs.get(node.name)))
            else:
                if node.name not in self._parameters:
                    own = torch.Generator().manual_seed(1_000_003 + index)
                    self._parameters[node.name] = _real(fake, sizes, own, None)
                values.append(self._parameters[node.name])
        return values

    def model(self) -> tuple[nn.Module, list[Any]]:
        """An nn.Module that computes the graph, with its parameters, and the other inputs: for torch.compile."""
        inputs = self.inputs()
        model = _Model(self.module, {i: inputs[i] for i in sorted(self.static)}, len(inputs))
        return model, [value for i, value in enumerate(inputs) if i not in self.static]

    def __repr__(self) -> str:
        names = [node.name for i, node in enumerate(placeholders(self.module)) if i in self.static]
        return f"{text(self.module)}\nparameters: {', '.join(names) or 'none'}"


class _Model(nn.Module):
    def __init__(self, graph: fx.GraphModule, parameters: Mapping[int, torch.Tensor], count: int) -> None:
        super().__init__()
        self.graph = graph
        self.held = nn.ParameterList([nn.Parameter(p, requires_grad=False) for p in parameters.values()])
        held = {position: slot for slot, position in enumerate(parameters)}
        free = iter(range(count - len(held)))
        self.order = [(True, held[i]) if i in held else (False, next(free)) for i in range(count)]

    def forward(self, *args: Any) -> Any:
        return self.graph(*[self.held[slot] if own else args[slot] for own, slot in self.order])


def _real(fake: torch.Tensor, sizes: Mapping[str, int], generator: torch.Generator, high: int | None) -> torch.Tensor:
    shape, stride = ([tracing.substituted(n, sizes) for n in numbers] for numbers in (fake.shape, fake.stride()))
    offset = tracing.substituted(fake.storage_offset(), sizes)
    if fake.dtype.is_floating_point:
        # In fp32, so that it is the same number that is rounded to a narrower type.
        values = torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1
    elif fake.dtype == torch.bool:
        values = torch.rand(shape, generator=generator) < 0.5
    else:
        values = torch.randint(0, high or 8, shape, generator=generator)
    end = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    buffer = torch.zeros(end + 2, dtype=fake.dtype, device=fake.device)
    result = buffer.as_strided(shape, stride, offset)
    result.copy_(values)
    return result


def graphs(
    operators: Sequence[str | Builder] | None = None,
    max_nodes: int = 12,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,) * 6 + (torch.bfloat16, torch.float64),
    dynamic: bool | None = None,
    exclude: Collection[str] = (),
    device: str = "cpu",
) -> st.SearchStrategy[RandomGraph]:
    """Small random graphs of aten operators, as Inductor hands them to a pass.

    Inputs have small shapes, contiguous or not, and some are parameters; values stay small, and what is decided by a
    value (comparisons, indices) depends on exact ones only, so that the outputs of two graphs can be compared. Graphs
    draw random numbers, write into inputs at the end, return views of inputs, the same value twice, and hold values
    that nobody uses. They shrink to few operators, and their repr is their text.

    operators: what the first operator and half of the others are taken from: names of families
        (`fxopt.testing.FAMILIES`), or builders, which are functions of a `fxopt.testing.Draft` that add operators by
        its `call` and return the result.
    max_nodes: about how many operators at most.
    dtypes: of floating-point inputs; one that is named more often appears more often. (A cast leads to others.)
    dynamic: whether sizes are symbolic; None is now and then.
    exclude: families that must not appear, or "write" for no writes into inputs.
    device: where the inputs are.
    """
    unknown = {name for name in (*(operators or ()), *exclude) if isinstance(name, str)} - {*FAMILIES, "write"}
    if unknown:
        raise ValueError(f"no family of operators is named {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    others = [(name, build) for name, build in FAMILIES.items() if name not in exclude]
    wanted = [(o, FAMILIES[o]) if isinstance(o, str) else (getattr(o, "__name__", "own"), o) for o in operators or ()]

    @st.composite
    def operator(draw: Callable[..., Any], d: Draft) -> None:
        """One operator: a strategy of its own, so that Hypothesis can take it out as a whole."""
        for _ in range(3):
            own = wanted and (not d.families or draw(st.booleans()))
            if d.add(*d.choice(wanted if own else others)):
                break

    @st.composite
    def graph(draw: Callable[..., Any]) -> RandomGraph:
        symbolic = draw(st.integers(0, _SYMBOLIC_ONE_IN)) == _SYMBOLIC_ONE_IN if dynamic is None else dynamic
        d = Draft(draw, device=device, dtypes=dtypes, symbols=draw(st.integers(1, 2)) if symbolic else 0)
        d.values.append(d.input(d.shape(1, 3), d.dtype()))
        for _ in range(1 + d.number(max_nodes)):
            if d.count() < max_nodes:
                draw(operator(d))
        written = _writes(d) if "write" not in exclude else []
        _outputs(d, written)
        return _finished(d)

    return graph()


def _writes(d: Draft) -> list[fx.Node]:
    """Copies into inputs, at the end, as AOTAutograd puts them; returns the inputs written."""
    written: list[fx.Node] = []
    while len(written) < 2 and d.number(_WRITES_ONE_IN) == _WRITES_ONE_IN - 1:
        fits: dict[Value, list[Value]] = {}
        for target in d.inputs:
            same = [
                v
                for v in d.values
                if v.shape == target.shape and v.dtype == target.dtype and v.base not in (*written, target.node)
            ]
            if same and target.node not in written and target.floating:
                fits[target] = same[::-1]
        if not fits:
            break
        target = d.choice(list(fits))
        # What has been read of an input is read before it is written.
        source = d.choice(fits[target])
        d.write(target, source)
        written.append(target.node)
    return written


def _outputs(d: Draft, written: Collection[fx.Node]) -> None:
    """Most values that nothing else uses, and any others, in any order and more than once.

    A view of an input that is written would show the new numbers: such a one is not returned.
    """
    candidates = [v for v in reversed(d.values) if v.base not in written]
    chosen = [v.node for v in candidates if not v.node.users and v.node.op != "placeholder" and d.number(8) < 7]
    if candidates:
        chosen += [d.choice(candidates).node for _ in range(d.number(3) if chosen else 1)]
    d.graph.output(tuple(chosen))


def _finished(d: Draft) -> RandomGraph:
    module = fx.GraphModule(d.module, d.graph)
    nodes = placeholders(module)
    module.meta[STATIC_INPUTS] = frozenset(i for i, node in enumerate(nodes) if node in d.static)
    tracing.with_sources(module.graph, [node.name for node in nodes])
    highs = {value.node.name: value.high for value in d.inputs if value.high is not None}
    sizes = {name: int(size.node.hint) for name, (_, size) in d.symbols.items()}
    return RandomGraph(module, highs, sizes, d.families)
