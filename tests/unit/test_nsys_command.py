from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import sys
import time
from pathlib import Path

import pytest

from profiler_core.collect import nsys, nsys_command
from profiler_core.collect.nsys_command import NsysError

# Leaves what nsys leaves: a report where it can import its raw file, else the raw file. MODE says how it fails.
STUB = r"""#!/bin/sh
mode=$(cat "$(dirname "$0")/mode" 2>/dev/null)
here=$(dirname "$0")
verb=$1
if [ "$verb" = export ]; then
    echo "export $LD_LIBRARY_PATH" >> "$here/calls"
    while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
    [ "$mode" = bad-export ] && { echo "ERROR: the report was made by a newer version"; exit 1; }
    [ "$mode" = silent-export ] && exit 0
    cp "$here/ready.sqlite" "$out"
    exit 0
fi
echo "profile $LD_LIBRARY_PATH" >> "$here/calls"
while [ "$1" != -o ]; do shift; done
report=$2.nsys-rep
shift 2
"$@"
status=$?
case $mode in
raw) touch "${report%.nsys-rep}.qdstrm"; echo "Importer error status: Importation failed."; exit 1 ;;
nothing) echo "No reports were generated" ;;
*) touch "$report" ;;
esac
exit $status
"""
IMPORTER = r"""#!/bin/sh
here=$(dirname "$0")/../target-linux-x64
echo "import $LD_LIBRARY_PATH" >> "$here/calls"
if [ -e "$here/no-libdw" ] && [ -z "$LD_LIBRARY_PATH" ]; then
    echo "error while loading shared libraries: libdw.so.1: cannot open shared object file: No such file or directory"
    exit 127
fi
[ -e "$4" ] && { echo "the output exists"; exit 1; }
[ -e "$2" ] && touch "$4"
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys with its importer, not on PATH."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    tool = script(tmp_path / "nsight" / "target-linux-x64" / "nsys", STUB)
    script(tmp_path / "nsight" / "host-linux-x64" / "QdstrmImporter", IMPORTER)
    with sqlite3.connect(tool.parent / "ready.sqlite") as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        connection.execute("INSERT INTO StringIds VALUES (1, 'add')")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER)")
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 3, 1)")
    connection.close()
    return tool


def set_mode(stub: Path, mode: str) -> None:
    (stub.parent / "mode").write_text(mode)


def calls(stub: Path) -> list[str]:
    return [line.strip() for line in (stub.parent / "calls").read_text().splitlines()]


def test_nsys_on_path_comes_first(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = script(tmp_path / "other" / "2099.1" / "nsys", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(stub.parent))
    assert nsys_command.find([f"{other.parent.parent}/*/nsys"]) == stub


def test_the_newest_version_is_taken_of_those_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    systems, compute = f"{tmp_path}/systems/*/bin/nsys", f"{tmp_path}/compute/*/host/nsys"
    assert nsys_command.find([systems, compute]) is None
    for version in ("2024.6.2", "2025.1.3", "2025.10.1", "2025.9.1"):
        script(tmp_path / "systems" / version / "bin" / "nsys", "")
    assert nsys_command.find([systems, compute]) == tmp_path / "systems" / "2025.10.1" / "bin" / "nsys"
    newest = script(tmp_path / "compute" / "2026.1.0" / "host" / "nsys", "")
    assert nsys_command.find([systems, compute]) == newest
    newest.chmod(0o600)
    assert nsys_command.find([systems, compute]) != newest


@pytest.mark.parametrize("folder", ["host-linux-x64", "linux-desktop-glibc_2_11_3-x64"])
def test_the_importer_is_found_beside_the_nsys_that_a_link_leads_to(tmp_path: Path, folder: str) -> None:
    real = script(tmp_path / "nsight" / "target-linux-x64" / "nsys", "")
    link = tmp_path / "bin" / "nsys"
    link.parent.mkdir()
    link.symlink_to(real)
    assert nsys_command.find_importer(link) is None
    importer = script(tmp_path / "nsight" / folder / "QdstrmImporter", "")
    assert nsys_command.find_importer(link) == importer


def test_profiling_is_light_and_sees_the_kernels_of_graphs() -> None:
    command = nsys_command.profile_command(Path("/n/nsys"), Path("/o/run"), ["python", "-o", "x.py"])
    assert command == [
        *("/n/nsys", "profile", "-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx", "--cuda-graph-trace=node"),
        *("--force-overwrite", "true", "-o", "/o/run", "python", "-o", "x.py"),
    ]


def test_a_capture_range_leaves_the_program_running_after_it() -> None:
    command = nsys_command.profile_command(
        Path("nsys"), Path("o"), ["x"], graph_nodes=False, capture_range="cudaProfilerApi"
    )
    assert "--cuda-graph-trace=graph" in command
    assert command[command.index("--capture-range=cudaProfilerApi") + 1] == "--capture-range-end=stop"


def test_recording_runs_the_program_and_leaves_a_readable_export(stub: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    exported = nsys_command.record(["touch", str(ran)], tmp_path / "run.v1", nsys=stub)
    assert ran.exists()
    assert exported == tmp_path / "run.v1.sqlite"
    assert (tmp_path / "run.v1.nsys-rep").exists()
    assert list(nsys.read(exported).kernels["name"]) == ["add"]
    assert calls(stub) == ["profile", "export"]


def test_a_raw_recording_is_imported_where_nsys_could_not(stub: Path, tmp_path: Path) -> None:
    set_mode(stub, "raw")
    exported = nsys_command.record(["true"], tmp_path / "run", nsys=stub)
    assert len(nsys.read(exported).kernels) == 1
    assert calls(stub) == ["profile", "import", "export"]


def test_the_library_path_is_for_importing_and_exporting_alone(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(stub, "raw")
    (stub.parent / "no-libdw").touch()
    nsys_command.record(["true"], tmp_path / "run", nsys=stub, library_path="/libs")
    assert calls(stub) == ["profile", "import /libs", "export /libs"]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cuda")
    nsys_command.record(["true"], tmp_path / "run", nsys=stub, library_path="/libs")
    assert calls(stub)[3:] == ["profile /cuda", "import /libs:/cuda", "export /libs:/cuda"]


def test_a_missing_libdw_is_named_with_its_package(stub: Path, tmp_path: Path) -> None:
    set_mode(stub, "raw")
    (stub.parent / "no-libdw").touch()
    with pytest.raises(NsysError, match=r"(?s)QdstrmImporter could not import.*Install libdw\.so\.1 .*libdw1.*loading"):
        nsys_command.record(["true"], tmp_path / "run", nsys=stub)


def test_without_an_importer_the_error_says_where_one_is(stub: Path, tmp_path: Path) -> None:
    set_mode(stub, "raw")
    (stub.parent.parent / "host-linux-x64" / "QdstrmImporter").unlink()
    with pytest.raises(NsysError, match=r"no QdstrmImporter beside it.*QdstrmImporter -i run\.qdstrm -o run\.nsys-rep"):
        nsys_command.record(["true"], tmp_path / "run", nsys=stub)


def test_a_program_that_fails_is_an_error_that_shows_its_last_lines(stub: Path, tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-c",
        "print('first'); [print(i) for i in range(100)]; raise SystemExit('out of memory')",
    ]
    with pytest.raises(NsysError, match=r"(?s)ended with status 1.*99\nout of memory") as caught:
        nsys_command.record(program, tmp_path / "run", nsys=stub)
    assert "first" not in str(caught.value)
    assert not (tmp_path / "run.sqlite").exists()


def test_no_report_is_an_error_and_an_old_one_does_not_stand_in(stub: Path, tmp_path: Path) -> None:
    nsys_command.record(["true"], tmp_path / "run", nsys=stub)
    set_mode(stub, "nothing")
    with pytest.raises(NsysError, match=r"(?s)wrote no report.*No reports were generated"):
        nsys_command.record(["true"], tmp_path / "run", nsys=stub)
    assert not (tmp_path / "run.sqlite").exists()


@pytest.mark.parametrize(("mode", "said"), [("bad-export", "made by a newer version"), ("silent-export", "nothing")])
def test_an_export_that_fails_is_an_error(stub: Path, tmp_path: Path, mode: str, said: str) -> None:
    set_mode(stub, mode)
    with pytest.raises(NsysError, match=rf"(?s)nsys export could not write .*run\.sqlite.*{said}"):
        nsys_command.record(["true"], tmp_path / "run", nsys=stub)


def test_a_program_that_does_not_end_is_ended_with_all_that_it_started(stub: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    with pytest.raises(NsysError, match=r"nsys profile did not end within 1 s"):
        nsys_command.record(program, tmp_path / "run", nsys=stub, timeout=1)
    deadline = time.monotonic() + 60  # the system takes a moment to take the killed ones away
    while any(str(tmp_path) in command for command in running()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [command for command in running() if str(tmp_path) in command]


def running() -> list[str]:
    """The command lines of all processes; that of one that has ended, but was not waited for, is empty."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            commands.append(file.read_bytes().decode("utf-8", "replace"))
    return commands


def test_without_nsys_the_error_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_command, "find", lambda: None)
    with pytest.raises(NsysError, match=r"not found on PATH.*developer\.nvidia\.com/nsight-systems"):
        nsys_command.record(["true"], tmp_path / "run")


def test_an_nsys_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NsysError, match=r"absent cannot be run: No such file or directory"):
        nsys_command.export(tmp_path / "x.nsys-rep", tmp_path / "x.sqlite", nsys=tmp_path / "absent")


def test_the_environment_of_this_process_is_left_alone(stub: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    nsys_command.record(["true"], tmp_path / "run", nsys=stub, library_path="/libs")
    assert dict(os.environ) == before
