"""Decodes the events of a Chrome trace one by one from its text, going on past damage, and reads its header."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from profiler_core.trace import TraceError

_SHOWN = 3  # places named in a message; the rest is a count
_SEPARATOR = re.compile(r"[ \t\n\r]*,?[ \t\n\r]*")
_EVENTS_KEY = re.compile(r'"traceEvents"\s*:\s*\[')
_EVENT_START = re.compile(r'\{\s*"(?:ph|cat|name)"\s*:')
# Not JSON, but printed by C++ for a bandwidth over no time; Python's decoder takes NaN. Replaced at equal length.
_BARE_NUMBER = re.compile(r"(?<=[:,\[ ])(?:nan|inf|-nan|-inf)(?=\s*[,}\]])")
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 14  # compressed bytes at a time: what damage costs before it

# deviceProperties' names -> those used here.
_DEVICE_LIMITS = {
    "name": "name",
    "totalGlobalMem": "memory_bytes",
    "numSms": "sm_count",
    "warpSize": "warp_size",
    "maxThreadsPerBlock": "max_threads_per_block",
    "maxThreadsPerMultiprocessor": "max_threads_per_sm",
    "regsPerBlock": "regs_per_block",
    "regsPerMultiprocessor": "regs_per_sm",
    "sharedMemPerBlock": "shared_per_block",
    "sharedMemPerBlockOptin": "shared_per_block_optin",
    "sharedMemPerMultiprocessor": "shared_per_sm",
    "maxSharedMemoryPerMultiProcessor": "shared_per_sm",  # AMD's spelling
}
_VERSIONS = tuple(
    f"{tool}_version"
    for tool in ("cuda_runtime", "cuda_driver", "cupti", "hip_runtime", "hip_driver", "roctracer", "rocprofiler")
)
_OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class EventStream:
    """The text of a trace as a stream of events; ``header`` gets the other top-level values on the way, and the number
    of events under "traceEvents" where there is such a list.

    Decimals and NaN stay strings, so that times lose nothing. ``damage`` says, after the last event, where the
    text breaks off and which damaged stretches were skipped; a bare ``nan`` or ``inf`` is read.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.header: dict[str, Any] = {}
        self.damage: list[str] = []
        self._skipped: list[int] = []  # where damaged events begin
        self._decode = json.JSONDecoder(parse_float=str, parse_constant=str, strict=False).raw_decode
        self._text = ""
        self._count = 0
        self._repaired = self._broken = False

    def events(self, data: str | bytes) -> Iterator[Any]:
        """Every event that is whole, in the order of the file."""
        self._text = data if isinstance(data, str) else self._decompressed(data)
        del data
        start = self._skip(0)
        opening = self._text[start : start + 1]
        if opening == "[":
            self.header["traceEvents"] = 0
            yield from self._events(start + 1)
        elif opening == "{":
            yield from self._members(start + 1)
        else:
            why = [f"it {_not_json(self._text)}.", *self.damage]
            raise TraceError(f"{self.where} is not a trace of torch.profiler: {' '.join(why)}")
        if "traceEvents" in self.header:
            self.header["traceEvents"] = self._count
        if self._skipped:
            shown = ", ".join(str(self._byte(at)) for at in self._skipped[:_SHOWN])
            more = ", ..." if len(self._skipped) > _SHOWN else ""
            self.damage.append(
                f"{len(self._skipped)} damaged stretches of the file were skipped, at byte {shown}{more}: the events "
                "there are lost. Export the trace again."
            )
        self._text = ""

    def _decompressed(self, data: bytes) -> str:
        if data[:2] == _GZIP:
            data = self._inflated(data)
        return data.decode(json.detect_encoding(data), "replace")

    def _inflated(self, data: bytes) -> bytes:
        """The decompressed bytes, up to the damage where there is any (gzip's own reader would give none)."""
        parts: list[bytes] = []
        at, inflate = 0, zlib.decompressobj(31)
        try:
            while at < len(data):
                parts.append(inflate.decompress(data[at : at + _CHUNK]))
                at = min(at + _CHUNK, len(data))
                if inflate.eof:  # of one member; another may follow, or padding
                    at -= len(inflate.unused_data)
                    if data[at : at + 2] != _GZIP:
                        break
                    inflate = zlib.decompressobj(31)
            cause = "" if inflate.eof else f"ends early, after {len(data)} bytes"
        except zlib.error as error:
            cause = f"is damaged behind its byte {at} ({error})"
        text = b"".join(parts)
        if cause:
            self.damage.append(
                f"The gzip stream {cause}: what follows byte {len(text)} of the decompressed text is lost. Copy or "
                "download the file again, or export the trace again."
            )
        return text

    def _members(self, at: int) -> Iterator[Any]:
        """The events among the members of the outermost object."""
        while True:
            text = self._text
            at = self._skip(at)
            if text[at : at + 1] == "}":
                return
            try:
                key, end = self._decode(text, at)
                end = self._skip(end)
                if text[end : end + 1] != ":" or not isinstance(key, str):
                    raise ValueError
                end = self._skip(end + 1)
                if key == "traceEvents" and text[end : end + 1] == "[":
                    self.header[key] = 0
                    at = yield from self._events(end + 1)
                else:
                    self.header[key], at = self._decode(text, end)
            except (ValueError, RecursionError):
                found = _EVENTS_KEY.search(text, at)
                if found is None:
                    self._broken_off(at)
                    return
                self._skipped.append(at)
                at = found.start()

    def _events(self, at: int) -> Generator[Any, None, int]:
        """The events from ``at`` on. Returns where the list ended."""
        text, decode, separator = self._text, self._decode, _SEPARATOR.match
        while True:
            at = separator(text, at).end()  # type: ignore[union-attr]  # as in _skip, without its call
            try:
                event, at = decode(text, at)
            except (ValueError, RecursionError):
                if text[at : at + 1] == "]":
                    return at + 1
                if not self._repaired:
                    self._repaired = True
                    text, times = _BARE_NUMBER.subn(lambda m: "NaN".rjust(len(m[0])), text)
                    self._text = text
                    if times:
                        continue
                following = self._next_whole(at)
                if following is None:
                    self._broken_off(at)
                    return len(text)
                self._skipped.append(at)
                at = following
            else:
                self._count += 1
                yield event

    def _next_whole(self, at: int) -> int | None:
        """Where the next event behind ``at`` begins that can be decoded. Each is tried on its own, without the rest of
        the text: the decoder's error counts the lines up to it, which would take the square of the file's length.
        """
        starts = _EVENT_START.finditer(self._text, at + 1)
        start = next(starts, None)
        while start is not None:
            following = next(starts, None)
            end = following.start() if following else len(self._text)
            try:
                event, _ = self._decode(self._text[start.start() : end])
                if "ph" in event:
                    return start.start()
            except (ValueError, RecursionError):
                pass
            start = following
        return None

    def _broken_off(self, at: int) -> None:
        if self._broken:
            return
        self._broken = True
        self.damage.append(
            f"The JSON breaks off at byte {self._byte(at)} of {self._byte(len(self._text))}, after {self._count} whole "
            "events: what follows is lost. Copy the file again, or export the trace again (the program may have been "
            "stopped, or the disk full, while it was written)."
        )

    def _skip(self, at: int) -> int:
        """Past white space and at most one comma."""
        return _SEPARATOR.match(self._text, at).end()  # type: ignore[union-attr]  # it matches the empty string

    def _byte(self, at: int) -> int:
        return len(self._text[:at].encode("utf-8", "surrogatepass"))


