"""The HTML report as a reader has it: in Chromium, from a file, with mouse and keyboard."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_reports
import pages
import pytest
from large_profile import large_profile

from fxopt.report import html
from fxopt.report.diff import diff
from fxopt.report.model import Report
from profiler_core.quantities import duration

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pages, each written once."""
    folder = tmp_path_factory.mktemp("pages")
    profile = pages.layered()
    html.write(pages.tuned(), folder / "report.html")
    html.write(profile, folder / "profile.html")
    html.write(Report(pages.tuned().graphs[:1], comparison=made_reports.comparison()), folder / "bench.html")
    html.write(diff(profile, pages.slower(profile)), folder / "diff.html")
    html.write(pages.hostile(), folder / "hostile.html", title="</title><script>window.fxoptHit = 8</script> @DATA@")
    html.write(Report(messages=["nothing"]), folder / "empty.html")
    html.write(large_profile(10_000), folder / "large.html")
    return folder


@pytest.fixture
def window(driver: Any, written: Path) -> Iterator[Page]:
    """The browser before a test has opened a page."""
    yield Page(driver, written)
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def page(window: Page) -> Page:
    """The tuning report, opened."""
    window.open("report")
    return window


class Page:
    """The page in the browser, with what the tests ask of it."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, name: str, sign: str = "rendered") -> None:
        pages.open_page(self.driver, self.folder / f"{name}.html", sign)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """As they read; a number and its unit are held together by a space of another kind."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())"
        return [text.replace("\xa0", " ") for text in self.run(script, selector)]

    def click(self, selector: str) -> None:
        """By the page's own event, wherever a sticky header lies."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(key).perform()

    def focused(self) -> str:
        return self.run("const e = document.activeElement; return e.getAttribute('aria-label') || e.innerText || e.id")

    def nodes(self) -> list[str]:
        """Names of the nodes' table, in the order shown."""
        return self.texts("#nodes tbody.rows > tr:not(.opened) > td:first-child")

    def width(self, pixels: int) -> None:
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def until(self, script: str) -> None:
        """Until the script gives something true. The limit is for a hang."""
        end = time.monotonic() + 30
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the page was opened, but for the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not (url.startswith("file://") and url.endswith(".html"))]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


# ---- opening ----


@pytest.mark.parametrize("name", ["report", "profile", "diff", "empty", "large"])
def test_it_opens_without_a_complaint_and_asks_nobody_for_anything(window: Page, name: str) -> None:
    window.open(name, "drawn")
    assert window.complaints() == []
    assert window.requests() == []
    assert window.overflow() <= 0


def test_the_first_screen_answers_in_words(page: Page) -> None:
    assert page.texts(".headline") == [
        "One call takes 2.00 ms instead of 3.00 ms: 1.50 times as fast as torch.compile by itself."
    ]
    assert page.texts(".answer h2") == [
        "How long does one call take?",
        "Where does the time go?",
        "What limits it?",
        "What was done, and what did it gain?",
        "At what error?",
    ]
    answers = page.texts(".answer > p")
    assert "matrix products" in answers[1] and "1.0e-06" in answers[4]
    assert page.run("return document.querySelector('.headline').getBoundingClientRect().bottom < innerHeight / 2")


def test_the_sections_show_what_the_report_holds(window: Page) -> None:
    window.open("report", "drawn")
    (body,) = window.texts("#main")
    for shown in (
        "tensor core idle",  # a label
        "held against 60",  # its evidence
        "Memcpy HtoD",  # unattributed
        "no launch in the trace",
        "95 % interval",
        "TF32",
        "sm mhz",
        "ranks 0, 1 measured",
        "freeze_weights: weights may change",  # out of reach
        "rule l2_bound did not fire: lacks l2_throughput",
        "x = x @ self.w",
        "# a comment",  # a line around it
    ):
        assert shown in body or shown in window.run("return document.getElementById('main').textContent"), shown
    assert len(window.all(".plot .main-svg")) > 3
    points = window.run("return document.querySelector('#roofline .plot').data.filter((t) => t.mode === 'markers')")
    assert sum(len(trace["x"]) for trace in points) == 2 * pages.LAYERS
    assert {trace["name"] for trace in points} == {"tensor core idle", "no limit found"}


def test_measured_modelled_and_missing_are_told_apart(page: Page) -> None:
    page.click("#nodes button.open")
    opened = "#nodes tr.opened "
    assert any("2.00 GFLOP" in text for text in page.texts(f"{opened}.modelled"))
    assert any("71.5 %" in text for text in page.texts(f"{opened}.measured"))
    assert "not measured" in page.texts(f"{opened}.missing")  # l1_hit_rate


# ---- the table ----


