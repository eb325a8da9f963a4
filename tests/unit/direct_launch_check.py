"""Whether a repeated launch gives a kernel what an ordinary one gives it; in a process of its own, under a stub of the
CUDA driver: `python direct_launch_check.py FOLDER`, with the stub there as libcuda.so.1. Prints "agrees".
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

FOLDER = sys.argv[1]
os.environ["TRITON_LIBCUDA_PATH"] = FOLDER
STUB = ctypes.CDLL(f"{FOLDER}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
STUB.stub_log.restype = ctypes.c_char_p

import pytest  # noqa: E402
import torch  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

made = CudaDriver()
made.get_current_device = lambda: 0
made.get_current_stream = lambda device: 77
made.get_device_capability = lambda device: (9, 0)
driver.set_active(made)

from passes.kernels import direct, launch, lstm_steps, split_attention, split_conv  # noqa: E402
from passes.split_products import rounded_once, split  # noqa: E402

launch.multiprocessors = lambda device: 132  # type: ignore[assignment]
lstm_steps.multiprocessors = launch.multiprocessors

_BYTES = {f"{kind}{bits}": bits // 8 for kind in "usbf" for bits in (8, 16, 32, 64)}
compiled: list[Any] = []
_remember = direct.remember


def remember(key: Any, kernel: Any, *given: Any, **named: Any) -> Any:
    compiled.append(kernel)
    return _remember(key, kernel, *given, **named)


direct.remember = remember


def tell_sizes() -> None:
    for kernel in compiled:
        (text,) = re.findall(r"\.entry \w+\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
        found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,]*?_param_\d+(?:\[(\d+)\])?", text)
        sizes = [int(count) if count else _BYTES[kind] for kind, count in found]
        assert not STUB.stub_parameters(kernel.name.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))


def launches(call: Callable[[], Any], operands: set[int]) -> list[list[str]]:
    """What the driver was given; memory that is none of the operands' as its place in what the call allocated."""
    allocated: list[torch.Tensor] = []

    def recorded(method: Any) -> Any:
        def and_record(*given: Any, **named: Any) -> torch.Tensor:
            result = method(*given, **named)
            if result.data_ptr() not in operands:  # what is dense already is its own copy
                allocated.append(result)
            return result

        return and_record

    STUB.stub_record(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_empty", "clone", "contiguous"):
            patch.setattr(torch.Tensor, name, recorded(getattr(torch.Tensor, name)))
        call()
    STUB.stub_record(0)
    lines = [line.split() for line in STUB.stub_log().decode().splitlines()]
    assert lines

    def place(word: str) -> str:
        if not _is_memory(word) or _number(word) in operands:
            return word
        for i, tensor in enumerate(allocated):
            if 0 <= (offset := _number(word) - tensor.data_ptr()) < tensor.numel() * tensor.element_size():
                return f"{i}+{offset}"
        raise AssertionError(f"{_number(word)} is nobody's memory")

    return [[*line[:5], *map(place, line[5:])] for line in lines]


def _number(word: str) -> int:
    return int.from_bytes(bytes.fromhex(word), "little")


def _is_memory(word: str) -> bool:
    return len(word) == 16 and _number(word) > 1 << 40


def check(name: str, make: Callable[[], tuple[Callable[[], Any], list[torch.Tensor]]], expected: int) -> None:
    """make: a call and the tensors that it is given. expected: kernels that are launched again without Triton."""
    direct._ready.clear()
    make()[0]()
    tell_sizes()
    kept = dict(direct._ready)
    assert len(kept) == expected, (name, kept)
    call, tensors = make()
    operands = {tensor.data_ptr() for tensor in tensors}
    direct._ready.clear()
    compiled.clear()
    ordinary = launches(call, operands)
    assert len(compiled) >= expected
    direct._ready.clear()
    direct._ready.update(kept)
    compiled.clear()
    repeated = launches(call, operands)
    assert bool(compiled) == (expected == 0), f"{name}: the launch was an ordinary one"
    assert all(len(line) > 7 for line in ordinary), ordinary
    assert ordinary == repeated, (name, *(pair for pair in zip(ordinary, repeated, strict=True) if pair[0] != pair[1]))
    took = []
    for known in ({}, kept):
        direct._ready.clear()
        direct._ready.update(known)
        best = float("inf")
        for _ in range(40):
            if not known:
                direct._ready.clear()
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
        took.append(best * 1e6)
    print(f"{name}: {took[0]:.0f} us ordinarily, {took[1]:.0f} us again", file=sys.stderr)


def products() -> Iterator[tuple[str, Callable[[], Any], int]]:
    def of(m, n, k, tile, block=0, bias=False, batch=0, single=False):
        def make():
            lead = [batch] if batch else []
            cut = rounded_once if single else split
            a = cut(torch.randn(*lead, m, k), block) if block else cut(torch.randn(*lead, m, k))
            b = cut(torch.randn(*lead, n, k))
            added = torch.randn(n) if bias else None
            out = torch.empty(*lead, *([tile[3]] if tile[3] > 1 else []), m, n)
            counts = None
            if tile[3] == 0:
                counts = torch.zeros(launch.needed_counts(m, n, tile) + 8, dtype=torch.int32)[4:]
            planes = ((a[0], None, a[1]), (b[0], None, b[1])) if single else (a, b)
            given = [*a, *b, out, *([added] if bias else []), *([] if counts is None else [counts])]
            return (lambda: launch.gemm(*planes, added, out, tile, counts)), given

        return make

    hopper, single = (128, 128, 64, 1, launch.HOPPER, 3), (128, 128, 64, 1, launch.HOPPER, 6)
    yield "Hopper", of(512, 768, 256, hopper, bias=True), 1
    yield "Hopper, blocks", of(512, 768, 2048, hopper, block=128), 1
    yield "Hopper, even parts", of(512, 768, 256, (128, 128, 64, 0, launch.HOPPER, 3), bias=True), 1
    yield "Hopper, shares", of(512, 768, 256, (128, 128, 64, 2, launch.HOPPER, 3)), 1
    yield "Hopper, one product", of(512, 768, 256, single, bias=True, single=True), 1
    yield "Hopper, rows that it cannot fetch", of(512, 768, 260, hopper), 1
    yield "plain", of(65, 96, 128, (64, 64, 64, 1, 4, 3), bias=True), 1
    yield "plain, batch and shares", of(64, 64, 256, (64, 64, 64, 2, 4, 3), batch=3), 1
    yield "plain, one product", of(64, 64, 256, (64, 64, 32, 1, 4, 2), single=True), 1

    def same():
        a = split(torch.randn(64, 128))
        out = torch.empty(64, 64)
        return (lambda: launch.gemm(a, a, None, out, (64, 64, 64, 1, 4, 3))), [*a, out]

    yield "an operand that is both", same, 0

    def strided():
        a, b = split(torch.randn(64, 128)), split(torch.randn(64, 128))
        bias, out = torch.randn(64, 2)[:, 0], torch.empty(64, 64)
        return (lambda: launch.gemm(a, b, bias, out, (64, 64, 64, 1, 4, 3))), [*a, *b, bias, out]

    yield "a bias that is copied", strided, 0


def attentions() -> Iterator[tuple[str, Callable[[], Any], int]]:
    def of(causal: bool, masked: bool, planes: bool, length: int = 200):
        def make():
            qkv = torch.randn(2, length, 3, 4, 64)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            bias = torch.randn(2, 1, length, length) if masked else None
            attend = split_attention.attend_split if planes else split_attention.attend
            kept: list[Any] = []  # its memory stays where it is, so that the next call's is another
            return (lambda: kept.append(attend(q, k, v, bias, 0.125, causal))), [q, k, v, *([bias] if masked else [])]

        return make

    yield "attention", of(False, False, False), 2
    yield "attention, causal, written split", of(True, False, True), 2
    yield "attention with a mask", of(False, True, False), 2
    yield "attention at once", of(False, False, False, 100), 1
    yield "attention at once, causal, written split", of(True, False, True, 100), 1
    yield "attention at once with a mask", of(False, True, False, 100), 1


def convolutions() -> Iterator[tuple[str, Callable[[], Any], int]]:
    def of(terms: int, bias: bool):
        def make():
            cut = split if terms == 3 else (lambda x: (lambda high, scale: (high, None, scale))(*rounded_once(x)))
            x, w = cut(torch.randn(2, 8, 8, 32)), cut(torch.randn(48, 9 * 32))
            added, out = torch.randn(48) if bias else None, torch.empty(2, 8, 8, 48)
            given = [t for t in (*x, *w, added, out) if t is not None]
            return (lambda: split_conv.launch(x, w, added, out, (3, 3), (1, 1), (1, 1), (1, 1))), given

        return make

    yield "convolution", of(3, True), 1
    yield "convolution, one product", of(1, False), 1


def recurrences() -> Iterator[tuple[str, Callable[[], Any], int]]:
    def of(layers, early=False):
        def make():
            steps, batch, hidden = 5, 8, 64
            config = replace(lstm_steps.choose(batch, hidden, 132), early=early)
            first, pre = torch.randn(layers, batch, 4 * hidden), torch.randn(steps, batch, 4 * hidden)
            bias = torch.randn(layers - 1, 4 * hidden) if layers > 1 else None
            cell = torch.zeros(layers, batch, hidden)
            below = split(torch.randn(layers - 1, 4 * hidden, hidden)) if layers > 1 else None
            weight = split(torch.randn(layers, 4 * hidden, hidden))
            kept: list[Any] = []
            given = [t for t in (first, pre, bias, *(below or ()), *weight) if t is not None]
            return (lambda: kept.append(lstm_steps.launch(first, pre, bias, cell, below, weight, config))), given

        return make

    yield "LSTM", of(1), 1
    yield "LSTM of two layers", of(2), 1
    yield "LSTM whose launches begin early", of(2, early=True), 1


def misaligned() -> None:
    """A launch whose operand lies at an odd place is an ordinary one, and of other code."""
    a, b, out = split(torch.randn(64, 128)), split(torch.randn(64, 128)), torch.empty(64 * 64 + 1)
    tile = (64, 64, 64, 1, 4, 3)
    direct._ready.clear()
    launch.gemm(a, b, None, out[1:].view(64, 64), tile)
    assert not direct._ready
    launch.gemm(a, b, None, out[:-1].view(64, 64), tile)
    assert len(direct._ready) == 1
    compiled.clear()
    launch.gemm(a, b, None, out[1:].view(64, 64), tile)
    assert len(compiled) == 1
    compiled.clear()
    launch.gemm(a, b, None, out[:-1].view(64, 64), tile)
    assert not compiled


def hooked() -> None:
    """Whoever listens to launches hears of each."""
    from triton import knobs

    a, b, out = split(torch.randn(64, 128)), split(torch.randn(64, 128)), torch.empty(64, 64)
    heard: list[str] = []
    launch.gemm(a, b, None, out, (64, 64, 64, 1, 4, 3))
    hook = lambda metadata: heard.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    launch.gemm(a, b, None, out, (64, 64, 64, 1, 4, 3))
    knobs.runtime.launch_enter_hook.remove(hook)
    launch.gemm(a, b, None, out, (64, 64, 64, 1, 4, 3))
    assert heard == ["split_gemm"], heard


def memory_lives_until_the_launch() -> None:
    """Whatever a call allocates is somebody's until its last kernel is launched."""
    made: list[tuple[int, int, Any]] = []
    new_empty, again = torch.Tensor.new_empty, direct.Ready.__call__

    def recorded(*given: Any, **named: Any) -> torch.Tensor:
        tensor = new_empty(*given, **named)
        made.append((tensor.data_ptr(), tensor.numel() * tensor.element_size(), weakref.ref(tensor)))
        return tensor

    def checked(self: Any, operands: Any, *varying: int) -> bool:
        for start, size, tensor in made:
            assert tensor() is not None or not any(start <= at < start + size for at in operands), "it was let go of"
        seen.append(len(operands))
        return again(self, operands, *varying)

    for cases in (products, attentions, convolutions, recurrences):
        for name, make, expected in cases():
            direct._ready.clear()
            make()[0]()
            call, _ = make()
            seen: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "new_empty", recorded)
                patch.setattr(direct.Ready, "__call__", checked)
                call()
            assert len(seen) >= expected, name
            made.clear()


def compiled_ahead() -> None:
    """What was compiled before tiles are timed need not be compiled then."""
    from triton import knobs

    from passes.kernels import tiling

    device, asked = torch.device("cpu"), []
    tiling.has_hopper = lambda device: True  # type: ignore[assignment]
    for product in (tiling.Product(512, 768, 704, bias=True), tiling.Product(60, 96, 144, batch=2, terms=1)):
        STUB.stub_record(1)
        tiling.compile_tiles(product, device)
        STUB.stub_record(0)
        assert not STUB.stub_log(), "nothing is launched"
        knobs.runtime.jit_cache_hook = lambda **given: asked.append(given) and None
        a, b = (tiling._planes(product, rows, device, torch.zeros) for rows in (product.m, product.n))
        for tile in tiling._tried(product, device):
            launch.gemm(*tiling._operands(product, tile, a, b))
        knobs.runtime.jit_cache_hook = None
        assert not asked, [given["repr"] for given in asked]


assert direct.supported()
compiled_ahead()
for cases in (products, attentions, convolutions, recurrences):
    for name, make, expected in cases():
        check(name, make, expected)
memory_lives_until_the_launch()
misaligned()
hooked()
print("agrees")
