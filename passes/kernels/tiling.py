"""In which tiles split products run: chosen by measurement on the device, remembered on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from passes.kernels import direct
from passes.kernels.launch import HOPPER, Tile, compile_only, gemm, has_hopper, multiprocessors, needed_counts

#: Tiles of three products: for Hopper those that were best for some product on an H200, elsewhere also smaller ones for
#: less shared memory.
HOPPER_TILES: tuple[Tile, ...] = ((128, 128, 64, 1, HOPPER, 3), (128, 64, 64, 1, HOPPER, 4), (64, 64, 64, 1, 4, 3))
TILES: tuple[Tile, ...] = (
    (128, 128, 64, 1, 8, 3),
    (64, 128, 64, 1, 4, 2),
    (64, 64, 64, 1, 4, 3),
    (64, 64, 32, 1, 4, 2),
)
#: the same for one product of fp16 operands, whose tiles take a third of the registers
SINGLE_TILES: tuple[Tile, ...] = (
    (128, 256, 64, 1, 8, 3),
    (128, 128, 64, 1, 8, 4),
    (64, 128, 64, 1, 4, 4),
    (64, 64, 32, 1, 4, 2),
)
#: and those of `scaled_gemm_hopper`, which are tried beside them
HOPPER_SINGLE_TILES: tuple[Tile, ...] = ((128, 256, 64, 1, HOPPER, 4), (128, 128, 64, 1, HOPPER, 6))
_SMALLEST: Tile = (64, 64, 32, 1, 4, 2)


@dataclass(frozen=True)
class Product:
    """[batch, M, K] x [batch, N, K]^T in fp32: with a scale a row or a block along K, and a bias [N] or none."""

    m: int
    n: int
    k: int
    batch: int = 1
    terms: int = 3
    block: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Convolution:
    """One over [batch, channels, height, width] in fp32, with weights [outputs, channels, height, width]."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def options(product: Product, multiprocessors: int, hopper: bool = False) -> list[Tile]:
    """The tiles worth measuring for a product, a likely best one first.

    K is shared out where the tiles alone leave multiprocessors without work.
    """
    found: list[tuple[float, Tile]] = []
    fetchable = hopper and product.batch == 1 and product.k % 8 == 0
    if product.terms == 1:
        of_chip = (*HOPPER_SINGLE_TILES, *SINGLE_TILES) if fetchable and not product.block else SINGLE_TILES
    else:
        of_chip = HOPPER_TILES if fetchable else TILES
    for bm, bn, bk, _, warps, stages in of_chip:
        if bm > 2 * max(product.m, 32) or bn > 2 * max(product.n, 32):
            continue  # mostly padding
        tiles = math.ceil(product.m / bm) * math.ceil(product.n / bn) * product.batch
        # Time in steps of a full multiprocessor, and a few of them to begin and end a tile; a small tile fetches more
        # for each multiply-add.
        weight = bm * bn * (1 + 64 / bm * 64 / bn) * (0.8 if warps == HOPPER and product.terms == 3 else 1)
        idle = math.ceil(tiles / multiprocessors) * multiprocessors - tiles
        if warps == HOPPER and product.terms == 3 and idle > tiles / 10:
            # The programs have an even number of steps, and a few more to hand sums on.
            steps = math.ceil(tiles * math.ceil(product.k / bk) / multiprocessors) + 5
            found.append((weight * steps, (bm, bn, bk, 0, warps, stages)))
        for shares in (1, 2, 4):
            if shares > 1 and (tiles * shares > 3 * multiprocessors or product.k < 128 * shares):
                continue
            waves = math.ceil(tiles * shares / multiprocessors)
            steps = math.ceil(product.k / bk / shares) + 3
            found.append((waves * weight * steps, (bm, bn, bk, shares, warps, stages)))
    return [tile for _, tile in sorted(found, key=lambda pair: pair[0])] or [_SMALLEST]


