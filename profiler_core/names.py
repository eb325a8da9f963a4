"""One spelling for a kernel's name, whatever tool wrote it.

The tools print the same C++ name through two demanglers. torch.profiler uses the compiler's; nsys and ncu use
NVIDIA's, which casts its constants, numbers template parameters in parameter lists and prints the return types of
functions inside template arguments::

    void at::native::elementwise_kernel<4, at::native::gpu_kernel_impl<F<float> >(at::TensorIteratorBase&, F<float>
        const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl<...>)                         torch.profiler
    void at::native::elementwise_kernel<(int)4, void at::native::gpu_kernel_impl<F<float>>(at::TensorIteratorBase &,
        const T1 &)::[lambda(int) (instance 1)]>(int, T2)                                                    nsys

Both become ``at::native::elementwise_kernel<4,at::native::gpu_kernel_impl<F<float>>()::{lambda(int)#1}>``: what
tells two kernels apart is kept, what only one of the demanglers knows is dropped.
"""

from __future__ import annotations

import re
from functools import lru_cache

_ANONYMOUS = "(anonymous namespace)"
# Stand-ins without brackets while brackets are being counted. No C++ name holds these characters.
_ANONYMOUS_MARK, _CALL_MARK, _SUBSCRIPT_MARK = "\x01", "\x02", "\x03"

_INSTANCE = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*?) ?\(instance (\d+)\)\]")
_INTEGER = r"(?:(?:unsigned |signed )?(?:char|short|int|long|long long|__int128)|bool|wchar_t|char(?:8|16|32)_t)"
_CAST = re.compile(rf"\({_INTEGER}\)(-?\d+)[uUlL]*")
_LITERAL = re.compile(r"(-?\d+)[uUlL]+")
_CLOSING = {"<": ">", "(": ")", "{": "}", "[": "]"}


@lru_cache(maxsize=1 << 16)
def canonical(name: str) -> str:
    """The one spelling of ``name``: without return type, parameter list and the parameter lists of enclosing
    functions, constants as plain numbers (``true`` as 1), ``const`` after what it qualifies, no spaces but those
    between words.

    Names that are no C++ signatures (Triton's, mangled ones, ``Memcpy DtoH (Device -> Pageable)``) and names cut
    off in the middle only lose superfluous spaces.
    """
    plain = " ".join(name.split())
    if not any(bracket in plain for bracket in "<(["):
        return plain
    text = plain.replace("<unnamed>", _ANONYMOUS_MARK).replace(_ANONYMOUS, _ANONYMOUS_MARK)
    text = re.sub(r"\boperator ?\(\)", f"operator{_CALL_MARK}", text)
    text = re.sub(r"\boperator ?\[\]", f"operator{_SUBSCRIPT_MARK}", text)
    previous = ""
    while previous != text:  # from the innermost outwards: a lambda can take a type made in another one
        previous, text = text, _INSTANCE.sub(r"{\1#\2}", text)
    if _sentence(text):
        return plain
    try:
        text = _function(text)
    except (ValueError, RecursionError):  # brackets that do not pair: cut off, or an operator such as operator<
        return plain
    return text.replace(_ANONYMOUS_MARK, _ANONYMOUS).replace(_CALL_MARK, "()").replace(_SUBSCRIPT_MARK, "[]")


@lru_cache(maxsize=1 << 16)
def base_name(name: str) -> str:
    """``name`` with its scopes but without return type, template arguments and parameters, such as
    ``at::native::vectorized_elementwise_kernel``.
    """
    text = canonical(name).replace(_ANONYMOUS, _ANONYMOUS_MARK)
    if _sentence(text):
        return canonical(name)
    try:
        kept = "".join(piece for piece in _pieces(text) if piece[0] not in "<(")
    except ValueError:
        kept = re.split(r"[<(]", text)[0].split(" ")[-1]
    return kept.replace(_ANONYMOUS_MARK, _ANONYMOUS) or canonical(name)


def _sentence(text: str) -> bool:
    """``text`` is no signature: none has a space before its parameters."""
    return " (" in text.split("<")[0]


def short_name(name: str) -> str:
    """The last part of :func:`base_name`, as nsys puts it into ``shortName``."""
    return base_name(name).rsplit("::", 1)[-1]


@lru_cache(maxsize=1 << 16)
def same_kernel(a: str, b: str) -> bool:
    """Whether ``a`` and ``b`` can be the same kernel: their canonical spellings are equal, or one of them is all
    that a tool gives of the other. That is a bare name (no template arguments, no parameters, the last scopes or
    none), or a name from which ncu's renaming took every scope: ``Kernel2<gemm>(Params)``.

    Not transitive: two instances of a template both agree with their bare name.
    """
    first, second = canonical(a), canonical(b)
    if first == second:
        return True
    return _abbreviates(a, b) or _abbreviates(b, a)