def test_a_search_leaves_the_rows_that_match_all_words(page: Page) -> None:
    page.press("/")
    assert page.focused() == "Search FX nodes"
    page.press("h.7.mlp add")
    assert page.nodes() == ["add_7"]
    page.press("\ue00c")  # Escape
    assert len(page.nodes()) == 25


def test_a_click_on_a_head_sorts_and_another_one_turns_it_around(page: Page) -> None:
    assert page.nodes()[0] == f"mm_{pages.LAYERS - 1}"  # the longest
    heads = "#nodes thead th:nth-child({}) button"
    page.click(heads.format(4))
    assert page.nodes()[0].startswith(("add_", "mul_"))
    assert page.one("#nodes thead th:nth-child(4)").get_attribute("aria-sort") == "ascending"
    page.click(heads.format(1))
    assert page.nodes()[:2] == ["add_0", "add_1"]


def test_all_pages_of_a_table_hold_every_row_once(page: Page) -> None:
    seen = page.nodes()
    page.click("#nodes .bar button:last-child")
    seen += page.nodes()
    assert sorted(seen) == sorted(f"{op}_{i}" for op in ("mm", "add", "mul") for i in range(pages.LAYERS))


def test_a_node_opens_to_its_kernels_counters_labels_and_source(page: Page) -> None:
    page.press("/", "mm_0")
    page.click("#nodes tbody tr td:nth-child(2)")  # anywhere in the row
    opened = page.one("#nodes tr.opened").text
    for part in (
        "sm80_gemm_0",
        "dram_throughput",
        "71.5 %",
        "tensor core idle",
        "device memory is busy",
        "x = x @ self.w",
    ):
        assert part in opened, part
    page.click("#nodes tbody tr td:nth-child(2)")
    assert not page.all("#nodes tr.opened")


def test_modules_open_down_to_the_one_that_holds_the_nodes(page: Page) -> None:
    rows = page.texts("#modules tbody tr:not([hidden]) td:first-child")
    assert "h" in [row.split()[-1] for row in rows] and "mlp" not in " ".join(rows)
    page.click("#modules tbody tr:nth-child(3) .twist")
    assert any("mlp" in row for row in page.texts("#modules tbody tr:not([hidden]) td:first-child"))


# ---- keyboard ----


def test_everything_can_be_reached_and_done_by_keyboard(page: Page) -> None:
    down, up, enter, escape, tab = "\ue015", "\ue013", "\ue007", "\ue00c", "\ue004"
    page.press(tab)
    assert page.focused() == "Skip to the report"
    page.press("/", down)
    first, second = page.nodes()[:2]
    assert page.focused() == first
    page.press(down)
    assert page.focused() == second
    page.press(enter)
    assert page.one("#nodes button.open[aria-expanded='true']").text == second
    page.press(escape)
    assert not page.all("#nodes tr.opened")
    page.press(up, up)
    assert page.focused() == "Search FX nodes"
    page.press(down, "\ue00f")  # Page Down
    assert page.focused() == page.nodes()[0] != first


def test_every_control_has_a_name(window: Page) -> None:
    window.open("report", "drawn")
    window.run("document.getElementById('js-plotly-tester').remove()")  # plotly's own, far outside of the window
    tree = window.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "combobox", "searchbox", "textbox", "link", "DisclosureTriangle", "dialog", "image", "img"}
    controls = [node for node in tree if not node.get("ignored") and node.get("role", {}).get("value") in roles]
    assert len(controls) > 40
    assert [node for node in controls if not node.get("name", {}).get("value", "").strip()] == []


# ---- colours, graphs, plots ----


