"""What a plan is keyed by: everything that can change which code is right or fastest for a graph."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import fxopt
from fxopt.fingerprints import module_digest
from fxopt.plan import plan_key
from fxopt.torch_api import inductor
from fxopt.torch_api.dynamo import compiled_from, is_fake
from profiler_core.environment import cpu

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def graph_text(gm: fx.GraphModule) -> str:
    """The graph without memory addresses, source lines or metadata: equal for equal graphs in any process."""
    # The bodies of higher-order operators (checkpoint, cond) are modules of their own.
    bodies = [(name, module) for name, module in gm.named_modules() if isinstance(module, fx.GraphModule)]
    bodies.sort(key=lambda item: item[0])
    return _ADDRESS.sub("0x", "\n".join(f"{name}: {module.graph}" for name, module in bodies))


def describe_input(value: Any) -> Any:
    """Shape, stride, dtype, device and gradient of a tensor; the type, and the value of a plain scalar, of the rest."""
    if isinstance(value, torch.Tensor):
        return {
            "shape": [str(size) for size in value.shape],
            "stride": [str(stride) for stride in value.stride()],
            "dtype": str(value.dtype),
            "device": value.device.type,
            "grad": value.requires_grad,
            "type": type(value).__name__,
        }
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return type(value).__name__


def in_words(
    gm: fx.GraphModule, inputs: Sequence[Any], static: Collection[int], precision: str | float
) -> dict[str, Any]:
    """What a person tells graphs apart by, as JSON data: what it was compiled from, the inputs of a call, the number of
    operators, and the precision that was asked for. No part of the key.
    """
    calls = ("call_function", "call_method", "call_module")
    return {
        "of": compiled_from(gm),
        "inputs": [_short(value) for position, value in enumerate(inputs) if position not in static],
        "operators": sum(node.op in calls for node in gm.graph.nodes),
        "precision": str(precision),
    }


def _short(value: Any) -> str:
    """A tensor as "float32[4, 8]"."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def shared_memory(inputs: Sequence[Any]) -> list[list[int]]:
    """Positions of inputs that lie in one storage, which a write to either would show; the groups of two or more."""
    groups: dict[int, list[int]] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_fake(value):
            groups.setdefault(value.untyped_storage().data_ptr(), []).append(position)
    return [group for address, group in groups.items() if address and len(group) > 1]


def weights_digest(tensors: Sequence[torch.Tensor]) -> str:
    """Tells two sets of weights apart, by the sum and the 2-norm of each in fp64: one pass over them, no copy."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.layout is torch.strided:
                norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
                total = tensor.detach().sum(dtype=torch.float64)
                # Nine digits: far above the rounding of the sums, far below any training step.
                digest.update(f"{total.item():.9e} {norm.item():.9e};".encode())
    return digest.hexdigest()


def device_identity(device: torch.device) -> dict[str, Any]:
    """The hardware that a decision holds for."""
    if device.type == "cuda":
        from profiler_core.clocks import clock_settings, driver_version

        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "driver": driver_version() or f"cuda {torch.version.cuda}",  # no NVML: CUDA still tells two stacks apart
            "clocks": clock_settings(device),
        }
    return {
        "name": cpu()[0],
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "fxopt": fxopt.__version__, "python": platform.python_version()}
    try:
        found["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found["triton"] = ""
    return found


def torch_flags() -> dict[str, Any]:
    """Process-wide settings of torch that change results or speed."""
    cudnn: Any = torch.backends.cudnn  # torch's annotations lack the newer settings
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": [
            [torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))] for device in ("cuda", "cpu")
        ],
        "default_dtype": str(torch.get_default_dtype()),
        "cudnn": {
            "allow_tf32": _setting(cudnn, "allow_tf32"),
            "convolution": _setting(cudnn.conv, "fp32_precision"),
            "recurrent": _setting(cudnn.rnn, "fp32_precision"),
            "benchmark": cudnn.benchmark,
            "deterministic": cudnn.deterministic,
        },
    }


def _setting(owner: Any, name: str) -> Any:
    """A setting of torch; "mixed" where the older and the newer ones contradict each other, so that reading raises."""
    try:
        return getattr(owner, name)
    except RuntimeError:
        return "mixed"


def rules_digest() -> str:
    """Digests of the rules as they are written: decisions rest on them. They are read, not imported."""
    return " ".join(map(module_digest, ("fxopt.launch_records", "fxopt.metrics", "fxopt.rule", "fxopt.rule_table")))


def key_parts(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    device: torch.device,
    deciding: Mapping[str, Any],
    patches: Mapping[str, Any],
    passes: Sequence[tuple[str, str]],
    session: bool,
    weights: str,
) -> dict[str, Any]:
    """The parts of a plan's key, as JSON data. Labels follow from measuring; what draws them is in `rules_digest`.

    passes: names and fingerprints of those that may run.
    """
    return {
        "graph": graph_text(gm),
        "inputs": [describe_input(value) for value in inputs],
        "shared": shared_memory(inputs),
        "device": device_identity(device),
        "versions": versions(),
        "flags": torch_flags(),
        "options": dict(deciding),
        "inductor": {key: _spell(value) for key, value in sorted(patches.items())},
        "inductor_config": inductor.config_fingerprint(),
        "passes": [list(entry) for entry in passes],
        "rules": rules_digest(),
        "session": session,
        "weights": weights,
    }


#: what ranks know a graph by: all that bears on it but the hardware and the weights, which may differ between them
_OF_GRAPH = ("graph", "inputs", "shared", "flags", "session")


def between_ranks(parts: Mapping[str, Any]) -> tuple[str, str]:
    """(what ranks know the graph by, what has to be alike on all of them): digests of the parts of a plan's key."""
    alike = {name: value for name, value in parts.items() if name not in (*_OF_GRAPH, "device", "weights")}
    return plan_key(**{name: parts[name] for name in _OF_GRAPH}), plan_key(**alike)


def _spell(value: Any) -> str:
    uuid = getattr(value, "uuid", None)
    return _ADDRESS.sub("0x", str(uuid()) if callable(uuid) else repr(value))
