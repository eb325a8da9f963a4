"""Every option of fxopt: meaning, default, environment variable; and how options are told from Inductor's.

A value comes from, in rising order: the default, the environment variable `FXOPT_<NAME>`, the caller.
`torch.compile` takes either `mode` or `options`, never both; `mode` may therefore also be given as an option.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fxopt import toml_file
from fxopt.warning import warn

OWN_PREFIX = "fxopt."
INDUCTOR_PREFIX = "inductor."
PRECISIONS = ("fp32", "tf32", "bf16")


class OptionError(ValueError):
    """An option whose value cannot be used. The message names option, value, origin and what is allowed."""


class UnknownOption(OptionError):
    """An option that neither fxopt nor Inductor has."""


class Mode(str, Enum):
    """`TUNE` measures within the time limit where no plan is found; `APPLY` uses plans and never measures."""

    TUNE = "tune"
    APPLY = "apply"


def _precision(value: Any) -> str | float:
    if isinstance(value, str):
        name = value.strip().lower()
        if name in PRECISIONS:
            return name
        value = float(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError("not a precision class and not an error budget")
    return float(value)


def _names(value: Any) -> tuple[str, ...] | None:
    """A sequence of names, or one string with commas. None and "all" stay None (only `passes` admits it)."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "all"):
        return None
    parts = value.split(",") if isinstance(value, str) else list(value)
    if any(not isinstance(part, str) for part in parts):
        raise ValueError("not all of them are names")
    names = tuple(part.strip() for part in parts)
    if isinstance(value, str):
        names = tuple(name for name in names if name)
    if any(not name for name in names) or len(set(names)) != len(names):
        raise ValueError("a name is empty or given twice")
    return names


