"""The page in a real Chromium, from a real HTTP server; the reports are made up (`page_node`), one of every state.

Needs Chromium and the extra `browser` (playwright, and axe-core for accessibility); skipped without.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from page_node import HOSTILE, MONOTONIC, NOW, node, ranks, report_of, server, slow, stalled
from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.drill.nvml_standin import StandIn as Cards
from stallwatch.model import Report, ServerReport
from stallwatch.web import HttpServer, Published, serve_http

from .harness import PATIENCE, STALL_AFTER, Exporter, StandIn

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Dialog, Page

pytestmark = [pytest.mark.e2e, pytest.mark.aside]

TICK = 1.0
RANKS = 8
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
DEADLINE = 1000 * PATIENCE
"""Milliseconds to wait for what a page shows at last; that it asks once a tick is seen by its own clock."""


class Served:
    """A server over reports that are told to it; `now` is its clock, in the seconds of Report.monotonic."""

    def __init__(self) -> None:
        self.now = MONOTONIC
        self.published = Published(TICK, lambda: self.now)
        with ThreadPoolExecutor(1) as elsewhere:  # on this thread playwright's own loop runs
            self.http: HttpServer = elsewhere.submit(serve_http, self.published, ["127.0.0.1:0"]).result()
        self.url = f"http://{self.http.addresses[0]}/"

    def tell(self, report: Report) -> None:
        self.published.publish(report)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.http.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    width, height = SIZES["desk"]
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        context.set_default_timeout(DEADLINE)
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture(scope="module")
def axe() -> str:
    package = pytest.importorskip("axe_playwright_python", reason="needs the extra `browser`")
    return (Path(str(package.__file__)).parent / "axe.min.js").read_text(encoding="utf-8")


def complaints(page: Page, axe: str) -> list[str]:
    """What axe-core finds wrong, of all its rules: the rule, and the first element."""
    page.evaluate(axe)
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]


def heard(page: Page) -> list[str]:
    """Errors of scripts, and what the console says, from now on."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return said


def after_ticks(page: Page, number: int = 2) -> None:
    """Wait until the page has asked for so many answers and taken them in."""
    for _ in range(number):
        with page.expect_response("**/live") as answer:
            pass
        answer.value.finished()
    page.evaluate("new Promise(done => setTimeout(done, 50))")


# --- as it is shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [1, 8, 64])
def test_the_page_is_whole_and_within_reach_of_everybody(
    served: Served, browser: Browser, axe: str, number: int, size: str, scheme: Any
) -> None:
    """One server is stalled; of eight, and of 64, others are slow, failed and unknown."""
    served.tell(node(number))
    width, height = SIZES[size]
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        said = heard(page)
        page.goto(served.url)
        after_ticks(page)

        assert page.get_by_role("rowheader", name="sglang-8000").count() == 1
        assert page.locator("#all tbody tr").count() == number
        first = page.locator("#all tbody tr").first
        assert "stalled (idle_wait) for 6m41s in post_load: every thread is asleep" in first.inner_text()
        assert page.get_by_role("group", name="ranks").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width, "only tables scroll sideways"
        assert complaints(page, axe) == []
        assert said == []


def test_axe_does_complain_of_what_is_out_of_reach(served: Served, page: Page, axe: str) -> None:
    served.tell(node(1))
    page.goto(served.url)

    page.evaluate("document.querySelector('main').append(document.createElement('img'))")
    page.evaluate("document.querySelector('#status').style.color = '#eee'")

    assert {each.partition(":")[0] for each in complaints(page, axe)} == {"image-alt", "color-contrast"}


def test_every_state_has_a_sign_and_a_word_beside_its_colour(served: Served, page: Page) -> None:
    states = ("stalled", "failed", "suspect", "unknown", "quiet", "slow", "working", "idle", "gone")
    served.tell(report_of([server(state, state) for state in states]))
    page.goto(served.url)

    for state in states:
        verdict = page.locator(f"#all tr.{state} .v")
        assert verdict.inner_text().startswith(state)
        assert len(verdict.evaluate("cell => getComputedStyle(cell, '::before').content")) > 2, state


