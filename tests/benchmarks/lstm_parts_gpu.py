"""Where the time of an LSTM's step goes: the kernel of all steps without one thing at a time.

What such a kernel (`passes/kernels/lstm_persistent.py`) computes is wrong; only its time counts.

    python tests/benchmarks/lstm_parts_gpu.py | tee results/h200/lstm_parts.txt

Each is made of the module's source with a few lines changed. Microseconds are the median of ROUNDS of CALLS launches,
with the allocation and zeroing of what they need.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, CALLS = 8, 4
#: steps, batch, units, layers
SHAPES = ((128, 32, 512, 2), (128, 1, 512, 1))
SLOW = "    else:  # a row that planes cannot hold"


def sources() -> dict[str, str]:
    """The module's source, whole and with changes, by name."""
    whole = (ROOT / "passes/kernels/lstm_persistent.py").read_text()

    def without(*parts: str) -> str:
        return changed(*((part, "") for part in parts))

    def changed(*pairs: tuple[str, str]) -> str:
        text = whole
        for old, new in pairs:
            if old not in text:
                raise SystemExit(f"the kernel has changed: it has no {old!r} any more")
            text = text.replace(old, new)
        return text

    lines = whole.splitlines(keepends=True)
    copies = [line for line in lines if "async_copy_global_to_shared(both" in line]
    lows = list(dict.fromkeys(line for line in lines if "rest = warpgroup_mma(" in line))
    states = "            c = sigmoid(f) * c + sigmoid(i) * tanh(g)\n            h = sigmoid(o) * tanh(c)\n"
    return {
        "whole": whole,
        "no slow path": without(whole[whole.index(SLOW) : whole.index("    gates.store(gl.where(there")]),
        "no waits": changed(('scope="gpu") < count:', 'scope="gpu") < count * 0:')),
        "relaxed release": changed(('sem="release"', 'sem="relaxed"')),
        "no copies of states": without(*copies),
        "one product": without(*lows),
        "no exponentials": changed((states, "            c = f * c + i * g\n            h = o * c\n")),
    }


def module(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def main() -> None:
    from passes.kernels import direct
    from passes.split_products import split

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    def weights(count: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return split(random(count, 4 * hidden, hidden) / hidden**0.5)

    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}; steps, batch, units, layers")
    with tempfile.TemporaryDirectory() as folder:
        for steps, batch, hidden, layers in SHAPES:
            first, pre = random(layers, batch, 4 * hidden), random(steps, batch, 4 * hidden)
            bias = random(layers - 1, 4 * hidden) if layers > 1 else None
            below = weights(layers - 1, hidden) if layers > 1 else None
            cell, weight = random(layers, batch, hidden), weights(layers, hidden)
            for name, source in sources().items():
                launch = module(name, source, Path(folder)).launch
                direct._ready.clear()  # of another kernel with the same key
                times = []
                for number in range(ROUNDS + 1):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(CALLS):
                        launch(first, pre, bias, cell, below, weight)
                    end.record()
                    end.synchronize()
                    if number:  # the first compiles
                        times.append(begin.elapsed_time(end) / CALLS * 1e3)
                time = statistics.median(times)
                shape = (steps, batch, hidden, layers)
                print(f"{shape} {name:20s} {time:8.1f} us, {time / (steps + layers - 1):.2f} us a step", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    main()
