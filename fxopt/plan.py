"""The decision on disk: one plan a file, written atomically, readable by several processes at once.

A plan is data. Reading one executes nothing and unpickles nothing; whoever applies it looks its passes up in
the registry. Layout under the store's root:

    plans/<key>.json             one plan
    plans/<key>.json.corrupt.N   files that were found broken, set aside
    provenance/  reports/        what is known of code that Inductor's cache serves, written by their owners
    measured/  ceilings/         what passes and rules measured on the device, written by their owners

The store is bounded: each `save` deletes the files that were used longest ago (`fxopt.store_size`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fxopt import store_size

PLAN_SCHEMA: Literal[1] = 1
# A plan of GPT-2 is some 100 kB. Past this a file is not one of ours, and is not read into memory.
MAX_PLAN_BYTES = 16 * 2**20
MAX_MACHINES = 64
MAX_DEPTH = 50  # below every limit of a JSON reader; also ends a structure that holds itself
_KEY = re.compile(r"[0-9a-f]{64}")


class PlanStoreError(RuntimeError):
    """The store or one of its files cannot be used. The message names the path, the cause and the remedy."""


class PlanMoved(PlanStoreError):
    """A plan that another machine made, and that is not right on this one."""


class PlanCorrupt(PlanStoreError):
    """A plan file that does not hold a plan of its name.

    file: the plan's path.  place: the line and column, or the field.  reason: what is wrong there.
    set_aside: where the file lies now, or None where it was not moved. read: by what only reads, and moves nothing.
    """

    def __init__(self, file: Path, place: str, reason: str, set_aside: Path | None, *, read: bool = False) -> None:
        self.file, self.place, self.reason, self.set_aside = file, place, reason, set_aside
        if read:
            remedy = f"It was left in place: `fxopt plans remove {file.stem[:12]}` deletes it"
        elif set_aside is not None:
            remedy = f"It was set aside as {set_aside.name}; the next tuning run writes a new plan."
        else:
            remedy = (
                "It could not be set aside: remove it by hand, or give another plan_dir (FXOPT_PLAN_DIR)."
            )
        super().__init__(f"plan file {file} is broken at {place}: {reason}. {remedy}")


class PlanNewer(PlanStoreError):
    """A plan that a newer fxopt wrote. It stays where it is."""


class PassUse(BaseModel):
    """One pass of a plan: its registered name, its options (the pass's fields), the stage that it ran in."""

    model_config = ConfigDict(extra="forbid")

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    stage: str


class Machine(BaseModel):
    """A machine, by digests of what identifies it (`fxopt.machine`)."""

    model_config = ConfigDict(extra="forbid")

    host: str
    gpus: list[str] = Field(default_factory=list)


_NEWER = ("resting", "to_come")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Plan(BaseModel):
    """What was decided for one graph, and the evidence. `PlanStore.save` refuses values that JSON lacks."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = PLAN_SCHEMA
    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: str = Field(default_factory=_now)  # ISO 8601, UTC
    decision: Literal["baseline", "candidate"]
    freeze: bool = False
    passes: list[PassUse] = Field(default_factory=list)
    # Graph passes that ran beside them and found nothing to do: Inductor's caches have the code under all of them.
    resting: list[PassUse] = Field(default_factory=list)
    inductor: dict[str, Any] = Field(default_factory=dict)  # patches of Inductor's config
    reports: list[dict[str, Any]] = Field(default_factory=list)  # of every pass that ran, kept or not
    verdict: dict[str, Any] | None = None  # the numerics gate's
    paired: dict[str, Any] | None = None  # the timing of baseline against candidate
    labels: list[dict[str, Any]] = Field(default_factory=list)  # that its passes saw
    to_come: list[dict[str, Any]] = Field(default_factory=list)  # labels of what its passes were to leave behind
    origins: dict[str, list[str]] = Field(
        default_factory=dict
    )  # post-grad node -> the pre-grad nodes it comes from
    mutated: list[int] = Field(default_factory=list)  # positions of the inputs that the graph writes to
    profile: dict[str, Any] = Field(default_factory=dict)  # a summary, not the profile
    environment: dict[str, Any] = Field(default_factory=dict)
    out_of_reach: list[str] = Field(default_factory=list)
    tuning_seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    calls_to_pay: float | None = Field(None, ge=0, allow_inf_nan=False)  # None: tuning never pays for itself
    memory_bytes: int | None = None  # that the plan costs over the baseline
    ablation: list[dict[str, Any]] = Field(default_factory=list)  # what each pass is worth, where it was asked for
    # Where it was verified (`fxopt.machine`): elsewhere it is verified before it is used.
    machines: list[Machine] = Field(default_factory=list, max_length=MAX_MACHINES)

    def content(self) -> bytes:
        """The plan as the file holds it. PlanStoreError for what JSON cannot carry, or is too large to read back."""
        try:
            # What only some plans have is left out elsewhere, so that an older fxopt can read those.
            data = {name: value for name, value in self.model_dump().items() if value or name not in _NEWER}
            ready = json_ready(data, "plan")
        except TypeError as error:
            raise PlanStoreError(f"the plan cannot be written as JSON: {error}") from error
        content = json.dumps(ready, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
        if len(content) > MAX_PLAN_BYTES:
            raise PlanStoreError(
                f"the plan {self.key} takes {len(content)} bytes, and {MAX_PLAN_BYTES} is the most that "
                "is read back: keep a summary of the profile in it, not the profile"
            )
        return content

    def digest(self) -> str:
        """SHA-256, in hex, of all but where it was verified."""
        return hashlib.sha256(self.model_copy(update={"machines": []}).content()).hexdigest()


@dataclass(frozen=True)
class PlanRow:
    """One file of the store, for a listing. `problem` says why it cannot be read, and is "" where it can; of a `broken`
    one no version of fxopt can make anything.
    """

    key: str
    path: Path
    bytes: int
    created: str = ""
    decision: str = ""
    freeze: bool = False
    passes: tuple[str, ...] = ()
    problem: str = ""
    broken: bool = False
    written: float = 0.0  # seconds since the epoch
    of: str = ""  # the function or model that the graph was compiled from, "" in plans of older versions
    inputs: tuple[str, ...] = ()
    precision: str = ""
    device: str = ""
    ratio: float | None = None  # baseline over kept code, where something was kept

    @property
    def age_days(self) -> float:
        """Since the decision; of what says no date, since the file was written."""
        try:
            made = datetime.fromisoformat(self.created).timestamp()
        except ValueError:
            made = self.written
        return (time.time() - made) / 86400


class _Broken(ValueError):
    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class PlanStore:
    """Plans under one directory, which is created by the first `save`.

    lock_timeout: seconds to wait for another process that writes. Readers need no lock.
    max_bytes: what all files under the directory may take together, None for any amount.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, lock_timeout: float = 10.0, max_bytes: int | None = None
    ) -> None:
        self.root = Path(root)
        self.lock_timeout = lock_timeout
        self.max_bytes = max_bytes

    @property
    def plans_dir(self) -> Path:
        return self.root / "plans"

    @property
    def provenance_dir(self) -> Path:
        return self.root / "provenance"

    @property
    def ceilings_dir(self) -> Path:
        return self.root / "ceilings"

    def path(self, key: str) -> Path:
        """The plan's file. Raises ValueError for what is not a key, so that no key leads out of the store."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a plan key: 64 hexadecimal digits are")
        return self.plans_dir / f"{key}.json"

    def load(self, key: str) -> Plan | None:
        """The plan of that key, to be used: it then counts as used last. None where there is none.

        Raises PlanCorrupt (the file is then set aside), PlanNewer, or PlanStoreError where it cannot be read.
        """
        path = self.path(key)
        plan = self._parsed(path, key, set_aside=True)
        if plan is None:
            return None
        with suppress(OSError):  # a store that is only read: what is deleted first is then what was written first
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return plan

    def read(self, key: str) -> Plan | None:
        """The plan of that key, to be looked at, or None where there is none. Changes nothing in the store.

        Raises PlanCorrupt, PlanNewer, or PlanStoreError where it cannot be read.
        """
        return self._parsed(self.path(key), key, set_aside=False)

    def _parsed(self, path: Path, key: str, *, set_aside: bool) -> Plan | None:
        content = _read(path)
        if content is None:
            return None
        try:
            return _parse(content, key, path)
        except _Broken as broken:
            aside = self._set_aside(path, content) if set_aside else None
            raise PlanCorrupt(path, broken.place, broken.reason, aside, read=not set_aside) from None

    def save(self, plan: Plan) -> Path:
        """Writes the plan in place of an earlier one of its key, which stands after a PlanStoreError."""
        path, content = self.path(plan.key), plan.content()
        with self._locked():
            # Only the lock's holder writes, so a temporary file that is there was left by a writer that died.
            for leftover in self.plans_dir.glob(".*.tmp"):
                with suppress(OSError):
                    leftover.unlink()
            _replace(path, content)
            if self.max_bytes is not None:
                store_size.shrink(self.root, self.max_bytes, keep=path)
        return path

    def list(self, limit: int = 1000) -> Sequence[PlanRow]:
        """Up to `limit` plans, newest file first. Broken ones carry their problem and are left in place."""
        try:
            files = [
                (entry.stat().st_mtime_ns, Path(entry.path))
                for entry in os.scandir(self.plans_dir)
                if entry.name.endswith(".json") and _KEY.fullmatch(entry.name[:-5])
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unusable(self.plans_dir, "read", error) from error
        rows = (self._row(path) for _, path in sorted(files, reverse=True)[:limit])
        return [row for row in rows if row is not None]

    def set_aside(self) -> Sequence[Path]:
        """The files that were found broken and moved out of the way."""
        return sorted(self.plans_dir.glob("*.json.corrupt.*"))

    def remove(self, key: str) -> bool:
        """Deletes the plan of that key; False where there is none."""
        path = self.path(key)
        if not path.exists():
            return False
        with self._locked():
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            except OSError as error:
                raise _unusable(path, "removed", error) from error
        return True

    def _row(self, path: Path) -> PlanRow | None:
        key, size, written = path.stem, 0, 0.0
        try:
            status = path.stat()
            size, written = status.st_size, status.st_mtime
            content = _read(path)
            if content is None:
                return None
            plan = _parse(content, key, path)
        except FileNotFoundError:
            return None
        except (_Broken, PlanStoreError) as error:
            return PlanRow(
                key, path, size, problem=str(error), broken=isinstance(error, _Broken), written=written
            )
        graph = plan.profile.get("graph")
        told = graph if isinstance(graph, dict) else {}
        inputs, ratio = told.get("inputs"), (plan.paired or {}).get("ratio")
        return PlanRow(
            key,
            path,
            size,
            plan.created,
            plan.decision,
            plan.freeze,
            tuple(use.name for use in plan.passes),
            written=written,
            of=str(told.get("of") or ""),
            inputs=tuple(map(str, inputs)) if isinstance(inputs, list) else (),
            precision=str(told.get("precision") or ""),
            device=str(plan.environment.get("device_name") or plan.environment.get("device_type") or ""),
            ratio=ratio if plan.decision == "candidate" and isinstance(ratio, float) else None,
        )

    def _set_aside(self, path: Path, content: bytes) -> Path | None:
        try:
            with self._locked():
                # Another process may have replaced it since, or set it aside first.
                if _read(path) != content:
                    return next(iter(reversed(_corrupt_names(path))), None)
                taken = {name.name for name in _corrupt_names(path)}
                number = next(n for n in range(1, len(taken) + 2) if f"{path.name}.corrupt.{n}" not in taken)
                target = path.with_name(f"{path.name}.corrupt.{number}")
                os.rename(path, target)
                return target
        except (OSError, PlanStoreError):
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import filelock

        try:
            self.plans_dir.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.plans_dir / ".lock", timeout=self.lock_timeout)
            lock.acquire()
        except filelock.Timeout as error:
            raise PlanStoreError(
                f"the plan store {self.root} stayed locked by another process for {self.lock_timeout:g} s. "
                f"If none is at work, remove {self.plans_dir / '.lock'}; "
                "or give another plan_dir (FXOPT_PLAN_DIR)."
            ) from error
        except (OSError, NotImplementedError) as error:
            raise _unusable(self.root, "written", error) from error
        try:
            yield
        finally:
            lock.release()


def parse_plan(content: bytes, key: str, origin: str) -> Plan:
    """The plan of that key that `content` holds; `origin` says in errors where it came from.

    Raises PlanStoreError. Nothing in it is executed or unpickled.
    """
    try:
        return _parse(content, key, Path(origin))
    except _Broken as broken:
        raise PlanStoreError(f"{origin} holds no plan: {broken}") from None


def plan_key(**parts: Any) -> str:
    """SHA-256, in hex, of the canonical JSON of the parts: sorted names, no spaces, no NaN; tuples as lists.

    Raises TypeError naming the place of a part that JSON cannot carry, such as `parts.graph.shapes[2]`.
    """
    ready = json_ready(parts, "parts")
    text = json.dumps(ready, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def json_ready(value: Any, where: str, depth: int = 0) -> Any:
    """The value in JSON's own types: tuples become lists, enum members their values, no other conversion.

    Raises TypeError naming the place (`where` and the way from there) of what is not a string, a finite
    number, a bool, None, a list or tuple, or a mapping with strings as names, at most MAX_DEPTH deep.
    """
    if isinstance(value, Enum):
        return json_ready(value.value, where, depth)
    if value is None or isinstance(value, (bool, str)):
        return value
    # Exact types: a subclass (numpy.float64, torch.SymInt's kin) may not print as the number that it equals.
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return value
    if depth == MAX_DEPTH and isinstance(value, (list, tuple, Mapping)):
        raise TypeError(f"{where[:80]}... is nested too deeply (more than {MAX_DEPTH} deep)")
    if isinstance(value, (list, tuple)):
        return [json_ready(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(
                    f"{where} has {name!r} ({type(name).__name__}) as a name; only strings can be"
                )
        return {str(name): json_ready(item, f"{where}.{name}", depth + 1) for name, item in value.items()}
    what = repr(value) if type(value) is float else f"a {type(value).__name__}"
    raise TypeError(f"{where} is {what}; allowed: string, finite number, bool, None, list, dict of these")


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_PLAN_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, "read", error) from error


def _parse(content: bytes, key: str, path: Path) -> Plan:
    """The plan that the bytes hold. Raises _Broken with the place, and PlanNewer."""
    if len(content) > MAX_PLAN_BYTES:
        raise _Broken(f"byte {MAX_PLAN_BYTES}", "the file is larger than any plan")
    try:
        text = content.decode("utf-8")
        data = json.loads(text, parse_constant=_no_constant)
    except _Broken:
        raise
    except UnicodeDecodeError as error:
        raise _Broken(f"byte {error.start}", "it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text.rstrip()) or not text.rstrip().endswith(("}", "]"))
        truncated = " (the file is cut off)" if at_end else ""
        raise _Broken(f"line {error.lineno}, column {error.colno}", f"{error.msg}{truncated}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _Broken("a number", str(error)) from None
    except RecursionError:
        raise _Broken("an unknown depth", "it is nested too deeply") from None
    if not isinstance(data, dict):
        raise _Broken("line 1, column 1", f"a JSON object was expected, not a {type(data).__name__}")
    version = data.get("schema_version")
    if type(version) is int and version > PLAN_SCHEMA:
        raise PlanNewer(
            f"plan file {path} has schema_version {version}, and this fxopt reads up to {PLAN_SCHEMA}: "
            "upgrade fxopt, or give this version a plan_dir of its own (FXOPT_PLAN_DIR). "
            "The file was left in place."
        )
    if type(version) is not int or version != PLAN_SCHEMA:
        raise _Broken("field schema_version", f"it is {version!r}, and {PLAN_SCHEMA} was expected")
    try:
        json_ready(data, "plan")  # a number such as 1e999 reads as infinity
        plan = Plan.model_validate_json(content, strict=True)
    except TypeError as error:
        raise _Broken("a value", str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(
            "."
        )
        raise _Broken(f"field {place}", first["msg"]) from None
    if plan.key != key:
        raise _Broken("field key", f"it is the plan of another key, {plan.key}")
    return plan


def _no_constant(name: str) -> Any:
    raise _Broken(f"the value {name}", "it is not JSON")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # 0o666 less the umask, as for any file: a plan directory may be shared by a group.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C included
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _unusable(path, "written", error) from error
        raise
    # The name's new target is on disk only once the directory is. Some file systems refuse; the plan is then
    # as safe as they make it.
    with suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _corrupt_names(path: Path) -> list[Path]:
    names = path.parent.glob(f"{path.name}.corrupt.*")
    return sorted(
        (name for name in names if name.suffix[1:].isdigit()), key=lambda name: int(name.suffix[1:])
    )


def _unusable(path: Path, verb: str, error: BaseException) -> PlanStoreError:
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PlanStoreError(
        f"{path} cannot be {verb}: {cause}. Give a directory that can with plan_dir (or FXOPT_PLAN_DIR), "
        "or repair this one's permissions or space."
    )