def test_dark_by_a_switch_and_by_preference(page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.click("#theme")
    dark = page.run(ground)
    assert light == "rgb(255, 255, 255)" and dark != light
    page.press("d")
    assert page.run(ground) == light
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    page.open("report", "drawn")
    assert page.run(ground) == dark
    text = page.run("return getComputedStyle(document.querySelector('#roofline .xtick text')).fill")
    assert min(map(int, re.findall(r"\d+", text)[:3])) > 150  # light on dark


def test_another_graph_is_chosen(page: Page) -> None:
    assert page.texts("#graph option") == ["Graph 1 of 3", "Graph 2 of 3", "Graph 3 of 3"]
    choose = "const g = document.getElementById('graph'); g.value = arguments[0]; g.dispatchEvent(new Event('change'))"
    page.run(choose, "1")
    assert page.texts(".headline")[0].startswith("Nothing was changed: torch.compile's own code is kept.")
    page.run(choose, "2")
    assert "it failed" in page.texts(".alert")
    assert not page.all("#nodes")  # nothing was measured of it
    page.click("#graphs button.link")
    assert page.texts(".headline")[0].startswith("One call takes 2.00 ms")
    assert page.complaints() == []


def test_a_mark_of_a_plot_opens_what_it_stands_for_and_escape_closes_it(window: Page) -> None:
    window.open("report", "drawn")
    for plot in ("#roofline", "#timeline"):
        at = window.run(
            "const p = document.querySelector(arguments[0] + ' .plot');"
            "p.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const m = [...p.querySelectorAll('.points path, .point path')].filter((e) => e.getBBox().width > 4).pop();"
            "const b = m.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
            plot,
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            event = {"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1}
            window.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
            if kind == "mouseMoved":
                window.until("return !document.getElementById('tip').hidden")
                assert "click for all of it" in window.one("#tip").text
        shown = window.one("#inspector")
        assert shown.get_attribute("open") is not None, plot
        assert "dram_throughput" in shown.text and "What limits it" in shown.text
        window.press("\ue00c")
        assert window.one("#inspector").get_attribute("open") is None


def test_the_timeline_shows_the_gaps_of_each_stream(page: Page) -> None:
    rows = page.texts("#timeline table tbody tr")
    assert len(rows) == 2  # streams 7 and 9
    cells = page.texts("#timeline table tbody tr:first-child td")
    assert "stream 7" in cells[0] and cells[1] == str(pages.LAYERS) and cells[4] == str(pages.LAYERS - 1)
    assert re.fullmatch(r"30\.0 us before sm80_gemm_\d", cells[5])


def test_the_graph_is_shown_before_and_after_each_pass(page: Page) -> None:
    assert page.texts("#graphtext summary") == ["tf32_matmul (joint) · 1 line gone, 1 new"]
    lines = page.texts("#graphtext .diff > div")
    assert lines[0] == "⋯ 16 unchanged lines" and lines[-3:] == ["-mm: before", "+mm: after", "return (mm,)"]
    choose = (
        "const s = document.querySelector('#graphtext select'); s.value = 'after'; s.dispatchEvent(new Event('change'))"
    )
    page.run(choose)
    lines = page.texts("#graphtext .diff > div")
    assert len(lines) == 22 and "mm: after" in lines and "mm: before" not in lines


# ---- other subjects ----


def test_a_comparison_tells_what_became_slower(window: Page) -> None:
    window.open("diff")
    assert window.texts(".answer h2")[1] == "Where did it change?"
    assert window.nodes()[0] == f"mm_{pages.LAYERS - 1}"
    assert window.texts("#nodes tbody tr:first-child .bad") == ["+30.0 us"]


# ---- numbers ----

PARTED = r"""
const walker = document.createTreeWalker(document.getElementById("main"), NodeFilter.SHOW_TEXT), found = [];
const parted = /\d (?:[num]?s|min|h|%|[kMGTP]?i?B(?:\/s)?|[kMGTP]?FLOP(?:\/s|\/byte)?)(?![\w\/])/;
while (walker.nextNode())
  if (parted.test(walker.currentNode.data) && !walker.currentNode.parentElement.closest("code, .source, .diff, svg"))
    found.push(walker.currentNode.data);
return found;
"""


@pytest.mark.parametrize("name", ["report", "profile", "diff"])
def test_a_number_and_its_unit_never_part(window: Page, name: str) -> None:
    window.open(name, "drawn")
    if name != "diff":
        window.run(OPEN_ALL, 0)
    assert len(re.findall(r"\d\xa0(?:us|ms|%)", window.run("return document.getElementById('main').textContent"))) > 20
    assert window.run(PARTED) == []


def test_times_are_spelled_as_in_every_other_form(page: Page) -> None:
    times = [0, 812, 999.6, 34_210, 999_600, 115_400_000, -2.5e9, 119.4e9, 200e9]
    assert page.run("return arguments[0].map(duration)", times) == [duration(ns) for ns in times]


@pytest.mark.parametrize("name", ["report", "profile", "diff", "bench"])
@pytest.mark.parametrize("pixels", [1280, 720])
def test_no_column_of_a_table_is_cut_off(window: Page, pixels: int, name: str) -> None:
    window.width(pixels)
    window.open(name, "drawn")
    cut = "return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => "
    assert window.run(cut + "e.innerText.slice(0, 80))") == []


COVERED = """
const box = (e) => e.getBoundingClientRect(), found = [];
for (const plot of document.querySelectorAll(".plot")) {
  const bar = box(plot.querySelector(".modebar"));
  for (const text of plot.querySelectorAll("text, .points path")) {
    const own = box(text);
    if (own.width && own.left < bar.right && own.right > bar.left && own.top < bar.bottom && own.bottom > bar.top)
      found.push(text.textContent || "a mark");
  }
}
return found;
"""


@pytest.mark.parametrize("pixels", [1280, 720, 400])
def test_the_toolbar_of_a_plot_covers_nothing(window: Page, pixels: int) -> None:
    window.width(pixels)
    window.open("report", "drawn")
    assert len(window.all(".plot .modebar")) == 3
    assert window.run(COVERED) == []


def test_eager_and_autocast_stand_beside_inductor_where_they_were_timed(window: Page) -> None:
    window.open("bench")
    first = window.texts(".answer:first-child li")
    assert [text.split("\n")[0] for text in first] == ["eager", "Inductor", "autocast", "fxopt"]
    assert "3.00x (2.90 to 3.10) the speed of eager; 1.50x (1.40 to 1.60) the speed of Inductor" in first[3]
    rows = window.texts("#compared table tbody tr")
    assert [row.split(", the whole work")[0] for row in rows if "the whole work" in row] == [
        f"{a} against {b}"
        for a, b in (
            ("eager", "Inductor"), ("eager", "autocast"), ("eager", "fxopt"), ("Inductor", "autocast"),
            ("Inductor", "fxopt"), ("autocast", "fxopt"),
        )
    ]  # fmt: skip
    assert "2.90 to 3.10" in rows[2] and "6.00 ms" in rows[2] and "2.00 ms" in rows[2]
    window.open("report")
    assert "Eager mode was not timed" in window.texts("#compared")[0]


def test_a_report_of_no_graph_says_so(window: Page) -> None:
    window.open("empty")
    assert window.texts(".headline")[0].startswith("No graph reached fxopt")


# ---- paper and small windows ----


def test_it_prints_opened_and_is_folded_again(window: Page) -> None:
    window.open("report", "drawn")
    rows, folded = "tr.opened", "main details:not([open])"
    window.run(
        "addEventListener('beforeprint', () => {"
        "  window.onPaper = [...arguments].map((selector) => document.querySelectorAll(selector).length); })",
        rows,
        folded,
    )
    paper = {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69}
    data = base64.b64decode(window.driver.execute_cdp_cmd("Page.printToPDF", paper)["data"])
    assert data.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 40
    opened, closed = window.run("return window.onPaper")
    assert opened >= 3 and closed == 0
    assert not window.all(rows) and window.all(folded)


def test_it_fits_a_telephone(window: Page) -> None:
    window.width(400)
    window.open("report", "drawn")
    assert window.overflow() <= 0
    window.click("#nodes button.open")
    window.click("#changes button.open")
    assert window.overflow() <= 0


# ---- names that want to be code ----


OPEN_ALL = """
document.querySelectorAll('main details').forEach((box) => { box.open = true });
tables.forEach((table) => table.shown.slice(0, table.size).forEach((row) => table.open && table.toggle(row)));
const graph = graphs[arguments[0]];
for (let i = 0; i < graph.kernels.rows; i += 3) inspect(graph.kernels.name[i], kernelDetail(graph, i));
document.getElementById('inspector').close();
return drawAll();
"""
HANDLERS = """
const own = (element) => element.getAttributeNames().some((name) => name.startsWith('on'));
return [...document.querySelectorAll('main *, dialog *, header *')].filter(own).length
"""
TALLEST = (
    "return Math.max(...[...document.querySelectorAll('tbody.rows > tr:not(.opened)')].map((r) => r.offsetHeight))"
)


@pytest.mark.parametrize("pixels", [1280, 400])
def test_nothing_of_a_hostile_trace_runs_and_the_layout_holds(window: Page, pixels: int) -> None:
    window.width(pixels)
    window.open("hostile", "drawn")
    scripts = len(window.all("script"))
    for graph in (1, 0):
        window.run("choose(arguments[0])", graph)
        window.run(OPEN_ALL, graph)
        assert window.overflow() <= 0
        assert window.all("main :is(img, iframe, object, script, style, form), main [href^=javascript]") == []
        assert window.run(HANDLERS) == 0
        for name in ("plain script", "image", "svg", "comment", "right to left"):
            text = pages.HOSTILE_NAMES[name]
            assert window.run("return document.getElementById('main').textContent.includes(arguments[0])", text), name
    assert window.run(TALLEST) < 420  # 5,000 characters do not make a row as high as the window
    assert len(window.all("script")) == scripts
    assert window.run("return window.fxoptHit === undefined")
    assert window.complaints() == []
    assert window.requests() == []
    assert window.run("return document.title").startswith("</title><script>")


def test_a_script_that_got_into_the_page_would_not_run(page: Page) -> None:
    """The policy is there for what escaping might miss one day."""
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.fxoptHit = 9'; document.body.append(s)"
    )
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.fxoptHit = 10\">')")
    page.run("return fetch('https://example.invalid/').catch(() => { window.refused = true })")
    assert page.run("return [window.fxoptHit, window.refused]") == [None, True]
    assert any("Content Security Policy" in text for text in page.complaints())
