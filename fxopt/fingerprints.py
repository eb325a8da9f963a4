"""Digests of code and of data that are the same in every process, and change with whatever they stand for."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["UnstableError", "canonical", "module_digest", "once", "source_digest"]

#: Packages that a pass rests on, whose versions are part of every key; the standard library is left out as well.
_FRAMEWORKS = frozenset({"torch", "fxopt", "builtins"})

#: Text of a module, and the `__spec__` that the module had then.
_texts: dict[str, tuple[Any, bytes]] = {}


_once = threading.local()


class UnstableError(ValueError):
    """A value that has no text which is the same in every process; the message shows it."""


def canonical(value: Any) -> str:
    """`value` as text: dataclasses by class and fields, mappings and sets in order, arrays by a digest of their bytes,
    functions by name and a digest of what they run. UnstableError for what has an address for a text.
    """
    if value is None or type(value) in (str, int, float, bool):  # as most constants of code are
        return _json(value)
    reach = _Reach()
    plain = reach.plain(value, strict=True)
    return _json([plain, reach.sources()] if reach.texts else plain)


def source_digest(cls: type) -> str:
    """Digest of the source that decides what `cls` does.

    That is the module of the class and of each of its base classes, and what these import, at the top or inside a
    function, from their own package or from files beside them; never torch, fxopt or the standard library. A module's
    text is read once, and again only when the module is loaded again: what somebody saves while this process runs is
    not what this process executes. The class itself counts too: the code of its functions with their defaults and the
    variables that they enclose, and its attributes. Where that code has no file (a notebook), so does whatever it
    reaches by global names.
    """
    kept: dict[type, str] | None = getattr(_once, "digests", None)
    if kept is not None and cls in kept:
        return kept[cls]
    reach = _Reach()
    bases = [base for base in cls.__mro__ if _is_own(base.__module__)]
    for base in bases:
        _collect(base.__module__, reach.texts)
    made = [reach.members(base) for base in bases]
    digest = hashlib.sha256(_json([_name(cls), made, reach.sources()]).encode()).hexdigest()
    if kept is not None:
        kept[cls] = digest
    return digest


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Within it, classes are taken to stay as they are: on this thread the digest of each one's source is made once."""
    before, _once.digests = getattr(_once, "digests", None), {}
    try:
        yield
    finally:
        _once.digests = before


def module_digest(name: str) -> str:
    """Digest of one module's text, as it was when this process first asked. It need not have been imported."""
    if name in sys.modules:
        file = sys.modules[name].__file__
    else:
        spec = importlib.util.find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
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
        for node in _import_statements(text):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    try:
                        base = importlib.util.resolve_name("." * node.level + base, package)
                    except ImportError:  # beyond the top of its package, or words in a string
                        continue
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    try:
        return tuple(dict.fromkeys(names()))
    except (SyntaxError, ValueError):  # not Python
        return ()


#: a line that begins as an import does, to its end or that of its parentheses
_IMPORT = re.compile(
    rb"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import[ \t]*(?:\([^)]*\)|[ \t](?:\\\r?\n|[^\n])+))", re.MULTILINE
)
#: an import that begins no line, or something that looks like one
_BESIDE = re.compile(rb"[:;][ \t]*(?:import|from)[ \t]")


def _import_statements(text: bytes) -> Iterator[ast.AST]:
    """All import statements, and perhaps some that a string holds. To parse what a plan's passes import, and no more,
    is what a process that applies one waits for; where a line is not what it looks like, the whole text is parsed.
    """
    if _BESIDE.search(text) is None:
        try:
            found = [ast.parse(match[1]).body for match in _IMPORT.finditer(text)]
        except (SyntaxError, ValueError):
            pass
        else:
            yield from (statement for body in found for statement in body)
            return
    yield from _statements(ast.parse(text))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements in it, and what holds some; not the expressions, which are most of a tree and import nothing."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            held = getattr(node, name, ())
            waiting += held if isinstance(held, list) else []  # an expression's `body` is one node


