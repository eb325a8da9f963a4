"""`new_pass`: which files are written, what is refused, and that nothing which is there is touched."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from fxopt.labels import Axis
from fxopt.registry import Stage
from fxopt.scaffold import ScaffoldError, new_pass, read_project


def write(name: str, directory: Path | None, **changed) -> str:
    given = {"stage": "joint", "answers": ["memory_bound"], "known": ["cuda_graphs"], **changed}
    return new_pass(name, directory, **given)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module in that file, as an import of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_package_of_one_pass_is_written_and_the_next_steps_are_told(tmp_path):
    told = write("merge-scales", tmp_path / "new")
    assert names(tmp_path / "new") == {"pyproject.toml", "merge_scales.py", "test_merge_scales.py", "merge_scales.md"}
    for line in (f"pip install -e {tmp_path / 'new'}", "fxopt passes show merge_scales", "FXOPT_DUMP=", "pytest "):
        assert line in told


def test_without_a_directory_the_folder_has_the_passs_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("merge-scales", None)
    assert names(tmp_path) == {"merge_scales"}


def test_the_project_registers_the_class_and_packages_the_module(tmp_path):
    write("merge_scales", tmp_path)
    project = read_project(tmp_path / "pyproject.toml")
    assert project["project"]["entry-points"] == {"fxopt.passes": {"merge_scales": "merge_scales:MergeScales"}}
    assert project["tool"]["setuptools"]["py-modules"] == ["merge_scales"]
    assert project["project"]["dependencies"] == ["fxopt>=0.1.0"]


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_the_pass_declares_what_was_asked_for(tmp_path, monkeypatch, stage):
    write("merge_scales", tmp_path, stage=stage, answers=["memory_bound", " cast_traffic", "memory_bound"])
    made = loaded(tmp_path / "merge_scales.py", monkeypatch).MergeScales
    assert (made.name, made.stage) == ("merge_scales", Stage(stage))
    assert made.answers == {Axis.MEMORY_BOUND, Axis.CAST_TRAFFIC}
    assert list(made().options()) == ["largest"]


def test_a_pass_that_answers_a_label_of_the_whole_graph_does_not_ask_for_it_on_a_node(tmp_path):
    write("by_node", tmp_path, answers=["memory_bound"])
    write("by_graph", tmp_path / "other", answers=["launch_bound"])
    assert "context.answers(node" in (tmp_path / "by_node.py").read_text()
    assert "context.answers(node" not in (tmp_path / "other" / "by_graph.py").read_text()
    assert "labels" not in (tmp_path / "other" / "test_by_graph.py").read_text()


@pytest.mark.parametrize("name", ["candidate", "axis", "graph", "any"])
def test_the_class_takes_no_name_that_its_module_uses(tmp_path, monkeypatch, name):
    write(name, tmp_path)
    module = loaded(tmp_path / f"{name}.py", monkeypatch)
    entry = read_project(tmp_path / "pyproject.toml")["project"]["entry-points"]["fxopt.passes"][name]
    assert getattr(module, entry.partition(":")[2]).name == name


def test_the_documentation_has_the_headings_of_a_passs_page(tmp_path):
    write("merge_scales", tmp_path)
    lines = (tmp_path / "merge_scales.md").read_text().splitlines()
    headings = ["# merge_scales", "## What it answers", "## Before and after", "## When it refuses"]
    assert [line for line in lines if line.startswith("#")] == [*headings, "## What it gained where"]


def test_every_name_of_the_templates_was_filled_in(tmp_path):
    write("merge_scales", tmp_path)
    for path in tmp_path.iterdir():
        assert "$" not in path.read_text(), path.name
        if path.suffix == ".py":
            ast.parse(path.read_text())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2fast", "no name for a module"),
        ("größer", "no name for a module"),
        ("a.b", "no name for a module"),
        ("../up", "no name for a module"),
        ("ends_", "no name for a module"),
        ("", "no name for a module"),
        ("lambda", "keyword"),
        ("cuda_graphs", "registered already"),
        ("json", "importable already"),
        ("torch", "importable already"),
        ("setup", "setuptools would take setup.py"),
        ("conftest", "pytest would take"),
        ("test_it", "pytest would take"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(tmp_path, name, message):
    with pytest.raises(ScaffoldError, match=message):
        write(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_of_the_name_on_the_path_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "merge_scales").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write("merge_scales", None)
    assert (tmp_path / "merge_scales" / "merge_scales.py").exists()


def test_files_that_are_there_are_named_and_left_as_they_are(tmp_path):
    mine = {"merge_scales.py": "mine", "merge_scales.md": "mine too"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ScaffoldError) as refused:
        write("merge_scales", tmp_path)
    assert all(str(tmp_path / name) in str(refused.value) for name in mine)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == mine


def test_a_second_pass_in_a_project_leaves_its_pyproject_alone_and_tells_the_line_to_add(tmp_path):
    write("first", tmp_path)
    before = (tmp_path / "pyproject.toml").read_text()
    told = write("second", tmp_path)
    assert (tmp_path / "pyproject.toml").read_text() == before
    assert '    second = "second:Second"' in told.splitlines()
    assert f"wrote {tmp_path / 'pyproject.toml'}" not in told
    assert '[project.entry-points."fxopt.passes"]:' in told


def test_a_project_without_passes_is_told_the_table_as_well(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    lines = write("first", tmp_path).splitlines()
    place = lines.index('    [project.entry-points."fxopt.passes"]')
    assert lines[place + 1] == '    first = "first:First"'


def test_a_project_that_has_the_line_already_is_told_nothing(tmp_path):
    line = '[project.entry-points."fxopt.passes"]\nfirst = "first:First"\n'
    (tmp_path / "pyproject.toml").write_text(line)
    assert "Add" not in write("first", tmp_path)


def test_a_project_that_means_something_else_by_the_name_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."fxopt.passes"]\nfirst = "else:Where"\n')
    with pytest.raises(ScaffoldError, match='first = "else:Where"'):
        write("first", tmp_path)
    assert names(tmp_path) == {"pyproject.toml"}


def test_a_project_that_is_no_toml_is_refused_with_the_place(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(ScaffoldError, match=r"pyproject\.toml, line 1, column \d+: this is not TOML: "):
        write("first", tmp_path)
    assert names(tmp_path) == {"pyproject.toml"}


def test_an_unknown_stage_or_label_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ScaffoldError, match="did you mean 'joint'"):
        write("first", tmp_path, stage="joints")
    with pytest.raises(ScaffoldError, match=r"passes/freeze_weights.py \(config\)"):
        write("first", tmp_path, stage="config")
    with pytest.raises(ScaffoldError, match="no label is named 'memory_bond'; did you mean 'memory_bound'"):
        write("first", tmp_path, answers=["memory_bond"])
    with pytest.raises(ScaffoldError, match="there are launch_bound"):
        write("first", tmp_path, answers=[""])


def test_a_folder_that_is_a_file_or_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ScaffoldError, match="file is a file"):
        write("first", tmp_path / "file")
    with pytest.raises(ScaffoldError, match="cannot be written"):
        write("first", tmp_path / "file" / "below")


def test_an_editable_install_finds_the_module_and_not_the_folder_of_its_name(tmp_path):
    """Without it, `pip install -e NAME` and then fxopt in the folder above import NAME/ as a namespace package."""
    write("merge_scales", tmp_path / "merge_scales")
    project = read_project(tmp_path / "merge_scales" / "pyproject.toml")
    assert project["tool"]["setuptools"] == {"py-modules": ["merge_scales"], "package-dir": {"": "."}}
