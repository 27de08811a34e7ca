"""Report pages in a real browser: Chromium, without a window (`make browser` installs it)."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.report.pages import HOSTILE, layered, measured, optimised, profiles
from xrlflow import api
from xrlflow.batch import Batch, Row
from xrlflow.pipeline.pages import result_page
from xrlflow.report.page.document import Page
from xrlflow.report.page.html import page_html

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the extra `test`)")
if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: `make browser` installs it"),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync",
]  # fmt: skip
SECTIONS = ["summary", "faster", "same", "changes", "time", "search", "next", "environment"]
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page in a tab. `faults`: what the console complains about, and requests to anywhere else."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.faults: list[str] = []
        self.tab: Tab = browser.new_page(**{"viewport": WIDE, **options})
        self.tab.set_default_timeout(20_000)
        self.tab.on(
            "console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None
        )
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on(
            "request", lambda r: None if r.url == url.partition("#")[0] else self.faults.append(r.url)
        )
        self.tab.goto(url)
        self.tab.wait_for_function("document.documentElement.dataset.ready !== undefined")

    def count(self, selector: str) -> int:
        return self.tab.locator(selector).count()

    def transform(self, side: str) -> str:
        found = self.tab.locator(f"[data-side={side}] svg > g").get_attribute("transform")
        assert found is not None
        return found

    def text(self, selector: str) -> str:
        return self.tab.locator(selector).inner_text()


def whole(name: str) -> Page:
    """A page on which every section has something to show."""
    page = result_page([measured(optimised(name))], profiled=False)
    before, after = profiles()
    run = replace(page.runs[0], operators_before=before, operators_after=after, lines=())
    return replace(page, runs=(run,))


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[Any]:
    """Opens pages; when the test is over they must not have complained."""
    tabs: list[Opened] = []

    def open_page(page: Page, anchor: str = "", **options: Any) -> Opened:
        file = tmp_path / "page.html"
        file.write_text(page_html(page.to_json()), encoding="utf-8")
        tabs.append(Opened(chromium, f"{file.as_uri()}{anchor}", **options))
        return tabs[-1]

    yield open_page
    faults = [tab.faults for tab in tabs]
    for tab in tabs:
        tab.tab.close()
    assert faults == [[]] * len(tabs)


@pytest.mark.parametrize("name", ["small", "large", "control"])
def test_every_section_is_filled(opened: Any, name: str) -> None:
    page = opened(whole(name))
    found = page.tab.evaluate(
        "[...document.querySelectorAll('main > section')].map(s => [s.id, s.innerText.length])"
    )
    assert [section for section, _ in found] == SECTIONS
    assert all(length > 60 for _, length in found)
    assert page.text("h1") == "1.84 times as fast"
    assert "95% interval 1.750 to 1.930" in page.text("#summary")
    for chart in ("#faster", "#search"):
        page.tab.wait_for_selector(f"{chart} .chart svg circle", state="attached")
    assert page.count("#faster .chart") == 2
    assert page.count("#faster circle") == 3 + 2 * 20
    assert page.count(".canvas svg .node, .canvas svg .fold") > 4
    # Headings, names for what has no text, and one thing for each anchor of the navigation.
    assert page.tab.evaluate(
        "[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))"
    )
    assert page.count("h1") == 1
    unnamed = page.tab.evaluate(
        "[...document.querySelectorAll('button, input, select, [role]')].filter(n => !n.textContent.trim()"
        " && !n.ariaLabel && !n.title && !n.labels?.length && n.role !== 'status').map(n => n.outerHTML)"
    )
    assert unnamed == []


def test_a_large_graph_is_laid_out_once_for_equal_layers(opened: Any) -> None:
    page = opened(whole("large"))
    assert page.count("[data-side=before] .node") <= 48
    page.tab.evaluate("window.xrlflow.views().forEach(view => view.unfold(true))")
    assert page.count("[data-side=before] .node") == 1405
    layouts = page.tab.evaluate("window.xrlflow.views().map(view => view.shapes.size)")
    assert max(layouts) <= 6


def test_folding(opened: Any) -> None:
    page = opened(whole("small"))
    side = "[data-side=before]"
    few = page.count(f"{side} .node")
    page.tab.locator(f"{side} .fold").first.click()
    assert page.count(f"{side} .fold") == 4 + 1  # the tail repeats as well
    page.tab.locator(f"{side} .fold").nth(1).click()
    assert page.count(f"{side} .node") == few + 14
    assert "/layer.1 · 14 operators" in str(page.tab.locator(f"{side} svg").text_content())
    page.tab.locator(f"{side} .head").nth(1).click()
    assert page.count(f"{side} .node") == few
    page.tab.locator(f"{side} button[title='Unfold all']").click()
    assert page.count(f"{side} .node") == 67
    page.tab.locator(f"{side} button[title='Fold all']").click()
    assert page.count(f"{side} .node") == few


def test_zoom_by_buttons_wheel_and_keys(opened: Any) -> None:
    page = opened(whole("small"))
    canvas = page.tab.locator("[data-side=before] .canvas")
    canvas.scroll_into_view_if_needed()

    def scale() -> float:
        (found,) = re.findall(r"scale\((.*)\)", page.transform("before"))
        return float(found)

    first = scale()
    page.tab.locator("[data-side=before] button[title='Zoom in']").click()
    assert scale() == pytest.approx(first * 1.3)
    page.tab.locator("[data-side=before] button[title='Zoom out']").click()
    assert scale() == pytest.approx(first)
    box = canvas.bounding_box()
    page.tab.mouse.move(box["x"] + 20, box["y"] + 200)
    page.tab.mouse.wheel(0, -1)  # the page scrolls
    page.tab.wait_for_timeout(50)
    assert scale() == pytest.approx(first)
    page.tab.mouse.move(box["x"] + 20, box["y"] + 200)
    page.tab.mouse.down()
    page.tab.mouse.up()
    page.tab.mouse.wheel(0, -60)
    page.tab.wait_for_function(f"window.xrlflow.views()[0].scale > {first * 1.1}")
    page.tab.keyboard.press("0")
    assert scale() == pytest.approx(first)
    before = page.transform("before")
    page.tab.keyboard.press("ArrowRight")
    assert page.transform("before") != before
    page.tab.keyboard.press("+")
    assert scale() == pytest.approx(first * 1.3)
    page.tab.keyboard.press("n")
    assert page.text("#live") == "Input, x, float[4,8]"
    page.tab.keyboard.press("n")
    page.tab.keyboard.press("n")
    assert "folded" in page.text("#live")
    page.tab.keyboard.press("Enter")
    assert page.text("#live").endswith("unfolded")


def test_search(opened: Any) -> None:
    page = opened(whole("large"))
    page.tab.locator("#find").fill("layer.42/matmul")
    assert page.text("#found") == "2 boxes; Enter goes from one to the next"
    page.tab.locator("#find").press("Enter")
    assert page.text("#found") == "1 of 2: before"
    hit = page.tab.locator("[data-side=before] .node.hit")
    assert str(hit.text_content()).endswith("MatMul")
    inside = page.tab.locator("[data-side=before] .canvas").bounding_box()
    box = hit.bounding_box()
    assert inside["x"] < box["x"] < inside["x"] + inside["width"]
    assert inside["y"] < box["y"] < inside["y"] + inside["height"]
    page.tab.locator("#find").press("Enter")
    assert page.count("[data-side=after] .node.hit") == 1
    page.tab.locator("#find").fill("no such thing")
    assert "nothing" in page.text("#found")
    page.tab.locator("#find").fill("")
    assert page.count(".hit") == 0


def test_a_substitution_leads_to_its_place_and_back(opened: Any) -> None:
    page = opened(whole("small"))
    row = page.tab.locator("#changes tr", has_text="CancelTransposes").nth(2)
    row.locator("button.link").click()
    assert row.get_attribute("aria-selected") == "true"
    assert page.tab.locator("[data-side=before] .chosen").all_inner_texts() != []
    ops = page.tab.locator("[data-side=before] .node.chosen text").all_text_contents()
    assert ops == ["Transpose", "Transpose"]
    assert page.tab.locator("[data-side=after] .node.chosen text").all_text_contents() == ["MatMul"]
    detail = page.text(".detail")
    for said in (
        "CancelTransposes",
        "transpose_q(transpose_p(x))",
        "proven: both sides agree",
        "by the cost model",
        "2 Transpose",
    ):
        assert said in detail, said
    address = page.tab.evaluate("location.hash")
    assert re.fullmatch(r"#change-\d+", address)
    again = opened(whole("small"), address)
    assert again.text(".detail h3") == page.text(".detail h3")
    page.tab.locator("[data-side=before] .node.chosen").first.click()
    assert page.text(".detail h3") == "Transpose"
    assert "CancelTransposes" in page.text(".detail")
    page.tab.locator(".detail button.link", has_text="CancelTransposes").click()
    assert page.text(".detail h3").endswith("CancelTransposes")


def test_bodies_can_be_looked_into(opened: Any) -> None:
    page = opened(whole("control"))
    page.tab.locator("[data-side=before] button[title='Unfold all']").click()
    said = page.tab.locator("[data-side=before] svg").text_content()
    for word in ("then_branch", "else_branch", "body", "Loop", "Tanh"):
        assert word in said
    assert page.count("[data-side=before] .node.changed") == 5


def test_tables_are_sorted(opened: Any) -> None:
    page = opened(whole("small"))
    head = page.tab.locator("#time th", has_text="operator")
    rows = page.tab.locator("#time tbody th")
    assert rows.all_inner_texts() == ["MatMul", "Transpose"]
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert rows.all_inner_texts() == ["Transpose", "MatMul"]
    page.tab.locator("#time th", has_text="after, ms").locator("button").click()
    assert rows.all_inner_texts() == ["MatMul", "Transpose"]
    assert "sorted by after, ms" in page.text("#live")


def test_hostile_names_are_text(opened: Any) -> None:
    page = opened(replace(whole("hostile"), title=HOSTILE[0]))
    page.tab.locator("[data-side=before] button[title='Unfold all']").click()
    assert page.tab.evaluate("window.broken") is None
    assert page.count("main img") == 0
    assert page.text("#model") == HOSTILE[0]
    for name in ("<img src=x", "nnnnn", "</script><script>"):
        page.tab.locator("#find").fill(name)
        assert page.text("#found") != "nothing has this in its operator, name or type", name
    page.tab.locator("[data-side=before] .node").nth(1).click()
    assert page.tab.evaluate("window.broken") is None
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", ["small", "hostile"])
def test_a_telephone_scrolls_only_down(opened: Any, name: str) -> None:
    page = opened(whole(name), viewport={"width": 375, "height": 700}, has_touch=True)
    page.tab.locator("#changes button.link").first.click()
    assert page.tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [375, 375]
    small = page.tab.evaluate(
        "[...document.querySelectorAll('main *')].filter(n => n.childElementCount === 0 && n.innerText"
        " && parseFloat(getComputedStyle(n).fontSize) < 11).length"
    )
    assert small == 0


def test_light_and_dark(opened: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = opened(whole("small"), color_scheme="dark")
    light = opened(whole("small"), color_scheme="light")
    colours = [page.tab.evaluate(ground) for page in (dark, light)]
    assert colours[0] != colours[1]
    light.tab.locator("#theme").click()
    assert light.tab.evaluate(ground) == colours[1]
    light.tab.locator("#theme").click()
    assert light.tab.evaluate(ground) == colours[0]
    assert light.text("#theme") == "Theme: dark"


def test_two_models_are_served(chromium: Browser) -> None:
    data = api.view(layered(4, tail=8), optimised("small").model, threads=1)
    with api.serving(data) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = Opened(chromium, server.url)
        assert page.text("h1") == "Two models, side by side"
        assert page.count("#changes tbody tr") == 8
        page.tab.locator("#changes button.link").first.click()
        assert page.count("[data-side=A] .node.chosen") == 2
        assert "MatMul" in page.text("#time")
        assert page.faults == []
        page.tab.close()
        server.shutdown()


def test_strategies_are_compared(opened: Any) -> None:
    both = whole("small")
    (run,) = both.runs
    other = replace(run, name="taso", after=None, substitutions=())
    page = opened(replace(both, kind="compare", runs=(run, other)))
    assert page.count("#strategies tbody tr") == 2
    page.tab.locator("#strategies button.link", has_text="taso").click()
    page.tab.wait_for_function("document.documentElement.dataset.ready === '1'")
    assert page.count(".pane") == 1
    page.tab.locator("#run").select_option("0")
    assert page.count(".pane") == 2


def many(tmp_path: Path) -> Batch:
    """A batch with rows of each kind, and names that are hostile."""

    def report(low: float | None, speedup: float | None, original: bool = False) -> dict[str, Any]:
        high = None if low is None or speedup is None else 2 * speedup - low
        return {
            "nodes_before": 90, "nodes_after": 70, "latency_before_ms": 2.0, "latency_after_ms": 1.5, "verified": True,
            "speedup": speedup, "speedup_low": low, "speedup_high": high, "returned_original": original, "reason": "",
            "threads": 2,
        }  # fmt: skip

    decided = report(None, None) | {"decided": 1.2, "decided_low": 1.1, "decided_high": 1.31}

    def row(name: str, **given: Any) -> Row:
        values = {
            "error": None,
            "files": (("x.onnx", 1), ("a #1/x.onnx.html", 1)),
            "machine": "cpu",
            "seconds": 61.5,
        }
        return Row(name, "key", **{**values, **given})

    rows = (
        row("a/x.onnx", report=report(1.2, 1.3)),
        row("b/x.onnx", report=report(None, 1.1), notes=("a note",)),
        row("c.onnx", report=report(None, None, original=True), machine="another"),
        row(HOSTILE[1], error=f"broken: {HOSTILE[0]}", files=()),
        row(HOSTILE[4], report=report(0.9, 0.95), earlier=True),
        row("d.onnx", report=decided),
    )
    return Batch(tmp_path / "fast", (*(r.name for r in rows), "waiting.onnx"), rows, 99.0, interrupted=True)


def test_the_page_of_a_batch(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(many(tmp_path).report_html(), encoding="utf-8")
    page = Opened(chromium, file.as_uri())
    found = page.tab.evaluate("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert found == ["summary", "models", "faster", "failures", "notes", "environment"]
    assert page.text("h1") == "2 of 7 models clearly faster"
    assert "1 model to go: the same command goes on" in page.text("#summary")
    names = "#models tbody tr th"
    assert page.count(names) == 7
    assert "1.100 to 1.310, as decided" in page.text("#models")
    assert page.text(f"{names} >> nth=3") == HOSTILE[1]
    assert page.tab.locator(f"{names} a").first.get_attribute("href") == "./a%20%231/x.onnx.html"
    assert page.count(f"{names} a") == 5
    page.tab.get_by_role("button", name="times as fast").click()
    assert page.text(f"{names} >> nth=0") == "a/x.onnx"  # the fastest first
    assert page.tab.evaluate("window.broken") is None
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tab.set_viewport_size({"width": 390, "height": 800})
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tab.close()
    assert page.faults == []