def test_without_javascript_everything_is_there_and_nothing_moves(served: Served, browser: Browser) -> None:
    served.tell(node(8))
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(served.url)

        assert page.locator("#all tbody tr").count() == 8
        assert page.get_by_text("Without JavaScript this page stands still").is_visible()
        assert not page.locator("#pause").is_visible()
        folded = page.locator("details", has=page.get_by_role("heading", name="vllm-8001"))
        assert not folded.get_by_role("group").is_visible()
        folded.locator("summary").click()
        assert folded.get_by_role("group").is_visible()

        served.tell(report_of([server("a")]))
        page.get_by_role("link", name="load it again").click()
        assert page.locator("#all tbody tr").count() == 1


# --- nothing gets in ---------------------------------------------------------------------------------------


def test_a_hostile_name_is_text(served: Served, page: Page) -> None:
    dialogs: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    served.tell(node(8, hostile=True))
    page.goto(served.url)
    after_ticks(page)

    assert page.get_by_role("rowheader", name=HOSTILE, exact=True).count() == 1
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    assert dialogs == []


def test_a_script_that_got_in_would_not_run(served: Served, page: Page) -> None:
    """The second lock: the policy allows the page's own script, by its hash."""
    served.tell(node(1))
    page.goto(served.url)
    said = heard(page)

    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.ran = true';
            document.body.append(script);
            const box = document.createElement('div');
            document.body.append(box);
            box.innerHTML = '<b onclick="window.ran = true">x</b>';
            box.firstChild.click();
        }"""
    )

    assert page.evaluate("window.ran === undefined")
    assert sum("Content Security Policy" in each for each in said) == 2


# --- live --------------------------------------------------------------------------------------------------


def starting(*others: ServerReport) -> Report:
    each = server("sglang-8000", phase="post_load", of=ranks(8, "post_load"))
    return report_of([each, slow(), *others])


def later(report: Report, seconds: float, servers: Sequence[ServerReport] | None = None) -> Report:
    return replace(report, timestamp=NOW + seconds, servers=tuple(report.servers if servers is None else servers))


def test_a_stall_appears_by_itself_and_is_told_to_a_screen_reader(served: Served, page: Page) -> None:
    served.tell(starting())
    page.goto(served.url)
    assert page.get_by_role("status").inner_text() == "2 inference servers on this node: 1 slow, 1 working."
    assert page.title() == "stallwatch"

    served.tell(later(starting(), 5, [stalled(), slow()]))

    page.get_by_role("status").get_by_text("1 stalled, 1 slow.").wait_for()
    assert page.title() == "1 stalled or failed - stallwatch"
    assert page.locator("#all tbody tr").first.inner_text().startswith("sglang-8000\tstalled (idle_wait)")
    assert page.get_by_role("group", name="ranks").first.is_visible(), "unfolded, as a person may have to look"
    assert page.locator("#changes li").all_inner_texts() == [
        "2023-11-14T22:21:46Z sglang-8000: stalled (idle_wait), was working"
    ]


def test_it_asks_once_a_tick(served: Served, page: Page) -> None:
    """By the page's own clock, which is moved by hand: no machine is too slow for it."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/live") else None)
    served.tell(report_of([server("s0")]))
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    page.goto(served.url)

    for number in range(1, 4):
        asked.clear()
        served.tell(later(report_of([server(f"s{number}")]), number))
        page.clock.run_for(int(1000 * TICK) - 1)
        assert asked == []
        page.clock.run_for(1)
        page.locator("#all tbody a", has_text=f"s{number}").wait_for()
        assert asked == [f"{served.url}live"]


def test_a_tick_leaves_focus_selection_and_what_was_unfolded_alone(served: Served, page: Page) -> None:
    served.tell(starting())
    page.goto(served.url)
    part = page.locator("details", has=page.get_by_role("heading", name="vllm-8001"))
    part.locator("summary").click()
    part.locator("summary").focus()
    page.evaluate("node => getSelection().selectAllChildren(node)", page.locator("dd b").first.element_handle())
    before = page.evaluate("getSelection().toString()")
    page.evaluate("window.row = document.querySelector('#all tbody tr')")

    served.tell(later(starting(), 5, [stalled(), slow(), server("a-new-one")]))
    page.locator("#all tbody tr").nth(2).wait_for()

    assert part.evaluate("part => part.open")
    assert page.evaluate("document.activeElement.textContent") == "vllm-8001: slow"
    assert page.evaluate("getSelection().toString()") == before != ""
    assert page.evaluate("window.row.isConnected"), "a server keeps its row, wherever that goes"
    assert page.locator("#all tbody tr").all_inner_texts()[0].startswith("sglang-8000")


