"""Inductor's modules, imported with room on the stack: one imports the next, hundreds of calls deep.

Nothing is imported from here; whoever imports Inductor imports this first.
"""

from __future__ import annotations

from importlib import import_module

from fxopt.call_stack import with_room

with_room(import_module, "torch._inductor.compile_fx")
