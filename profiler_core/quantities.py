"""Quantities as people read them: three digits, and the unit or the prefix that suits their size. JSON keeps ns, bytes
and FLOPs as they are.
"""

from __future__ import annotations

import re

__all__ = ["duration", "glued", "prefixed", "quantity", "three_digits"]

_MINUTES = 119.5e9
_TIMES = (("s", 1e9), ("ms", 1e6), ("us", 1e3))
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_PREFIXED = {"byte": "B", "byte/s": "B/s", "FLOP": "FLOP", "FLOP/s": "FLOP/s"}
# 999.5 us would print as "1000 us" at three digits, so it goes to the next unit.
_ROUNDED_UP = 0.9995
_UNITS = r"[num]?s|min|h|%|(?:[kMGTP]i?)?B(?:/s)?|[kMGTP]?FLOP(?:/s|/byte)?|bytes?(?:/s)?|bits?|[kMG]Hz"
_NUMBER_AND_UNIT = re.compile(rf"(?<=\d) (?=(?:{_UNITS})(?![\w/]))")


def duration(ns: float | None) -> str:
    """A time given in nanoseconds: ``850 ns``, ``12.3 us``, ``4.56 ms``, ``1.20 s``; from two minutes on as
    ``3 min 20 s``; ``-`` where it is not known.
    """
    if ns is None or ns != ns:
        return "-"
    if abs(ns) >= _MINUTES:
        whole = round(ns / 1e9)
        return f"{int(whole / 60)} min {abs(whole) % 60} s"
    for unit, size in _TIMES:
        if abs(ns) >= size * _ROUNDED_UP:
            return f"{three_digits(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def quantity(value: float, unit: str) -> str:
    """A value in a unit such as "ns", "byte", "FLOP/s" or "%"; "1" and "" are the unit of a plain ratio."""
    if unit == "ns":
        return duration(value)
    if unit in _PREFIXED:
        return prefixed(value, _PREFIXED[unit])
    return f"{value:.3g}" if unit in ("", "1") else f"{value:.3g} {unit}"


def prefixed(value: float, unit: str) -> str:
    """``2.50 GFLOP``, ``640 kB/s``, ``12 B``"""
    for prefix, size in _PREFIXES:
        if abs(value) >= size * _ROUNDED_UP:
            return f"{three_digits(value / size)} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def glued(text: str, space: str = "\N{NO-BREAK SPACE}") -> str:
    """`text` with `space` between each number and its unit, so that they stay on one line."""
    return _NUMBER_AND_UNIT.sub(space, text)
