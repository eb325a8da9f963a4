"""What the tests of a pass use: small graphs, one pass run on one of them, and any graph else.

    from fxopt import testing

    def test_before_and_after():
        result = testing.run(MyPass(), testing.capture(fn, torch.randn(4, 8)))
        assert result.after == "..."

    def test_the_numbers():
        testing.check(MyPass(), fn, torch.randn(4, 8), dtypes=(torch.float32, torch.bfloat16))

    def test_what_is_left_alone():
        testing.refuses(MyPass(), other, torch.randn(4, 8), because="used elsewhere")

    @given(testing.graphs())
    def test_any_graph_stays_equivalent(graph):
        testing.equivalent(MyPass(), graph)

`graphs` and what builds them need Hypothesis (`pip install 'fxopt[testing]'`); nothing else does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxopt.testing.capturing import CaptureError, capture
    from fxopt.testing.checking import LAYOUTS, Case, check
    from fxopt.testing.drafting import Draft, Inapplicable, Value
    from fxopt.testing.equivalence import difference, equivalent
    from fxopt.testing.operators import FAMILIES
    from fxopt.testing.printing import text
    from fxopt.testing.random_graphs import RandomGraph, graphs
    from fxopt.testing.running import Result, context, labels, refuses, run

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "CaptureError",
    "Case",
    "Draft",
    "Inapplicable",
    "RandomGraph",
    "Result",
    "Value",
    "capture",
    "check",
    "context",
    "difference",
    "equivalent",
    "graphs",
    "labels",
    "refuses",
    "run",
    "text",
]

_HOMES = {
    "capturing": ("CaptureError", "capture"),
    "checking": ("LAYOUTS", "Case", "check"),
    "drafting": ("Draft", "Inapplicable", "Value"),
    "equivalence": ("difference", "equivalent"),
    "operators": ("FAMILIES",),
    "printing": ("text",),
    "random_graphs": ("RandomGraph", "graphs"),
    "running": ("Result", "context", "labels", "refuses", "run"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_NEED_HYPOTHESIS = ("drafting", "operators", "random_graphs")


def __getattr__(name: str) -> Any:
    import importlib

    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if home in _NEED_HYPOTHESIS and (error.name or "").split(".")[0] == "hypothesis":
            raise ImportError(f"fxopt.testing.{name} needs Hypothesis: pip install 'fxopt[testing]'") from error
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
