from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from profiler_core.attribute.engine import attribute
from profiler_core.collect.inductor import Launch, NodeInfo, Provenance
from profiler_core.environment import environment
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, Profile, ProfileFormatError
from profiler_core.trace import Kernel, Op, Trace

LAUNCHES = (
    Launch("extern_kernels.mm", 1, ("permute", "mm"), True, 24.0, 60.0),
    Launch("triton_poi_fused_add_relu_0", 2, ("add", "relu"), False, None, 40.0),
    Launch("triton_poi_fused_idle_1", 3, ("relu",), False, 6.0, 40.0),
)


def node(name: str, **fields) -> NodeInfo:
    return NodeInfo(
        name, "call_function", f"aten.{name}.default", (2, 3), (3, 1), "float32", "cuda:0", file="m.py", **fields
    )


NODES = {
    "x": NodeInfo("x", "placeholder", "x", static=True),
    "permute": node("permute", flops=0.0, bytes=0.0, line=1),
    "mm": node("mm", flops=24.0, bytes=60.0, line=2, module_path="lin", module_class="Linear"),
    "add": node("add", flops=6.0, bytes=72.0, line=3),
    "relu": node("relu", flops=6.0, bytes=48.0, line=4),
}


@pytest.fixture
def profile() -> Profile:
    """Two calls: 100 + 120 ns in the product, 30 + 50 ns in the fused kernel, and a copy of 7 ns in the second."""
    ops, kernels = [], []
    for i, (product, fused) in enumerate(((100, 30), (120, 50))):
        t = 10_000 * i
        ops += [
            Op(f"fxopt::iteration#{i}", 5, t, t + 1000),
            Op("fxopt::extern_kernels.mm:1", 5, t + 10, t + 50),
            Op("cudaLaunchKernel", 5, t + 20, t + 30, 10 * i + 1, "cuda_runtime"),
            Op("fxopt::triton_poi_fused_add_relu_0:2", 5, t + 60, t + 90),
            Op("cuLaunchKernel", 5, t + 70, t + 80, 10 * i + 2, "cuda_driver"),
        ]
        kernels += [
            Kernel("gemm", 0, 7, t + 200, product, 10 * i + 1, (2, 1, 1), (128, 1, 1), 90, 4096),
            Kernel("triton_poi_fused_add_relu_0", 0, 7, t + 500, fused, 10 * i + 2),
        ]
    kernels.append(Kernel("Memcpy HtoD", 0, 7, 10_900, 7, 99))
    trace = Trace.of(ops, kernels, iterations=2, wall_ns=(900.0, 1100.0))
    return attribute(trace, Provenance("2.0", LAUNCHES, NODES, ""), {"device_name": "test"})


def test_time_is_conserved_and_medians_are_per_call(profile: Profile) -> None:
    assert (profile.total_ns, profile.attributed_ns, profile.unattributed_ns) == (307, 300, 7)
    assert profile.attributed_share == 300 / 307
    assert profile.kernel_ns == (130 + 177) / 2
    assert profile.wall_ns == 1000.0
    assert isinstance(profile.total_ns, int)


def test_frames_have_the_documented_columns(profile: Profile) -> None:
    assert {c: str(t) for c, t in profile.kernels.dtypes.items()} == KERNEL_COLUMNS
    assert {c: str(t) for c, t in profile.nodes.dtypes.items()} == NODE_COLUMNS
    assert set(profile.nodes["node"]) == {"permute", "mm", "add", "relu"}  # operators only


def test_groups_are_the_launches_of_the_wrapper_in_order(profile: Profile) -> None:
    groups = profile.groups()
    assert list(groups["launch"]) == [launch.key for launch in LAUNCHES]
    assert list(groups["time_ns"]) == [110.0, 40.0, 0.0]
    assert list(groups["kernels"]) == [1, 1, 0]
    assert list(groups["share"]) == [220 / 307, 80 / 307, 0.0]
    first = groups.iloc[0]
    assert (first["module_path"], first["line"], first["dtype"], first["extern"]) == ("lin", 2, "float32", True)
    assert math.isnan(groups["flops"][1]) and groups["bytes"][1] == 40.0  # not modelled is not zero


