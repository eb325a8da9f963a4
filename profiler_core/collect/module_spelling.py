"""Dynamo's spelling of a module (``node.meta["nn_module_stack"]``) as the name that the model has for it.

A spelling is Python that leads to the module, in which Dynamo has shortened ``._modules['h']`` to ``.h`` wherever the
name has no quote and no bracket, whatever else it has. A name may be anything without a dot, so what is neither Python
nor plain text is read by hand:

    L['self'].h._modules['a"b'].a\\tb           h.a"b.a<tab>b
    getattr(getattr(L['self'], 'a b'), 'c')     a b.c
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ROOT = re.compile(rf"[LG]\[(?:{_TEXT})\]|\w+")  # a local or global (`L['self']`), or, outside Dynamo, a plain name
_ITEM = re.compile(rf"\[(\d+|{_TEXT})\]")
_NAMED = re.compile(rf", ({_TEXT})\)")
_END = re.compile(rf"\.|{_ITEM.pattern}|{_NAMED.pattern}|\Z")  # of a name without quotes
_GETATTR = "getattr("
# What leads to a module and is no part of its name.
_NOT_MODULES = {"_modules", "__closure__", "cell_contents", "_orig_mod", "__self__", "__func__", "__dict__"}


def module_path(spelling: str) -> str:
    """The dotted name of a module under its root.

    >>> module_path("L['self']._modules['h']._modules['0'].attn")
    'h.0.attn'
    """
    steps, end = _steps(spelling, 0)
    if end < len(spelling):
        steps = list(_pieces(spelling))
    kept: list[str] = []
    after_closure = False
    for step in steps:
        if not (step in _NOT_MODULES or (after_closure and step.isdigit())):
            kept.append(step)
        after_closure = step == "__closure__"
    return ".".join(kept)


def _steps(text: str, at: int) -> tuple[list[str], int]:
    """The names from the root on, and where what can be read ends."""
    if text.startswith(_GETATTR, at):
        steps, end = _steps(text, at + len(_GETATTR))
        named = _NAMED.match(text, end)
        if named is None:
            return steps, at
        steps.append(_value(named[1]))
        at = named.end()
    else:
        root = _ROOT.match(text, at)
        if root is None:
            return [], at
        steps, at = [], root.end()
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is not None:
            steps.append(_value(item[1]))
            at = item.end()
        elif text[at] == ".":
            end = _END.search(text, at + 1).start()  # type: ignore[union-attr]  # it matches the end of the text
            steps.append(_value(f"'{text[at + 1 : end]}'"))
            at = end
        else:
            break
    return steps, at


def _value(literal: str) -> str:
    """What a number or a text in quotes says."""
    if "\\" in literal:
        try:
            return str(ast.literal_eval(literal))
        except (SyntaxError, ValueError):  # not of Dynamo's making
            pass
    return literal[1:-1] if literal[0] in "'\"" else literal


def _pieces(text: str) -> Iterator[str]:
    """Of Python that is more than names (``list(L['d'].values())[1].up``): whatever looks like one."""
    root = _ROOT.match(text)
    for match in re.finditer(rf"\.(\w+)|{_ITEM.pattern}", text[root.end() if root else 0 :]):
        yield match[1] or _value(match[2])
