"""Every view of `holdfast serve`, and the report: narrow, dark, by keys alone, with errors, with hostile names."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

import holdfast
from holdfast.serving.server import StoreServer
from tests.browser.chromium import Browser
from tests.browser.looking import CONTRAST
from tests.browser.stores import add_sharded, fill_store, make_store
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.recordings import Recording, write_recorded
from tests.kit.thinning import pair_up

pytestmark = pytest.mark.timeout(900)

A: Final = "llama/base/step-400"
B: Final = "llama/base/step-1200"
LEAF: Final = "model.layers.3.mlp.down_proj.weight"
ROW: Final = "document.querySelector('.row[data-full=true]:not([hidden])')"
DONE: Final = "!document.querySelector('progress')"
VIEWS: Final = {
    "snapshots": ("#/snapshots", f"{ROW} && document.querySelector('#timeline svg')"),
    "snapshot": (f"#/snapshot?name={B}", ROW),
    "tensor": (
        f"#/tensor?name={A}&leaf={LEAF}&other={B}",
        f"{DONE} && ['#heat canvas', '#histogram svg', '#values td'].every((place) => document.querySelector(place))",
    ),
    "ranks": ("#/snapshot?name=fsdp/step-200", f"{ROW} && document.querySelectorAll('.grid').length > 1"),
    "pieces": (
        "#/tensor?name=fsdp/step-200&leaf=model.layers.3.down.weight",
        f"{DONE} && ['#heat canvas', '#piece-map rect', '#values td'].every((place) => document.querySelector(place))",
    ),
    "movement": ("#/movement?filter=llama/base/", f"{DONE} && document.querySelector('#moves canvas')"),
    "compare": (f"#/compare?a={A}&b={B}", f"{ROW} && {DONE} && document.querySelector('#layers canvas')"),
    "sharing": ("#/sharing", f"{ROW} && document.querySelector('canvas')"),
    "runs": ("#/runs?a=good&b=bad", f"{ROW} && document.querySelector('#report')"),
    "run": ("#/run?name=burst", f"{ROW} && document.querySelector('#nan-row')"),
    "cache": ("#/cache", ROW),
    "health": ("#/health", "document.querySelector('#verdict-line .pill')"),
    "report": ("", "document.querySelector('#grid .row') && document.querySelector('#depth-plot svg')"),
}
"""By name: the address, and what is true once the view is drawn. The report has an address of its own."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with make_store(tmp_path_factory.mktemp("views") / "ckpts") as store:
        add_sharded(store)
        fill_store(store)
        with store.serve() as started:
            yield started


@pytest.fixture
def page(browser: Browser, server: StoreServer) -> Iterator[Browser]:
    """The page with its token; a test that leaves a complaint, or a request to elsewhere, has failed."""
    browser.size(1440, 1000)
    browser.emulate(scheme="light")
    browser.visit("about:blank")
    browser.visit(server.url)
    browser.wait_for(ROW)
    yield browser
    base = server.url.partition("#")[0]
    assert browser.complaints == []
    assert [each for each in browser.requests if not each.startswith(base)] == []


def open_view(page: Browser, view: str) -> None:
    """Go to a view and wait until it is drawn; to the report by its link."""
    address, is_drawn = VIEWS["runs" if view == "report" else view]
    page.run(f"location.hash = {json.dumps(address)}")
    page.wait_for(is_drawn)
    if view == "report":
        page.click("#report")
        page.wait_for(VIEWS[view][1])
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_telephone_and_texts_have_contrast_and_all_has_names(page: Browser, view: str) -> None:
    page.size(420, 900)
    page.emulate(scheme="dark")
    open_view(page, view)

    assert page.run("document.documentElement.scrollWidth") <= 420
    assert page.run(CUT) == []
    assert page.run(CONTRAST) == []
    page.emulate(scheme="light")
    assert page.run(CONTRAST) == []
    assert find_unnamed(page) == []


@pytest.mark.slow  # drawn in light colours from the start
@pytest.mark.parametrize("view", VIEWS)
def test_texts_of_a_light_page_have_contrast(page: Browser, view: str) -> None:
    page.size(420, 900)
    open_view(page, view)

    assert page.run(CUT) == []
    assert page.run(CONTRAST) == []


