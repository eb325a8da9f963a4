"""Public and recorded files of Nsight Compute: what is expected of each, against what the reader got."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from profiler_core.collect.ncu import read
from profiler_core.counter_table import CounterError, CounterTable

SOL = "GPU Speed Of Light Throughput"

# file, expected launches, names, cells that are not available, expected values (row, metric, value)
DETAILS = [
    (
        "rtx5090_dsocr_gemv_details.csv", 1, 1, 3,
        [
            (0, "dram__bytes_read.sum", 2.33e6),
            (0, "dram__bytes_write.sum", 0.0),
            (0, "gpu__time_duration.sum", 6750.0),
            (0, "sm__throughput.avg.pct_of_peak_sustained_elapsed", 9.15),
            (0, "gpc__cycles_elapsed.max", 13485.0),
            (0, "sm__cycles_active.avg", 9495.42),
            (0, "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", 19.66),
            (0, "dram__bytes.sum.per_second", 345.14e9),
            (0, f"{SOL}: DRAM Frequency", 13.72e9),
            (0, "l1tex__t_sector_hit_rate.pct", 40.73),
            (0, "lts__t_sector_hit_rate.pct", 27.66),
            (0, "smsp__issue_active.avg.pct_of_peak_sustained_active", 12.06),
            (0, "sm__maximum_warps_per_active_cycle_pct", 16.67),
            (0, "sm__warps_active.avg.pct_of_peak_sustained_active", 11.32),
            (0, "Occupancy: Block Limit Barriers", 24.0),
        ],
    ),
    (
        "rtx5090_dsocr_k3_details.csv", 1, 1, 3,
        [
            (0, "dram__bytes_read.sum", 3.35e6),
            (0, "gpu__time_duration.sum", 23420.0),
            (0, "sm__ops_path_tensor_src_bf16_dst_fp32.sum", 1275068416.0),
            (0, "gpc__cycles_elapsed.max", 46970.0),
            (0, "dram__bytes.sum.per_second", 143.20e9),
            (0, "launch__occupancy_limit_registers", 5.0),
        ],
    ),
    (
        "rtx5090_dsocr_k3_section_occupancy.csv", 1, 1, 0,
        [
            (0, "Occupancy: Max Cluster Size", 8.0),
            (0, "sm__maximum_warps_avg_per_active_cycle", 8.0),
            (0, "sm__warps_active.avg.per_cycle_active", 7.29),
        ],
    ),
    (
        "transcribed_european_locale_cc89.csv", 3, 2, 0,
        [
            (0, "gpu__time_duration.sum", 117344.0),
            (1, "gpu__time_duration.sum", 120416.0),
            (2, "gpu__time_duration.sum", 14912.0),
            (0, "dram__bytes.sum", 27595520.0),
            (1, "dram__bytes.sum", 30818944.0),
            (2, "dram__bytes.sum", 2348544.0),
            (0, "sm__throughput.avg.pct_of_peak_sustained_elapsed", 65.77),
            (1, "sm__throughput.avg.pct_of_peak_sustained_elapsed", 65.63),
            (2, "sm__throughput.avg.pct_of_peak_sustained_elapsed", 6.70),
            (2, "launch__block_size", 512.0),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("file", "launches", "names", "missing", "values"), DETAILS, ids=lambda v: str(v)[:40])
def test_details_pages(
    shared: Path, file: str, launches: int, names: int, missing: int, values: list[tuple[int, str, float]]
) -> None:
    table = read(shared / "corpus" / "ncu" / file)
    assert len(table.rows) == launches and table.rows["name"].nunique() == names
    assert int(table.rows[table.metrics].isna().to_numpy().sum()) == missing
    got = [(row, metric, float(table.rows[metric].iloc[row])) for row, metric, _ in values]
    assert got == [(row, metric, pytest.approx(value)) for row, metric, value in values]
    assert table.partial == table.notes == ()


# file, row: name's length, process, id, grid, block
LAUNCHES = [
    ("rtx5090_dsocr_gemv_details.csv", 0, 303, 1740670, 0, (224, 1, 1), (32, 4, 1)),
    ("rtx5090_dsocr_k3_details.csv", 0, 90, 1741703, 0, (152, 4, 1), (128, 1, 1)),
    ("rtx5090_dsocr_k3_section_occupancy.csv", 0, 90, 1741703, 0, (152, 4, 1), (128, 1, 1)),
    ("transcribed_european_locale_cc89.csv", 0, 22, 143016, 0, (128, 1, 1), (512, 1, 1)),
    ("transcribed_european_locale_cc89.csv", 2, 30, 143016, 2, (1, 123, 1), (512, 1, 1)),
]


@pytest.mark.parametrize(("file", "row", "length", "process", "identifier", "grid", "block"), LAUNCHES)
def test_launches_of_details_pages(
    shared: Path, file: str, row: int, length: int, process: int, identifier: int, grid: tuple, block: tuple
) -> None:
    found = read(shared / "corpus" / "ncu" / file).rows.iloc[row]
    assert (len(found["name"]), found["process"], found["id"]) == (length, process, identifier)
    assert (found["grid_x"], found["grid_y"], found["grid_z"]) == grid
    assert (found["block_x"], found["block_y"], found["block_z"]) == block


@pytest.mark.parametrize(
    ("file", "quoted", "remedy"),
    [
        ("failed_ERR_NVGPUCTRPERM.csv", "does not have permission to access", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("failed_driver_resource.csv", "a driver resource was unavailable", "dcgmi profile --pause"),
    ],
)
def test_failed_runs_are_errors_with_the_remedy(shared: Path, file: str, quoted: str, remedy: str) -> None:
    with pytest.raises(CounterError) as caught:
        read(shared / "corpus" / "ncu" / file)
    assert file in str(caught.value) and quoted in str(caught.value) and remedy in str(caught.value)


# --- the captures ----------------------------------------------------------------------------------------------------

# file, kernels, warnings, sums over all kernels of the metrics in SUMMED
SUMMED = ["gpu__time_duration.sum", "dram__bytes_read.sum", "sm__inst_executed_pipe_tensor.sum"]
CAPTURES = [
    ("h200_sdpa/ncu_raw.csv", 22, 1, (815872.0, 311989760.0, 12599296.0)),
    ("h200_block/ncu_raw_base_units.csv", 42, 0, (322656.0, 79830528.0, 516096.0)),
]


def plain(file: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows as the csv module sees them, without the log and the units."""
    with file.open(newline="") as lines:
        header, _, *rows = csv.reader(line for line in lines if not line.startswith("=="))
    return header, rows


