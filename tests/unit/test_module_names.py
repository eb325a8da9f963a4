"""Modules may have any name without a dot; a profile gives it as it is, of compiled graphs and outside of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import profiler_core
from profiler_core.collect.module_spelling import module_path

ODD = [
    'a"b',
    "a'b",
    "a\"'b",
    "a\tb",
    "a\nb",
    "a\\b",
    "a[0]",
    "a['x']",
    "a[b",
    "a]b",
    "é λ",
    "{a}",
    "%s",
    " a ",
    "a, 'b')",
]
ODD += ["getattr(x, 'y')", "getattr(a", ")", "class", "0", "\u2028", "x" * 5_000]


class Named(nn.Module):
    """Layers that are the keys of a ModuleDict, and layers that are attributes."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        self.of = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = getattr(self, name)(self.of[name](x))
        return x

    @property
    def paths(self) -> list[str]:
        return [path for name in self.names for path in (f"of.{name}", name)]


@pytest.mark.usefixtures("fresh_dynamo")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True))
@example(ODD)
def test_the_spelling_of_dynamo_is_read_whatever_the_name(names: list[str]) -> None:
    taken = set(dir(nn.ModuleDict())) | set(dir(Named([]))) | {"_orig_mod"}
    assume(not any("." in name or name in taken for name in names))
    found = []

    def keep(gm, inputs):
        stacks = [node.meta.get("nn_module_stack") for node in gm.graph.nodes if node.op == "call_function"]
        found.extend(module_path(list(stack.values())[-1][0]) for stack in stacks if stack)
        return gm.forward

    model = Named(names)
    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(torch.ones(2, 4))
    assert found == model.paths


@pytest.mark.parametrize(
    ("spelling", "path"),
    [
        ("list(L['d'].values())[1].up", "d.values.1.up"),
        ("dict.__getitem__(L['d'], 'k').up", "__getitem__.d.up"),
        ("L['self'].h[0].a b['c.d']", "h.0.a b.c.d"),
        (r"L['self'].a\q\x", r"a\q\x"),  # not of Dynamo's making
        ("getattr(L['self'], name).up", "self.up"),
        ("", ""),
        ("?", ""),
    ],
)
def test_what_is_more_than_names_is_read_as_far_as_it_goes(spelling: str, path: str) -> None:
    assert module_path(spelling) == path


@pytest.mark.usefixtures("fresh_dynamo")
def test_profiles_name_modules_as_the_model_does(tmp_path) -> None:
    names = ['a"b', "a\tb", "a\\b", "a[0]", "é λ", "x" * 5_000]
    model = Named(names).eval()
    for fn in (model, torch.compile(model)):
        with torch.no_grad():
            profile = profiler_core.profile(
                fn, torch.ones(2, 4), iterations=1, warmup=1, counters="none", clocks="off", store=tmp_path / "p"
            )
        assert set(model.paths) <= set(profile.nodes["module_path"])
        assert profile.attributed_share == 1.0 and not any("partial" in note for note in profile.notes)
        profile.save(tmp_path / "p.json")
        again = profiler_core.load(tmp_path / "p.json")
        assert list(again.nodes["module_path"]) == list(profile.nodes["module_path"])
