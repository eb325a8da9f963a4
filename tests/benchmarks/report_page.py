"""How large the HTML report of a profile is, and how soon a browser shows it.

    python tests/benchmarks/report_page.py                                  # 10,000 kernels, five openings
    python tests/benchmarks/report_page.py --kernels 100000 --json page.json

Needs Chromium, chromedriver and selenium (`sh tools/install_chromium.sh`, `pip install '.[browser]'`). Times are from
the start of the navigation, by the browser's own clock: "rendered" when the first screen and all tables stand,
"interactive" when plots can be drawn too (plotly.js is loaded), "drawn" when all of them stand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import plotly
from large_profile import large_profile

from fxopt.report import html
from profiler_core.environment import cpu

SIGNS = ("rendered", "interactive", "drawn")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1280,900",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=int, default=10_000)
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    load = os.getloadavg()[0]
    profile = large_profile(arguments.kernels)
    html.page(large_profile(200))  # imports, and plotly.js packed once
    began = time.perf_counter()
    page = html.page(profile)
    seconds = time.perf_counter() - began
    plotting = len(html.packed_plotly()[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        size = path.stat().st_size
        openings, version = measure(path, arguments.openings)
    result = {
        "command": f"python tests/benchmarks/report_page.py --kernels {arguments.kernels}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": {
            "cpu": cpu()[0],
            "cores": len(os.sched_getaffinity(0)),
            "platform": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "browser": version,
            "plotly": plotly.__version__,
            "load_before": load,
        },
        "kernels": arguments.kernels,
        "nodes": len(profile.nodes),
        "page_bytes": size,
        "plotly_bytes": plotting,
        "bytes_beyond_plotly": size - plotting,
        "write_seconds": seconds,
        "opening_ms": {sign: {"median": median(times), "all": times} for sign, times in openings.items()},
    }
    print(f"{arguments.kernels:,} kernels: {size / 1e6:.2f} MB, of which plotly.js is {plotting / 1e6:.2f} MB")
    print(f"written in {seconds:.1f} s")
    for sign, times in openings.items():
        print(f"{sign}: {median(times):,.0f} ms after the navigation began ({min(times):,.0f} to {max(times):,.0f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(path: Path, openings: int) -> tuple[dict[str, list[float]], str]:
    """Times by sign, in ms, and the browser's version. Each opening has a browser of its own: nothing is warm."""
    from selenium import webdriver

    times: dict[str, list[float]] = {sign: [] for sign in SIGNS}
    version = ""
    for _ in range(openings):
        with tempfile.TemporaryDirectory() as folder:
            options = webdriver.ChromeOptions()
            options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
            for flag in (*FLAGS, f"--user-data-dir={folder}"):
                options.add_argument(flag)
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
            try:
                version = f"{driver.capabilities['browserName']} {driver.capabilities['browserVersion']}"
                for sign, at in opened(driver, path).items():
                    times[sign].append(at)
            finally:
                driver.quit()
    return times, version


def opened(driver: Any, path: Path) -> dict[str, float]:
    driver.get(path.as_uri())
    end = time.monotonic() + 120
    while not driver.execute_script("return document.documentElement.dataset.drawn"):
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not drawn within two minutes")
        time.sleep(0.2)
    marks = "return performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"
    found = dict(driver.execute_script(marks))
    return {sign: float(found[f"report-{sign}"]) for sign in SIGNS}


if __name__ == "__main__":
    main()