def test_what_is_unattributed_is_listed_with_its_reason(profile: Profile) -> None:
    (row,) = profile.unattributed().to_dict("records")
    assert (row["name"], row["kernels"], row["time_ns"]) == ("Memcpy HtoD", 1, 7)
    assert "no launch" in row["reason"]


def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "new" / "profile.json"
    profile.save(path)
    loaded = Profile.load(path)
    pd.testing.assert_frame_equal(loaded.kernels, profile.kernels)
    pd.testing.assert_frame_equal(loaded.nodes, profile.nodes)
    pd.testing.assert_frame_equal(loaded.groups(), profile.groups())
    assert (loaded.environment, loaded.iterations, loaded.wall_ns) == ({"device_name": "test"}, 2, 1000.0)
    assert loaded.launches == profile.launches
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]  # no temporary file is left


def test_an_empty_profile_survives_its_file(tmp_path: Path) -> None:
    empty = attribute(Trace.of((), (), device_type="cpu"), Provenance("2.0", (), {}, ""), {})
    assert empty.total_ns == 0 and math.isnan(empty.attributed_share) and empty.kernel_ns == 0.0
    empty.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded.total_ns == 0 and math.isnan(loaded.wall_ns) and len(loaded.groups()) == 0


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.update(schema_version=1), "schema_version: expected 2, got 1"),
        (lambda d: d["kernels"]["columns"].remove("launch"), "kernels"),
        (lambda d: d["kernels"]["rows"][0].__setitem__(d["kernels"]["columns"].index("start_ns"), "soon"), "kernels"),
        (lambda d: d["nodes"].pop("rows"), "nodes"),
        (lambda d: d["launches"][0].pop("nodes"), "launches"),
        (lambda d: d.pop("iterations"), "header"),
        (lambda d: d.update(iterations=0), "iterations: expected an integer of 1 or more, got 0"),
        (lambda d: d.update(iterations=1.5), "iterations: expected an integer"),
        (lambda d: d.update(environment=[["a", 1]]), "environment: expected an object"),
        (lambda d: d.update(notes="text"), "notes: expected a list of texts"),
        (lambda d: d.update(notes=[1]), "notes: expected a list of texts"),
        (lambda d: d.update(wall_ns=10**400), "OverflowError"),
        (
            lambda d: d["kernels"]["rows"][1].__setitem__(d["kernels"]["columns"].index("duration_ns"), -1),
            "row 1: dura",
        ),
        (
            lambda d: d["kernels"]["rows"][0].__setitem__(d["kernels"]["columns"].index("start_ns"), 2**70),
            "kernels: Over",
        ),
        (lambda d: d["kernels"]["dtypes"].pop(), "kernels"),
    ],
)
def test_a_malformed_file_is_refused_by_name_place_and_remedy(profile, tmp_path, change, place) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileFormatError) as error:
        Profile.load(path)
    assert str(path) in str(error.value) and place in str(error.value) and "profile again" in str(error.value)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ProfileFormatError, match="not JSON"):
        Profile.load(path)


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ProfileFormatError, match="not JSON"):
        Profile.load(path)


