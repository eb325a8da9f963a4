"""Digests of code and of data that are the same in every process, and change with whatever they stand for."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["canonical", "module_digest", "source_digest"]

#: Packages that a pass rests on, whose versions are part of every key; the standard library is left out as well.
_FRAMEWORKS = frozenset({"torch", "fxopt", "builtins"})

#: Text of a module, and the `__spec__` that the module had then.
_texts: dict[str, tuple[Any, bytes]] = {}


def canonical(value: Any) -> str:
    """`value` as text: dataclasses by their fields, mappings and sets in order."""

    def plain(item: Any) -> Any:
        if isinstance(item, Enum):
            return str(item.value)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return {f.name: plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
        if isinstance(item, Mapping):
            return {str(key): plain(element) for key, element in item.items()}
        if isinstance(item, (set, frozenset)):
            return sorted((plain(element) for element in item), key=repr)
        if isinstance(item, (list, tuple)):
            return [plain(element) for element in item]
        return item

    return json.dumps(plain(value), sort_keys=True, default=repr)


def source_digest(cls: type) -> str:
    """Digest of the source that decides what `cls` does.

    That is the module of the class and of each of its base classes, and what these import, at the top or inside a
    function, from their own package or from files beside them; never torch, fxopt or the standard library. A module's
    text is read once, and again only when the module is loaded again: what somebody saves while this process runs is
    not what this process executes. The code of the class itself counts too, for a class that has no file.
    """
    digest = hashlib.sha256(f"{cls.__module__}.{cls.__qualname__}".encode())
    bases = [base for base in cls.__mro__ if _is_own(base.__module__)]
    texts: dict[str, bytes] = {}
    for base in bases:
        _collect(base.__module__, texts)
    for name, text in sorted(texts.items()):
        digest.update(f"\n{name} {len(text)}\n".encode() + text)
    for base in bases:
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            if isinstance(function, types.FunctionType):
                digest.update(name.encode() + _function(function, set()))
    return digest.hexdigest()


def module_digest(name: str) -> str:
    """Digest of one module's text, as it was when this process first asked."""
    file = sys.modules[name].__file__
    return hashlib.sha256(_text(name, Path(file)) if file is not None else b"").hexdigest()


def _is_own(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "__main__" or (top not in _FRAMEWORKS and top not in sys.stdlib_module_names)


def _collect(name: str, texts: dict[str, bytes]) -> None:
    """Add the text of the module `name`, and of all that it imports, to `texts`."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name in texts or file is None:
        return
    package = str(getattr(module, "__package__", None) or "")
    root = Path(file).resolve().parent
    for _ in filter(None, package.split(".")):
        root = root.parent
    _follow(name, Path(file).resolve(), package, root, texts)


def _follow(name: str, file: Path, package: str, root: Path, texts: dict[str, bytes]) -> None:
    """root: the folder that `name` was imported from, an entry of sys.path."""
    texts[name] = text = _text(name, file)
    for imported in _imports(text, package):
        parts = imported.split(".")
        # In site-packages a file's neighbours have nothing to do with it.
        beside = parts[0] == name.partition(".")[0] or root.name not in ("site-packages", "dist-packages")
        if imported in texts or not beside or not _is_own(imported):
            continue
        base = root.joinpath(*parts)
        for found, its_package in ((base / "__init__.py", imported), (base.with_suffix(".py"), ".".join(parts[:-1]))):
            if found.is_file():
                _follow(imported, found, its_package, root, texts)
                break


def _text(name: str, file: Path) -> bytes:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    held = _texts.get(name)
    if module is None or held is None or held[0] is not spec:
        try:
            held = (spec, file.read_bytes())
        except OSError:  # taken away since it was imported
            held = (spec, b"")
        _texts[name] = held
    return held[1]


@functools.lru_cache(maxsize=256)
def _imports(text: bytes, package: str) -> tuple[str, ...]:
    """Full names of what a module's text imports, wherever in it; `from a import b` may mean a.b, so both."""

    def names() -> Iterator[str]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    try:
        return tuple(dict.fromkeys(names()))
    except (SyntaxError, ValueError, ImportError):  # not Python, or beyond the top of its package
        return ()


def _function(function: types.FunctionType, seen: set[types.FunctionType]) -> bytes:
    """A function's code, with that of the functions it names where their module has no file to read them from."""
    seen.add(function)
    found = _code(function.__code__)
    if getattr(sys.modules.get(function.__module__), "__file__", None) is None:
        for name in sorted(set(function.__code__.co_names)):
            other = function.__globals__.get(name)
            if isinstance(other, types.FunctionType) and other not in seen and other.__module__ == function.__module__:
                found += name.encode() + _function(other, seen)
    return found


def _code(code: types.CodeType) -> bytes:
    constants = [_code(item).hex() if isinstance(item, types.CodeType) else canonical(item) for item in code.co_consts]
    return code.co_code + repr((code.co_names, code.co_varnames, constants)).encode()
