"""Launching a Triton kernel again without binding its arguments anew. Triton's private interfaces are used here alone.

A launch through `kernel[grid](...)` looks at every argument to find the compiled code, and encodes each tensor
descriptor: on the CPU that takes longer than a small product on the GPU. A caller who knows from shapes and strides
that nothing but addresses has changed gives these to the code that the first launch compiled.

Tested with Triton 3.6; with any other every launch is an ordinary one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

_TESTED = "3.6."
_ALIGNED = 16  #: bytes; where an address is a multiple of them, Triton compiles other code than where it is not
_MOST_MAPS, _MOST_KERNELS = 64, 4096
#: what `remember` made of a key
_ready: dict[Hashable, Ready] = {}


@functools.cache
def supported() -> bool:
    import triton

    return triton.__version__.startswith(_TESTED)


@dataclass(slots=True)
class _Address:
    """What Triton reads of a tensor where it encodes a descriptor."""

    value: int

    def data_ptr(self) -> int:
        return self.value


@dataclass(slots=True)
class _Descriptor:
    """What Triton reads of a tensor descriptor."""

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"


@dataclass(slots=True)
class Ready:
    """A compiled kernel with all of its parameters but addresses, and integers that vary.

    note: what was given to `remember`, as the memory that the caller has to make for a launch.
    """

    run: Callable[..., None]
    given: list[Any]  # what the launcher takes, with holes
    addresses: list[tuple[int, int]]  # (hole, operand)
    maps: list[tuple[int, int, Callable[[int], Any], dict[int, Any]]]  # (hole, operand, encoding, those made)
    varying: list[int]
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    knobs: Any  # Triton's settings, of which the hooks are two
    note: Any

    def __call__(self, operands: Sequence[int], *varying: int) -> bool:
        """Launch on the current stream with the operands at these addresses (0 for one that is not there).

        False, and nothing was launched, where another device is current, an operand is not aligned or somebody listens
        to launches: the ordinary way does all of it.
        """
        bits = 0
        for address in operands:
            bits |= address
        if bits % _ALIGNED or self.current_device() != self.device or self._heard():
            return False
        given = self.given.copy()
        given[3] = self.current_stream(self.device)
        for hole, operand in self.addresses:
            given[hole] = operands[operand]
        for hole, operand, encode, made in self.maps:
            address = operands[operand]
            encoded = made.get(address)
            if encoded is None:
                if len(made) >= _MOST_MAPS:
                    made.clear()
                encoded = made[address] = encode(address)
            given[hole] = encoded
        for hole, value in zip(self.varying, varying, strict=True):
            given[hole] = value
        self.run(*given)
        return True

    def _heard(self) -> bool:
        begin, end = self.knobs.launch_enter_hook, self.knobs.launch_exit_hook
        return bool((begin is not None and begin.calls) or (end is not None and end.calls))


def on_device(tensor: Any) -> AbstractContextManager[Any]:
    """With the tensor's device the current one; what is not on a GPU is for Triton's interpreter."""
    import torch

    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def known(key: Hashable) -> Ready | None:
    return _ready.get(key)


def remember(
    key: Hashable,
    kernel: Any,
    grid: tuple[int, ...],
    parameters: Sequence[Any],
    operands: Sequence[Any],
    note: Any = None,
    varying: Sequence[int] = (),
) -> Ready | None:
    """Keep what an ordinary launch compiled, for later ones with equal keys.

    key: all that decides which code is compiled and what its integers are: device, shapes, strides, types, constants.
    kernel: what the launch returned. parameters: what it was given, each of the kernel's parameters in order, constants
    too. operands: the tensors whose addresses later launches will give, or None. varying: which parameters are integers
    that differ from launch to launch; the kernel must not be specialised on them.

    None, and nothing is kept, where that cannot be: the launch used another tensor, as a copy that lies densely, two
    operands are at one address, or one is where no later one may be.
    """
    ready = _ready.get(key)
    if ready is not None:
        return ready
    if not supported() or any(tensor is not None and tensor.data_ptr() % _ALIGNED for tensor in operands):
        return None  # for operands that are not aligned it is other code
    ready = _prepared(kernel, grid, parameters, operands, note, varying)
    if ready is not None:
        if len(_ready) >= _MOST_KERNELS:
            _ready.clear()
        _ready[key] = ready
    return ready


def _prepared(
    kernel: Any,
    grid: tuple[int, ...],
    parameters: Sequence[Any],
    operands: Sequence[Any],
    note: Any,
    varying: Sequence[int],
) -> Ready | None:
    from triton import knobs
    from triton.runtime import driver

    where = {tensor.data_ptr(): i for i, tensor in enumerate(operands) if tensor is not None}
    launcher = getattr(kernel, "run", None)
    if len(where) < sum(tensor is not None for tensor in operands) or 0 in where or launcher is None:
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    given: list[Any] = [*grid, *(1,) * (3 - len(grid)), None, kernel.function, launcher.launch_cooperative_grid]
    given += [launcher.launch_pdl, None, None, kernel.packed_metadata, None, None, None]
    addresses, changing = [], []
    maps: list[tuple[int, int, Callable[[int], Any], dict[int, Any]]] = []
    encodings = iter(kernel.metadata.tensordesc_meta or ())
    for i, parameter in enumerate(parameters):
        base = getattr(parameter, "base", parameter)
        if not hasattr(base, "data_ptr"):
            if i in varying:
                changing.append(len(given))
            given.append(parameter)
            continue
        operand = where.get(base.data_ptr())
        if operand is None:
            return None
        if base is parameter:
            addresses.append((len(given), operand))
            given.append(None)
        else:
            encoding = next(encodings, None)
            if encoding is None:  # Triton passes it as a pointer
                return None
            encode = functools.partial(_encoded, tuple(parameter.shape), tuple(parameter.strides), encoding)
            maps.append((len(given), operand, encode, {}))
            given += [None, *parameter.shape, *parameter.strides]
    run = launcher.launch
    if maps:  # the function that takes descriptors already encoded
        run = inspect.getclosurevars(run).nonlocals["launcher"]
    device, stream = driver.active.get_current_device, driver.active.get_current_stream
    return Ready(run, given, addresses, maps, changing, device(), device, stream, knobs.runtime, note)


def _encoded(shape: tuple[int, ...], strides: tuple[int, ...], encoding: Any, address: int) -> Any:
    """The Tensor Memory Accelerator's description of a matrix: it holds nothing but what is given here."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(_Descriptor(_Address(address), shape, strides), encoding)[0]
