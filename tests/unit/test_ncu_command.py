from __future__ import annotations

import os
import stat
import time
from itertools import pairwise
from pathlib import Path

import pytest

from profiler_core.collect.ncu_command import command, environment, find, run
from profiler_core.counter_table import CounterError

METRICS = ["gpu__time_duration.sum", "dram__bytes_read.sum"]
TABLE = (
    '"ID","Process ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum"\n'
    '"","","","","","ns"\n'
    '"0","7","k","(32, 1, 1)","(4, 1, 1)","5,888"\n'
)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def stub(tmp_path: Path, log: str = TABLE, then: str = "") -> Path:
    """An ncu that notes its arguments and environment beside itself and writes ``log`` to its --log-file."""
    (tmp_path / "log").write_text(log)
    return executable(
        tmp_path / "bin" / "ncu",
        f'printf "%s\\n" "$@" > "{tmp_path}/arguments"\nenv > "{tmp_path}/environment"\n'
        'while [ $# -gt 0 ]; do [ "$1" = --log-file ] && out="$2"; shift; done\n'
        f'cat "{tmp_path}/log" > "$out"\n{then}\n',
    )


# --- finding it ------------------------------------------------------------------------------------------------------


def test_ncu_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = stub(tmp_path)
    executable(tmp_path / "opt" / "2025.1" / "ncu", "")
    monkeypatch.setenv("PATH", str(ncu.parent))
    assert find([f"{tmp_path}/opt/*/ncu"]) == ncu


def test_else_the_newest_version_that_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for version in ("2025.3.1", "2025.10.0", "2024.3.2"):
        executable(tmp_path / version / "ncu", "")
    (tmp_path / "2026.1.0").mkdir()
    (tmp_path / "2026.1.0" / "ncu").write_text("no program")
    assert find([f"{tmp_path}/*/ncu"]) == tmp_path / "2025.10.0" / "ncu"
    assert find([f"{tmp_path}/none/*/ncu"]) is None


def test_where_there_is_none_the_error_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler_core.collect.ncu_command.find", lambda: None)
    with pytest.raises(CounterError, match=r"ncu.*was not found on PATH.*developer\.nvidia\.com/nsight-compute"):
        run(["true"], METRICS, tmp_path / "x.csv")


# --- the command -----------------------------------------------------------------------------------------------------


def options(line: list[str]) -> dict[str, str]:
    return {a: b for a, b in pairwise(line) if a.startswith("--") and not b.startswith("--")}


def test_by_default_neither_caches_nor_clocks_are_touched() -> None:
    line = command("ncu", ["python", "train.py", "--csv"], METRICS, "out.csv")
    assert line[0] == "ncu" and line[-3:] == ["python", "train.py", "--csv"]
    found = options(line[:-3])
    assert found["--metrics"] == "gpu__time_duration.sum,dram__bytes_read.sum"
    assert found["--cache-control"] == found["--clock-control"] == "none"
    assert found["--replay-mode"] == "kernel"
    assert found["--rename-kernels"] == "off" and found["--print-units"] == "base"
    assert found["--page"] == "raw" and "--csv" in line and found["--log-file"] == "out.csv"
    assert found["--profile-from-start"] == "on" and found["--target-processes"] == "all"
    assert "--nvtx" not in line and "--export" not in line


def test_options_are_passed_on() -> None:
    line = command(
        "ncu",
        ["a.out"],
        METRICS,
        Path("r.ncu-rep"),
        replay="application",
        cache_control="all",
        clock_control="base",
        nvtx_include="step/",
        profile_from_start=False,
        target_processes="application-only",
    )
    found = options(line)
    assert found["--replay-mode"] == "application"
    assert (found["--cache-control"], found["--clock-control"]) == ("all", "base")
    assert "--nvtx" in line and found["--nvtx-include"] == "step/"
    assert found["--profile-from-start"] == "off" and found["--target-processes"] == "application-only"
    assert found["--export"] == "r.ncu-rep" and "--force-overwrite" in line and "--csv" not in line


