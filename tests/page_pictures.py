"""Draw docs/pictures/page-*.png: the page over a made-up node.  `make page-pictures`; needs Chromium and `browser`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from page_node import MONOTONIC, node
from stallwatch.model import Report
from stallwatch.web import Published, serve_http

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PICTURES: Mapping[str, dict[str, Any]] = {
    "page-light": {"viewport": {"width": 1180, "height": 830}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1180, "height": 830}, "color_scheme": "dark"},
    "page-phone": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "light",
        "device_scale_factor": 2,
        "is_mobile": True,
    },
}


def past(report: Report) -> list[Report]:
    """What led to `report`: its servers work, and one after the other comes to what it is in now."""
    servers = [replace(each, verdict=replace(each.verdict, state="working", reason="none")) for each in report.servers]
    told = [replace(report, servers=tuple(servers))]
    for number in sorted(range(len(servers)), key=lambda number: report.servers[number].since_timestamp):
        servers[number] = report.servers[number]
        told.append(replace(report, timestamp=servers[number].since_timestamp, servers=tuple(servers)))
    return [*told, report]


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    published = Published(1.0, lambda: MONOTONIC)
    for report in past(node(6)):
        published.publish(report)
    with ThreadPoolExecutor(1) as elsewhere:  # on this thread playwright's own loop runs
        http = elsewhere.submit(serve_http, published, ["127.0.0.1:0"]).result()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, how in PICTURES.items():
                with browser.new_context(**how) as context:
                    page = context.new_page()
                    page.goto(f"http://{http.addresses[0]}/")
                    page.screenshot(path=FOLDER / f"{name}.png")
            browser.close()
    finally:
        http.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
