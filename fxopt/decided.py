"""What a tuning run has decided, as a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from fxopt import identity, machine, nearest
from fxopt.labels import Label
from fxopt.plan import PassUse, Plan
from fxopt.registry import Pass
from fxopt.report.model import GraphReport, to_plain


def decided(
    report: GraphReport,
    passes: Sequence[Pass],
    *,
    patches: Mapping[str, Any],
    origins: Mapping[str, tuple[str, ...]],
    mutated: Collection[int],
    device: torch.device,
    seconds: float,
    parts: Mapping[str, Any],
    graph: Mapping[str, Any] | None = None,
    to_come: Sequence[Label] = (),
    resting: Sequence[Pass] = (),
) -> Plan:
    """The plan of the code whose measurements are in `report`, which learns after how many calls tuning has paid.

    passes: those that are kept, none where Inductor's own code is. patches: the caller's Inductor options. origins:
    pre-grad nodes by post-grad node. mutated: numbers of the inputs that the graph writes to. seconds: spent on tuning.
    parts: of the plan's key; their digests tell later why another graph does not find this plan.
    graph: what tells this plan from others, for a listing (`fxopt.identity.in_words`). to_come: those of the report's
    labels that were no part of what passes saw, and so are none where the plan is applied. resting: graph passes
    that ran beside those that are kept, and found nothing to do.
    """
    profile = report.profile
    assert profile is not None, "a plan is made of what was measured"
    gain = (report.baseline_wall_ns or 0.0) - (report.kept_wall_ns or 0.0)
    kept = report.decision == "candidate"
    report.calls_to_pay = seconds * 1e9 / gain if kept and gain > 0 else None
    return Plan(
        key=report.key,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        decision="candidate" if kept else "baseline",
        freeze=report.frozen,
        passes=list(map(_use, passes)),
        resting=list(map(_use, resting)),
        inductor={key: identity._spell(value) for key, value in patches.items()},
        reports=[to_plain(entry) for entry in report.candidates],
        verdict=to_plain(report.verdict),
        paired=to_plain(report.ratio),
        labels=[label.to_json() for label in report.labels if label not in to_come],
        to_come=[label.to_json() for label in to_come],
        origins={name: list(pre_grad) for name, pre_grad in origins.items()},
        mutated=sorted(mutated),
        profile={
            "graph": dict(graph or {}),
            "kernel_ns": profile.kernel_ns,
            "wall_ns": profile.wall_ns,
            "attributed_share": profile.attributed_share,
            "kept_kernel_ns": report.kept_kernel_ns,
            "kept_wall_ns": report.kept_wall_ns,
            "floor_ns": report.floor_ns,
            "floor_flops": report.floor_flops,
            "floor_bytes": report.floor_bytes,
        },
        environment={**to_plain(profile.environment), nearest.FIELD: nearest.digests(parts)},
        out_of_reach=list(report.out_of_reach),
        tuning_seconds=seconds,
        calls_to_pay=report.calls_to_pay,
        memory_bytes=report.memory_bytes,
        ablation=to_plain(report.ablation),
        machines=[machine.machine(device)],
    )


def _use(p: Pass) -> PassUse:
    return PassUse(name=p.name, options=to_plain(p.options()), stage=p.stage.value)