def test_no_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="no metrics"):
        command("ncu", ["a.out"], [], "x.csv")


def test_inductor_compiles_in_the_process_and_numbers_are_english() -> None:
    assert environment({"A": "1", "LC_ALL": "de_DE.UTF-8"}) == {
        "A": "1",
        "LC_ALL": "C.UTF-8",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


# --- running it ------------------------------------------------------------------------------------------------------


def test_a_run_gives_the_table(tmp_path: Path) -> None:
    output = tmp_path / "x.csv"
    table = run(["my program", "--flag"], METRICS, output, ncu=stub(tmp_path), replay="application")
    assert table.rows["gpu__time_duration.sum"].tolist() == [5888.0]
    assert table.replay == "application" and table.path == str(output) and table.partial == ()
    assert (tmp_path / "arguments").read_text().splitlines() == command(
        "", ["my program", "--flag"], METRICS, output, replay="application"
    )[1:]
    assert "TORCHINDUCTOR_COMPILE_THREADS=1\n" in (tmp_path / "environment").read_text()


def test_the_environment_of_this_process_does_not_change(tmp_path: Path) -> None:
    before = dict(os.environ)
    run(["a.out"], METRICS, tmp_path / "x.csv", ncu=stub(tmp_path))
    assert dict(os.environ) == before


def test_a_program_that_fails_after_its_kernels_gives_a_partial_table(tmp_path: Path) -> None:
    table = run(["a.out"], METRICS, tmp_path / "x.csv", ncu=stub(tmp_path, then="exit 9"))
    assert len(table.rows) == 1
    assert table.partial == ("ncu, or the program in it, ended with status 9; kernels may be missing at the end.",)


def test_a_failed_run_shows_ncus_error_the_remedy_and_the_last_lines(tmp_path: Path) -> None:
    ncu = stub(tmp_path, "==ERROR== ERR_NVGPUCTRPERM - no permission\n", "seq 100; echo program said this >&2; exit 1")
    with pytest.raises(CounterError) as caught:
        run(["a.out"], METRICS, tmp_path / "x.csv", ncu=ncu)
    message = str(caught.value)
    assert message.startswith("ncu, or the program in it, ended with status 1: ")
    assert "ERR_NVGPUCTRPERM - no permission" in message
    assert message.count("NVreg_RestrictProfilingToAdminUsers=0") == 1
    assert message.endswith("99\n100\nprogram said this") and "\n50\n" not in message


def test_errors_that_ncu_only_prints_have_their_remedy_too(tmp_path: Path) -> None:
    ncu = executable(tmp_path / "ncu", "echo '==ERROR== Profiling failed because a driver resource was unavailable.'")
    with pytest.raises(CounterError, match=r"(?s)wrote no counters.*dcgmi profile --pause.*==ERROR== Profiling failed"):
        run(["a.out"], METRICS, tmp_path / "x.csv", ncu=ncu)


def test_what_an_earlier_run_left_is_not_read(tmp_path: Path) -> None:
    output = tmp_path / "x.csv"
    output.write_text(TABLE)
    with pytest.raises(CounterError, match="status 3"):
        run(["a.out"], METRICS, output, ncu=executable(tmp_path / "ncu", "exit 3"))
    assert not output.exists()


def test_an_ncu_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(CounterError, match="absent cannot be run"):
        run(["a.out"], METRICS, tmp_path / "x.csv", ncu=tmp_path / "absent")


def test_a_run_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    ncu = stub(tmp_path, then=f'sleep 60 & echo $! > "{tmp_path}/child"; echo still at it; wait')
    with pytest.raises(CounterError, match=r"(?s)did not end within 1 s.*fewer metrics.*still at it"):
        run(["a.out"], METRICS, tmp_path / "x.csv", ncu=ncu, timeout=1)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # ended, and waits for whoever adopted it
            return
        time.sleep(0.05)
    raise AssertionError("the child of ncu still runs")