@dataclass
class Choices:
    """What was measured on the devices of this process, and of others that share the file `path`.

    Each key (device, versions, product, the kernel's code) has a tile and its time in microseconds; that of a library's
    product has neither tile nor code.
    """

    path: Path | None = None

    def __post_init__(self) -> None:
        self._found: dict[str, list[float]] = self._read()

    def tile(self, product: Product, device: torch.device) -> tuple[Tile, float]:
        """The fastest tile on this device and its time; where there is no GPU to measure on, the likely best and 0."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return options(product, 132)[0], 0.0
        *tile, took = self._known(
            f"{product} {_code_of(product)}",
            device,
            lambda: measure_tiles(product, device),
            lambda: compile_tiles(product, device),
        )
        return tuple(int(value) for value in tile), took  # type: ignore[return-value]

    def library(self, product: Product, device: torch.device) -> float:
        """The time of cuBLAS for bf16 operands of three times the length; 0 where there is no GPU."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return 0.0
        return self._known(f"library {product}", device, lambda: [measure_library(product, device)])[-1]

    def tf32(self, product: Product, device: torch.device) -> float:
        """The time of cuBLAS for fp32 operands in TF32; 0 where there is no GPU."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return 0.0
        alike = replace(product, terms=1, block=0, bias=False)
        return self._known(f"TF32 {alike}", device, lambda: [measure_tf32(alike, device)])[-1]

    def convolution(self, of: Convolution, device: torch.device) -> tuple[float, float]:
        """The times of this project's kernel for one product, and of cuDNN in TF32; zeros where there is no GPU."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return 0.0, 0.0
        own = self._known(f"{of} {_code_of(of)}", device, lambda: [measure_convolution(of, device)])[-1]
        return own, self._known(f"TF32 {of}", device, lambda: [measure_cudnn_tf32(of, device)])[-1]

    def _known(
        self,
        what: str,
        device: torch.device,
        measure: Callable[[], list[float]],
        prepare: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """What is known of `what`, else what `measure` finds, alone on the device. prepare: whatever can be done
        before, while others measure.
        """
        import triton

        name = torch.cuda.get_device_properties(device).name
        key = f"{name}, torch {torch.__version__}, Triton {triton.__version__}, {what}"
        if key not in self._found:
            from fxopt.build import wake
            from profiler_core import exclusive

            with self._turn(key):
                self._found.update(self._read())  # what another process has measured meanwhile
                if key not in self._found:
                    with contextlib.suppress(Exception):  # whatever it is, it is met again by who measures
                        prepare()
                    with exclusive.measuring(device):
                        wake(device)  # or what is timed first would look slow
                        self._found[key] = measure()
                    self._write()
        return self._found[key]

    def _turn(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Held by the process that measures `what`, or writes the file ("file"). Others compile something else."""
        from profiler_core import exclusive

        if self.path is None:
            return contextlib.nullcontext()
        digest = hashlib.sha256(what.encode()).hexdigest()[:16]
        # Hidden, as other locks are, which nobody deletes to make room.
        return exclusive.turn(self.path.with_name(f".{self.path.stem}.{digest}.lock"))

    def _read(self) -> dict[str, list[float]]:
        try:
            data = json.loads(self.path.read_text()) if self.path is not None else {}
            return {str(key): [float(v) for v in found] for key, found in data.items() if _sound(found)}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # unreadable: measured and written anew

    def _write(self) -> None:
        from profiler_core.files import write_atomically

        if self.path is not None:
            # A convenience of later processes, which can measure again.
            with contextlib.suppress(OSError), self._turn("file"):
                self._found = {**self._read(), **self._found}
                write_atomically(self.path, json.dumps(self._found, indent=1, sort_keys=True))


@functools.cache
def _code_of(what: Product | Convolution) -> str:
    """Digest of the kernels that compute it and of the tiles to choose from: of other code the times tell nothing."""
    from fxopt.fingerprints import module_digest

    if isinstance(what, Convolution):
        modules, tiles = ["split_conv"], ""
    else:
        modules = ["split_gemm", "split_gemm_hopper"]
        tiles = repr((SINGLE_TILES, HOPPER_SINGLE_TILES) if what.terms == 1 else (TILES, HOPPER_TILES))
    digests = [module_digest(f"passes.kernels.{name}") for name in modules]
    return hashlib.sha256("".join([*digests, tiles]).encode()).hexdigest()[:12]


def _sound(found: Any) -> bool:
    """Whether this is a time, or a tile and a time."""
    if not isinstance(found, list) or len(found) not in (1, 7):
        return False
    *tile, took = map(float, found)
    return 0 < took < math.inf and all(0 < v < math.inf or (v == 0 and i == 3) for i, v in enumerate(tile))


def choices_in(folder: Path | None) -> Choices:
    """The choices kept in a folder for measurements; those of this process alone where there is none."""
    return choices(folder / "tiles.json" if folder is not None else None)


@functools.cache
def choices(path: Path | None) -> Choices:
    """The choices kept in a file, read once a process."""
    return Choices(path)


def compile_tiles(product: Product, device: torch.device) -> None:
    """Compile the kernels that `measure_tiles` times, several at once: it takes ten times as long as to time them."""
    from fxopt.torch_api.dynamo import outside_tracing

    try:
        from triton import AsyncCompileMode
    except ImportError:  # an older Triton compiles them when they are timed
        return
    a, b = (_planes(product, rows, device, torch.empty) for rows in (product.m, product.n))
    begun = []
    with outside_tracing(), torch.no_grad(), direct.on_device(a):
        threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
        with threads, AsyncCompileMode(threads, ignore_errors=True):
            for tile in _tried(product, device):
                with contextlib.suppress(Exception):  # whatever it is, it is met again where the tile is timed
                    begun.append(compile_only(*_operands(product, tile, a, b)))
        for kernel in begun:
            with contextlib.suppress(Exception):
                kernel = kernel.result() if hasattr(kernel, "result") else kernel
                kernel.run  # noqa: B018  - loads the code, and compiles what launches it


def _tried(product: Product, device: torch.device) -> list[Tile]:
    return options(product, multiprocessors(device), has_hopper(device))[: 9 if product.terms == 3 else 10]


def _planes(p: Product, rows: int, device: torch.device, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make([*([p.batch] if p.batch > 1 else []), rows, p.k], dtype=torch.float16, device=device)


def _operands(p: Product, tile: Tile, a: torch.Tensor, b: torch.Tensor) -> Any:
    """(left planes and scales, right ones, bias, output, tile), as `gemm` takes them, for a tile of a product."""
    low = (a, b) if p.terms == 3 else (None, None)
    blocks = p.k // p.block if p.block else 1
    scales = [torch.ones(*plane.shape[:-1], n, device=a.device) for plane, n in ((a, blocks), (b, 1))]
    bias = torch.ones(p.n, device=a.device) if p.bias and tile[3] <= 1 else None
    out = torch.empty(p.batch, max(tile[3], 1), p.m, p.n, device=a.device)
    return (a, low[0], scales[0]), (b, low[1], scales[1]), bias, out, tile


def measure_tiles(product: Product, device: torch.device) -> list[float]:
    """The fastest of `options` and its time, on operands that no cache holds."""
    from fxopt.torch_api.dynamo import outside_tracing

    p = product
    tiles, calls, reading = list[Tile](), list[Callable[[int], Any]](), list[float]()
    with outside_tracing(), torch.no_grad(), torch.cuda.device(device):
        a, b = (_planes(p, rows, device, _random) for rows in (p.m, p.n))
        copies, outs = _copies(b), dict[torch.Size, torch.Tensor]()
        for tile in _tried(p, device):
            left, (_, low, scales), bias, out, _ = _operands(p, tile, a, b)
            out = outs.setdefault(out.shape, out)  # it may be a large one
            counts = torch.zeros(needed_counts(p.m, p.n, tile), dtype=torch.int32, device=device)

            def call(i: int, given: Any = (left, low, scales, bias, out, tile, counts)) -> None:
                left, low, scales, *others = given
                right = copies[i % len(copies)]
                gemm(left, (right, None if low is None else right, scales), *others)

            tiles.append(tile)
            calls.append(call)
            reading.append(max(tile[3] - 1, 0) * out.numel() * 4 / 3e6)  # the other shares, at 3 TB/s
        times = [took + more for took, more in zip(_times(calls), reading, strict=True)]
    took, tile = min(zip(times, tiles, strict=True))
    return [*map(float, tile if took < math.inf else _SMALLEST), took]


def measure_library(product: Product, device: torch.device) -> float:
    from fxopt.torch_api.dynamo import outside_tracing

    p = product
    with outside_tracing(), torch.no_grad(), torch.cuda.device(device):
        lead = [p.batch] if p.batch > 1 else []
        a = _random([*lead, p.m, 3 * p.k], device).to(torch.bfloat16)
        copies = _copies(_random([*lead, p.n, 3 * p.k], device).to(torch.bfloat16))
        multiply = torch.bmm if lead else torch.mm
        return _time(lambda i: multiply(a, copies[i % len(copies)].mT, out_dtype=torch.float32))


def measure_tf32(product: Product, device: torch.device) -> float:
    from fxopt.torch_api.dynamo import outside_tracing
    from passes.tf32_matmul import tf32

    p = product
    with outside_tracing(), torch.no_grad(), torch.cuda.device(device), tf32():
        lead = [p.batch] if p.batch > 1 else []
        a = _random([*lead, p.m, p.k], device).float()
        copies = _copies(_random([*lead, p.n, p.k], device).float())
        multiply = torch.bmm if lead else torch.mm
        return _time(lambda i: multiply(a, copies[i % len(copies)].mT))


def measure_convolution(of: Convolution, device: torch.device) -> float:
    from fxopt.torch_api.dynamo import outside_tracing
    from passes.kernels import split_conv

    with outside_tracing(), torch.no_grad(), torch.cuda.device(device):
        x = _random([of.x[i] for i in (0, 2, 3, 1)], device)
        w = _random([of.w[0], math.prod(of.w[1:])], device)
        scales = torch.ones(*x.shape[:-1], 1, device=device), torch.ones(len(w), 1, device=device)
        around = zip(of.x[2:], of.w[2:], of.stride, of.padding, of.dilation, strict=True)
        size = [(n + 2 * pad - apart * (window - 1) - 1) // stride + 1 for n, window, stride, pad, apart in around]
        out = torch.empty(of.x[0], *size, of.w[0], device=device)
        window = of.w[2], of.w[3]
        planes = (x, None, scales[0]), (w, None, scales[1])
        return _time(lambda i: split_conv.launch(*planes, None, out, window, of.stride, of.padding, of.dilation))


def measure_cudnn_tf32(of: Convolution, device: torch.device) -> float:
    """In the faster of the two layouts that Inductor may choose."""
    from fxopt.torch_api.dynamo import outside_tracing
    from passes.tf32_matmul import tf32

    with outside_tracing(), torch.no_grad(), torch.cuda.device(device), tf32():
        took = []
        for layout in (torch.contiguous_format, torch.channels_last):
            x, w = (_random(list(shape), device).float().to(memory_format=layout) for shape in (of.x, of.w))
            given = of.stride, of.padding, of.dilation
            took.append(_time(lambda i, x=x, w=w, given=given: torch.conv2d(x, w, None, *given)))  # type: ignore[misc]
        return min(took)


def _random(shape: list[int], device: torch.device, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """As a model's operands are: on small or equal numbers a multiplier draws less power, and clocks stay higher."""
    source = torch.Generator(device).manual_seed(0)
    return (torch.randn(shape, device=device, generator=source) * 4096).to(dtype)


def _copies(b: torch.Tensor) -> list[torch.Tensor]:
    """`b` several times over, so that its next use does not find it in L2, as in a model with other weights between."""
    return [b, *(b.clone() for _ in range(min(7, int(2e8 / max(b.numel() * 2, 1)))))]


def _time(call: Callable[[int], Any]) -> float:
    """Microseconds a call. Raises what the call raises."""
    return _times([call], failing=False)[0]


def _times(
    calls: Sequence[Callable[[int], Any]], launches: int = 16, rounds: int = 3, failing: bool = True
) -> list[float]:
    """Microseconds a call of each, back to back in a CUDA graph so that no launch is waited for; infinity for one that
    fails, if that is allowed: more shared memory or registers than the chip has.

    In turns, and the least: what else happens on the device does not meet the same one each time.
    """
    from fxopt.torch_api.cuda import cublas_workspaces_of_a_capture

    graphs: list[torch.cuda.CUDAGraph | None] = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        try:
            call(0)
            torch.cuda.synchronize()
            with cublas_workspaces_of_a_capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for i in range(launches):
                    call(i)
        except Exception:
            if not failing:
                raise
            graphs.append(None)
        else:
            graphs.append(graph)
    least = [math.inf] * len(graphs)
    for _ in range(rounds):
        for number, captured in enumerate(graphs):
            for _ in range(4 if captured is not None else 0):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                captured.replay()  # type: ignore[union-attr]
                end.record()
                end.synchronize()
                least[number] = min(least[number], start.elapsed_time(end) * 1e3 / launches)
    return least