CUT: Final = """(() => {
  const found = [], SCROLLED = '.grid, .facts, .plan, pre, .hidden';
  for (const node of document.querySelectorAll('main :is(button, a, h1, h2, h3, label, .fact)')) {
    const box = node.getBoundingClientRect();
    if (!box.width || !node.checkVisibility() || node.closest(SCROLLED)) continue;
    if (box.right > 421 || box.left < -1) found.push([node.textContent.slice(0, 40), box.left, box.right]);
  }
  // The table of the report has more columns than a narrow page, and scrolls.
  for (const grid of document.querySelectorAll('main .grid:not(#grid)')) {
    if (grid.scrollWidth > grid.clientWidth + 1) found.push([grid.getAttribute('aria-label'), grid.scrollWidth]);
  }
  return found;
})()"""
"""Controls and headings that a narrow page cuts."""

REACHABLE: Final = """[...document.querySelectorAll(
    'a[href], button:not(:disabled), input, select, textarea, summary, [tabindex="0"]')]
  .filter((node) => node.tabIndex >= 0 && node.checkVisibility() && getComputedStyle(node).visibility !== 'hidden')"""
MARK: Final = f"{REACHABLE}.forEach((node, at) => {{ node.dataset.seat = at; }}), {REACHABLE}.length"
FOCUSED: Final = """(() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const by = document.getElementById(node.getAttribute('aria-labelledby'))?.textContent;
  const label = node.getAttribute('aria-label') || node.labels?.[0]?.textContent || node.textContent;
  const hasOutline = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
  const isSeen = hasOutline || style.boxShadow !== 'none' || node.id === 'skip';
  return [node.dataset.seat ?? null, node.tagName, (by || label || node.placeholder || '').trim(), isSeen];
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_every_control_is_reached_by_tab_has_a_name_and_shows_the_focus(page: Browser, view: str) -> None:
    open_view(page, view)
    count = page.run(MARK)
    page.run("document.activeElement.blur(), getSelection().removeAllRanges()")
    reached: set[str] = set()
    for _ in range(2 * count + 10):
        page.press("Tab")
        seat, tag, name, is_seen = page.run(FOCUSED)
        if seat is None:
            continue
        assert name, f"{tag} {seat} has no name"
        assert is_seen, f"{tag} {name[:60]!r} does not show that it has the focus"
        reached.add(seat)
        if len(reached) == count:
            break

    missed = f"{REACHABLE}.filter((node) => !{json.dumps(sorted(reached))}.includes(node.dataset.seat))"
    assert len(reached) == count, page.run(f"{missed}.map((node) => node.outerHTML.slice(0, 120))")


def find_unnamed(page: Browser) -> list[object]:
    """Return what can have the focus, or is a picture, and has no name or role."""
    unnamed: list[object] = []
    for node in page.call("Accessibility.getFullAXTree")["nodes"]:
        role = node["role"]["value"]
        focusable = any(each["name"] == "focusable" for each in node.get("properties", ()))
        if node["ignored"] or role == "RootWebArea" or node.get("name", {}).get("value", "").strip():
            continue
        if role in ("image", "img", "columnheader", "progressbar") or (focusable and role != "main"):
            unnamed.append((role, page.call("DOM.describeNode", backendNodeId=node["backendDOMNodeId"])["node"]))
    return unnamed


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_whatever_can_have_the_focus_or_is_a_picture_has_a_name_and_a_role(page: Browser, view: str) -> None:
    open_view(page, view)

    assert find_unnamed(page) == []


EDGES: Final = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const card = parse(getComputedStyle(document.querySelector('.card')).backgroundColor);
  const ratio = (color) => {
    const [a, b] = [light(parse(color)), light(card)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const boxes = [...document.querySelectorAll('main :is(input:not([type=checkbox]), select, .button)')];
  const holders = boxes.filter((box) => box.placeholder);
  return [
    boxes.length, Math.min(...boxes.map((box) => ratio(getComputedStyle(box).borderTopColor))),
    holders.length, Math.min(...holders.map((box) => ratio(getComputedStyle(box, '::placeholder').color))),
  ];
})()"""