def other_json(header: Mapping[str, Any], categories: Counter[str]) -> str:
    """What a JSON file without any event of torch.profiler seems to be, by its keys and its events' categories."""
    if "traceEvents" in header:
        if not header["traceEvents"]:
            return "it holds no events; the profiler was never started, or stopped before its first step"
        found = ", ".join(name or "none" for name, _ in categories.most_common(5)) or "none"
        return f"it is a Chrome trace of something else (categories of its events: {found})"
    keys = set(header)
    wanted = "give the file of torch.profiler's export_chrome_trace"
    if {"schema", "nodes"} <= keys:
        return f"it seems to be an execution trace (ExecutionTraceObserver), which has no times of kernels; {wanted}"
    if {"segments", "device_traces"} & keys:
        return f"it seems to be a snapshot of CUDA memory; {wanted}"
    if {"postToPre", "preToPost"} & keys:
        return f"it seems to be Inductor's provenance mapping, which belongs to a trace but is none; {wanted}"
    named = ", ".join(sorted(map(str, keys))[:8]) or "none"
    return f"it has no list 'traceEvents' (its keys: {named}); {wanted}"


def _not_json(text: str) -> str:
    if not text.strip():
        return "is empty"
    if text.startswith("SQLite format 3"):
        return "is an SQLite database; nsys exports are read as such"
    return f"is not JSON (it begins {text[:20]!r})"


def run_meta(header: Mapping[str, Any], path: str, threads: dict[int, str], notes: list[str]) -> dict[str, Any]:
    """What is known of the run. Only what is named here: headers also carry job names and environments. What is
    damaged is left out, and said in ``notes``.
    """
    meta: dict[str, Any] = {"source": "kineto", "path": path, "tool": "torch.profiler (Kineto)", "devices": {}}
    if "schemaVersion" in header:
        meta["tool"] += f", schema {header['schemaVersion']}"
    versions = {key: header[key] for key in _VERSIONS if key in header}
    if versions:
        meta["versions"] = versions
    for key in _OPTIONS:
        if key in header:
            meta[key] = bool(header[key])
    base = header.get("baseTimeNanoseconds")
    if isinstance(base, int):
        meta["base_ns"] = base
    distributed = header.get("distributedInfo")
    if isinstance(distributed, dict):
        meta.update({key: distributed[key] for key in ("rank", "world_size", "backend") if key in distributed})
    devices = header.get("deviceProperties")
    for position, device in enumerate(devices if isinstance(devices, list) else []):
        if not isinstance(device, dict):
            continue
        wrong = [key for key in ("id", "computeMajor", "computeMinor", *_DEVICE_LIMITS) if not _usable(device, key)]
        if wrong:
            whole = "; the device was left out" if "id" in wrong else ""
            notes.append(f"deviceProperties, entry {position}: no usable {', '.join(wrong)}{whole}")
        if "id" in wrong:
            continue
        good = {key: value for key, value in device.items() if key not in wrong}
        known = {ours: good[theirs] for theirs, ours in _DEVICE_LIMITS.items() if theirs in good}
        if "computeMajor" in good and "computeMinor" not in wrong:
            known["capability"] = (good["computeMajor"], good.get("computeMinor", 0))
        meta["devices"][good.get("id", position)] = known
    if threads:
        meta["threads"] = threads
    return meta


def _usable(device: Mapping[str, Any], key: str) -> bool:
    """Whether a device's property is of its type, or absent."""
    value = device.get(key, "" if key == "name" else 0)
    return type(value) is str if key == "name" else type(value) is int and 0 <= value < 2**63