def test_a_gzipped_file_is_read_and_a_damaged_archive_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    whole = gzip.compress(path.read_bytes())
    path.write_bytes(whole)
    assert Profile.load(path).total_ns == profile.total_ns
    for damaged in (whole[:-20], whole[:12], whole[:40] + b"\xff" * 40 + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(ProfileFormatError, match=r"profile\.json: not JSON .*profile again"):
            Profile.load(path)


def test_what_json_has_no_word_for_is_saved_as_text_list_or_null(profile: Profile, tmp_path: Path) -> None:
    import numpy as np
    import pandas as pd

    when = datetime(2024, 5, 6, tzinfo=timezone.utc)
    profile.environment.update(
        count=np.int64(3), sizes=np.array([1, 2]), file=Path("/a/b"), date=when, none=math.nan, most=math.inf
    )
    profile.iterations, profile.wall_ns = np.int64(2), math.inf
    profile.kernels["labels"] = [{"b", "a"}, None, np.array([1.5]), Path("x"), pd.NaT]
    profile.kernels["date"] = pd.Timestamp("2024-01-02")
    profile.kernels["rate"] = [1.0, math.inf, -math.inf, math.nan, 2.0]
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded.environment == {
        "device_name": "test", "count": 3, "sizes": [1, 2], "file": "/a/b", "date": str(when), "none": None,
        "most": None,
    }  # fmt: skip
    assert loaded.iterations == 2 and math.isnan(loaded.wall_ns)
    assert loaded.kernels["labels"].tolist() == [("a", "b"), None, (1.5,), "x", None]
    assert loaded.kernels["date"].tolist() == ["2024-01-02 00:00:00"] * 5
    assert loaded.kernels["rate"].isna().tolist() == [False, True, True, True, False]


def test_columns_of_a_caller_keep_their_types(profile: Profile, tmp_path: Path) -> None:
    import pandas as pd

    big = 2**60 + 1
    added = {
        "whole": pd.Series([big, 1, 2, 3, 4]),
        "some": pd.Series([big, None, 2, 3, 4], dtype="Int64"),
        "objects": pd.Series([big, None, 2, 3, 4], dtype=object),
        "unsigned": pd.Series([2**64 - 1] * 5, dtype="uint64"),
        "none": pd.Series([None] * 5, dtype=object),
        "unknown": pd.Series([math.nan] * 5),
        "real": pd.Series([1.0, math.nan, 2.0, 3.0, 4.0]),
        "single": pd.Series([0.1] * 5, dtype="float32"),
        "flag": pd.Series([True, False] * 2 + [True]),
        "maybe": pd.Series([True, None, False, True, True], dtype="boolean"),
        "text": pd.Series(list("abcde")),
    }
    for name, values in added.items():
        profile.kernels[name] = values
    profile.save(tmp_path / "p.json")
    pd.testing.assert_frame_equal(Profile.load(tmp_path / "p.json").kernels, profile.kernels)


def test_a_file_that_does_not_say_the_types_is_read(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile.kernels["rate"] = 1.5
    profile.save(path)
    data = json.loads(path.read_text())
    del data["kernels"]["dtypes"], data["nodes"]["dtypes"]
    path.write_text(json.dumps(data))
    assert Profile.load(path).kernels["rate"].tolist() == [1.5] * 5


def test_what_is_unattributed_may_have_any_name(profile: Profile) -> None:
    profile.kernels.loc[profile.kernels["method"] == "none", "name"] = "k\ud800"
    assert profile.unattributed()["name"].tolist() == ["k\ud800"]


def test_a_failed_save_leaves_the_old_file(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    before = path.read_text()
    profile.environment["device"] = profile.environment  # has no end
    with pytest.raises(RecursionError):
        profile.save(path)
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1


def test_the_environment_is_json_and_private_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = environment("cpu")
    text = json.dumps(found)
    assert found["device_type"] == "cpu" and found["device_name"] and found["torch"] and found["threads"] >= 1
    assert found["date"].endswith("+00:00")
    for private in ("hunter2", str(Path.home()), str(Path.cwd()), __import__("socket").gethostname()):
        assert len(private) < 4 or private not in text


def test_importing_the_profiler_imports_neither_pandas_nor_triton() -> None:
    code = (
        "import sys, profiler_core.profiles, profiler_core.attribute.engine, profiler_core.environment as e;"
        "e.environment('cpu'); print([m for m in ('pandas', 'triton', 'torch._inductor') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
