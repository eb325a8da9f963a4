from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_profiles import HOSTILE, T, build, kernel, node, two_calls

from profiler_core.parquet import MissingDependency, from_parquet, to_parquet
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, Profile, ProfileFormatError


@pytest.fixture
def profile() -> Profile:
    return two_calls()


def test_parquet_gives_the_profile_back(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    to_parquet(profile, tmp_path / "made" / "here")
    back = from_parquet(tmp_path / "made" / "here")
    pd.testing.assert_frame_equal(back.kernels, profile.kernels)
    pd.testing.assert_frame_equal(back.nodes, profile.nodes)
    assert (back.environment, back.launches, back.notes) == (profile.environment, profile.launches, profile.notes)
    assert (back.iterations, math.isnan(back.wall_ns)) == (2, True)
    assert back.kernels["nodes"].tolist() == profile.kernels["nodes"].tolist()  # tuples again, empty ones too
    assert sorted(p.name for p in (tmp_path / "made" / "here").iterdir()) == [
        "kernels.parquet", "nodes.parquet", "profile.json"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [tuple, list, set], ids=["tuples", "lists", "sets"])
def test_labels_that_a_caller_added_are_in_the_file(profile: Profile, tmp_path: Path, kind: type) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = [(), ("l2_bound", "memory_bound"), (), ("launch_bound",), ()]
    profile.kernels["labels"] = [kind(value) for value in labels]
    profile.nodes["layer"] = ["layer0", None]
    profile.to_parquet(tmp_path)
    seen = parquet.read_table(tmp_path / "kernels.parquet")["labels"].to_pylist()
    assert seen == [list(value) for value in labels]
    back = Profile.from_parquet(tmp_path)
    assert back.kernels["labels"].tolist() == labels
    assert back.nodes["layer"].equals(profile.nodes["layer"])


def test_a_column_that_parquet_cannot_hold_is_refused_by_name(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    profile.kernels["labels"] = ["text", 1, ("a",), None, {}]
    with pytest.raises(ValueError, match=r"kernels: column 'labels' does not fit Parquet .*; leave it out"):
        profile.to_parquet(tmp_path)


def test_a_failed_export_leaves_the_earlier_one(profile: Profile, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    to_parquet(profile, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    profile.nodes["labels"] = ["text", 1]
    with pytest.raises(ValueError, match="nodes: column 'labels'"):
        to_parquet(profile, tmp_path)
    del profile.nodes["labels"]
    profile.environment["self"] = profile.environment
    with pytest.raises(RecursionError):
        to_parquet(profile, tmp_path)
    del profile.environment["self"]
    wrote = parquet.write_table
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="disk is full"):
        patch.setattr(parquet, "write_table", _full_at_the_second(wrote))
        to_parquet(profile, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _full_at_the_second(write: Callable[..., None]) -> Callable[..., None]:
    calls = []

    def limited(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk is full")
        write(*args, **options)

    return limited


@pytest.mark.parametrize(
    "change", [{"iterations": 0}, {"environment": []}, {"notes": "text"}, {"wall_ns": 10**400}], ids=str
)
def test_a_header_of_nonsense_is_refused(profile: Profile, tmp_path: Path, change: dict[str, Any]) -> None:
    pytest.importorskip("pyarrow")
    to_parquet(profile, tmp_path)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ProfileFormatError, match=r"profile\.json: .*export the profile again"):
        from_parquet(tmp_path)


def test_parquet_of_nothing_has_every_column(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    to_parquet(build([], []), tmp_path)
    back = from_parquet(tmp_path)
    assert {c: str(t) for c, t in back.kernels.dtypes.items()} == KERNEL_COLUMNS
    assert {c: str(t) for c, t in back.nodes.dtypes.items()} == NODE_COLUMNS


def test_other_readers_of_parquet_see_nulls_lists_and_units(profile: Profile, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    to_parquet(profile, tmp_path)
    table = parquet.read_table(tmp_path / "kernels.parquet")
    assert table["registers"].to_pylist()[2] is None
    assert table["dram_read_bytes"].to_pylist() == [None, 1.5e6, None, math.inf, None]
    assert table["nodes"].to_pylist()[2:] == [["mm", "add"], ["mm"], []]
    assert table["grid"].to_pylist()[1:3] == [[2, 1, 1], None]
    marks = {field.name: field.metadata[b"unit"] for field in table.schema}
    assert (marks["duration_ns"], marks["name"]) == (b"ns", b"")
    assert json.loads(table.schema.metadata[b"fxopt"])["schema_version"] == 2


def test_a_folder_of_two_exports_is_refused(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    to_parquet(profile, tmp_path / "a")
    to_parquet(profile, tmp_path / "b")
    (tmp_path / "b" / "nodes.parquet").replace(tmp_path / "a" / "nodes.parquet")
    with pytest.raises(ProfileFormatError, match=r"nodes\.parquet: .*another export.*export the profile again"):
        from_parquet(tmp_path / "a")


@pytest.mark.parametrize("name", ["kernels.parquet", "nodes.parquet", "profile.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_export_is_refused_by_name(profile: Profile, tmp_path: Path, name: str, damage: str) -> None:
    pytest.importorskip("pyarrow")
    to_parquet(profile, tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"[]")
    with pytest.raises(ProfileFormatError, match=f"{name}: .*export the profile again"):
        from_parquet(tmp_path)


def test_without_pyarrow_the_remedy_is_named(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'fxopt\[parquet\]'"):
        to_parquet(profile, tmp_path)
    with pytest.raises(MissingDependency, match=r"pip install 'fxopt\[parquet\]'"):
        from_parquet(tmp_path)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_come_back(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    rows = [kernel(name, T, 10, nodes=(name,), operator=name, graph=name), kernel("plain", T + 50, 11)]
    made = build(rows, [node(name, graph=name, module_path=name, file=name, source=name), node("mm")])
    to_parquet(made, tmp_path)
    assert from_parquet(tmp_path).kernels["name"].tolist() == [name.replace("\ud800", "\ufffd"), "plain"]
