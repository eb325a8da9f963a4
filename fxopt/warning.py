"""The one kind of warning that fxopt gives about itself."""

from __future__ import annotations

import warnings


class FxoptWarning(UserWarning):
    """Something went wrong inside fxopt; the model runs all the same."""


def warn(message: str) -> None:
    warnings.warn(f"fxopt: {message}", FxoptWarning, stacklevel=2)
