"""Source lines travel with a profile, and only those of files that are still what ran."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
from made_profiles import build, kernel, node

from profiler_core import source_text
from profiler_core.profiles import Profile, ProfileFormatError
from profiler_core.source_text import source_lines

TEXT = "".join(f"line {n}\n" for n in range(1, 21))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(TEXT)
    return path


def test_three_lines_around_each_are_kept_once(file: Path) -> None:
    found = source_lines([(str(file), 2, "line 2"), (str(file), 4, "  line 4"), (str(file), 20, "line 20")])
    assert found == {str(file): {n: f"line {n}" for n in (1, 2, 3, 4, 5, 6, 7, 17, 18, 19, 20)}}


@pytest.mark.parametrize(
    "places",
    [
        [("{file}", 2, "line 2"), ("{file}", 3, "something else")],  # edited since
        [("{file}", 21, "line 21")],
        [("{file}", 0, "line 0"), ("", 1, "line 1"), ("{file}", 2, "")],  # nothing known
        [("{file}.txt", 2, "line 2")],  # no Python source
        [("/nowhere/model.py", 2, "line 2"), ("nul\0.py", 2, "line 2"), ("/nowhere", 2, "a")],
    ],
)
def test_nothing_is_taken_of_a_file_that_is_not_what_ran(file: Path, places: list[tuple[str, int, str]]) -> None:
    (file.parent / "model.py.txt").write_text(TEXT)
    assert source_lines([(name.replace("{file}", str(file)), line, text) for name, line, text in places]) == {}


def test_an_edit_after_the_first_look_is_seen(file: Path) -> None:
    places = [(str(file), 2, "line 2")]
    assert source_lines(places)
    file.write_text("another\n" + TEXT)
    assert source_lines(places) == {}


def test_a_cell_of_a_notebook_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = TEXT.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<ipython-input-1-abc>", (len(TEXT), None, lines, "<ipython-input-1-abc>"))
    assert list(source_lines([("<ipython-input-1-abc>", 1, "line 1")])["<ipython-input-1-abc>"]) == [1, 2, 3, 4]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.py"
        path.write_text(f"{name}\n" * 50 + "x" * 5000)
        places += [(str(path), n, name) for n in range(1, 51)]
    monkeypatch.setattr(source_text, "MOST_LINES", 60)
    found = source_lines(places)
    assert [len(lines) for lines in found.values()] == [51, 9]
    assert max(len(text) for lines in found.values() for text in lines.values()) == source_text.LONGEST


def a_profile(file: Path) -> Profile:
    return build([kernel("k", 1, 2)], [node("mm", file=str(file), line=10, source="line 10")])


def test_a_saved_profile_shows_its_source_elsewhere(file: Path, tmp_path: Path) -> None:
    profile = a_profile(file)
    profile.save(tmp_path / "p.json")
    held = profile.source_lines()
    assert list(held[str(file)]) == list(range(7, 14))
    file.unlink()
    assert Profile.load(tmp_path / "p.json").source_lines() == held
    assert profile.source_lines() == {}


def test_a_parquet_export_shows_its_source_elsewhere(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    profile = a_profile(file)
    profile.to_parquet(tmp_path / "p")
    held = profile.source_lines()
    file.unlink()
    assert Profile.from_parquet(tmp_path / "p").source_lines() == held != {}


def test_a_profile_from_before_sources_were_kept_is_read(file: Path, tmp_path: Path) -> None:
    data = a_profile(file).to_json()
    del data["sources"]
    assert list(Profile.from_json(data).source_lines()) == [str(file)]
    for bad in ([1], {"a": 1}, {"a": {"b": "text"}}):
        with pytest.raises(ProfileFormatError, match="header: ValueError"):
            Profile.from_json(json.loads(json.dumps({**data, "sources": bad})))