def _number(value: Any) -> Any:
    # True is an int to Python, and pydantic would read it as 1.
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def _maybe_bool(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("auto", "none") else value


def _memory(value: Any) -> int | str | None:
    """Bytes as a number; a share as "20%". None and "none" set no limit."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    if isinstance(value, str) and value.strip().endswith("%"):
        share = float(value.strip().removesuffix("%"))
        if not 0 <= share <= 100:
            raise ValueError("not a share")
        return f"{share:g}%"
    number = float(value) if isinstance(value, (str, float)) else value
    if isinstance(number, bool) or not 0 <= number < float("inf") or number != int(number):
        raise ValueError("not a number of bytes")
    return int(number)


def _bytes(value: Any) -> int | None:
    number = _memory(value)
    if isinstance(number, str):
        raise ValueError("not a number of bytes")
    return number


def _path(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, (str, os.PathLike)) and os.fspath(value) else value


def _thresholds(value: Any) -> tuple[tuple[str, float], ...]:
    """Thresholds from a mapping, flat ("rule.metric") or by rule, or from a TOML file of the same form."""
    file = None
    if isinstance(value, (str, os.PathLike)):
        file = Path(value).expanduser() if os.fspath(value) else None
        value = toml_file.read(file) if file is not None else {}
    if isinstance(value, tuple):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"thresholds is {value!r}, not a mapping of names to numbers and not a TOML file of them")
    flat: dict[str, float] = {}
    for name, entry in value.items():
        of_rule = isinstance(entry, Mapping)
        flat.update({f"{name}.{key}": number for key, number in entry.items()} if of_rule else {name: entry})
    from fxopt.rules import thresholds

    for name, number in flat.items():  # what cannot be is said now rather than while tuning
        try:
            thresholds({name: number})
        except ValueError as error:
            raise ValueError(f"{toml_file.place(file, str(name)) if file is not None else ''}{error}") from None
    return tuple(sorted((name, float(number)) for name, number in flat.items()))


_Count = Annotated[int, BeforeValidator(_number)]


def _field(default: Any, description: str, allowed: str, *, decides: bool = False, **bounds: Any) -> Any:
    """`allowed` is shown in error messages; `decides`: another value may lead to another plan."""
    extra: dict[str, Any] = {"allowed": allowed, "decides": decides}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class Options(BaseModel):
    """What the caller asked for. Made by `split_options` or `resolve_options`, which give readable errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    precision: Annotated[str | float, BeforeValidator(_precision)] = _field(
        "fp32",
        "What a rewrite may cost in accuracy against fp64: fp32 is no worse than a small multiple of "
        "Inductor's own error; tf32 and bf16 admit those formats; a number is a budget for the relative L2 "
        "error.",
        "fp32, tf32, bf16, or a number above 0 and below 1 (relative L2 error against fp64)",
        decides=True,
    )
    objective: Literal["wall", "kernel"] = _field(
        "wall",
        "What decides whether a candidate is kept: wall time of a call, or the sum of its kernel times (of two whose "
        "kernels take as long, the faster call; a call that got slower than the baseline's is told in the report).",
        "wall or kernel",
        decides=True,
    )
    passes: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = _field(
        None,
        "The passes that may run, by name. Not given: every registered one.",
        "names of passes, as a sequence or with commas; or all",
        decides=True,
    )
    disable: Annotated[tuple[str, ...], BeforeValidator(_names)] = _field(
        (),
        "Passes that must not run, by name.",
        "names of passes, as a sequence or with commas",
        decides=True,
    )
    plan_dir: Annotated[Path | None, BeforeValidator(_path)] = _field(
        None,
        "Where plans are kept. Not given: this user's cache directory for fxopt.",
        "a directory",
    )
    plan_limit: Annotated[int | None, BeforeValidator(_bytes)] = _field(
        2**30,
        "What the plan directory may take; the files used longest ago are deleted first.",
        "a number of bytes, or none",
    )
    distributed: Literal["auto", "off"] = _field(
        "auto",
        "Under torch.distributed: auto lets one rank measure and all ranks agree on one plan; off lets each rank tune "
        "by itself.",
        "auto or off",
    )
    distributed_timeout: Annotated[float, BeforeValidator(_number)] = _field(
        60.0,
        "How long a rank waits for the others to reach the same graph, and for a sign of life of one that is at work.",
        "seconds, more than 0",
        gt=0,
    )
    pairs: _Count = _field(
        30,
        "Interleaved pairs of timed baseline and candidate blocks.",
        # The widest distribution-free interval of a median, [min, max] of n values, covers 1 - 2^(1-n):
        # 96.9 % at n = 6, 93.8 % at n = 5.
        "a whole number, 6 or more (fewer give no 95 % interval of a median)",
        ge=6,
    )
    time_limit: Annotated[float, BeforeValidator(_number)] = _field(
        600.0,
        "Time that tuning one graph may take, compiling included: no candidate is begun after it. Waiting while "
        "another process measures on the same GPU does not count, up to as long again.",
        "seconds, more than 0",
        gt=0,
    )
    memory_limit: Annotated[int | str | None, BeforeValidator(_memory)] = _field(
        None,
        "Memory that a candidate may take beyond Inductor's code: constants that it holds and, on CUDA, whatever else "
        "stays allocated, and the peak of a call. Not given: it is only reported.",
        "a number of bytes, or a share of the device's memory such as 20%",
        decides=True,
    )
    ablate: bool = _field(
        False,
        "Measure what each kept pass is worth, alone and taken away, into the report's ablation. Costs a compilation "
        "and a comparison for each, beyond the time limit.",
        "true or false",
    )
    warmup: _Count = _field(3, "Calls before anything is measured.", "a whole number, 0 or more", ge=0)
    iterations: _Count = _field(5, "Calls that are profiled.", "a whole number, 1 or more", ge=1)
    verify_inputs: _Count = _field(
        2,
        "Fresh sets of inputs on which a candidate is checked, besides the caller's own.",
        "a whole number, 0 or more",
        decides=True,
        ge=0,
    )
    logits: Annotated[bool | None, BeforeValidator(_maybe_bool)] = _field(
        None,
        "Whether the output is logits, so that the largest entry must agree too. Not given: judged from the "
        "output.",
        "true, false or auto",
        decides=True,
    )
    on_error: Literal["fallback", "raise"] = _field(
        "fallback",
        "After an error inside fxopt: run plain Inductor with one warning, or raise the error.",
        "fallback or raise",
    )
    report: Annotated[Path | None, BeforeValidator(_path)] = _field(
        None, "A file to which the report is written as JSON.", "a file"
    )
    verbose: bool = _field(False, "Print what happens as it happens.", "true or false")
    counters: Literal["auto", "none", "quick", "full"] = _field(
        "auto",
        "Hardware counters that labels rest on, read by CUPTI while the baseline is profiled. auto: all on an NVIDIA "
        "GPU, none elsewhere. Where they cannot be had, labels rest on times and modelled work.",
        "auto, none, quick or full",
        decides=True,
    )
    thresholds: Annotated[tuple[tuple[str, float], ...], BeforeValidator(_thresholds)] = _field(
        (),
        "Thresholds of the rules, over their defaults (`fxopt rules` lists them).",
        "a mapping of names such as memory_bound.dram_throughput to numbers, or a TOML file of them",
        decides=True,
    )
    dump: Annotated[Path | None, BeforeValidator(_path)] = _field(
        None,
        "Where the graph before and after each graph pass is written, numbered. Compiles past the caches, which would "
        "keep passes from running.",
        "a directory",
    )
    bisect: Annotated[int | None, BeforeValidator(_number)] = _field(
        None,
        "Apply only the first N rewrites of the process, in order: what `fxopt bisect` sets.",
        "a whole number, 0 or more",
        ge=0,
    )
    freeze: bool = _field(
        False,
        "Fold weights into the compiled code. Set by fxopt.optimize: a torch.compile backend is handed the "
        "parameters as inputs and cannot freeze them.",
        "true or false",
        decides=True,
    )

    @property
    def plan_root(self) -> Path:
        """`plan_dir`, or the user's cache directory for fxopt. Not created here."""
        if self.plan_dir is not None:
            return self.plan_dir
        import platformdirs

        return platformdirs.user_cache_path("fxopt")

    def deciding(self) -> dict[str, Any]:
        """The options that bear on which plan is right, JSON-able: the options' part of a plan's key."""
        names = [name for name, info in Options.model_fields.items() if _extra(info, "decides")]
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names
        }


