from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_core.collect.ncu import parse, read
from profiler_core.collect.ncu_text import base_unit, metric_name, number
from profiler_core.counter_table import CounterError

FIXED = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
]
DETAILS = [*FIXED, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
RULES = ["Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup"]


def csv(*rows: list[str] | str) -> str:
    """Rows quoted as ncu does; a string is a line of its own."""
    return "".join((row if isinstance(row, str) else ",".join(map(quoted, row))) + "\n" for row in rows)


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


def launch(name: str = "k", identifier: int = 0, process: int = 7, grid: str = "(4, 2, 1)") -> list[str]:
    return [str(identifier), str(process), "python", "127.0.0.1", name, "1", "13", "(32, 4, 1)", grid, "0", "9.0"]


def raw(metrics: dict[str, str], *rows: list[str]) -> str:
    """A raw page with ``metrics`` (name -> unit) and the rows' values."""
    return csv([*FIXED, *metrics], [""] * len(FIXED) + list(metrics.values()), *rows)


def detail(metric: str, unit: str, value: str, section: str = "Command line profiler metrics", **which: Any) -> str:
    return csv([*launch(**which), section, metric, unit, value]).rstrip("\n") + ","


def test_a_raw_page_has_a_row_a_launch_and_a_column_a_metric() -> None:
    table = parse(
        raw(
            {"gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "byte"},
            [*launch("first"), "5,888", "8,399,616"],
            [*launch("second", 1, grid="(2048, 1, 1)"), "1,205.50", "0"],
        ),
        "x.csv",
    )
    assert table.metrics == ["gpu__time_duration.sum", "dram__bytes_read.sum"]
    assert table.rows["name"].tolist() == ["first", "second"]
    assert table.rows["id"].tolist() == [0, 1]
    assert table.rows["gpu__time_duration.sum"].tolist() == [5888.0, 1205.5]
    assert table.rows["dram__bytes_read.sum"].tolist() == [8399616.0, 0.0]
    assert table.units == {"gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "byte"}
    first = table.rows.iloc[0]
    assert (first.process, first.device, first.stream, first.context) == (7, 0, 13, 1)
    assert (first.grid_x, first.grid_y, first.grid_z) == (4, 2, 1)
    assert (first.block_x, first.block_y, first.block_z) == (32, 4, 1)
    assert (table.source, table.path, table.partial) == ("ncu", "x.csv", ())


@pytest.mark.parametrize(
    ("unit", "base", "factor"),
    [
        ("ns", "ns", 1.0), ("nsecond", "ns", 1.0), ("us", "ns", 1e3), ("usecond", "ns", 1e3), ("ms", "ns", 1e6),
        ("msecond", "ns", 1e6), ("s", "ns", 1e9), ("second", "ns", 1e9),
        ("byte", "byte", 1.0), ("Kbyte", "byte", 1e3), ("Mbyte", "byte", 1e6), ("Gbyte", "byte", 1e9),
        ("Gbyte/s", "byte/s", 1e9), ("Mbyte/second", "byte/s", 1e6), ("byte/ns", "byte/s", 1e9),
        ("Kbyte/block", "byte/block", 1e3), ("hz", "hz", 1.0), ("Mhz", "hz", 1e6), ("Ghz", "hz", 1e9),
        ("cycle/nsecond", "hz", 1e9), ("cycle/second", "hz", 1.0), ("%", "%", 1.0), ("inst/cycle", "inst/cycle", 1.0),
        ("register/thread", "register/thread", 1.0), ("", "", 1.0), ("block", "block", 1.0),
    ],
)  # fmt: skip
def test_units_become_base_units(unit: str, base: str, factor: float) -> None:
    assert base_unit(unit) == (base, factor)


def test_units_differ_from_row_to_row_on_the_details_page() -> None:
    text = csv(DETAILS)
    for i, (unit, value) in enumerate([("byte", "512"), ("Kbyte", "2.05"), ("Mbyte", "3.35"), ("", "n/a")]):
        text += detail("dram__bytes_read.sum", unit, value, identifier=i) + "\n"
    table = parse(text)
    np.testing.assert_array_equal(table.rows["dram__bytes_read.sum"], [512.0, 2050.0, 3350000.0, np.nan])
    assert table.units == {"dram__bytes_read.sum": "byte"}


def test_a_unit_of_another_kind_is_left_out_and_said() -> None:
    text = csv(DETAILS, detail("m__x.sum", "byte", "1"), detail("m__x.sum", "ns", "2.5", identifier=1))
    table = parse(text)
    np.testing.assert_array_equal(table.rows["m__x.sum"], [1.0, np.nan])
    assert table.partial == (
        "m__x.sum: values in ns (line 3), not in byte, are left out. Print the file again with --print-units base.",
    )


@pytest.mark.parametrize("unit", ["MB", "MiB", "ns", "byte/s"])
def test_a_count_of_bytes_needs_a_unit_of_bytes(unit: str) -> None:
    """3.35 in a unit that is not known could be any number of bytes."""
    text = csv(DETAILS, detail("dram__bytes_read.sum", unit, "3.35"))
    table = parse(text)
    assert table.rows["dram__bytes_read.sum"].isna().all() and table.units == {"dram__bytes_read.sum": "byte"}
    assert f"values in {unit} (line 2), not in byte, are left out" in table.partial[0]


# --- the two locales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "english", "european"),
    [
        ("2.33", 2.33, None), ("0.125", 0.125, None), ("1,205.00", 1205.0, None), ("1,205,000", 1205000.0, None),
        ("1234.567", 1234.567, None), ("65,77", None, 65.77), ("0,125", None, 0.125), ("1.205,00", None, 1205.0),
        ("27.595.520", None, 27595520.0), ("117.344", 117.344, 117344.0), ("117,344", 117344.0, 117.344),
        ("128", 128.0, 128.0), ("-3", -3.0, -3.0), ("1.5e+06", 1.5e6, None),
        ("1,2", None, 1.2), ("12,34,56", None, None), ("1.2.3", None, None), ("nan", None, None), ("all", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_numbers_of_either_locale(text: str, english: float | None, european: float | None) -> None:
    assert number(text, european=False) == english
    assert number(text, european=True) == european


METRICS = {"gpu__time_duration.sum": "ns", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%"}


def test_one_decimal_comma_makes_every_point_a_thousands_separator() -> None:
    table = parse(raw(METRICS, [*launch(), "117.344", "100"], [*launch(), "14.912", "6,70"]))
    assert table.rows["gpu__time_duration.sum"].tolist() == [117344.0, 14912.0]
    assert table.rows["sm__throughput.avg.pct_of_peak_sustained_elapsed"].tolist() == [100.0, 6.7]
    assert table.notes == ()


def test_one_decimal_point_makes_every_comma_a_thousands_separator() -> None:
    table = parse(raw(METRICS, [*launch(), "117,344", "65.77"]))
    assert table.rows["gpu__time_duration.sum"].tolist() == [117344.0]


def test_without_proof_numbers_are_english_and_a_note_says_so() -> None:
    table = parse(raw(METRICS, [*launch(), "117.344", "100"]))
    assert table.rows["gpu__time_duration.sum"].tolist() == [117.344]
    (note,) = table.notes
    assert "'117.344' (line 3, gpu__time_duration.sum)" in note and "English" in note
    assert parse(raw(METRICS, [*launch(), "117", "100"])).notes == ()


def test_proofs_of_both_locales_are_an_error_that_names_their_places() -> None:
    text = raw(METRICS, [*launch(), "5,888.50", "10"], [*launch(), "5", "65,77"])
    with pytest.raises(
        CounterError, match=r"x\.csv.*'5,888\.50' \(line 3, gpu__time_duration\.sum\).*'65,77' \(line 4"
    ):
        parse(text, "x.csv")


def test_lists_of_cpus_prove_no_decimal_comma() -> None:
    table = parse(raw({"numa__cpu_affinity": "", **METRICS}, [*launch(), "0,16", "1,205.00", "10"]))
    assert table.rows["gpu__time_duration.sum"].tolist() == [1205.0]
    assert "numa__cpu_affinity" in table.notes[0]


# --- values that are no numbers ------------------------------------------------------------------------------------


def test_missing_values_are_nan_and_text_is_no_column() -> None:
    names = {"m__a.sum": "", "m__b.sum": "", "m__c.sum": "", "launch__func_cache_config": "", "m__d.sum": ""}
    table = parse(
        raw(
            names,
            [*launch(), "n/a", "no data", "", "CachePreferNone", "nan"],
            [*launch(), "n/a", "2", "3.5", "CachePreferL1", "4"],
        )
    )
    assert table.metrics == ["m__a.sum", "m__b.sum", "m__c.sum", "m__d.sum"]
    np.testing.assert_array_equal(table.rows[table.metrics], [[np.nan] * 4, [np.nan, 2.0, 3.5, 4.0]])  # all float64
    assert set(map(str, table.rows[table.metrics].dtypes)) == {"float64"}
    assert "m__d.sum: values that are no numbers are left out ('nan')." in table.notes
    assert not any("hold text" in note for note in table.notes)  # of the launch in words, as every report has it


def test_columns_of_nvtx_ranges_are_no_metrics() -> None:
    name = "python.0.Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    table = parse(raw({name: "", "m__a.sum": ""}, [*launch(), "aten::mm", "1"]))
    assert table.metrics == ["m__a.sum"] and name in table.notes[0]


# --- the details page ----------------------------------------------------------------------------------------------


def test_display_names_become_perfworks_names_where_they_are_known() -> None:
    sol, memory = "GPU Speed Of Light Throughput", "Memory Workload Analysis"
    assert metric_name(sol, "Duration") == "gpu__time_duration.sum"
    # The same words mean two metrics.
    assert metric_name(sol, "Memory Throughput") == "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
    assert metric_name(memory, "Memory Throughput") == "dram__bytes.sum.per_second"
    assert metric_name(memory, "Mem Busy") == "Memory Workload Analysis: Mem Busy"
    assert metric_name("Anything", "lts__t_sector_hit_rate.pct") == "lts__t_sector_hit_rate.pct"
    assert metric_name("Tables", "Duration", "Row 1") == "Tables: Row 1: Duration"


def test_a_metric_that_two_sections_show_is_read_once() -> None:
    text = csv(
        [*DETAILS, *RULES],
        detail("gpu__time_duration.sum", "us", "6.75"),
        detail("Duration", "us", "6.75", "GPU Speed Of Light Throughput"),
        [*launch(), "SpeedOfLight", "", "", "", "SOLBottleneck", "OPT", 'Low, "compute".', "global", "80.34"],
        detail("Memory Throughput", "%", "19.66", "GPU Speed Of Light Throughput"),
        detail("Memory Throughput", "Gbyte/s", "345.14", "Memory Workload Analysis"),
    )  # fmt: skip
    table = parse(text)
    (row,) = table.rows.to_dict("records")
    assert row["gpu__time_duration.sum"] == 6750.0
    assert row["gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"] == 19.66
    assert row["dram__bytes.sum.per_second"] == pytest.approx(345.14e9)
    assert table.notes == table.partial == ()


def test_two_sections_that_disagree_are_noted() -> None:
    table = parse(csv(DETAILS, detail("a__x.sum", "", "1"), detail("a__x.sum", "", "2", "Other")))
    assert table.rows["a__x.sum"].tolist() == [1.0]
    assert table.notes == ("a__x.sum: shown twice with different values for 1 rows; the first was kept.",)


def test_body_item_labels_are_part_of_the_key() -> None:
    header = [*DETAILS[:12], "Body Item Label", *DETAILS[12:], *RULES]
    rows = [
        [*launch(), "Memory Tables", label, "Requests", "", value] for label, value in [("Load", "5"), ("Store", "7")]
    ]
    rule = [*launch(), "Memory Tables", "", "", "", "", "Rule", "OPT", "Words", "local", "12.5"]
    table = parse(csv(header, *(csv(row).rstrip("\n") + "," for row in rows), rule))
    assert table.rows["Memory Tables: Load: Requests"].tolist() == [5.0]
    assert table.rows["Memory Tables: Store: Requests"].tolist() == [7.0]
    assert table.partial == ()


def test_a_description_over_several_lines_is_one_row() -> None:
    rule = csv([*launch(), "SpeedOfLight", "", "", "", "R", "OPT", 'One\nTwo "three"', "global", "1"])  # fmt: skip
    text = csv([*DETAILS, *RULES], detail("m__a.sum", "", "1")) + rule + detail("m__b.sum", "", "2")
    table = parse(text)
    assert table.metrics == ["m__a.sum", "m__b.sum"] and table.partial == () and len(table.rows) == 1


def test_launches_of_the_same_kernel_are_told_apart_by_their_number() -> None:
    text = csv(DETAILS)
    for process, identifier, value in [(7, 0, "1"), (7, 1, "2"), (8, 1, "3"), (7, 2, "4")]:
        text += detail("m__a.sum", "", value, process=process, identifier=identifier) + "\n"
    table = parse(text)
    assert table.rows["m__a.sum"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert table.rows["process"].tolist() == [7, 7, 8, 7]
    assert table.rows["id"].tolist() == [0, 1, 1, 2]
    assert table.notes == ("Rows of 2 processes (7, 8), each in its own order.",)


# --- what is around the table, and damage --------------------------------------------------------------------------


def test_logs_and_program_output_are_no_rows() -> None:
    table = parse(
        csv(
            "==PROF== Connected to process 7 (/usr/bin/python3)",
            '==PROF== Profiling "k" - 0: 0%....50%....100% - 9 passes',
            "loss 0.5, step 1",
            "==WARNING== Clocks are not locked",
        )
        + raw({"m__a.sum": ""}, [*launch(), "1"])
        + "step 2\n"
        + csv([*launch(identifier=1), "2"], "==PROF== Disconnected from process 7")
    )
    assert table.rows["m__a.sum"].tolist() == [1.0, 2.0]
    assert table.passes == 9
    assert table.notes == ("ncu warned: Clocks are not locked",)


def test_tables_that_follow_one_another_are_one_and_numbers_may_restart() -> None:
    one = raw({"m__a.sum": "", "m__b.sum": "us"}, [*launch(), "1", "2"])
    other = raw({"m__b.sum": "ns", "m__c.sum": ""}, [*launch(), "3", "4"])
    table = parse(one + other)
    assert table.rows["id"].tolist() == [0, 0]
    np.testing.assert_array_equal(
        table.rows[["m__a.sum", "m__b.sum", "m__c.sum"]], [[1.0, 2000.0, np.nan], [np.nan, 3.0, 4.0]]
    )


def test_a_last_row_that_is_cut_off_is_left_out_and_said() -> None:
    whole = raw({"m__a.sum": "", "m__b.sum": ""}, [*launch(), "1", "2"], [*launch(identifier=1), "3", "4"])
    between_fields = parse(whole[: whole.rindex(',"4')] + "\n")
    assert between_fields.rows["m__a.sum"].tolist() == [1.0]
    assert between_fields.partial == ("Line 4 has 12 fields where 13 are due and was left out (it begins '1').",)
    within_quotes = parse(whole[: whole.rindex('"4') + 2])
    assert within_quotes.rows["m__a.sum"].tolist() == [1.0]
    assert "the file is cut off" in within_quotes.partial[0]


def test_a_row_cut_off_in_the_middle_costs_that_row_alone() -> None:
    whole = raw({"m__a.sum": ""}, [*launch(), "1"], [*launch("cut", 1), "2"], [*launch(identifier=2), "3"])
    lines = whole.split("\n")
    lines[3] = lines[3][: lines[3].index("cut") + 2]
    table = parse("\n".join(lines))
    assert table.rows["id"].tolist() == [0, 2]
    assert table.partial == ("Line 4 ends within quotes and was left out.",)


def test_an_error_after_some_kernels_makes_the_table_partial() -> None:
    table = parse(raw({"m__a.sum": ""}, [*launch(), "1"]) + "==ERROR== The application returned an error code (9).\n")
    assert table.partial == ("ncu reported: The application returned an error code (9).",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ("hello\nworld\n", 'no table of ncu .its header begins with "ID",.'),
        (csv(DETAILS), "the table has no row"),
        (raw({"m__a.sum": "ns"}), "the table has no row"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "(?s)No kernels were profiled.*--nvtx-include"),
        (
            "==ERROR== ERR_NVGPUCTRPERM - no permission\n",
            "(?s)ERR_NVGPUCTRPERM - no perm.*RestrictProfilingToAdminUsers",
        ),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable.\n",
            "(?s)driver.*dcgmi profile --pause",
        ),
        ("==ERROR== Something new\n", "Something new"),
    ],
)
def test_a_file_without_kernels_is_an_error_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(CounterError, match=said) as caught:
        parse(text, "run.csv")
    assert "run.csv" in str(caught.value)


def test_names_of_five_thousand_characters_with_commas_are_read() -> None:
    name = "void k<" + "std::array<char *, (unsigned long)1>, " * 140 + "int>(T1)"
    assert len(name) > 5000
    assert parse(raw({"m__a.sum": ""}, [*launch(name), "1"])).rows["name"].tolist() == [name]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_redirected_on_windows_are_read(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text(raw({"m__a.sum": ""}, [*launch(), "1.50"]), encoding=encoding, newline="\r\n")
    table = read(file)
    assert table.rows["m__a.sum"].tolist() == [1.5] and table.path == str(file)


def test_more_rows_than_are_held_at_once_stay_in_order() -> None:
    rows = [[*launch(identifier=i), str(i % 7), f"{i}.50"] for i in range(2500)]
    table = parse(raw({"m__a.sum": "", "m__b.sum": ""}, *rows))
    assert table.rows["m__a.sum"].tolist() == [float(i % 7) for i in range(2500)]
    assert table.rows["m__b.sum"].tolist() == [i + 0.5 for i in range(2500)]
    assert table.rows["id"].tolist() == list(range(2500))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.csv"):
        read(tmp_path / "absent.csv")


def test_a_carriage_return_inside_a_row_costs_that_row_alone() -> None:
    table = parse(raw({"m__a.sum": ""}, [*launch(), "1"], [*launch(identifier=1), "2"]).replace('"1"\n', '"1"\r x\n'))
    assert table.rows["id"].tolist() == [1]
    assert table.partial[0].startswith("Line 3 is no CSV (")


@pytest.mark.parametrize("digits", ["9" * 20, "9" * 5000])
def test_numbers_beyond_their_column_are_left_out_and_said(digits: str) -> None:
    row = launch(grid=f"({digits}, 2, 1)")
    row[0] = row[1] = row[6] = row[9] = digits
    table = parse(raw({"launch__registers_per_thread": "", "m__a.sum": ""}, [*row, digits[:20], "1"]))
    found = table.rows.iloc[0]
    assert [found[name] for name in ("id", "process", "stream", "device")] == [-1, 0, -1, -1]
    assert [found[f"grid_{axis}"] for axis in "xyz"] == [0, 2, 1]
    assert np.isnan(found["launch__registers_per_thread"]) and found["m__a.sum"] == 1
    assert len(table.partial) == 6 and "Line 3: Process ID '999" in "".join(table.partial)


@pytest.mark.parametrize("page", ["raw", "details"])
def test_of_a_column_that_stands_there_twice_the_first_is_read(page: str) -> None:
    if page == "raw":
        twice = [*FIXED, "Stream", "m__a.sum", "m__a.sum"]
        text = csv(twice, [""] * len(twice), [*launch(), "99", "1", "2"])
    else:
        text = csv([*DETAILS, "Metric Value"], [*launch(), "s", "m__a.sum", "", "1", "2"])
    table = parse(text)
    assert (table.rows["stream"].tolist(), table.rows["m__a.sum"].tolist()) == ([13], [1.0])
    assert table.notes[0].startswith("Line 1: columns that stand there twice, of which the first is read: ")


@pytest.mark.parametrize("unit", ["parsec", "Kns", "byte", "%"])
def test_a_duration_needs_a_unit_of_time(unit: str) -> None:
    table = parse(csv(DETAILS, detail("gpu__time_duration.sum", unit, "5"),
                      detail("gpu__time_duration.sum", "us", "7", identifier=1)))  # fmt: skip
    np.testing.assert_array_equal(table.rows["gpu__time_duration.sum"], [np.nan, 7000.0])
    assert table.units["gpu__time_duration.sum"] == "ns"
    assert f"values in {unit} (line 2), not in ns, are left out" in table.partial[0]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("9" * 400, "is beyond a float"),
        ("1e999", "is beyond a float"),
        ("-5", "is a negative time"),
        ("9007199254740994", "is over 2**53 ns (104 days)"),
    ],
)
def test_a_time_that_cannot_be_is_left_out_and_said(value: str, why: str) -> None:
    table = parse(raw({"gpu__time_duration.sum": "ns"}, [*launch(), value], [*launch(identifier=1), "5"]))
    np.testing.assert_array_equal(table.rows["gpu__time_duration.sum"], [np.nan, 5.0])
    (said,) = table.partial
    assert said.endswith(f"(line 3) {why} and was left out.")
