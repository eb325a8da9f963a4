"""What the name of a range says: an iteration, a call of a compiled graph, or a launch in generated code."""

from __future__ import annotations

import re
import string
from functools import lru_cache
from urllib.parse import quote, unquote

from profiler_core.trace import COMPILED_GRAPH_PREFIX, ITERATION_PREFIX, RANGE_PREFIX

_STEP = re.compile(r"ProfilerStep#(\d+)$")  # what torch.profiler's step() leaves
_MODULE = "nn.Module: "
_LINE = "source line: "
# Kineto writes a name into its JSON as it stands: a quote ends the event there, control characters and all that is not
# ASCII go. What is left as it is here reads well and comes back; the rest is spelt as in a URL.
_LEFT = "".join(set(string.printable) - set(string.whitespace) - set('"\\%')) + " "
_GENERATED = re.compile(r"(?:graph_\d+_)?(?:cpp|triton|multi_kernel)_\w+$")


def launch_name(kernel: str, handle: int, graph: str = "") -> str:
    """The name of the range around a launch; ``graph`` tells the graphs of one trace apart."""
    return f"{RANGE_PREFIX}{kernel}:{handle}{'@' + graph if graph else ''}"


def launch_of(name: str) -> tuple[str, str]:
    """(``kernel:handle``, graph) of a launch range; ("", "") for any other name.

    >>> launch_of("fxopt::extern_kernels.mm:4@0/1")
    ('extern_kernels.mm:4', '0/1')
    """
    if not name.startswith(RANGE_PREFIX) or name.startswith(ITERATION_PREFIX):
        return "", ""
    key, _, graph = name[len(RANGE_PREFIX) :].partition("@")
    return key, graph


def kernel_of(key: str) -> str:
    """The kernel in a key ``kernel:handle``."""
    return key.rpartition(":")[0]


def iteration_of(name: str) -> int:
    """The number in ``fxopt::iteration#3`` or ``ProfilerStep#3``, -1 for any other name and above 2**31."""
    if name.startswith(ITERATION_PREFIX):
        number = name[len(ITERATION_PREFIX) :]
    else:
        step = _STEP.match(name)
        number = step[1] if step else ""
    known = number.isdecimal() and len(number) <= 10 and int(number) <= 2**31  # int() has a limit of digits itself
    return int(number) if known else -1


def graph_call_of(name: str) -> str | None:
    """Inductor's key of the compiled graph whose call this annotation is ("" where it has none); None for any other
    name.
    """
    if not name.startswith(COMPILED_GRAPH_PREFIX):
        return None
    return name[len(COMPILED_GRAPH_PREFIX) :].strip(" #")


def module_name(path: str, kind: str) -> str:
    """The name of the range around a module's call: its path in the model, and its class."""
    return f"{_MODULE}{_spelt(kind).replace(' ', '%20')} {_spelt(path)}"


def module_of(name: str) -> tuple[str, str]:
    """(path, class) of a module's range; ("", "") for any other name.

    >>> module_of("nn.Module: Linear h.0.up")
    ('h.0.up', 'Linear')
    """
    if not name.startswith(_MODULE):
        return "", ""
    kind, _, path = name[len(_MODULE) :].partition(" ")
    return _read(path), _read(kind)


def line_name(file: str, line: int) -> str:
    """The name of the range around a source line that runs."""
    return f"{_LINE}{_spelt(file)}:{line}"


def line_of(name: str) -> tuple[str, int]:
    """(file, line) of a source line's range; ("", 0) for any other name.

    >>> line_of("source line: train.py:12")
    ('train.py', 12)
    """
    if not name.startswith(_LINE):
        return "", 0
    file, _, number = name[len(_LINE) :].rpartition(":")
    return (_read(file), int(number)) if number.isdecimal() and len(number) < 10 else ("", 0)


@lru_cache(maxsize=1 << 12)
def _spelt(text: str) -> str:
    return quote(text, safe=_LEFT, errors="surrogatepass")


def _read(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def is_generated(name: str) -> bool:
    """Whether this is the name of a kernel that Inductor wrote."""
    return bool(_GENERATED.match(name))
