"""fxopt: FX graph optimisation passes for torch.compile, guided by hardware profiles.

    torch.compile(model, backend="profile_guided")
    fxopt.optimize(model, (example,))

Importing fxopt changes nothing in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fxopt.registry import register
    from fxopt.report.model import collect_reports, full_report, last_report, recent_reports
    from fxopt.session import OptimizedModule, optimize

_LAZY = {
    "OptimizedModule": "fxopt.session",
    "optimize": "fxopt.session",
    "collect_reports": "fxopt.report.model",
    "full_report": "fxopt.report.model",
    "last_report": "fxopt.report.model",
    "recent_reports": "fxopt.report.model",
    "register": "fxopt.registry",
}

__all__ = [
    "OptimizedModule",
    "__version__",
    "collect_reports",
    "full_report",
    "last_report",
    "optimize",
    "recent_reports",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fxopt' has no attribute {name!r}")