@pytest.mark.parametrize(("view", "scheme"), pair_up(["snapshots", "sharing", "report"], ["light", "dark"]))
def test_edges_of_controls_and_placeholders_have_contrast(page: Browser, view: str, scheme: str) -> None:
    page.emulate(scheme=scheme)
    open_view(page, view)
    boxes, edge, holders, text = page.run(EDGES)

    assert min(boxes, holders) > 0
    assert edge >= 3.0
    assert text >= 4.5


KEYS: Final = {
    "snapshots": (".grid", ["Enter"], "location.hash.startsWith('#/snapshot?')"),
    "snapshot": (".grid", ["Enter"], "!location.hash.endsWith('step-1200')"),
    "tensor": ("#heat canvas", ["ArrowDown", "Enter"], "location.hash.includes('index=')"),
    "ranks": ("[aria-label^=Leaves]", ["Enter"], "!location.hash.endsWith('step-200')"),
    "pieces": ("#heat canvas", ["ArrowRight", "Enter"], "location.hash.includes('index=')"),
    "movement": ("#moves canvas", ["ArrowRight", "Enter"], "!document.querySelector('#tip').hidden"),
    "compare": ("#layers canvas", ["ArrowRight", "Enter"], "location.hash.startsWith('#/tensor?')"),
    "sharing": ("[aria-label^='Snapshots by']", ["Enter"], "location.hash.startsWith('#/snapshot?')"),
    "runs": ("#report", ["Enter"], "location.pathname.startsWith('/report/')"),
    "run": (".grid", ["ArrowDown", "Enter"], "document.querySelector('#event td')"),
    "cache": (".grid", ["ArrowDown", "Enter"], "document.querySelector('#why pre')"),
    "health": ("[data-read=true]", ["Enter"], "document.querySelector('#verdict-line').textContent.includes('read')"),
    "report": ("#grid", ["ArrowDown", "Enter"], "!document.querySelector('#detail').hidden"),
}
"""By view: what has the focus, keys, and what is true afterwards."""


@pytest.mark.slow
@pytest.mark.parametrize("view", KEYS)
def test_what_a_view_is_for_is_done_by_keys_alone(page: Browser, view: str) -> None:
    assert set(KEYS) == set(VIEWS)
    place, keys, condition = KEYS[view]
    open_view(page, view)
    page.run(f"document.querySelector({json.dumps(place)}).focus()")
    for key in keys:
        page.press(key)

    page.wait_for(condition)


def drop_refused(page: Browser) -> None:
    """Forget the browser's own lines about answers that are no success: those are what is tested."""
    page.complaints[:] = [each for each in page.complaints if "Failed to load resource" not in each]


@pytest.mark.slow
@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("report", "ranks", "pieces")])
def test_in_every_view_an_error_is_a_sentence(browser: Browser, tmp_path: Path, view: str) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for name in (A, B):
            store.save(name, {"model": {"w": torch.ones(3)}})
        with store.serve() as server:
            browser.size(1440, 1000)
            browser.visit("about:blank")
            browser.visit(server.url)
            browser.wait_for(ROW)
            shutil.rmtree(tmp_path / "store")
            browser.wait_for("document.querySelector('#live').textContent.includes('gone')")
            browser.run(f"location.hash = '#/' ; location.hash = {json.dumps(VIEWS[view][0])}")
            browser.wait_for("document.querySelector('main .alarm')")
            told = browser.run("document.querySelector('main .alarm').textContent")

    assert told.endswith(".")
    assert "gone" in told
    drop_refused(browser)
    assert browser.complaints == []


