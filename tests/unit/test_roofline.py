"""Ceilings are measured, kept, and measured again where the file is corrupt; settings stay as they were."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_core import roofline
from profiler_core.roofline import (
    Ceilings,
    CeilingsCorrupt,
    ceilings,
    matrix_units,
    measure_ceilings,
    tf32_matmul,
)

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Ceilings]:
    """Small buffers in place of the default ones; the list grows by one for each measurement made."""
    made: list[Ceilings] = []
    real = measure_ceilings
    monkeypatch.setattr(roofline, "_SECONDS_PER_RATE", 0.0)

    def measure(device: torch.device) -> Ceilings:
        made.append(real(device, copy_bytes=1 << 16, sizes={"float32": 64}, repeats=2))
        return made[-1]

    monkeypatch.setattr(roofline, "measure_ceilings", measure)
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SECONDS_PER_RATE", 0.0)


def stored(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


@pytest.mark.usefixtures("quick")
def test_the_rates_asked_for_are_measured_and_positive() -> None:
    found = measure_ceilings(CPU, copy_bytes=1 << 20, sizes={"float32": 64, "bfloat16": 64}, repeats=1)
    assert set(found.flops_per_s) == {"float32", "bfloat16"}
    assert found.copy_bytes_per_s > 0 and min(found.flops_per_s.values()) > 0
    assert found.environment["threads"] == torch.get_num_threads()


@pytest.mark.usefixtures("quick")
def test_a_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_best_seconds", lambda fn, device, repeats: 1.0)
    found = measure_ceilings(CPU, copy_bytes=4096, sizes={"float32": 16})
    assert found.copy_bytes_per_s == 2 * 4096
    assert found.flops_per_s == {"float32": 2 * 16**3}


@pytest.mark.usefixtures("quick")
def test_measuring_leaves_the_callers_random_state_alone() -> None:
    before = torch.get_rng_state()
    measure_ceilings(CPU, copy_bytes=1 << 12, sizes={"float32": 16}, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_call_reads_what_the_first_one_kept(small: list[Ceilings], tmp_path: Path) -> None:
    first = ceilings(CPU, tmp_path / "ceilings")
    assert ceilings(CPU, tmp_path / "ceilings") == first
    assert len(small) == 1


def test_another_number_of_threads_is_another_measurement(small: list[Ceilings], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    ceilings(CPU, tmp_path)
    try:
        torch.set_num_threads(threads + 1)
        ceilings(CPU, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(small) == 2
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_without_a_store_nothing_is_kept(small: list[Ceilings]) -> None:
    ceilings(CPU, None)
    ceilings(CPU, None)
    assert len(small) == 2


def _without(name: str) -> Any:
    return lambda data: {key: item for key, item in data.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: None, "top level"),
        (_without("copy_bytes_per_s"), "copy_bytes_per_s"),
        (lambda data: {**data, "copy_bytes_per_s": -1.0}, "copy_bytes_per_s"),
        (lambda data: {**data, "flops_per_s": {"float32": "fast"}}, "float32"),
        (lambda data: {**data, "schema_version": 99}, "schema_version"),
    ],
)
def test_a_corrupt_file_is_set_aside_and_measured_again(
    small: list[Ceilings], tmp_path: Path, damage: Any, says: str
) -> None:
    ceilings(CPU, tmp_path)
    path = stored(tmp_path)
    broken = json.dumps(damage(json.loads(path.read_text())))
    path.write_text(broken)
    with pytest.warns(RuntimeWarning, match=says):
        found = ceilings(CPU, tmp_path)
    assert found == small[1]
    assert path.with_name(path.name + ".corrupt").read_text() == broken
    assert ceilings(CPU, tmp_path) == found


@pytest.mark.parametrize("content", [b"", b'{"schema_version": 1, "dev', b"\xff\xfe\x00"])
def test_a_torn_file_is_measured_again(small: list[Ceilings], tmp_path: Path, content: bytes) -> None:
    ceilings(CPU, tmp_path)
    stored(tmp_path).write_bytes(content)
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert ceilings(CPU, tmp_path) == small[1]


def test_a_store_that_cannot_be_written_costs_one_warning_and_no_second_measurement(
    small: list[Ceilings], tmp_path: Path
) -> None:
    store = tmp_path / "file"
    store.write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert ceilings(CPU, store) == small[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ceilings(CPU, store) == small[0] and len(small) == 1
        assert ceilings(CPU, store, again=True) == small[1] and ceilings(CPU, store) == small[1]
        higher = roofline.raised(CPU, store, replace(small[1], copy_bytes_per_s=1e15))
        assert ceilings(CPU, store) == higher and higher.copy_bytes_per_s == 1e15


def test_what_others_keep_in_a_store_is_read_though_it_cannot_be_written(small: list[Ceilings], tmp_path: Path) -> None:
    kept = ceilings(CPU, tmp_path)
    lock = Path(f"{stored(tmp_path)}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()  # no lock can be made, whoever runs this
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ceilings(CPU, tmp_path) == kept and len(small) == 1


def test_no_temporary_file_is_left(small: list[Ceilings], tmp_path: Path) -> None:
    ceilings(CPU, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".lock"}


def test_ceilings_come_back_from_json_equal(small: list[Ceilings]) -> None:
    found = ceilings(CPU, None)
    assert Ceilings.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(CeilingsCorrupt, match="measured"):
        Ceilings.from_json(_without("measured")(found.to_json()))


def _settings() -> tuple[str, str, Any]:
    try:
        old: Any = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "mixed"
    return torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision, old


@pytest.fixture
def matmul_settings() -> Any:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


def _set_legacy() -> None:
    torch.set_float32_matmul_precision("high")


def _set_new() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _set_inherited() -> None:
    torch.backends.fp32_precision = "tf32"


@pytest.mark.usefixtures("matmul_settings")
@pytest.mark.parametrize("setting", [lambda: None, _set_legacy, _set_new, _set_inherited])
@pytest.mark.parametrize("enabled", [True, False])
def test_tf32_is_switched_for_the_block_only_even_when_it_raises(setting: Any, enabled: bool) -> None:
    setting()
    before = _settings()
    with pytest.raises(KeyError), tf32_matmul(enabled):
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if enabled else "ieee")
        raise KeyError
    assert _settings() == before


@pytest.mark.usefixtures("matmul_settings")
def test_an_inherited_setting_stays_inherited() -> None:
    torch.backends.fp32_precision = "tf32"
    with tf32_matmul(False):
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_cpu_has_matrix_units_where_its_flags_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False}, raising=False
    )
    monkeypatch.setattr(roofline, "_cpuinfo_flags", lambda: {"avx2"})
    assert matrix_units(CPU) == set()
    monkeypatch.setattr(roofline, "_cpuinfo_flags", lambda: {"avx2", "amx_bf16"})
    assert matrix_units(CPU) == {"bfloat16"}


@pytest.mark.parametrize(
    ("capability", "units"), [((7, 5), set()), ((9, 0), {"tf32", "bfloat16", "float16"})]
)
def test_a_gpu_has_matrix_units_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], units: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert matrix_units(torch.device("cuda")) == units
