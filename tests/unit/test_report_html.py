"""The page of a report as text: what it holds, and that nothing in it can be taken for markup or code."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from typing import Any

import made_profiles
import made_reports
import pytest
from large_profile import large_profile

from fxopt.labels import Axis
from fxopt.report import html
from fxopt.report.diff import diff
from fxopt.report.model import Report
from fxopt.report.page import words
from fxopt.report.page.data import Texts, number

MOST_BYTES = 3_000_000
"""That the data of 10,000 kernels may add to the plotting library."""


def held(page: str, name: str) -> str:
    """What a data block of the page unpacks to."""
    (packed,) = re.findall(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    return gzip.decompress(base64.b64decode(packed)).decode()


def data_of(page: str) -> Any:
    return json.loads(held(page, "data"))


def column(data: Any, table: Any, name: str) -> list[Any]:
    """A column of a table of the page, texts and lists of texts undone."""
    if name in table["texts"]:
        return [data["texts"][i] for i in table["texts"][name]]
    if name in table["lists"]:
        return [[data["texts"][i] for i in data["lists"][at]] for at in table["lists"][name]]
    return table["numbers"][name]


def test_the_data_are_the_profiles() -> None:
    profile = made_profiles.two_calls()
    data = data_of(html.page(profile, labels=[]))
    (graph,) = data["graphs"]
    kernels, window = graph["profile"]["kernels"], profile.window
    assert column(data, kernels, "name") == window["name"].tolist()
    assert column(data, kernels, "nodes") == [list(nodes) for nodes in window["nodes"]]
    assert column(data, kernels, "duration_ns") == window["duration_ns"].tolist()
    assert column(data, kernels, "start_ns") == [0, 10_000, 20_000, 30_000]  # since the first, for JSON's sake
    assert column(data, kernels, "dram_read_bytes") == [1.5e6, None, None, None]  # NaN and infinity are missing
    assert column(data, kernels, "registers") == [32, None, 32, 32]
    assert sum(column(data, graph["profile"]["unattributed"], "time_ns")) == profile.unattributed_ns
    assert graph["profile"]["attributed_ns"] + graph["profile"]["unattributed_ns"] == profile.total_ns


def test_a_report_keeps_every_field_but_the_profile() -> None:
    report = made_reports.full()
    data = data_of(html.page(report))
    fields = data["graphs"][0]["report"]
    expected = report.to_json()["graphs"][0]
    assert {name for name in expected if name not in fields} == set()
    assert fields["profile"] is None and fields["ratio"] == expected["ratio"]
    assert data["messages"] == ["a message of the whole"] and data["eager"][0]["name"] == "lstm"


def test_scripts_are_admitted_by_their_hashes_and_requests_not_at_all() -> None:
    page = html.page(made_reports.full())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    admitted = re.findall(r"'sha256-([^']*)'", policy)
    digests = [hashlib.sha256(text.encode()).digest() for text in (script, held(page, "plotly"))]
    assert admitted == [base64.b64encode(digest).decode() for digest in digests]
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy and "connect-src" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|url\(", page.replace(script, ""))


@pytest.mark.parametrize("name", list(made_profiles.HOSTILE))
def test_no_name_stands_in_the_page_as_it_is(name: str) -> None:
    text = made_profiles.HOSTILE[name] + "<!--</script><script>"
    profile = made_profiles.build([made_profiles.kernel(text, made_profiles.T, 100, operator=text)])
    page = html.page(profile, title=f"{text} @DATA@")
    assert text not in page and "<!--" not in page.partition("<body>")[0]
    assert page.count("<script") == page.count("</script>") == 3
    data = data_of(page)
    assert text in data["texts"] or "\ud800" in text  # whole, but in the packed data


def test_the_data_of_ten_thousand_kernels_are_small() -> None:
    page = html.page(large_profile(10_000))
    (packed,) = re.findall(r'id="plotly">([^<]*)<', page)
    assert len(data_of(page)["graphs"][0]["profile"]["kernels"]["numbers"]["duration_ns"]) == 10_000
    assert len(page) - len(packed) < MOST_BYTES


def test_it_is_written_where_asked_and_returned(tmp_path) -> None:
    path = html.write(made_reports.full(), tmp_path / "new" / "report.html", title="My <model>")
    assert path == tmp_path / "new" / "report.html"
    text = path.read_text(encoding="utf-8")
    assert "<title>My &lt;model&gt;</title>" in text and data_of(text)["title"] == "My <model>"


def test_other_subjects_are_refused() -> None:
    with pytest.raises(TypeError, match="a Report, a Profile or a Diff, not of dict"):
        html.page({})


def test_a_comparison_and_an_empty_report_have_pages() -> None:
    profile = made_profiles.two_calls()
    data = data_of(html.page(diff(profile, profile)))
    assert data["kind"] == "diff" and data["graphs"][0]["tables"]["kernels"]["rows"] > 0
    assert data_of(html.page(Report(messages=["nothing"])))["graphs"] == []


# ---- words ----


def test_the_headline_says_what_a_call_takes_and_took() -> None:
    graph = made_reports.graph()
    told = words.summary(graph.profile, graph.labels, graph)
    assert (
        told["headline"] == "One call takes 2.00 ms instead of 3.00 ms: 1.50 times as fast as torch.compile by itself."
    )
    assert "1.40 to 1.60, from 30 pairs" in told["detail"]
    graph.source = "plan"
    assert "nothing in this process" in words.summary(None, [], graph)["detail"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("tuned", "None is both right and faster"), ("apply", "never measures"), ("fallback", "failed")],
)
def test_an_unchanged_graph_says_why(source: str, said: str) -> None:
    graph = made_reports.graph()
    graph.decision, graph.ratio, graph.source = "baseline", None, source
    told = words.summary(graph.profile, graph.labels, graph)
    assert said in told["detail"]
    assert "torch.compile's own code" in told["headline"]


def test_a_graph_whose_time_was_up_before_a_rewrite_is_not_said_to_have_none() -> None:
    graph = made_reports.graph()
    graph.decision, graph.ratio, graph.source, graph.candidates = "baseline", None, "tuned", []
    graph.out_of_reach = ["freeze_weights: weights may change between calls"]
    assert words.summary(graph.profile, graph.labels, graph)["detail"].startswith("No rewrite applies here.")
    graph.out_of_reach.append("causal_mask: not tried, the time limit of 30 s is spent")
    told = words.summary(graph.profile, graph.labels, graph)
    assert "time limit of 30 s was spent before anything was tried" in told["alerts"][0]
    assert "No rewrite" not in told["detail"]


def test_where_the_time_goes_adds_up() -> None:
    profile = large_profile(400)
    where = words.summary(profile, [])["answers"][1]
    assert math.isclose(sum(row["share"] for row in where["rows"]), 1.0)
    assert {row["text"] for row in where["rows"]} == {
        words.KINDS[family] for family in ("gemm", "pointwise", "reduction", "attention")
    }


def test_every_axis_is_told_in_words() -> None:
    assert set(words.AXES) == {axis.value for axis in Axis}


@pytest.mark.parametrize(
    ("family", "operator", "kind"),
    [
        ("gemm", "aten::add", "gemm"),
        ("operator", "aten::addmm", "gemm"),
        ("operator", "aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("operator", "aten::mkldnn_convolution", "convolution"),
        ("operator", "mkl::_mkl_linear", "gemm"),
        ("operator", "aten::cumsum", "operator"),
        ("", "", ""),
    ],
)
def test_the_kind_of_work_of_an_operator_is_in_its_name(family: str, operator: str, kind: str) -> None:
    assert words.kind_of(family, operator) == kind


def test_numbers_are_short_and_texts_stand_once() -> None:
    assert [number(value) for value in (1.0, 1 / 3, math.nan, math.inf, None, 10**18)] == [
        1,
        0.333333,
        None,
        None,
        None,
        10**18,
    ]
    texts = Texts()
    assert [texts.text("a"), texts.text("b"), texts.text("a"), texts.list(("a", "b")), texts.list(("a", "b"))] == [
        0,
        1,
        0,
        0,
        0,
    ]
    assert texts.to_json() == {"texts": ["a", "b"], "lists": [[0, 1]]}
