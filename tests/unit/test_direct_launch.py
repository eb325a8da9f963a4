"""Kernels launched again without Triton's binding: what is remembered, and when a launch has to be an ordinary one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from passes.kernels import direct

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Kernel:
    """What Triton compiled, as far as it is read here: without tensor descriptors unless `meta` has some."""

    def __init__(self, meta=(), scratch=0):
        self.launched: list[tuple] = []
        self.function, self.packed_metadata = 5, (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=meta)
        launcher = self.launched_encoded

        def with_descriptors(*given):
            raise AssertionError("descriptors are encoded already")
            launcher(*given)

        self.run = SimpleNamespace(
            launch=with_descriptors if meta else launcher,
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=scratch,
            profile_scratch_size=0,
        )

    def launched_encoded(self, *given):
        self.launched.append(given)


class Descriptor:
    def __init__(self, base):
        self.base, self.shape, self.strides = base, base.shape, base.stride()


@pytest.fixture
def triton(monkeypatch):
    """A Triton whose driver has device 0 and stream 9, in place of any that is installed."""
    encoded: list[int] = []

    def encode(descriptor, meta):
        encoded.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr(), meta), *descriptor.shape, *descriptor.strides]

    active = SimpleNamespace(get_current_device=lambda: active.device, get_current_stream=lambda device: 9, device=0)
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    parts = {
        "triton": {"__version__": "3.6.0", "knobs": SimpleNamespace(runtime=hooks), "__path__": []},
        "triton.runtime": {"driver": SimpleNamespace(active=active)},
        "triton.backends": {"__path__": []},
        "triton.backends.nvidia": {"__path__": []},
        "triton.backends.nvidia.driver": {"make_tensordesc_arg": encode},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(direct, "_ready", {})
    direct.supported.cache_clear()
    yield SimpleNamespace(active=active, hooks=hooks, encoded=encoded, module=sys.modules["triton"])
    direct.supported.cache_clear()


def operands(count=3):
    return [torch.zeros(64) for _ in range(count)]


def addresses(tensors):
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def test_later_launches_have_their_own_addresses_and_the_first_ones_numbers(triton):
    kernel, (a, b, out) = Kernel(), operands()
    ready = direct.remember("key", kernel, (7, 2), (a, b, out, 3, None, out), (a, b, None, out), note="memory")
    assert direct.known("key") is ready and ready.note == "memory"
    x, y, z = addresses(operands())
    assert ready([x, y, 0, z])
    (launched,) = kernel.launched
    assert launched[:13] == (7, 2, 1, 9, 5, False, False, None, None, (4, 1, 0), None, None, None)
    assert launched[13:] == (x, y, z, 3, None, z)


def test_integers_that_vary_are_given_with_each_launch(triton):
    kernel, (a, out) = Kernel(), operands(2)
    ready = direct.remember("key", kernel, (1,), (a, 0, 8, out), (a, out), varying=(1,))
    for step in range(3):
        assert ready(addresses([a, out]), step)
    assert [given[14:16] for given in kernel.launched] == [(0, 8), (1, 8), (2, 8)]
    with pytest.raises(ValueError, match="argument 2 is"):
        ready(addresses([a, out]))


def test_a_descriptor_is_encoded_once_an_address(triton):
    kernel, (a, out) = Kernel(meta=["swizzle"]), operands(2)
    ready = direct.remember("key", kernel, (1,), (Descriptor(a), a, out), (a, out))
    for _ in range(3):
        assert ready(addresses([a, out]))
    others = [16 * i for i in range(1, 100)]
    for address in others:
        assert ready([address, out.data_ptr()])
    assert triton.encoded == [a.data_ptr(), *others]
    assert kernel.launched[0][13:] == (("map", a.data_ptr(), "swizzle"), 64, 1, a.data_ptr(), out.data_ptr())
    assert kernel.launched[-1][13] == ("map", others[-1], "swizzle")
    assert len(ready.maps[0][3]) <= 64, "memory is bounded where addresses never come again"


@pytest.mark.parametrize(
    "case",
    ["copied", "the same twice", "empty", "scratch memory", "interpreted", "another Triton", "descriptor as pointer"],
)
def test_what_cannot_be_repeated_is_launched_the_ordinary_way_each_time(triton, case):
    kernel, (a, b, c, out) = Kernel(scratch=64 if case == "scratch memory" else 0), operands(4)
    if case == "another Triton":
        triton.module.__version__ = "3.7.0"
    if case == "the same twice":
        b = a.view(8, 8)
    if case == "empty":
        b = torch.empty(0)
    given = (a, b.clone() if case == "copied" else Descriptor(b) if case == "descriptor as pointer" else b, out)
    compiled = None if case == "interpreted" else kernel
    assert direct.remember("key", compiled, (1,), given, (a, b, out)) is None
    assert direct.known("key") is None
    if case in ("copied", "the same twice", "empty"):
        again = direct.remember("key", kernel, (1,), (a, c, out), (a, c, out))
        assert again is direct.known("key") is not None, "it was that call, and no later one"


def test_odd_addresses_another_device_and_whoever_listens_take_the_ordinary_way(triton):
    kernel, (a, out) = Kernel(), operands(2)
    odd = torch.zeros(65)[1:]
    assert direct.remember("key", Kernel(), (1,), (odd, out), (odd, out)) is None, "compiled for odd addresses"
    ready = direct.remember("key", kernel, (1,), (a, out), (a, out))
    assert not ready(addresses([odd, out]))
    triton.active.device = 1
    assert not ready(addresses([a, out]))
    triton.active.device = 0
    triton.hooks.launch_enter_hook.calls.append(print)
    assert not ready(addresses([a, out]))
    triton.hooks.launch_enter_hook.calls.clear()
    triton.hooks.launch_exit_hook = SimpleNamespace(calls=[print])
    assert not ready(addresses([a, out]))
    triton.hooks.launch_exit_hook = None
    assert kernel.launched == []
    assert ready(addresses([a, out])) and len(kernel.launched) == 1


def test_no_more_kernels_are_kept_than_there_is_room_for(triton, monkeypatch):
    monkeypatch.setattr(direct, "_MOST_KERNELS", 4)
    a, out = operands(2)
    for key in range(20):
        direct.remember(key, Kernel(), (1,), (a, out), (a, out))
        assert direct.known(key) is not None
    assert len(direct._ready) <= 4


def test_a_repeated_launch_gives_the_driver_byte_for_byte_what_an_ordinary_one_gives_it(tmp_path):
    """Every kernel of this project, compiled for an H200 by Triton and launched under a stub of the CUDA driver."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("needs Triton with its backend for NVIDIA's GPUs")
    import triton

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not direct.supported():
        pytest.skip("needs a C compiler and a Triton whose launcher is known")
    stub = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", f"-I{headers}", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
    subprocess.run([*command, str(HERE / "cuda_driver_stub.c")], check=True)
    run = subprocess.run(
        [sys.executable, str(HERE / "direct_launch_check.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "agrees", run.stderr[-3000:]