# Set by the session object alone, so it has no environment variable and no place among a backend's options.
SESSION_ONLY = frozenset({"freeze"})


class OptionRow(NamedTuple):
    """One option as documentation shows it."""

    name: str
    default: str
    environment: str  # "" where no environment variable sets it
    allowed: str
    description: str


def environment_variable(name: str) -> str:
    return "FXOPT_" + name.upper()


def option_names() -> tuple[str, ...]:
    """Names that a caller of the backend may give: fxopt's options and `mode`, without the session's own."""
    return ("mode", *(name for name in Options.model_fields if name not in SESSION_ONLY))


def describe_options() -> list[OptionRow]:
    """Every option: default, environment variable, allowed values and meaning, in declaration order."""
    rows = [
        OptionRow(
            "mode",
            Mode.TUNE.value,
            environment_variable("mode"),
            "tune, apply, or a mode of Inductor",
            "tune: measure where no plan is found; apply: use plans and never measure (for live traffic). "
            "A mode of Inductor stands for its options, in the baseline and in every candidate.",
        )
    ]
    for name, info in Options.model_fields.items():
        default = "" if info.default in (None, ()) else str(info.default).lower()
        environment = "" if name in SESSION_ONLY else environment_variable(name)
        rows.append(OptionRow(name, default, environment, _extra(info, "allowed"), info.description or ""))
    return rows


def resolve_options(
    given: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, session: bool = False
) -> Options:
    """Options from `given` (fxopt's own names only), then the environment, then the defaults.

    An empty environment variable counts as not set; one that begins with FXOPT_ and is none of fxopt's gets a warning.
    Raises UnknownOption and OptionError.
    """
    environ = os.environ if environ is None else environ
    _warn_of_unknown(environ)
    for name in given:
        if name not in Options.model_fields:
            raise _unknown(name, ())
        if name in SESSION_ONLY and not session:
            raise OptionError(
                f"option {name!r} is not for torch.compile: a backend is handed the parameters as inputs. "
                "Use fxopt.optimize(model, example_inputs)."
            )
    values: dict[str, Any] = {}
    for name in Options.model_fields:
        variable = environment_variable(name)
        if name in given:
            values[name] = _parse(name, given[name], f"option {name!r}")
        elif name not in SESSION_ONLY and environ.get(variable, "").strip():
            values[name] = _parse(name, environ[variable].strip(), f"environment variable {variable}")
    return Options(**values)


#: environment variables that set no option
_OTHER_VARIABLES = ("FXOPT_MODE", "FXOPT_BISECT_LOG", "FXOPT_SHARED")


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = [*_OTHER_VARIABLES, *(row.environment for row in describe_options() if row.environment)]
    for name in sorted(environ):
        if name.startswith("FXOPT_") and name not in known and not name.startswith("FXOPT_TEST_"):
            bare = [one.removeprefix("FXOPT_") for one in known]
            near = difflib.get_close_matches(name.removeprefix("FXOPT_"), bare, 1, 0.6)
            hint = f"; did you mean FXOPT_{near[0]}?" if near else "; `fxopt options` lists those there are"
            warn(f"the environment variable {name} is none of fxopt's and has no effect{hint}")