HOSTILE: Final = "<img src=//evil.example/x onerror=document.title='owned'><script>document.title='owned'</script>"
DRAWN: Final = "main .alarm, #moves canvas, .row[data-full=true], #values td, #verdict-line .pill, .none:not([hidden])"
SAFE: Final = HOSTILE.replace("/", "-")
"""As a part of a name, which has no slashes of its own."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """A store with markup in every name and value that a user can choose."""
    with holdfast.open(tmp_path_factory.mktemp("hostile") / "store") as store:
        for number in (1, 2):
            tree = {
                HOSTILE: torch.full((4, 4), float(number)),
                "text": HOSTILE,
                "deep": {f"{HOSTILE}.{at}.x": torch.ones(2) * number * at for at in range(4)},
            }
            metadata = {HOSTILE: HOSTILE, "metrics": {HOSTILE: float(number)}}
            store.save(f"{SAFE}/{number}", tree, metadata=metadata)
        store.tag(SAFE, f"{SAFE}/2")
        for name, is_bad in (("a", False), ("b", True)):
            recording = Recording(
                f"{SAFE}{name}",
                is_bad=is_bad,
                hole=math.nan,
                stem=HOSTILE,
                notes=(HOSTILE,),
                environment={HOSTILE: HOSTILE + name},
            )
            write_recorded(store.repository, recording)
        store_artifact(store.repository, make_artifact("a"))
        with store.serve() as started:
            yield started


ADDRESSES: Final = {
    "snapshots": ("snapshots", {}),
    "snapshots that match nothing": ("snapshots", {"filter": HOSTILE}),
    "a wrong condition": ("snapshots", {"filter": f"{HOSTILE} <"}),
    "snapshot": ("snapshot", {"name": f"{SAFE}/2"}),
    "no snapshot": ("snapshot", {"name": HOSTILE}),
    "tensor": ("tensor", {"name": f"{SAFE}/2", "leaf": HOSTILE, "other": f"{SAFE}/1"}),
    "no tensor": ("tensor", {"name": f"{SAFE}/2", "leaf": HOSTILE + "x"}),
    "a wrong index": ("tensor", {"name": f"{SAFE}/2", "leaf": HOSTILE, "index": HOSTILE}),
    "movement": ("movement", {"filter": f"{SAFE}/"}),
    "compare": ("compare", {"a": f"{SAFE}/1", "b": f"{SAFE}/2"}),
    "compare with nothing": ("compare", {"a": HOSTILE, "b": HOSTILE}),
    "sharing": ("sharing", {"prefix": HOSTILE, "keep_best": HOSTILE, "keep_within": HOSTILE}),
    "runs": ("runs", {"a": f"{SAFE}a", "b": f"{SAFE}b"}),
    "no runs": ("runs", {"a": HOSTILE, "b": HOSTILE}),
    "run": ("run", {"name": f"{SAFE}b", "row": "2"}),
    "no run": ("run", {"name": HOSTILE}),
    "no step": ("run", {"name": f"{SAFE}b", "step": HOSTILE, "filter": HOSTILE, "row": HOSTILE}),
    "cache": ("cache", {"key": HOSTILE}),
    "health": ("health", {}),
    "no view": (HOSTILE, {HOSTILE: HOSTILE}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ADDRESSES, "report"])
def test_markup_in_every_name_and_value_is_text(browser: Browser, hostile: StoreServer, case: str) -> None:
    base = hostile.url.partition("#")[0]
    view, parameters = ADDRESSES["runs" if case == "report" else case]
    browser.size(1440, 1000)
    browser.visit("about:blank")
    browser.visit(hostile.url)
    browser.wait_for(ROW)
    browser.run(f"location.hash = '#/' + {json.dumps(view)} + '?' + new URLSearchParams({json.dumps(parameters)})")
    browser.wait_for(f"document.querySelector({json.dumps(DRAWN)}) && {DONE}")
    browser.wait_for("!document.querySelector('main').textContent.includes('Reading')")
    if case == "report":
        browser.wait_for("document.querySelector('#report')")
        browser.click("#report")
        browser.wait_for(VIEWS["report"][1])
    browser.run("new Promise((done) => setTimeout(done, 100))")

    if case in ("snapshots", "snapshot", "tensor", "compare", "runs", "run"):
        assert "<script>" in browser.run("document.body.textContent")
    assert browser.run("document.querySelectorAll('img, iframe, object, main script, [onerror]').length") == 0
    assert "owned" not in browser.run("document.title").replace("'owned'", "")
    assert [each for each in browser.requests if not each.startswith(base)] == []
    drop_refused(browser)
    assert browser.complaints == []
