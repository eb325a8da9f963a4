"""Finds Nsight Systems, records with it, and turns its reports into SQLite."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from profiler_core.collect import processes

# Where NVIDIA's installers and the distributions put it; nsight-compute ships a copy.
PLACES = (
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/target-linux-*/nsys",
)
MISSING = (
    "Nsight Systems (nsys) was not found on PATH or where its installers put it. Install it from "
    "https://developer.nvidia.com/nsight-systems (package nsight-systems-cli of NVIDIA's repositories), or put nsys "
    "on PATH"
)
_TAIL = 15  # lines of a tool's output that an error shows
_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[.\d]*): cannot open shared object file")


class NsysError(RuntimeError):
    """nsys is not there or failed; the message has its last lines and the remedy."""


def find(places: Sequence[str] = PLACES) -> Path | None:
    """nsys: the one on PATH, else the newest version in ``places`` (absolute glob patterns), else None."""
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    found = [path for pattern in places for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
    return max(found, key=_version, default=None)


def find_importer(nsys: Path) -> Path | None:
    """The QdstrmImporter that belongs to ``nsys``: its host folder lies beside nsys's own."""
    real = nsys.resolve()
    for folder in (real.parent, real.parent.parent):
        for pattern in ("host-linux-*/QdstrmImporter", "linux-desktop-*/QdstrmImporter"):
            for importer in sorted(folder.glob(pattern)):
                if os.access(importer, os.X_OK):
                    return importer
    return None


def profile_command(
    nsys: Path, output: Path, argv: Sequence[str], *, graph_nodes: bool = True, capture_range: str = ""
) -> list[str]:
    """The command that runs ``argv`` under nsys and leaves the report at ``output``.nsys-rep.

    No CPU sampling and no context switches: with them a report of seconds has gigabytes. ``graph_nodes``: kernels
    of a CUDA graph one by one, which attribution needs; it costs some overhead at each node. ``capture_range``:
    "cudaProfilerApi" records only between cudaProfilerStart and cudaProfilerStop; the program then runs on.
    """
    return [
        *(str(nsys), "profile", "-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx"),
        f"--cuda-graph-trace={'node' if graph_nodes else 'graph'}",
        *((f"--capture-range={capture_range}", "--capture-range-end=stop") if capture_range else ()),
        *("--force-overwrite", "true", "-o", str(output)),
        *argv,
    ]


def record(
    argv: Sequence[str],
    output: Path,
    *,
    nsys: Path | None = None,
    graph_nodes: bool = True,
    capture_range: str = "",
    library_path: str | None = None,
    timeout: float | None = None,
) -> Path:
    """Run ``argv`` under nsys; ``output``.nsys-rep and ``output``.sqlite are written (over what is there), the path
    of the latter is returned. ``output`` is a path without a suffix.

    Where nsys cannot import its own raw file (it leaves ``output``.qdstrm), QdstrmImporter is run on it.
    ``library_path`` is put before LD_LIBRARY_PATH for importing and exporting alone, never for the program.
    ``timeout`` (seconds) is for the program; its whole process group is then ended. Raises NsysError, also where
    the program itself fails.
    """
    nsys = nsys or _required()
    raw, report, sqlite = (Path(f"{output}{suffix}") for suffix in (".qdstrm", ".nsys-rep", ".sqlite"))
    for stale in (raw, report, sqlite):  # what an earlier run left must not pass for this one's
        stale.unlink(missing_ok=True)
    command = profile_command(nsys, output, argv, graph_nodes=graph_nodes, capture_range=capture_range)
    status, said = _run(command, timeout=timeout)
    if not report.exists() and raw.exists():
        # nsys's status then tells of the failed import and hides the program's.
        import_raw(raw, report, nsys=nsys, library_path=library_path)
    elif status:
        raise _failure(f"nsys profile, or the program in it, ended with status {status}", said)
    elif not report.exists():
        raise _failure(f"nsys profile wrote no report ({report})", said)
    return export(report, sqlite, nsys=nsys, library_path=library_path)


def import_raw(raw: Path, report: Path, *, nsys: Path | None = None, library_path: str | None = None) -> Path:
    """Make the report ``report`` (.nsys-rep) from a raw recording (.qdstrm)."""
    nsys = nsys or _required()
    importer = find_importer(nsys)
    if importer is None:
        raise NsysError(
            f"{nsys} could not import {raw} and has no QdstrmImporter beside it. Install the whole of Nsight Systems "
            f"(not the target part alone), or import it elsewhere: QdstrmImporter -i {raw.name} -o {report.name}"
        )
    report.unlink(missing_ok=True)  # the importer does not overwrite
    status, said = _run([str(importer), "-i", str(raw), "-o", str(report)], library_path=library_path)
    if status or not report.exists():
        raise _failure(f"{importer.name} could not import {raw} (status {status})", said)
    return report


def export(report: Path, sqlite: Path, *, nsys: Path | None = None, library_path: str | None = None) -> Path:
    """Write the report ``report`` as SQLite to ``sqlite``, over what is there."""
    nsys = nsys or _required()
    command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(sqlite), str(report)]
    status, said = _run(command, library_path=library_path)
    if status or not sqlite.exists() or not sqlite.stat().st_size:
        raise _failure(f"nsys export could not write {sqlite} from {report} (status {status})", said)
    return sqlite


def _required() -> Path:
    nsys = find()
    if nsys is None:
        raise NsysError(MISSING + ".")
    return nsys


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(path)))


def _run(command: Sequence[str], *, library_path: str | None = None, timeout: float | None = None) -> tuple[int, str]:
    """Exit status and the last lines of what was printed."""
    environment: Mapping[str, str] | None = None
    if library_path:
        folders = (library_path, os.environ.get("LD_LIBRARY_PATH", ""))
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folder for folder in folders if folder)}
    try:
        ended = processes.run(command, environment=environment, timeout=timeout)
    except OSError as error:
        raise NsysError(f"{command[0]} cannot be run: {error.strerror}. {MISSING}.") from error
    said = "\n".join(ended.said.splitlines()[-_TAIL:])
    if ended.late:
        raise _failure(f"{Path(command[0]).name} {command[1]} did not end within {timeout:g} s and was ended", said)
    return ended.status, said


def _failure(what: str, said: str) -> NsysError:
    library = _LIBRARY.search(said)
    remedy = ""
    if library:
        package = " (apt-get install libdw1, or elfutils-libs)" if library[1].startswith("libdw.") else ""
        remedy = f" Install {library[1]}{package}, or name the folder that has it as library_path."
    return NsysError(f"{what}.{remedy} Its last lines:\n{said or '(nothing)'}")
