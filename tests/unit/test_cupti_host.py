"""CUPTI without a GPU: which library is loaded, the layout of its structs, names, passes, and errors that say what."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiler_core.collect.cupti import host, library
from profiler_core.collect.cupti.library import (
    CALLS,
    CountersBusy,
    CountersError,
    CountersNotPermitted,
    CountersUnavailable,
    CuptiError,
    Library,
    UnknownMetric,
    find,
)

TIME, INSTRUCTIONS = "gpu__time_duration.sum", "smsp__inst_executed.sum"


@pytest.fixture(scope="module")
def cupti() -> Library:
    try:
        return library.load()
    except CountersUnavailable as error:
        pytest.skip(f"needs nvidia-cuda-cupti: {error}")


# --- structs -----------------------------------------------------------------------------------------------


def test_every_struct_is_laid_out_as_the_headers_say(cupti: Library, tmp_path: Path) -> None:
    compiler, include = shutil.which("cc") or shutil.which("gcc"), Path(cupti.path).parents[1] / "include"
    if compiler is None:
        pytest.skip("needs a C compiler")
    if not (include / "cupti_range_profiler.h").is_file():
        pytest.skip(f"needs CUPTI's headers; there are none in {include}")
    # The headers want two things that the wheel lacks: the driver's types, and C++'s <string>, which they never use.
    (tmp_path / "cuda.h").write_text(
        "#pragma once\ntypedef int CUdevice; typedef struct CUctx_st *CUcontext; typedef struct CUfunc_st *CUfunction;"
    )
    (tmp_path / "string").write_text("")
    lines, expected = [], []
    for params in CALLS.values():
        name = params.__name__
        for field, _ in params._fields_:
            lines.append(f'printf("%zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            expected.append((name, field, getattr(params, field).offset, getattr(params, field).size))
        lines.append(f'printf("%zu 0\\n", (size_t){name}_STRUCT_SIZE);')
        expected.append((name, "STRUCT_SIZE", params.size(), 0))
    headers = ("cupti_target.h", "cupti_profiler_target.h", "cupti_profiler_host.h", "cupti_range_profiler.h")
    includes = "".join(f"#include <{name}>\n" for name in ("stdio.h", "cuda.h", "cupti_common.h", *headers))
    (tmp_path / "layout.c").write_text(includes + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n")
    program = tmp_path / "layout"
    subprocess.run([compiler, "-w", f"-I{tmp_path}", f"-I{include}", tmp_path / "layout.c", "-o", program], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert [(*e[:2], *f) for e, f in zip(expected, found, strict=True)] == expected


# --- which library -----------------------------------------------------------------------------------------


def empty(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def maps(tmp_path: Path, *libraries: str) -> Path:
    path = tmp_path / "maps"
    path.write_text("".join(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 42   {name}\n" for name in libraries))
    return path


def test_the_loaded_library_goes_before_any_on_disk_and_tritons_does_not_count(tmp_path: Path) -> None:
    on_disk = empty(tmp_path / "nvidia/cu13/lib/libcupti.so.13")
    triton = "/site/triton/backends/nvidia/lib/cupti/libcupti.so.12"
    loaded = maps(tmp_path, "/usr/lib/libc.so.6", triton, "/torch's own/libcupti.so.13")
    assert find(loaded, [str(tmp_path)]) == "/torch's own/libcupti.so.13"
    assert find(maps(tmp_path, triton), [str(tmp_path)]) == str(on_disk)


def test_the_library_is_of_the_cuda_that_torch_was_built_for(tmp_path: Path, monkeypatch) -> None:
    new = empty(tmp_path / "nvidia/cu13/lib/libcupti.so.13")
    old = empty(tmp_path / "nvidia/cuda_cupti/lib/libcupti.so.12")
    import torch

    for version, path in (("13.0", new), ("12.8", old), (None, new)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert find(maps(tmp_path), [str(tmp_path)]) == str(path)


def test_a_missing_library_is_an_error_that_names_the_places_searched(tmp_path: Path) -> None:
    (tmp_path / "nvidia/cu13").mkdir(parents=True)
    with pytest.raises(CountersUnavailable, match=f"{tmp_path}/nvidia/cu13/lib.*nvidia-cuda-cupti"):
        find(maps(tmp_path), [str(tmp_path)])


def test_a_file_that_is_no_library_and_one_without_the_functions_are_named(tmp_path: Path) -> None:
    with pytest.raises(CountersUnavailable, match=r"libcupti\.so\.13"):
        Library(str(empty(tmp_path / "libcupti.so.13")))
    if sys.platform == "linux":
        with pytest.raises(CountersUnavailable, match=r"has no cuptiRangeProfilerEnable.*12\.6"):
            Library("libc.so.6").call("cuptiRangeProfilerEnable")


# --- names, passes, errors ---------------------------------------------------------------------------------


def test_chips_are_known_without_a_gpu(cupti: Library) -> None:
    assert {"GA100", "GA102", "AD102", "GH100", "GB100", "GB202"} <= set(host.chips())
    with host.Host("GH100") as gh100:
        assert {"sm__warps_active", "l1tex__t_sector_hit_rate", "sm__throughput"} <= set(gh100.base_metrics())


def test_an_unknown_chip_is_named(cupti: Library) -> None:
    with pytest.raises(CountersUnavailable, match="'GX999'"):
        host.passes("GX999", [TIME])


def test_metrics_added_together_share_passes(cupti: Library) -> None:
    many = [TIME, "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct", "dram__bytes_read.sum", INSTRUCTIONS]
    alone = [host.passes("GH100", [name]) for name in many]
    assert host.passes("GH100", many) < sum(alone)
    with host.Host("GH100") as one_by_one:
        for name in many:
            one_by_one.add([name])
        assert host.image_passes(one_by_one.config_image()) > host.passes("GH100", many)


def test_bad_names_are_named_and_only_they(cupti: Library) -> None:
    names = [TIME, "dram__bytes_written.sum", "gpu__time_duration.nonsense", INSTRUCTIONS]
    assert host.unknown("GH100", names) == names[1:3]
    assert host.unknown("GB202", ["dram__bytes_read.sum", "dram__bytes_op_read.sum"]) == ["dram__bytes_read.sum"]
    with pytest.raises(UnknownMetric, match=r"GH100 has no metric 'dram__bytes_written.sum', 'gpu__time_duration.non"):
        host.config_image("GH100", names)


def test_a_refused_name_spoils_the_host_object_which_is_why_each_check_has_its_own(cupti: Library) -> None:
    with host.Host("GH100") as spoilt:
        with pytest.raises(CountersError):
            spoilt.add(["nonsense"])
        with pytest.raises(CountersError):
            spoilt.add([TIME])
    assert host.passes("GH100", [TIME]) == 1  # on another object


def test_asking_for_nothing_is_refused(cupti: Library) -> None:
    with pytest.raises(ValueError, match="no metrics"):
        host.config_image("GH100", [])


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (35, CountersNotPermitted, "NVreg_RestrictProfilingToAdminUsers=0.*CAP_SYS_ADMIN"),
        (40, CountersNotPermitted, "enable_profiling=1"),
        (26, CountersBusy, "dcgmi profile --pause"),
        (39, CountersBusy, "torch.profiler"),
        (33, CountersUnavailable, "virtual GPU"),
        (43, CountersUnavailable, "MIG"),
        (27, CountersUnavailable, "does not support"),
        (999, CuptiError, "CUPTI_ERROR_UNKNOWN"),
    ],
)
def test_a_result_code_becomes_an_error_with_a_remedy(cupti: Library, code: int, kind: type, said: str) -> None:
    error = library._error("cuptiRangeProfilerEnable", code, cupti._describe(code))
    assert type(error) is kind and isinstance(error, CountersError)
    with pytest.raises(kind, match=said):
        raise error
    assert "cuptiRangeProfilerEnable" in str(error) and "CUPTI_ERROR_" in str(error) and str(code) in str(error)