@pytest.mark.parametrize(("file", "kernels", "warnings", "sums"), CAPTURES)
def test_every_cell_of_a_raw_page(
    shared: Path, file: str, kernels: int, warnings: int, sums: tuple[float, ...]
) -> None:
    """The captures were printed in English and in base units, so that a cell is its digits without commas."""
    table = read(shared / "captures" / file)
    header, rows = plain(shared / "captures" / file)
    assert len(header) == 290 and len(rows) == kernels == len(table.rows)
    assert table.rows["name"].tolist() == [row[4] for row in rows]
    assert table.passes == 3 and table.partial == ()
    assert sum(note.startswith("ncu warned") for note in table.notes) == warnings
    text = []
    for column, metric in enumerate(header[11:], 11):
        printed = [row[column].replace(",", "") for row in rows]
        if metric not in table.metrics:
            text.append(metric)
            continue
        expected = [float(cell) if cell else math.nan for cell in printed]
        assert table.rows[metric].tolist() == pytest.approx(expected, rel=1e-15, nan_ok=True), metric
    assert text == [
        "device__attribute_confidential_computing_mode",
        "device__attribute_display_name",
        "launch__cluster_scheduling_policy",
        "launch__func_cache_config",
        "launch__tpc_enabled",
    ]
    assert tuple(float(table.rows[metric].sum()) for metric in SUMMED) == sums


ASKED_FOR = [
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__maximum_warps_per_active_cycle_pct",
    "launch__waves_per_multiprocessor",
]


@pytest.fixture(scope="module")
def sdpa(shared: Path) -> tuple[CounterTable, list[str], list[list[str]]]:
    file = shared / "captures" / "h200_sdpa" / "ncu_raw.csv"
    return read(file), *plain(file)


@pytest.mark.parametrize("metric", ASKED_FOR)
@pytest.mark.parametrize("row", range(22))
def test_metrics_of_the_sdpa_capture(
    sdpa: tuple[CounterTable, list[str], list[list[str]]], row: int, metric: str
) -> None:
    table, header, rows = sdpa
    assert table.rows[metric].iloc[row] == float(rows[row][header.index(metric)].replace(",", ""))


def test_launches_of_the_sdpa_capture(shared: Path) -> None:
    table = read(shared / "captures" / "h200_sdpa" / "ncu_raw.csv")
    assert table.rows["id"].tolist() == list(range(22)) and set(table.rows["process"]) == {1576}
    for axis in "xyz":
        assert table.rows[f"grid_{axis}"].tolist() == table.rows[f"launch__grid_dim_{axis}"].tolist()
        assert table.rows[f"block_{axis}"].tolist() == table.rows[f"launch__block_dim_{axis}"].tolist()
    assert {table.units[m] for m in ("gpu__time_duration.sum", "dram__bytes_read.sum")} == {"ns", "byte"}
