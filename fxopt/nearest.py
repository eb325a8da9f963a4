"""Why no plan was found: in what the key of a graph differs from those of the plans that are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fxopt.plan import PlanStore, PlanStoreError, plan_key

#: parts of a plan's key (`fxopt.identity.key_parts`), as a reader knows them
SPELLED = {
    "graph": "the graph",
    "inputs": "the inputs' shapes, strides, types or values",
    "shared": "which inputs share memory",
    "device": "the device, its driver or clocks, or the number of threads",
    "versions": "versions of torch, Triton, Python or fxopt",
    "flags": "torch's flags (gradients, autocast, precision, cuDNN)",
    "options": "fxopt's options",
    "inductor": "options of Inductor given with the call",
    "inductor_config": "Inductor's configuration",
    "passes": "the registered passes or their code",
    "rules": "the rules",
    "session": "the way in: torch.compile or fxopt.optimize",
    "weights": "the weights, which count where accuracy is given up",
}
#: what a plan keeps of them, in its environment
FIELD = "key_parts"
_LOOKED_AT = 200


def digests(parts: Mapping[str, Any]) -> dict[str, str]:
    """A short digest of each part of a key."""
    return {name: plan_key(part=value)[:16] for name, value in parts.items()}


def explain(store: PlanStore, parts: Mapping[str, Any]) -> str:
    """A sentence about the newest plans: in what the nearest one of the same graph differs from these parts."""
    mine = digests(parts)
    try:
        rows = store.list(_LOOKED_AT)
    except PlanStoreError as error:
        return str(error)
    if not rows:
        return f"there are no plans in {store.plans_dir}"
    alike: list[tuple[int, str, list[str]]] = []
    for row in rows:
        try:
            theirs = json.loads(row.path.read_bytes())["environment"][FIELD]
            differ = [name for name, digest in mine.items() if theirs[name] != digest]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # broken, or written before plans had this
        if "graph" not in differ:
            alike.append((len(differ), row.key, differ))
    if not alike:
        return f"none of the {len(rows)} plans in {store.plans_dir} is known to be of this graph"
    _, key, differ = min(alike)
    return f"the plan {key[:12]} is of this graph, but differs in {'; '.join(SPELLED[name] for name in differ)}"