def test_an_unfolded_server_that_is_folded_again_stays_so(served: Served, page: Page) -> None:
    served.tell(node(1))
    page.goto(served.url)
    part = page.locator("details").first
    part.locator("summary").click()

    after_ticks(page)

    assert not part.evaluate("part => part.open")


def test_a_server_that_goes_and_comes_keeps_the_table_in_order(served: Served, page: Page) -> None:
    every = [server(f"s{number}") for number in range(6)]
    served.tell(report_of(every))
    page.goto(served.url)
    for told in (every[3:], every[::2], [], every, [*every[4:], server("a")]):
        served.tell(later(report_of(told), len(told)))
        names = sorted(each.server.name for each in told)
        page.wait_for_function(
            "names => JSON.stringify([...document.querySelectorAll('#all tbody a')].map(a => a.textContent)) === names"
            " && document.querySelectorAll('details').length === JSON.parse(names).length",
            arg=str(names).replace("'", '"').replace(", ", ","),
        )


def test_an_old_report_is_never_shown_as_new(served: Served, page: Page) -> None:
    served.tell(node(1))
    page.goto(served.url)
    assert not page.get_by_role("alert").is_visible()

    served.now += 60
    page.get_by_role("alert").get_by_text("not served as new").wait_for()
    assert "What stands below is of 2023-11-14T22:21:41Z, not of now" in page.get_by_role("alert").inner_text()

    served.tell(replace(later(node(1), 60), monotonic=served.now))
    page.get_by_role("alert").wait_for(state="hidden")
    assert page.locator("#live time").inner_text() == "2023-11-14T22:22:41Z"

    served.http.stop()
    page.get_by_role("alert").get_by_text("stallwatch does not answer").wait_for()


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    try:
        library = build(tmp_path)
    except NoCompilerError as error:
        pytest.skip(str(error))
    cards = Cards(tmp_path, library, RANKS)
    yield cards
    cards.clear()


@pytest.mark.server
def test_a_real_stall_comes_to_the_page_of_a_real_exporter(tmp_path: Path, page: Page, cards: Cards, axe: str) -> None:
    """Of an open page, from the start of the server to the end of its stall, without loading it again."""
    with (
        Exporter(tmp_path, environment=cards.environment()) as exporter,
        StandIn("barrier-deadlock", tmp_path, cards=tmp_path, load_seconds=4.0) as server,
    ):
        page.goto(exporter.url)
        row = page.locator("#all tbody tr", has=page.get_by_role("rowheader", name=server.name))
        row.get_by_text("reading weights").wait_for(
            timeout=1000 * PATIENCE
        )  # eight processes on a machine that others use
        server.wait_for_line("Load weight end", RANKS)
        row.get_by_text("stalled (idle_wait)").wait_for(timeout=1000 * (STALL_AFTER + PATIENCE))
        part = page.locator("details", has=page.get_by_role("heading", name=server.name))
        told, ranks = row.inner_text(), part.locator("tbody tr").all_inner_texts()
        assert complaints(page, axe) == []
        server.rank(3).send_signal(signal.SIGUSR1)
        server.wait_for_line("ready to roll")
        row.get_by_text(re.compile("^idle")).wait_for(timeout=1000 * PATIENCE)

    assert "on each of 8 GPUs 76 GiB held, 0 % used, waiting for TP3, last progress " in told
    assert [rank.split("\t")[0] for rank in ranks] == [
        f"TP{each}" + (" (waited for)" if each == 3 else "") for each in range(RANKS)
    ]
    assert all("76.0" in rank and "futex" in rank for rank in ranks), ranks


# --- by keyboard -------------------------------------------------------------------------------------------


def test_the_page_is_read_and_paused_by_keyboard(served: Served, page: Page) -> None:
    served.tell(report_of([slow()]))
    page.goto(served.url)
    part = page.locator("details")
    assert not part.evaluate("part => part.open")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the server's name: leads to its part, and unfolds it
    page.wait_for_function("document.querySelector('details').open")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "ranks"

    page.locator("#pause").focus()
    page.keyboard.press("Enter")
    assert page.locator("#pause").inner_text() == "Go on"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2.5 * 1000 * TICK)
    assert asked == []

    page.keyboard.press("Enter")
    after_ticks(page, 1)
    assert asked
