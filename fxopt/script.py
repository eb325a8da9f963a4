"""Runs other people's programs in this process as Python itself would: a script, a module, or a function of one."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import runpy
import sys
import traceback
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fxopt.cli_output import did_you_mean

if TYPE_CHECKING:
    import torch

    from profiler_core.profiles import Profile

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended, as shells give it


class TargetError(Exception):
    """What was to be run is not there; the message says what, where and what to do."""


class WrongFunction(TargetError):
    """A function that is none, or that returns neither (model, inputs) nor the result of its work."""


@dataclass(frozen=True)
class Target:
    """What is to be run: ``kind`` is "script" (a file, a folder or an archive with a ``__main__.py``), "module" or
    "function" (``package.module:name``).
    """

    kind: str
    name: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, arguments: Sequence[str] = (), *, module: bool = False) -> Target:
        """Raises :class:`TargetError` where there is no such file."""
        if module:
            return cls("module", name, tuple(arguments))
        if os.path.exists(name):  # Path's own raises for a name that is too long
            return cls("script", name, tuple(arguments))
        owner, colon, function = name.partition(":")
        if colon and function and all(part.isidentifier() for part in owner.split(".")):
            return cls("function", name, tuple(arguments))
        near = ""
        if name.endswith(".py"):
            near = did_you_mean(Path(name).name, [path.name for path in Path(name).absolute().parent.glob("*.py")])
        elif all(part.isidentifier() for part in name.split(".")):
            near = f"; a module is run with -m {name}"
        raise TargetError(f"{name}: there is no such file{near}")

    @property
    def command(self) -> str:
        """How Python would be told to run it."""
        import shlex

        return shlex.join([*(("-m",) if self.kind == "module" else ()), self.name, *self.arguments])

    @property
    def ours(self) -> str:
        """The same for one of fxopt's commands."""
        import shlex

        start = ["-m", self.name] if self.kind == "module" else [self.name]
        return shlex.join([*start, *(("--", *self.arguments) if self.arguments else ())])


@dataclass
class Outcome:
    """How a program ended: its exit code, and the error that ended it where one did."""

    code: int = 0
    error: BaseException | None = None

    @property
    def interrupted(self) -> bool:
        return isinstance(self.error, KeyboardInterrupt)