def _abbreviates(a: str, b: str) -> bool:
    """``a`` is a shortened spelling of ``b``."""
    short, full = canonical(a), canonical(b)
    if not any(bracket in a.replace("<unnamed>", "").replace(_ANONYMOUS, "") for bracket in "<("):
        base = base_name(b)
        return base == short or base.endswith("::" + short)
    return "::" not in short and short == _without_scopes(full)


@lru_cache(maxsize=1 << 16)
def _without_scopes(text: str) -> str:
    return re.sub(r"(?:\w+|\(anonymous namespace\))::", "", text)


def _pieces(text: str) -> list[str]:
    """``text`` cut into its bracketed groups, brackets included, and what stands between them. Raises ValueError
    where brackets do not pair.
    """
    pieces: list[str] = []
    stack: list[str] = []
    start = 0
    for i, character in enumerate(text):
        if character in "<({[":
            if not stack and i > start:
                pieces.append(text[start:i])
            if not stack:
                start = i
            stack.append(_CLOSING[character])
        elif character in ">)}]":
            if character == ">" and text[i - 1] == "-":  # operator->, or an arrow in a sentence
                continue
            if not stack or stack.pop() != character:
                raise ValueError(f"unpaired {character!r} at {i}")
            if not stack:
                pieces.append(text[start : i + 1])
                start = i + 1
    if stack:
        raise ValueError(f"{stack[-1]!r} is missing")
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def _function(text: str) -> str:
    """A function's name as it stands at the outermost level: without return type and parameters."""
    pieces = _pieces(text)
    end = next((i for i, piece in enumerate(pieces) if piece[0] == "(" and not _encloses(pieces, i)), len(pieces))
    return _type("".join(pieces[:end]), function=True)


def _encloses(pieces: list[str], i: int) -> bool:
    """Piece ``i`` is the parameter list of a function in which the rest of the name is defined."""
    return i + 1 < len(pieces) and re.match(r"(?: const)?(?: ?&&?)?::", pieces[i + 1]) is not None


def _type(text: str, function: bool = False) -> str:
    """One template argument or parameter; ``function`` says that it begins with a function's name."""
    text = text.strip()
    if text in ("true", "false"):
        return "1" if text == "true" else "0"
    literal = _CAST.fullmatch(text) or _LITERAL.fullmatch(text)
    if literal:
        return literal[1]
    pieces = _pieces(text)
    enclosing = [i for i in range(len(pieces)) if pieces[i][0] == "(" and _encloses(pieces, i)]
    if function or enclosing:
        pieces = _without_return_type(pieces, enclosing[0] if enclosing else len(pieces))
        enclosing = [i for i in range(len(pieces)) if pieces[i][0] == "(" and _encloses(pieces, i)]
    written: list[str] = []
    for i, piece in enumerate(pieces):
        if i in enclosing:
            written.append("()")
        elif piece[0] in "<({[" and len(piece) > 1:
            lambda_number = re.search(r"#\d+(?=}$)", piece) if piece[0] == "{" else None
            inside = piece[1 : -1 - len(lambda_number[0])] if lambda_number else piece[1:-1]
            arguments = ",".join(_type(part) for part in _split(inside))
            written.append(f"{piece[0]}{arguments}{lambda_number[0] if lambda_number else ''}{piece[-1]}")
        else:
            written.append(piece)
    return _const_after("".join(written))


def _without_return_type(pieces: list[str], end: int) -> list[str]:
    """``pieces`` without the words before the name that the piece ``end`` closes."""
    for i in range(end - 1, -1, -1):
        if pieces[i][0] in "<({[":
            continue
        _, space, name = pieces[i].rpartition(" ")
        if space:
            return [piece for piece in (name.lstrip("*&"), *pieces[i + 1 :]) if piece]
    return pieces


def _split(text: str) -> list[str]:
    """``text`` at its outermost commas; nothing for an empty list."""
    parts, current = [], ""
    for piece in _pieces(text):
        if piece[0] in "<({[":
            current += piece
            continue
        first, *others = piece.split(",")
        current += first
        for other in others:
            parts.append(current)
            current = other
    parts.append(current)
    return parts if len(parts) > 1 or parts[0].strip() else []


def _const_after(text: str) -> str:
    """``const char *`` as ``char const*``, and no space but between two words."""
    if text.startswith("const "):
        end, depth = len(text), 0
        for i, character in enumerate(text):
            depth += (character in "<({[") - (character in ">)}]")
            if depth == 0 and character in "*&":
                end = i
                break
        text = f"{text[6:end].rstrip()} const{text[end:]}"
    return re.sub(r" ?([^\w ]) ?", r"\1", re.sub(r"(?<=[>)}\]]) (?=const\b)", "\x04", text)).replace("\x04", " ")
