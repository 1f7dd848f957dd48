"""The page of a report: safe and self-contained as a file, and an explorer that shows what its data says, in a browser."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="the extra `report` is not installed: no jinja2")

from locallip.proofs.rows import Row
from locallip.proofs.settings import Settings
from locallip.report.build import page_of
from locallip.report.page import Card, Figure, Page, Section, embedded, render
from locallip.report.runs import Certified, Run
from locallip.training.recipe import find
from tests.report_data import CLASSES, EPS, GRID, HOSTILE, LAYERS, figure, network, page

PLATE = np.array([18, 21, 27])[:, None, None]  # the colour of a map where nothing can change
AT_EPS = GRID.index(EPS)
NETWORKS = [network(images=16), network("mnist-like", 4, (1, 28, 28))]
TRIED = next(image for image in reversed(NETWORKS[0]["images"]) if image["radius"])
TRIED["tried"] = True  # its radius is the largest of the grid's that is proved
SMALL = page({"networks": NETWORKS})
FULL = page({"networks": [network()]})  # as many images as a report shows


def odd_network() -> dict[str, Any]:
    """Return a network of unusual data: hostile names, 200 classes, an estimate, nulls, a layer of one row."""
    odd = network(HOSTILE, 4)
    odd["classes"] = [f"{HOSTILE} {k}" for k in range(200)]
    odd["guarantee"], odd["eps_text"] = "estimate", f"{HOSTILE} eps"
    odd["layers"] = [{"title": HOSTILE, "units": 64, "map": [1, 64]}]
    odd["global_lipschitz"] = [3.0, math.inf]
    for image in odd["images"]:
        image["logits"] += [-1.0 - k / 100 for k in range(190)]
        image["lower"] = [row + [-20.0] * 190 for row in image["lower"]]
        image["upper"] = [row + [-0.5] * 190 for row in image["upper"]]
        image["lipschitz"] = [[1.0, math.nan] for _ in GRID]
        image["varying"] = [[k] for k in range(len(GRID))]
        image["maps"] = base64.b64encode(bytes(64 * len(GRID))).decode()
        image["decided_by"] = HOSTILE
    odd["images"][0]["margin"] = [math.nan] * len(GRID)
    odd["images"][0]["attacked"] = odd["images"][0]["radius"] / 2  # an attack inside: possible, as this is no proof
    return odd


def odd_page() -> Page:
    """Return a page where every text tries to break out of its place."""
    empty = network("empty", 0)
    sections = [Section("one", HOSTILE, HOSTILE, [Figure("odd", HOSTILE, HOSTILE, figure("x", "x").svg, HOSTILE, HOSTILE)])]
    return Page(HOSTILE, HOSTILE, [Card(HOSTILE, HOSTILE, [(HOSTILE,) * 3])], sections, {"networks": [odd_network(), empty]})


def made_page() -> Page:
    """Return a page with all figures that runs can have, made from their values as a report is."""
    epochs = [
        {
            "epoch": epoch,
            "clean_loss": 1.0 / epoch,
            "worst_loss": 2.0 / epoch,
            "global_bound": 90.0 / epoch,
            "local_bound": 60.0 / epoch,
            "local_norms": [1.0, 2.0, 3.0],
            "global_norms": [1.1, 2.1, 3.5],
            "varying": [0.9, 0.5],
        }
        for epoch in range(1, 9)
    ]
    settings = Settings(
        "made", "f" * 64, "cifar10", "test", 60, "0" * 64, "36/255", "deterministic", 0.0, 20, 100, 32, 1, "", {}, True
    )
    kinds = [
        ("CERTIFIED", "global bound"),
        ("ATTACKED", "attack"),
        ("UNKNOWN", "nothing"),
        ("MISCLASSIFIED", "clean logits"),
    ]
    rows = [
        Row(n, n % 10, n % 10, *kinds[n % 4], "deterministic", 0.0, 0.14, 0.1, 2.0, 3.0, 0.1, 0.01 * n) for n in range(60)
    ]
    steps = {"layers": ["0", "1"], "power": [[30, 300], [9, 12]], "lanczos": [[9, 12], [3, 4]], "power_cap": 300}
    evaluation = {"clean": 71.0, "pgd": 65.0, "estimate": 55.3, "certified": 55.1, "images": 60}
    explored = {"network": network(images=8), "steps": steps}
    run = Run(
        "fast",
        asdict(find("fast-cifar10-6c2f-local-b")),
        epochs,
        evaluation,
        {},
        "CPU",
        [Certified(settings, rows)],
        explored,
    )
    return page_of([run, replace(run, name="another, with a long name that wraps somewhere")])


# ------------------------------------------------------------------------------------------------------- without a browser


def test_whole_page_is_one_small_file_without_addresses() -> None:
    text = render(FULL)
    assert len(text.encode()) < 5_000_000
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.sub(r"base64|\"[A-Za-z0-9+/=]{40,}\"", "", text))
    assert not re.search(
        r"<(img|iframe|object|embed|audio|video)\b|<script[^>]*\bsrc=|<link(?! rel=\"icon\" href=\"data:,\")", text
    )
    assert "@import" not in text
    assert "url(" not in text


def test_data_cannot_end_its_script_and_keeps_its_values() -> None:
    data = {"name": HOSTILE, "line": "\u2028", "values": [1.5, -2, None, True]}
    text = embedded(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json.loads(embedded({"a": [math.nan, math.inf, (-math.inf, 1.0)]})) == {"a": [None, None, [None, 1.0]]}


def test_hostile_names_are_escaped_in_the_file() -> None:
    text = render(odd_page())
    assert "<img" not in text
    assert text.count("</script>") == 2  # the data's and the script's own


def test_style_and_script_cannot_end_their_elements() -> None:
    text = render(page(None))
    assert text.count("</style") == text.count("</script") == 1


def test_without_an_explorer_the_page_has_no_trace_of_it() -> None:
    text = render(page(None))
    assert 'id="explorer"' not in text
    assert "Explore single images" not in text
    assert "fast-cifar10-6c2f-local-b" in text


# ------------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return headless Chromium, started once."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no browser: none of chromium, chromium-browser, google-chrome is on the path")
    with api.sync_playwright() as player:
        running = player.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages that the tests open."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {"full": FULL, "small": SMALL, "odd": odd_page(), "empty": page({"networks": []}), "plain": page(None)}
    pages["made"] = made_page()
    for name, content in pages.items():
        (folder / f"{name}.html").write_text(render(content), encoding="utf-8", newline="")
    return {name: folder / f"{name}.html" for name in pages}


class Tabs:
    """Opens pages in one tab per kind of device, and keeps what went wrong in any of them."""

    def __init__(self, browser: Any, files: dict[str, Path]) -> None:
        self.browser, self.files = browser, files
        self.tabs: dict[tuple[int, str], Any] = {}
        self.troubles: list[str] = []

    def __call__(self, name: str = "small", width: int = 1280, scheme: str = "light") -> Any:
        if (width, scheme) not in self.tabs:
            self.tabs[width, scheme] = self.new_tab(width, scheme)
        tab = self.tabs[width, scheme]
        tab.emulate_media(media="screen")
        tab.goto(self.files[name].as_uri())
        return tab

    def new_tab(self, width: int, scheme: str) -> Any:
        tab = self.browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
        tab.set_default_timeout(10_000)
        tab.on("console", lambda message: self.troubles.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        tab.on("requestfailed", lambda request: self.troubles.append(f"failed: {request.url[:80]}"))
        tab.on("request", lambda request: None if local(request.url) else self.troubles.append(request.url))
        return tab


@pytest.fixture(scope="module")
def tabs(browser: Any, files: dict[str, Path]) -> Tabs:
    """Return the tabs of this module: starting one costs more than a test."""
    return Tabs(browser, files)


@pytest.fixture
def opened(tabs: Tabs) -> Iterator[Tabs]:
    """Return what opens a page by name; after the test no error or foreign request may have been seen."""
    tabs.troubles.clear()
    yield tabs
    assert tabs.troubles == []


def local(url: str) -> bool:
    """Return whether the address is the page itself or data within it."""
    return url.startswith(("data:", "blob:")) or (url.startswith("file:") and url.split("#")[0].endswith(".html"))


def numbers(text: str) -> list[float]:
    """Return the numbers in a text of the page."""
    return [float(found) for found in re.findall(r"-?\d[\d.]*", text.replace("\u2212", "-").replace(",", ""))]


def shown_order(tab: Any) -> list[int]:
    """Return the indices of the images in the gallery, in its order."""
    labels = tab.locator(".thumb").evaluate_all("all => all.map((thumb) => thumb.getAttribute('aria-label'))")
    return [int(numbers(label)[0]) for label in labels]


def choose(tab: Any, image: dict[str, Any]) -> None:
    """Choose an image by a click on its thumbnail."""
    tab.locator(f".thumb[aria-label^='Image {image['index']},']").click()


def expected(images: list[dict[str, Any]], order: Callable[[dict[str, Any]], Any]) -> list[int]:
    """Return the indices of the images in that order."""
    return [image["index"] for image in sorted(images, key=order)]


def pixels(tab: Any, canvas: str) -> np.ndarray:
    """Return the colours of a canvas, (3, H, W)."""
    values = tab.locator(canvas).evaluate(
        "c => [c.height, c.width, ...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    )
    return np.array(values[2:]).reshape(values[0], values[1], 4)[..., :3].transpose(2, 0, 1)


def sides(tab: Any, selector: str) -> list[list[float]]:
    """Return the left and right ends of what the selector finds, in pixels."""
    return tab.locator(selector).evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect()).map((box) => [box.left, box.right])"
    )


def by_verdict(verdict: str) -> dict[str, Any]:
    """Return the first image with the verdict."""
    return next(image for image in NETWORKS[0]["images"] if image["verdict"] == verdict)


def test_slider_shows_the_numbers_of_each_radius(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("UNKNOWN")
    choose(tab, image)
    said = []
    for step in (0, 1, AT_EPS, len(GRID) - 1):
        tab.locator("#radius").fill(str(step))
        check_numbers(tab, image, step)
        said.append("is not proved" in tab.locator("#sentence").inner_text())
    assert said == [False, False, True, True]


def check_numbers(tab: Any, image: dict[str, Any], step: int) -> None:
    """Compare every number that depends on the radius with the data."""
    radius, share = numbers(tab.locator("#place").inner_text())[:2]
    assert radius == pytest.approx(GRID[step], rel=5e-3)
    assert share == round(100 * GRID[step] / EPS)

    margin = image["margin"][step]
    sentence = tab.locator("#sentence").inner_text()
    if margin > 0:
        said = numbers(sentence.split("at least")[1])[0]
        assert margin * 0.99 <= said <= margin + 1e-9  # three digits, and never more than is proved
    else:
        assert "is not proved to lead" in sentence

    rows = {
        row.split("\n")[0]: numbers(row.split("\n")[1])
        for row in tab.locator("#logits .row").all_inner_texts()
        if "…" in row
    }
    assert list(rows) == [CLASSES[k] for k in np.argsort(image["logits"])[::-1]]
    for k, name in enumerate(CLASSES):
        lower, upper = image["lower"][step][k], image["upper"][step][k]
        assert rows[name] == [pytest.approx(lower, rel=1e-2), pytest.approx(upper, rel=1e-2)]
        assert rows[name][0] <= lower + 1e-9
        assert rows[name][1] >= upper - 1e-9

    texts = tab.locator(".layer p").all_inner_texts()
    for text, free, (_, units, _) in zip(texts, image["varying"][step], LAYERS, strict=True):
        assert [int(n) for n in numbers(text)] == [free, units, units - free]

    radii = [numbers(text) for text in tab.locator("#radii .amount").all_inner_texts()]
    for shown, near, wide in zip(radii, image["lipschitz"][step], NETWORKS[0]["global_lipschitz"], strict=True):
        assert shown == [pytest.approx(near * GRID[step], rel=1e-2), pytest.approx(wide * GRID[step], rel=1e-2)]


def test_bars_of_logits_stand_where_their_numbers_are(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("UNKNOWN")
    choose(tab, image)
    tab.locator("#radius").fill("9")
    boxes = sides(tab, "#logits .span")
    order = np.argsort(image["logits"])[::-1]
    ends = [(image["lower"][9][k], image["upper"][9][k]) for k in order]
    slope, offset = np.polyfit(np.ravel(ends), np.ravel(boxes), 1)
    assert slope > 0
    assert np.abs(slope * np.ravel(ends) + offset - np.ravel(boxes)).max() < 1.5  # pixels: one axis for all bars
    crossing = [k for k in order if k != image["label"] and image["upper"][9][k] >= image["lower"][9][image["label"]]]
    floor = slope * image["lower"][9][image["label"]] + offset
    assert np.abs(np.array(sides(tab, "#logits .cut"))[:, 0] - floor).max() < 1.5  # the line at the label's lower end
    over = sides(tab, "#logits .over:visible")
    assert len(over) == len(crossing) > 0
    for (left, right), k in zip(over, crossing, strict=True):
        assert left == pytest.approx(max(floor, slope * image["lower"][9][k] + offset), abs=1.5)
        assert right == pytest.approx(slope * image["upper"][9][k] + offset, abs=1.5)
    assert "compared in pairs" in tab.locator("#logits-note").inner_text()


def test_bars_of_radii_share_one_logarithmic_axis(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("UNKNOWN")
    choose(tab, image)
    widths, reach = [], []
    for step in (3, 11):
        tab.locator("#radius").fill(str(step))
        for kind, bounds in [(".near", image["lipschitz"][step]), (".wide", NETWORKS[0]["global_lipschitz"])]:
            widths += [right - left for left, right in sides(tab, f"#radii {kind}")]
            reach += [math.log10(bound * GRID[step]) for bound in bounds]
    slope, offset = np.polyfit(reach, widths, 1)
    assert slope > 10
    assert np.abs(slope * np.array(reach) + offset - widths).max() < 1.5


def test_maps_light_up_where_units_can_change(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("UNKNOWN")
    choose(tab, image)
    maps = np.frombuffer(base64.b64decode(image["maps"]), np.uint8)
    for step in (0, 7):
        tab.locator("#radius").fill(str(step))
        start = 0
        for k, (_, _, (height, width)) in enumerate(LAYERS):
            values = maps[start + step * height * width :][: height * width].reshape(height, width)
            start += len(GRID) * height * width
            drawn = pixels(tab, f".layer:nth-child({k + 1}) canvas")
            assert ((drawn != PLATE).any(0) == (values > 0)).all()
            brightness = drawn.sum(0)[np.unravel_index(np.argsort(values, axis=None), values.shape)]
            assert (np.diff(brightness) >= 0).all()
            assert (brightness.max() > 200) == (step > 0)


def test_image_and_adversary_are_drawn_from_their_bytes(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("ATTACKED")
    choose(tab, image)
    original = np.frombuffer(base64.b64decode(image["pixels"]), np.uint8).reshape(3, 32, 32)
    difference = np.frombuffer(base64.b64decode(image["adversary"]["difference"]), np.int8).reshape(3, 32, 32)
    assert (pixels(tab, "#large") == original).all()
    changed = np.clip(original + 255 * image["adversary"]["scale"] / 127 * difference, 0, 255)
    assert np.abs(pixels(tab, "#adversary figure:nth-child(2) canvas") - changed).max() <= 0.51
    factor = numbers(tab.locator("#adversary figure:nth-child(3)").inner_text())[0]
    assert factor == 10
    amplified = np.clip(127.5 + factor * 255 * image["adversary"]["scale"] / 127 * difference, 0, 255)
    assert np.abs(pixels(tab, "#adversary figure:nth-child(3) canvas") - amplified).max() <= 0.51
    assert CLASSES[image["adversary"]["class"]] in tab.locator("#adversary figure:nth-child(2)").inner_text()


def test_axis_of_radii_marks_what_is_known(opened: Tabs) -> None:
    tab, image = opened(), by_verdict("CERTIFIED")
    choose(tab, image)
    marks = {
        text.rsplit(" ", 1)[0]: numbers(text)[-1] for text in tab.locator(".marks li").all_inner_texts() if numbers(text)
    }
    assert image["radius"] * 0.99 <= marks["certified radius"] <= image["radius"]
    assert marks["attack succeeds at"] == pytest.approx(image["attacked"], rel=5e-3)
    assert marks["eps, 36/255 ="] == pytest.approx(EPS, rel=5e-3)
    edges = tab.locator("#axis .track").first.evaluate(
        """track => [".safe", ".gap", ".attacked", ".eps", ".here"].map((name) => {
          const mark = track.querySelector(name), width = (element) => element.getBoundingClientRect().width;
          return [parseFloat(mark.style.left), 100 * width(mark) / width(track)];
        })"""
    )
    unit = edges[3][0] / EPS  # per cent of the axis for one unit of distance
    safe, gap, attacked, _, here = edges
    assert safe[1] == pytest.approx(unit * image["radius"], rel=0.01)
    assert gap == [
        pytest.approx(unit * image["radius"], rel=0.01),
        pytest.approx(unit * (image["attacked"] - image["radius"]), rel=0.01),
    ]
    assert attacked[0] == pytest.approx(unit * image["attacked"], rel=0.01)
    assert here[0] == pytest.approx(unit * GRID[AT_EPS], rel=0.01)


def test_images_without_radius_or_adversary_say_so(opened: Tabs) -> None:
    tab = opened()
    choose(tab, by_verdict("MISCLASSIFIED"))
    assert "nothing to certify" in tab.locator("#axis").inner_text()
    assert tab.locator("#axis .safe, #axis .gap, #axis .attacked").count() == 0
    assert tab.locator("#adversary canvas").count() == 0
    choose(tab, by_verdict("ATTACKED"))
    assert "No radius is certified" in tab.locator("#axis").inner_text()
    choose(tab, by_verdict("UNKNOWN"))
    assert "No attack succeeded" in tab.locator("#axis").inner_text()
    assert "No attack succeeded" in tab.locator("#adversary").inner_text()


def test_gallery_is_sorted_and_filtered_as_the_data_says(opened: Tabs) -> None:
    tab, images = opened(), NETWORKS[0]["images"]
    assert shown_order(tab) == expected(images, lambda i: (-(i["radius"] or -1), i["index"]))
    tab.select_option("#sort", "smallest")
    assert shown_order(tab) == expected(images, lambda i: (i["radius"] or math.inf, i["index"]))
    tab.select_option("#sort", "class")
    assert shown_order(tab) == expected(images, lambda i: (i["label"], i["index"]))
    tab.select_option("#sort", "index")
    assert shown_order(tab) == [image["index"] for image in images]

    tab.select_option("#verdict", "UNKNOWN")
    kept = [image for image in images if image["verdict"] == "UNKNOWN"]
    assert shown_order(tab) == [image["index"] for image in kept]
    tab.locator("#least").fill("0.1")
    kept = [image for image in kept if image["radius"] >= 0.1]
    assert 0 < len(kept) < 4
    assert shown_order(tab) == [image["index"] for image in kept]
    assert tab.locator("#count").inner_text() == f"{len(kept)} of 16 images"
    tab.select_option("#class", str(kept[0]["label"]))
    assert shown_order(tab) == [image["index"] for image in kept if image["label"] == kept[0]["label"]]
    tab.locator("#least").fill("9")
    assert shown_order(tab) == []
    assert tab.locator("#keys").inner_text() == "No image passes these filters."
    assert not tab.locator("#detail").is_visible()  # or the last image would seem to pass
    tab.locator("#least").fill("0")
    assert tab.locator("#detail").is_visible()


def test_a_filter_that_drops_the_chosen_image_chooses_one_that_is_shown(opened: Tabs) -> None:
    tab = opened()
    choose(tab, by_verdict("CERTIFIED"))
    tab.select_option("#verdict", "ATTACKED")
    assert tab.locator("#who").text_content().startswith(f"Image {shown_order(tab)[0]}:")
    assert tab.locator(".thumb[aria-selected=true]").count() == 1


def test_a_radius_that_was_tried_in_steps_is_called_a_lower_bound(opened: Tabs) -> None:
    tab = opened()
    for image in (by_verdict("CERTIFIED"), TRIED):
        choose(tab, image)
        assert tab.locator("#axis").text_content().count("at least") == (2 if image is TRIED else 0)


def test_keyboard_chooses_images_and_moves_the_radius(opened: Tabs) -> None:
    tab = opened(width=360)
    order = shown_order(tab)
    tab.locator("#least").focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "thumb"

    def chosen() -> int:
        assert tab.locator(".thumb[aria-selected=true]").count() == tab.locator(".thumb[tabindex='0']").count() == 1
        assert tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
        return int(numbers(tab.locator("#who").inner_text())[0])

    line = tab.evaluate("getComputedStyle(document.getElementById('gallery')).gridTemplateColumns.split(' ').length")
    places = {"ArrowRight": 1, "ArrowDown": 1 + line, "ArrowLeft": line, "ArrowUp": 0, "End": 15, "Home": 0}
    for key, place in places.items():
        tab.keyboard.press(key)
        assert chosen() == order[place]
    tab.keyboard.press("ArrowLeft")  # nothing before the first
    assert chosen() == order[0]
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "radius"
    tab.keyboard.press("ArrowRight")
    assert numbers(tab.locator("#place").inner_text())[0] == pytest.approx(GRID[AT_EPS + 1], rel=5e-3)
    assert tab.locator("#radius").get_attribute("aria-valuetext").endswith("117 % of 36/255")


def test_another_network_can_be_chosen(opened: Tabs) -> None:
    tab = opened()
    tab.select_option("#network", "1")
    assert sorted(shown_order(tab)) == [image["index"] for image in NETWORKS[1]["images"]]
    grey = pixels(tab, "#large")
    assert grey.shape == (3, 28, 28)
    assert (grey[0] == grey[1]).all()
    assert (grey[0] == grey[2]).all()


def test_light_and_dark_follow_the_system_and_the_button(opened: Tabs) -> None:
    def brightness(tab: Any) -> float:
        return float(np.mean(numbers(tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    for scheme, other in [("light", "dark"), ("dark", "light")]:
        tab = opened("plain", scheme=scheme)
        assert (brightness(tab) > 128) == (scheme == "light")
        assert tab.locator("#theme").inner_text().lower() == f"{other} mode"
        tab.locator("#theme").click()
        assert (brightness(tab) > 128) == (other == "light")
        assert tab.locator("#theme").inner_text().lower() == f"{scheme} mode"


@pytest.mark.parametrize("name", ["small", "odd", "made"])
def test_phone_scrolls_only_downwards(opened: Tabs, name: str) -> None:
    tab = opened(name, width=360)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.evaluate("document.body.scrollWidth") <= 360
    wide = tab.locator(".drawing").evaluate_all("all => all.filter((e) => e.scrollWidth > e.clientWidth + 1).length")
    assert wide == 0  # charts are seen whole
    tall = tab.locator("#bar").bounding_box()["height"]
    assert tall < 450 if name == "odd" else tall < 150  # it stays in view, so it must leave room


def test_charts_scroll_in_their_frames_where_letters_would_become_too_small(opened: Tabs) -> None:
    tab = opened("small", width=280)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 280
    chart = tab.locator(".drawing").first
    assert chart.evaluate("e => e.scrollWidth > e.clientWidth")
    assert chart.get_attribute("tabindex") == "0"  # by keyboard too


def test_slider_is_marked_at_multiples_of_eps(opened: Tabs) -> None:
    """Marks stand where the slider's thumb is at that radius."""
    tab = opened()
    marks = tab.locator("#notches > span")
    assert marks.all_inner_texts() == ["0", "eps", "2 eps"]
    slider, mark = tab.locator("#radius").bounding_box(), marks.nth(1).bounding_box()
    at = (AT_EPS / (len(GRID) - 1)) * (slider["width"] - 16) + 8 + slider["x"]
    assert mark["x"] + mark["width"] / 2 == pytest.approx(at, abs=3)


