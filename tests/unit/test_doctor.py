"""`fxopt doctor`: what is there, what is not, and what to do about it."""

from __future__ import annotations

import json

import pytest

from fxopt import doctor
from fxopt.cli import run


def examined() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def test_the_operators_of_the_cpu_can_be_measured_here(capsys):
    assert run(["doctor", "--json"]) == 0
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["operators on the CPU"]["state"] == "yes"
    assert {"Python", "torch", "GPU", "nsys", "ncu", "C++ compiler", "Python.h", "Triton", "plans"} <= set(found)
    assert run(["doctor", "--quiet"]) == 0
    assert "operators on the CPU" not in capsys.readouterr().out


def test_a_missing_compiler_is_a_gap_with_a_remedy(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = examined()["C++ compiler"]
    assert (found.state, found.remedy) == ("no", "apt-get install g++, or set CXX")
    assert "no-such-compiler" in found.found


def test_a_compiler_that_cannot_build_says_what_it_said(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: omp.h' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = examined()["C++ compiler"]
    assert found.state == "no" and "fatal error: omp.h" in found.found and found.remedy


@pytest.mark.parametrize("version, state", [("2.9.1", "broken"), ("2.12.0", "yes"), ("2.15.0", "broken")])
def test_a_torch_that_is_not_supported_ends_it(monkeypatch, capsys, version, state):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    found = examined()
    assert found["torch"].state == state and version in found["torch"].found
    assert run(["doctor"]) == (1 if state == "broken" else 0)
    captured = capsys.readouterr()
    if state == "broken":
        assert "remedy: pip install" in captured.out and "nothing can be measured" in captured.err
    else:
        assert "not tested" in captured.out


def test_one_check_that_fails_hides_no_other(monkeypatch):
    def broken():
        raise OSError("no permission")
        yield

    broken.__name__ = "_tools"
    monkeypatch.setattr(doctor, "_tools", broken)
    found = examined()
    assert found["tools"].state == "no" and "no permission" in found["tools"].found
    assert "plans" in found


@pytest.mark.parametrize("place", ["plans", "plans/below/it"])
def test_a_folder_for_plans_is_tried_and_not_only_looked_at(monkeypatch, tmp_path, place):
    """As root sees /proc: no permission is missing, and nothing can be made there."""
    monkeypatch.setenv("FXOPT_PLAN_DIR", str(tmp_path / place))
    (found,) = doctor._folder()
    assert (found.state, found.found) == ("yes", f"kept in {tmp_path / place}") and not any(tmp_path.iterdir())

    def refuse(path, *arguments, **options):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(type(tmp_path), "mkdir", refuse)
    (found,) = doctor._folder()
    assert (found.state, found.found) == ("no", f"{tmp_path / place} cannot be written to: No such file or directory")
    assert found.remedy == "set FXOPT_PLAN_DIR to a folder of yours"
