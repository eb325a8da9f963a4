"""Which kernels ran, for which operator and FX node, and what limited them.

>>> import profiler_core                                                    # doctest: +SKIP
>>> profile = profiler_core.profile(model, x)                               # doctest: +SKIP
>>> profile.by("line")                                                      # doctest: +SKIP
>>> profiler_core.load("trace.json.gz", "counters.csv", "torch_trace.log")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler_core.live import profile
    from profiler_core.loading import load
    from profiler_core.marks import measured
    from profiler_core.profiles import Profile
    from profiler_core.ranks import merge
    from profiler_core.recording import record

__all__ = ["Profile", "load", "measured", "merge", "profile", "record"]

_PLACES = {
    "Profile": "profiles",
    "load": "loading",
    "measured": "marks",
    "merge": "ranks",
    "profile": "live",
    "record": "recording",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Late: pandas and torch take a second to import, and most of the package needs neither.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"profiler_core.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