def split_options(
    mode: str | None,
    options: Mapping[str, Any] | None,
    inductor_keys: Collection[str],
    inductor_modes: Mapping[str, Mapping[str, Any]],
    *,
    environ: Mapping[str, str] | None = None,
    session: bool = False,
) -> tuple[Options, Mode, dict[str, Any]]:
    """What `torch.compile(mode=, options=)` was given: fxopt's options, mode, patches of Inductor's config.

    mode: "tune", "apply", a mode of Inductor (a key of `inductor_modes`), or None.
    options: fxopt's own names and Inductor's config keys ("triton.cudagraphs"), "-" and "_" alike. "fxopt."
        or "inductor." in front says whose it is; without, a name that both have is fxopt's.
    Patches that are given win over those of an Inductor mode. Their values are not looked at here
    (`fxopt.torch_api.inductor.check_values`).
    session: the caller is fxopt.optimize, which may also set what a backend cannot (`freeze`).
    Raises UnknownOption and OptionError.
    """
    environ = os.environ if environ is None else environ
    own: dict[str, Any] = {}
    patches: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for given, value in (options or {}).items():
        if not isinstance(given, str):
            raise OptionError(f"option {given!r}: a name is needed, not {type(given).__name__}")
        owner, name = _owner(given, inductor_keys)
        if (earlier := spelling.setdefault(f"{owner}{name}", given)) != given:
            raise OptionError(f"options {earlier!r} and {given!r} are the same one: give it once")
        (own if owner == OWN_PREFIX else patches)[name] = value

    stated: dict[Mode, str] = {}
    from_modes: dict[str, Any] = {}
    for value, source in _modes(mode, own.pop("mode", None)):
        kind, expanded = _mode(value, source, inductor_modes)
        from_modes.update(expanded)
        if kind is not None:
            stated[kind] = source
    if len(stated) > 1:
        raise OptionError(
            "mode is given twice and differently: "
            + " and ".join(f"{kind.value!r} by {source}" for kind, source in stated.items())
        )
    if not stated and (value := environ.get(environment_variable("mode"), "").strip()):
        kind, expanded = _mode(value, f"environment variable {environment_variable('mode')}", inductor_modes)
        # A mode of Inductor that the caller gave stands; the environment then only says whether to measure.
        from_modes = from_modes or expanded
        if kind is not None:
            stated[kind] = "environment"
    return (
        resolve_options(own, environ=environ, session=session),
        next(iter(stated), Mode.TUNE),
        {**from_modes, **patches},
    )


def _owner(given: str, inductor_keys: Collection[str]) -> tuple[str, str]:
    """(OWN_PREFIX or INDUCTOR_PREFIX, the name without prefix and with underscores)."""
    name = given.replace("-", "_")
    own_name = name.removeprefix(OWN_PREFIX)
    if not name.startswith(INDUCTOR_PREFIX) and (own_name == "mode" or own_name in Options.model_fields):
        return OWN_PREFIX, own_name
    inductor_name = name.removeprefix(INDUCTOR_PREFIX)
    if not name.startswith(OWN_PREFIX) and inductor_name in inductor_keys:
        return INDUCTOR_PREFIX, inductor_name
    raise _unknown(given, inductor_keys)


def _unknown(given: str, inductor_keys: Collection[str]) -> UnknownOption:
    name = given.replace("-", "_").removeprefix(OWN_PREFIX).removeprefix(INDUCTOR_PREFIX)
    known = option_names()
    # fxopt's own first: Inductor has several hundred, and some of them resemble anything.
    nearest = difflib.get_close_matches(name, known, 1, 0.6)
    nearest = nearest or difflib.get_close_matches(name, inductor_keys, 1, 0.75)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return UnknownOption(
        f"unknown option {given!r}{hint} fxopt's options: {', '.join(known)}. "
        "Keys of torch._inductor.config are accepted too"
    )


def _modes(argument: Any, option: Any) -> Iterator[tuple[Any, str]]:
    if argument is not None:
        yield argument, "the argument mode"
    if option is not None:
        yield option, "option 'mode'"


def _mode(
    value: Any, source: str, inductor_modes: Mapping[str, Mapping[str, Any]]
) -> tuple[Mode | None, dict[str, Any]]:
    """The mode of fxopt that a value states, if any; the patches of the Inductor mode that it names."""
    name = value.value if isinstance(value, Mode) else value
    if isinstance(name, str):
        name = name.strip().lower()
        if name in (Mode.TUNE.value, Mode.APPLY.value):
            return Mode(name), {}
        if name in inductor_modes:
            return None, dict(inductor_modes[name])
    choices = ", ".join((*(mode.value for mode in Mode), *inductor_modes))
    raise OptionError(f"mode is {value!r}, from {source}; allowed: {choices}")


def _extra(info: Any, key: str) -> Any:
    return info.json_schema_extra[key]


def _parse(name: str, value: Any, source: str) -> Any:
    try:
        return getattr(Options(**{name: value}), name)
    except (ValidationError, TypeError) as error:
        allowed = _extra(Options.model_fields[name], "allowed")
        # Of a file or of many names "allowed" says too little.
        causes = error.errors() if isinstance(error, ValidationError) and name == "thresholds" else []
        why = [str(cause["ctx"]["error"]) for cause in causes if "error" in cause.get("ctx", {})]
        if why:
            raise OptionError(f"{'; '.join(why)} ({source})") from error
        raise OptionError(f"{name} is {value!r}, from {source}; allowed: {allowed}") from error
