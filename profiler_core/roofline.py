"""What a device can reach: copy bandwidth and matrix-product rates, measured once and kept.

These are achievable ceilings, not datasheet figures: the best of a few runs of a large copy and of a large
square matrix product through the same libraries that the model uses. A kernel may still exceed the copy
ceiling when its data stay in a cache, which is why the size of the last-level cache is kept beside the
rates.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from profiler_core.exclusive import measuring
from profiler_core.files import write_atomically

__all__ = [
    "Ceilings",
    "ceilings",
    "kept_at",
    "last_level_cache_bytes",
    "matrix_units",
    "measure_ceilings",
    "tf32_matmul",
]

SCHEMA_VERSION = 1
_LOCK_TIMEOUT_S = 120.0
_SECONDS_PER_RATE = 0.4
_unkept: dict[Path, Ceilings] = {}  # what could not be written, by the file that it belongs in
_told: set[Path] = set()  # folders of which the process has been warned


class CeilingsCorrupt(ValueError):
    """A stored file that is not what this module writes."""


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device.

    Args:
        device: the device's name.
        copy_bytes_per_s: bytes read plus bytes written per second of a large copy.
        flops_per_s: FLOP/s of a large matrix product by input type: "float32", and "tf32", "bfloat16",
            "float16" where the device has units for them.
        measured: date of the measurement, ISO 8601.
        environment: torch version, threads, matmul settings, last-level cache (``last_level_cache_bytes``,
            int or None).
    """

    device: str
    copy_bytes_per_s: float
    flops_per_s: dict[str, float]
    measured: str
    environment: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Ceilings:
        """Raises CeilingsCorrupt naming the field that is missing or of the wrong kind."""
        if not isinstance(data, dict):
            raise CeilingsCorrupt("the top level is not an object")
        if data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version")
            raise CeilingsCorrupt(f"field 'schema_version' is {found!r}, this version reads {SCHEMA_VERSION}")
        kinds: dict[str, type] = {
            "device": str,
            "copy_bytes_per_s": float,
            "flops_per_s": dict,
            "measured": str,
            "environment": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(data.get(name), kind):
                raise CeilingsCorrupt(f"field '{name}' is missing or not of type {kind.__name__}")
        rates = {"copy_bytes_per_s": data["copy_bytes_per_s"], **data["flops_per_s"]}
        for name, rate in rates.items():
            if not (isinstance(rate, float) and 0 < rate < float("inf")):
                raise CeilingsCorrupt(f"field '{name}' is {rate!r}, not a positive rate")
        return cls(**{name: data[name] for name in kinds})


def kept_at(device: torch.device, store: Path) -> Path:
    """Where the ceilings of ``device`` are kept in ``store``, under its name, torch's version, the thread count and the
    matmul settings.
    """
    return Path(store) / f"{_slug(device)}.json"


def ceilings(device: torch.device, store: Path | None, *, again: bool = False) -> Ceilings:
    """The ceilings of ``device``: those kept in the folder ``store`` (see :func:`kept_at`), else, or where ``again``
    asks for it, measured now (about 3 s on a CPU) and written there.

    A corrupt file is set aside as ``*.corrupt`` and measured again, with a warning. What cannot be written is kept for
    as long as the process lives, with one warning for the folder. ``store=None`` measures without keeping.
    """
    if store is None:
        with measuring(device):
            return measure_ceilings(device)
    from filelock import FileLock, Timeout

    path = kept_at(device, store)
    if path in _unkept and not again:
        return _unkept[path]
    found = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            kept = None if again else _load(path)
            if kept is not None:
                return kept
            with measuring(device):
                found = measure_ceilings(device)
            _write(path, found)
            return found
    except Timeout:
        reason = f"{path}.lock is held by another process; remove it if none runs"
    except OSError as error:
        kept = None if again or found else _readable(path)
        if kept is not None:  # by somebody who may write there
            return kept
        reason = f"{error}; make the folder writable or choose another"
    if path.parent not in _told:
        _told.add(path.parent)
        warnings.warn(f"device ceilings cannot be kept in {path.parent}: {reason}", RuntimeWarning, stacklevel=2)
    if found is None:
        with measuring(device):
            found = measure_ceilings(device)
    _unkept[path] = found
    return found


def raised(device: torch.device, store: Path | None, known: Ceilings) -> Ceilings:
    """Measure again because a kernel beat ``known``, and keep the higher rate of each pair.

    A ceiling taken while the machine was busy is too low, and every label drawn from it is wrong.
    """
    found = measure_ceilings(device)
    rates = {name: max(rate, known.flops_per_s.get(name, 0.0)) for name, rate in found.flops_per_s.items()}
    copy = max(found.copy_bytes_per_s, known.copy_bytes_per_s)
    best = replace(found, copy_bytes_per_s=copy, flops_per_s=rates)
    if store is not None:
        path = kept_at(device, store)
        try:
            _write(path, best)
            _unkept.pop(path, None)
        except OSError:  # that it cannot be kept is `ceilings`' to say
            _unkept[path] = best
    return best


def measure_ceilings(
    device: torch.device,
    *,
    copy_bytes: int | None = None,
    sizes: dict[str, int] | None = None,
    repeats: int = 5,
) -> Ceilings:
    """Measure now. The random state and the matmul settings of the caller stay as they are.

    Args:
        device: a CPU or CUDA device.
        copy_bytes: bytes of the copied buffer; 1 GiB on CUDA (a quarter of the free memory if that is less),
            on a CPU 256 MiB or four last-level caches, at most 1 GiB.
        sizes: side n of the n*n*n product by type, and so which types are measured; all that
            ``matrix_units`` names, and float32, by default.
        repeats: timed runs after warming up; the best counts.
    """
    cuda = device.type == "cuda"
    cache = last_level_cache_bytes(device)
    if copy_bytes is None:
        copy_bytes = _copy_bytes(device, cache)
    if sizes is None:
        wide, narrow = (4096, 8192) if cuda else (1024, 1024)
        sizes = {"float32": wide} | {
            name: wide if name == "tf32" else narrow for name in matrix_units(device)
        }
    with torch.no_grad(), torch.inference_mode(False):
        rates = {}
        copy = _copy_rate(device, copy_bytes, repeats)
        for name, size in sorted(sizes.items()):
            if cuda and name in ("float32", "tf32"):
                with tf32_matmul(name == "tf32"):
                    rates[name] = _product_rate(device, torch.float32, size, repeats)
            else:
                dtype = torch.float32 if name == "tf32" else getattr(torch, name)
                rates[name] = _product_rate(device, dtype, size, repeats)
    sized = {"last_level_cache_bytes": cache, "copy_bytes": copy_bytes, "sizes": sizes}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Ceilings(_device_name(device), copy, rates, now, {**_settings(device), **sized})


def matrix_units(device: torch.device) -> set[str]:
    """Types for which the device has matrix hardware.

    CUDA: compute capability 8.0 and above has tensor cores for TF32, bfloat16 and float16 (CUDA C++
    Programming Guide, "Compute Capabilities"). CPU: bfloat16 where it has AVX512_BF16 or AMX_BF16
    instructions.
    """
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= (8, 0)
        return {"tf32", "bfloat16", "float16"} if capable else set()
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        flags = {name for name, value in capabilities.items() if value is True} | _cpuinfo_flags()
        return {"bfloat16"} if flags & {"avx512_bf16", "amx_bf16"} else set()
    return set()


def last_level_cache_bytes(device: torch.device) -> int | None:
    """Size of the last cache before memory: L2 on CUDA, the largest that Linux names on a CPU; None where
    unknown.
    """
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            found.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(found, default=None)


@contextmanager
def tf32_matmul(enabled: bool) -> Iterator[None]:
    """TF32 for CUDA matrix products on or off within the block, and as before after it, errors included.

    Uses ``fp32_precision``: reading the older ``allow_tf32`` after that one was set raises in torch 2.9 and
    later. A setting inherited from ``torch.backends.fp32_precision`` reads like one made here; it is given
    back as inherited.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32" if enabled else "ieee"
        yield
    finally:
        matmul.fp32_precision = "none"
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before


# --- measuring ---------------------------------------------------------------------------------------------


def _copy_bytes(device: torch.device, cache: int | None) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(1 << 30, free // 4)
    return min(max(1 << 28, 4 * (cache or 0)), 1 << 30)


def _copy_rate(device: torch.device, size: int, repeats: int) -> float:
    source = _random(device, size // 4, torch.float32)  # not zeros: some GPUs compress those in memory
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / _best_seconds(lambda: target.copy_(source), device, repeats)


def _product_rate(device: torch.device, dtype: torch.dtype, n: int, repeats: int) -> float:
    a, b = (_random(device, n * n, dtype, seed).view(n, n) for seed in (1, 2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    return 2.0 * n**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device, repeats)


def _random(device: torch.device, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)  # its own: the caller's random state is not ours
    return torch.rand(count, generator=generator, device=device).sub_(0.5).to(dtype)


def _best_seconds(fn: Callable[[], Any], device: torch.device, repeats: int) -> float:
    once = _seconds_cuda if device.type == "cuda" else _seconds
    for _ in range(2):
        once(fn, device)
    best, runs, began = float("inf"), 0, time.perf_counter()
    # A busy machine needs more tries to be seen at its best, and an idle GPU time to raise its clocks.
    while runs < repeats or time.perf_counter() - began < _SECONDS_PER_RATE:
        best = min(best, once(fn, device))
        runs += 1
    return best


def _seconds(fn: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _seconds_cuda(fn: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


# --- what identifies a measurement, and its file -----------------------------------------------------------


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return match[1].strip()
    import platform

    return platform.processor() or platform.machine() or "cpu"


def _cpuinfo_flags() -> set[str]:
    try:
        match = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(match[1].split()) if match else set()


def _settings(device: torch.device) -> dict[str, Any]:
    settings: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        settings["bf16_reduced_precision"] = str(matmul.allow_bf16_reduced_precision_reduction)
        settings["fp16_reduced_precision"] = str(matmul.allow_fp16_reduced_precision_reduction)
        settings["blas"] = str(torch.backends.cuda.preferred_blas_library())
    else:
        mkldnn = torch.backends.mkldnn
        settings["mkldnn"] = bool(mkldnn.is_available() and mkldnn.enabled)
        settings["mkldnn_fp32_precision"] = str(mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
    return settings


def _slug(device: torch.device) -> str:
    import hashlib

    parts = json.dumps([_device_name(device), _settings(device)], sort_keys=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", _device_name(device)).strip("-").lower()
    return f"{name[:40]}-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"


def _readable(path: Path) -> Ceilings | None:
    try:
        return Ceilings.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _load(path: Path) -> Ceilings | None:
    if not path.exists():
        return None
    try:
        return Ceilings.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (CeilingsCorrupt, UnicodeDecodeError, json.JSONDecodeError) as error:
        aside = path.with_name(path.name + ".corrupt")
        path.replace(aside)
        warnings.warn(
            f"device ceilings in {path} cannot be read ({error}); set aside as {aside.name}, measuring again",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _write(path: Path, found: Ceilings) -> None:
    write_atomically(path, json.dumps(found.to_json(), indent=1))
