"""The passes that options name: whether there are such, asked before a model is measured without them.

A program may register passes of its own, so a name that nobody knows yet is no error until the program has come to its
model: a function's module has been imported by then, and a script has made what it calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxopt.cli_output import did_you_mean
from fxopt.options import OptionError, environment_variable

_OPTIONS = ("passes", "disable")


@dataclass
class NamedPasses:
    """names: each with the option, or the environment variable, that names it. refused: what was wrong, once it was."""

    names: Mapping[str, str]
    asked: bool = False
    refused: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> NamedPasses:
        """Of the options as they are given, whose form is right, and of the environment."""
        from fxopt.options import split_options
        from fxopt.torch_api import inductor

        resolved, _, _ = split_options(None, options, inductor.config_keys(), inductor.list_modes())
        given = {name.replace("-", "_").removeprefix("fxopt.") for name in options}
        names: dict[str, str] = {}
        for option in _OPTIONS:
            variable = environment_variable(option)
            origin = f"option {option!r}" if option in given else f"environment variable {variable}"
            names |= dict.fromkeys(getattr(resolved, option) or (), origin)
        return cls(names)

    def problem(self) -> str:
        """What is wrong with the first name that no pass has which is registered by now; "" where all are."""
        from fxopt import registry

        absent = next(iter(registry.missing(list(self.names))), None)
        if absent is None:
            return ""
        known = registry.discover()
        near = did_you_mean(absent, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
        return f"{self.names[absent]}: no pass is named {absent!r}{near}"

    def check(self) -> None:
        """Raises OptionError for a name that no pass has by now."""
        if problem := self.problem():
            raise OptionError(problem)

    def before_a_call(self) -> None:
        """The same inside of a program, before its first call of a model. Ends it as `sys.exit` does, which an
        `except Exception` of its own does not keep up, and a thread hears without a word; `after` then says why.
        """
        if not self.asked:
            self.asked = True
            self.refused = self.problem()
        if self.refused:
            raise SystemExit(2)

    def after(self) -> None:
        """The same of a program that has ended, by this perhaps, or a thread of it alone."""
        if self.refused:
            raise OptionError(self.refused)
        if not self.asked:
            self.check()