def test_print_is_light_and_shows_the_chosen_image_without_controls(opened: Tabs) -> None:
    tab = opened(scheme="dark")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert numbers(tab.evaluate("getComputedStyle(document.body).color"))[0] < 60
    for gone in ("#theme", "#gallery", ".controls", "#radius", "nav", "a.data"):
        assert not tab.locator(gone).first.is_visible(), gone
    for kept in ("#large", "#place", "#sentence", "#logits", ".layer canvas", "#adversary canvas", ".drawing svg"):
        assert tab.locator(kept).first.is_visible(), kept


@pytest.mark.parametrize(
    ("name", "scheme", "width"), [("small", "light", 1280), ("small", "dark", 360), ("made", "light", 1280)]
)
def test_no_serious_barrier(opened: Tabs, name: str, scheme: str, width: int) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed (extra `dev`)"
    )
    tab = opened(name, scheme=scheme, width=width)
    choose(tab, by_verdict("CERTIFIED"))
    found = axe.Axe().run(tab).response
    assert found["passes"]  # the check did run
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in grave] == []


def test_headings_and_landmarks_are_in_order(opened: Tabs) -> None:
    tab = opened()
    levels = tab.locator("h1, h2, h3, h4").evaluate_all("all => all.map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert max(np.diff(levels)) == 1
    assert [tab.locator(mark).count() for mark in ("main", "header", "footer", "nav")] == [1, 1, 1, 1]
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"


def test_data_of_a_figure_can_be_downloaded(opened: Tabs, tmp_path: Path) -> None:
    tab = opened("plain")
    with tab.expect_download() as waiting:
        tab.locator("#loss a.data").click()
    assert waiting.value.suggested_filename == "loss.csv"
    waiting.value.save_as(tmp_path / "loss.csv")
    assert (tmp_path / "loss.csv").read_bytes() == figure("loss", "Loss").csv.encode()


def test_hostile_names_stay_text_and_an_estimate_is_never_called_certified(opened: Tabs) -> None:
    tab = opened("odd")
    tab.locator(".thumb").first.click()
    assert tab.locator("img").count() == 0
    for place in ("h1", ".card h2", "#one h2", "figcaption >> nth=0", "#who", "#facts", "#sentence", ".layer h4", "#place"):
        assert HOSTILE in tab.locator(place).first.inner_text(), place
    for place in ("#network option", "#class option >> nth=1"):
        assert HOSTILE in tab.locator(place).first.text_content(), place
    assert tab.locator(".drawing").first.get_attribute("aria-label") == HOSTILE
    text = tab.locator("#explorer").inner_text().lower()
    assert "no proof" in text
    assert "certified" not in text.replace("explore", "")


def test_odd_data_is_shown_as_not_known_and_never_as_proved(opened: Tabs) -> None:
    tab, odd = opened("odd"), odd_network()
    choose(tab, odd["images"][0])
    assert "is not estimated to lead" in tab.locator("#sentence").inner_text()
    assert "the estimate is wrong here" in tab.locator("#axis").inner_text()
    assert tab.locator("#radii .amount").nth(1).inner_text() == "not known / not known"
    assert tab.locator("#logits .row.label").count() == 1
    assert tab.locator("#logits .row").count() == 13  # twelve classes and the axis
    assert "188 other classes" in tab.locator("#logits-note").inner_text()
    tab.select_option("#network", "1")
    assert "nothing to explore" in tab.locator("#nothing").inner_text()
    assert not tab.locator("#detail").is_visible()
    tab.select_option("#network", "0")
    assert tab.locator("#detail").is_visible()


def test_no_network_at_all_is_said(opened: Tabs) -> None:
    tab = opened("empty")
    assert "nothing to explore" in tab.locator("#nothing").inner_text()
    assert not tab.locator("#choice").is_visible()


def test_slider_answers_within_50_ms(opened: Tabs) -> None:
    tab = opened("full")
    times = tab.evaluate(
        """async () => {
          const slider = document.getElementById("radius"), times = [];
          const painted = () => new Promise((done) => requestAnimationFrame(() => {
            const channel = new MessageChannel();  // its message comes after the frame was drawn
            channel.port1.onmessage = done;
            channel.port2.postMessage(0);
          }));
          for (let k = 0; k < 26; k++) {
            const start = performance.now();
            slider.value = k % 13;
            slider.dispatchEvent(new Event("input"));
            await painted();
            times.push(performance.now() - start);
          }
          return times;
        }"""
    )
    assert len(times) == 26
    assert median(times) < 50, times


def test_figures_of_runs_are_drawn_inside_their_frames(opened: Tabs) -> None:
    tab = opened("made")
    assert tab.locator(".drawing svg").count() == 17
    outside = tab.locator(".drawing svg").evaluate_all(
        """all => all.flatMap((svg) => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll("text, path, rect, circle, line")].filter((part) => {
                const box = part.getBoundingClientRect();
                return box.left < frame.left - 2 || box.right > frame.right + 2
                    || box.top < frame.top - 2 || box.bottom > frame.bottom + 2;
            }).map((part) => part.textContent || part.outerHTML.slice(0, 80));
        })"""
    )
    assert outside == []
    colours = tab.locator(".drawing svg path.line").evaluate_all("all => all.map((line) => getComputedStyle(line).stroke)")
    assert "none" not in colours
    assert len(set(colours)) >= 3