class _Reach:
    """What values and code stand for, as JSON has it, followed from one to the next.

    Strict, as for options, a value without a stable text is an error; in code it counts by its class alone.
    """

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self._seen: set[int] = set()

    def sources(self) -> list[list[str]]:
        """Names and digests of the modules whose text counts."""
        return [[name, hashlib.sha256(text).hexdigest()] for name, text in sorted(self.texts.items())]

    def plain(self, item: Any, strict: bool) -> Any:
        if isinstance(item, Enum):
            return self.plain(item.value, strict)
        if item is None or isinstance(item, (str, int, float)):
            return item
        if isinstance(item, type):
            return self.kind(item)
        if dataclasses.is_dataclass(item):
            fields = {f.name: self.plain(getattr(item, f.name, None), strict) for f in dataclasses.fields(item)}
            return {"": _name(type(item)), **fields}
        if isinstance(item, Mapping):
            return dict(self._apart([(key, element) for key, element in item.items()], strict, self._entry))
        if isinstance(item, (set, frozenset)):
            return sorted(self._apart(item, strict, self.plain), key=_json)
        if isinstance(item, (list, tuple)):
            return [self.plain(element, strict) for element in item]
        if isinstance(item, types.ModuleType):
            self._module(item.__name__)
            return item.__name__
        if isinstance(item, types.FunctionType):
            return self._function(item)
        wrapped = getattr(item, "__wrapped__", getattr(item, "fn", None))  # functools' caches, Triton's kernels
        if isinstance(wrapped, types.FunctionType):
            return [_name(type(item)), self._function(wrapped)]
        if isinstance(item, functools.partial):
            return [self.plain(part, strict) for part in (item.func, item.args, item.keywords)]
        if isinstance(item, types.MethodType):
            return [self.plain(item.__func__, strict), self.plain(item.__self__, strict)]
        if isinstance(item, types.BuiltinFunctionType):
            owner = item.__self__
            bound = owner is not None and not isinstance(owner, (type, types.ModuleType))
            return [_name(item), self.plain(owner, strict) if bound else None]
        try:
            return _array(item) or _text_of(item)
        except UnstableError:
            if strict:
                raise
        if id(item) in self._seen or not _is_own(type(item).__module__):
            return _name(type(item))
        self._seen.add(id(item))
        return [self.kind(type(item)), self.plain(getattr(item, "__dict__", None), strict)]

    def kind(self, cls: type) -> Any:
        """A class by its name and, where it is not a framework's, by what it and its bases are made of."""
        bases = [base for base in cls.__mro__ if _is_own(base.__module__) and not _is_installed(base.__module__)]
        for base in bases:
            self._module(base.__module__)
        return [_name(cls), [self.members(base) for base in bases]]

    def members(self, cls: type) -> list[Any]:
        if id(cls) in self._seen:
            return []
        self._seen.add(id(cls))
        return [[name, self._attribute(name, value)] for name, value in sorted(vars(cls).items())]

    def _attribute(self, name: str, value: Any) -> Any:
        if isinstance(value, property):
            return [self.plain(part, strict=False) for part in (value.fget, value.fset)]
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, functools.cached_property):
            value = value.func
        dunder = name.startswith("__") and name.endswith("__")
        return None if dunder and not isinstance(value, types.FunctionType) else self.plain(value, strict=False)

    def _function(self, function: types.FunctionType) -> Any:
        """A function's name, code, defaults and enclosed variables; and what it names, where it has no file."""
        name = _name(function)
        if id(function) in self._seen or not _is_own(function.__module__ or ""):
            return name
        self._seen.add(id(function))
        code, space = function.__code__, function.__globals__
        found = [name, hashlib.sha256(_code(code)).hexdigest()]
        held = [function.__defaults__, function.__kwdefaults__, [_content(cell) for cell in function.__closure__ or ()]]
        if space.get("__file__") is None or code.co_filename.startswith("<"):
            held.append([(name, space[name]) for name in sorted(_global_names(code, space))])
        else:
            self._module(function.__module__)
        return [*found, self.plain(held, strict=False)]

    def _module(self, name: str) -> None:
        if _is_own(name) and not _is_installed(name):
            _collect(name, self.texts)

    def _entry(self, entry: tuple[Any, Any], strict: bool) -> tuple[str, Any]:
        key = self.plain(entry[0], strict)
        return key if isinstance(key, str) else f"{type(entry[0]).__name__} {_json(key)}", self.plain(entry[1], strict)

    def _apart(self, items: Iterable[Any], strict: bool, each: Callable[[Any, bool], Any]) -> list[Any]:
        """`each` of `items`, none of which knows what the others have seen: they come in no order of their own."""
        before, found = self._seen, []
        for item in items:
            self._seen = set(before)
            found.append(each(item, strict))
        self._seen = before
        return found


_encoder = json.JSONEncoder(sort_keys=True)  # one for all: json.dumps makes its own for each of a thousand small texts


def _json(plain: Any) -> str:
    return _encoder.encode(plain)


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"


def _text_of(item: Any) -> str:
    text = repr(item)
    if re.search(r"\bat 0x[0-9a-fA-F]+", text):
        raise UnstableError(f"{text} is written with an address, which differs from process to process")
    return text


def _array(item: Any) -> list[Any] | None:
    """Kind of elements, shape, device and a digest of the bytes, for a tensor or an array of numpy's."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(item, torch.Tensor):
        try:
            flat = item.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy().tobytes()
        except Exception as error:
            raise UnstableError(f"the bytes of a {type(item).__name__} cannot be read: {error}") from error
        kind = [str(item.dtype), list(item.shape), str(item.device)]
    elif numpy is not None and isinstance(item, numpy.ndarray) and not item.dtype.hasobject:
        raw, kind = item.tobytes(), [str(item.dtype), list(item.shape)]
    else:
        return None
    return [*kind, hashlib.sha256(raw).hexdigest()]


def _is_installed(module: str) -> bool:
    """Whether `module` is some package's that the environment has, and no user's own file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _global_names(code: types.CodeType, space: Mapping[str, Any]) -> set[str]:
    """Global variables, of those in `space`, that `code` or a function inside it reads."""
    found = space.keys() & code.co_names
    if found:  # among them may be names of attributes; most of what dataclasses generate has neither
        loads = (step for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        found = found.intersection(step.argval for step in loads)
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return found.union(*(_global_names(item, space) for item in inner))


def _code(code: types.CodeType) -> bytes:
    constants = [_code(item).hex() if isinstance(item, types.CodeType) else canonical(item) for item in code.co_consts]
    return code.co_code + repr((code.co_names, code.co_varnames, code.co_freevars, constants)).encode()