def run(target: Target) -> Outcome:
    """Run a script or a module as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``, to its end.

    An error's traceback is printed on stderr as Python prints it, without the frames of what ran the program. What the
    program asks of ``atexit`` happens when this process ends.
    """
    with as_main(target):
        try:
            if target.kind == "module":
                runpy.run_module(target.name, run_name="__main__", alter_sys=True)
            elif Path(target.name).is_file() and not zipfile.is_zipfile(target.name):
                _run_file(os.path.abspath(target.name))
            else:
                runpy.run_path(target.name, run_name="__main__")
        except SystemExit as ended:
            return Outcome(_exit_code(ended), ended)
        except KeyboardInterrupt as error:
            if not _while_tuning(error):
                print_error(error)
            return Outcome(INTERRUPTED, error)
        except ImportError as error:
            if target.kind == "module" and _of_runpy(error):
                raise TargetError(f"-m {target.name}: {error}; it is looked for from {os.getcwd()}") from None
            print_error(error)
            return Outcome(1, error)
        except BaseException as error:
            print_error(error)
            return Outcome(1, error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
    return Outcome()


def _run_file(path: str) -> None:
    """Not by runpy, which puts the path into ``sys.argv[0]``, where Python leaves what was typed."""
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def function_of(target: Target) -> Callable[[], Any]:
    """The function of ``package.module:name``. Raises :class:`TargetError`; what importing raises passes through."""
    owner, _, name = target.name.partition(":")
    if target.arguments:
        raise TargetError(f"{target.name}: a function is called without arguments; {target.arguments[0]!r} is one")
    try:
        found: Any = importlib.import_module(owner)
    except ModuleNotFoundError as error:
        if error.name and (owner == error.name or owner.startswith(f"{error.name}.")):
            raise TargetError(
                f"{target.name}: there is no module {error.name}; it is looked for from {os.getcwd()}"
            ) from None
        raise
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [known for known in dir(found) if not known.startswith("_")])
            raise TargetError(f"{target.name}: {owner} has no {part!r}{near}")
        found = getattr(found, part)
    kind = f"a {type(found).__name__}"
    if isinstance(found, type):
        kind = "a class"
    elif callable(found) and not _is_module(found):
        return found
    raise WrongFunction(
        f"{target.name} is {kind}, not a function: name one that returns (model, inputs), or that does the work"
    )


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def told(value: Any) -> str:
    """What a function returned, in words: "a Linear", "a tuple (Linear, Tensor)"."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        held = ", ".join(type(item).__name__ for item in value[:4]) + (", ..." if len(value) > 4 else "")
        return f"a {type(value).__name__} ({held})"
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


@dataclass(frozen=True)
class Work:
    """What a function stands for: ``call`` is the work; of a model, with its inputs."""

    call: Callable[..., Any]
    model: torch.nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""  # of a function that does the work: what to say where it turns out to do none


def work_of(target: Target, imported: Callable[[], None] | None = None) -> Work:
    """The function's own work, or, where it returns ``(model, inputs)``, the model's call with them.

    Inputs: a tuple or list of positional arguments, a dict of keyword arguments, or one value. imported: is called
    once the function's module has been imported, before the function is. Raises :class:`WrongFunction`.
    """
    import torch

    function = function_of(target)
    if imported is not None:
        imported()
    try:
        made = function()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
            raise TargetError(
                f"{target.name}: {error}: a function that needs no arguments is expected, which does the work or "
                "returns (model, inputs)"
            ) from None
        raise
    _refuse_models(target, made)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        return Work(
            function,
            refusal=f"{target.name} returned {told(made)}, not (model, inputs), and {{}}: return model, (x,), or call "
            "the model in the function",
        )
    model, inputs = made
    args: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, (tuple, list)) else ()
    kwargs = dict(inputs) if isinstance(inputs, dict) else {}
    if not isinstance(inputs, (tuple, list, dict)):
        args = (inputs,)

    def call() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return Work(call, model, args, kwargs)


def _refuse_models(target: Target, made: Any) -> None:
    """Raises WrongFunction where a model is returned and it is not clear with what it is called: the work of such a
    function would be to build it.
    """
    held = list(made.values()) if isinstance(made, dict) else list(made) if isinstance(made, (tuple, list)) else [made]
    models = [isinstance(item, type) or _is_module(item) for item in held]
    if not any(models) or (isinstance(made, tuple) and models == [True, False] and not isinstance(made[0], type)):
        return
    remedy = "return model, (x,)"
    if isinstance(made, tuple) and models[:1] == [True] and not any(models[1:]) and len(made) > 2:
        names = ", ".join("xyzuvw"[: len(made) - 1])
        remedy = f"all inputs belong into one tuple: return model, ({names})"
    raise WrongFunction(f"{target.name} returned {told(made)}, not (model, inputs): {remedy}")


def run_profiled(
    target: Target,
    *,
    skip: int = 3,
    calls: int = 5,
    whole: bool = False,
    counters: str | None = None,
    lines: bool = True,
) -> tuple[Profile, Outcome]:
    """Run a program to its end and profile some of its calls: see :func:`profiler_core.program.recording`.

    A function is called ``skip`` times and then profiled by :func:`profiler_core.profile`, with hardware counters on a
    GPU. Raises :class:`~profiler_core.program.NothingRecorded` (with the program's outcome as ``outcome``) where there
    was nothing to profile.
    """
    from profiler_core.program import NothingRecorded, recording

    if target.kind == "function":
        return _profiled_function(target, skip, calls, counters, lines), Outcome()
    with recording(skip=skip, calls=calls, whole=whole, lines=lines, own=[own_folder()]) as recorder:
        outcome = run(target)
    try:
        return recorder.profile(), outcome
    except NothingRecorded as error:
        error.outcome = outcome  # type: ignore[attr-defined]
        raise


def _profiled_function(target: Target, skip: int, calls: int, counters: str | None, lines: bool) -> Profile:
    from profiler_core.live import profile

    with as_main(target):
        work = work_of(target)
        found = profile(work.call, iterations=calls, warmup=skip, counters=counters, lines=lines, own=[own_folder()])
    if work.model is None and found.window.empty:
        raise WrongFunction(work.refusal.format("ran no operator"))
    return found


def own_folder() -> str:
    return str(Path(__file__).resolve().parent)


@contextlib.contextmanager
def as_main(target: Target) -> Iterator[None]:
    """``sys.argv`` and ``sys.path[0]`` as the program expects them; put back afterwards."""
    argv, path, main = list(sys.argv), list(sys.path), sys.modules.get("__main__")
    first = os.getcwd() if target.kind != "script" else os.path.dirname(os.path.realpath(target.name))
    sys.argv[:] = [target.name if target.kind == "script" else argv[0], *target.arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P: then it adds nothing, and neither is it here
        sys.path[:1] = [first]
    home = str(Path(__file__).resolve().parents[1])
    if home not in sys.path:  # it was the folder that has just made way: what is imported late is found all the same
        sys.path.append(home)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


def _exit_code(ended: SystemExit) -> int:
    """As Python turns it into one: text is printed, and means 1."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def print_error(error: BaseException) -> None:
    """The traceback as Python prints it of the program alone: no frames of what runs and watches it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _without_own_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    traceback.print_exception(type(error), error, error.__traceback__)


_HIDDEN = (
    "runpy",
    "fxopt.script",
    "fxopt.cli_run",
    "fxopt.bench",
    "fxopt.rerouted",
    "profiler_core.program",
    "profiler_core.collect.module_calls",
)


def _without_own_frames(found: TracebackType | None) -> TracebackType | None:
    kept = []
    while found is not None:
        if found.tb_frame.f_globals.get("__name__") not in _HIDDEN:
            kept.append(found)
        found = found.tb_next
    for one, following in zip_longest(kept, kept[1:]):
        one.tb_next = following
    return kept[0] if kept else None


def raised_in_fxopt(error: BaseException) -> bool:
    """Whether fxopt's own code raised it, as against what it calls."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__")).split(".")[0] in ("fxopt", "passes")


def _while_tuning(error: BaseException) -> bool:
    """Whether it arose in fxopt, which the program's own code has no part in."""
    found = error.__traceback__
    while found is not None:
        if found.tb_frame.f_globals.get("__name__") == "fxopt.backend":
            return True
        found = found.tb_next
    return False


def _of_runpy(error: ImportError) -> bool:
    """Whether runpy itself could not find the module, as against an import inside of it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == "runpy"
