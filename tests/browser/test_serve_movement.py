"""Movement over a series in a real browser: the map, the line of one layer, its links, and stopping."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.diff.movement import MeasuredBytes, PairMovement
from holdfast.serving.answers import movement as answers
from tests.browser.chromium import Browser
from tests.browser.looking import NAMES, fill, show
from tests.kit.hooking import Hook
from tests.kit.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(900)


DONE = "document.querySelector('#moves canvas') && !document.querySelector('progress')"


@pytest.mark.slow
def test_the_list_of_snapshots_leads_to_the_movement_of_its_filter(page: Browser) -> None:
    fill(page, "#filter", "llama/finetune/")
    page.wait_for("document.querySelector('#movement').href.includes('finetune')")
    page.click("#movement")
    page.wait_for(f"location.hash.startsWith('#/movement?filter=llama') && {DONE}")

    assert page.run("document.querySelector('#moves canvas').width") == 2
    assert page.run("document.querySelector('#moves canvas').height") == 7
    assert page.run("document.querySelector('#moves-status').textContent") == (
        "Compares all 3 snapshots of llama/finetune/."
        " Distances are divided by the number of steps between two snapshots."
    )


def test_a_cell_shows_its_layer_as_a_line_and_leads_on(page: Browser) -> None:
    show(page, "#/movement?filter=llama/base/", DONE)
    page.run("document.querySelector('#moves canvas').focus()")
    for _ in range(3):
        page.press("ArrowDown")
    page.press("ArrowRight")
    tip = page.run("document.querySelector('#tip').textContent")
    assert tip.startswith("model.layers.2llama/base/step-200 to llama/base/step-300")
    assert tip.endswith(" per step")
    page.press("Enter")
    page.wait_for("location.hash.includes('layer=model.layers.2')")
    assert page.run("document.querySelector('#layer-title').textContent") == "model.layers.2"
    assert page.run("document.querySelectorAll('#moves-plot .line[d]').length") >= 2
    page.click("#tensors")
    page.wait_for(
        f"location.hash.includes('by=leaf') && document.querySelectorAll('.heat-rows span').length === 7 && {DONE}"
    )
    page.run("history.back()")
    page.wait_for(f"document.querySelector('#layer-title').textContent === 'model.layers.2' && {DONE}")
    page.wait_for("document.querySelector('#compare')")
    page.click("#compare")
    page.wait_for(f"location.hash.startsWith('#/compare') && {NAMES}.length === 7")


@pytest.mark.slow
def test_two_snapshots_lead_to_the_movement_of_their_series(page: Browser) -> None:
    show(page, "#/compare?a=llama/base/step-100&b=llama/base/step-200", "document.querySelector('#series-movement')")
    page.click("#series-movement")
    page.wait_for(f"location.hash.startsWith('#/movement') && {DONE}")

    assert page.run("document.querySelector('#moves canvas').width") == 11


@pytest.mark.slow
def test_of_several_series_one_is_chosen(page: Browser) -> None:
    show(page, "#/movement?limit=4", DONE)
    status = page.run("document.querySelector('#moves-status').textContent")
    assert status.startswith("Compares 4 of 12 snapshots, at equal distances, of llama/base/.")
    page.run(
        "(() => { const box = document.querySelector('select[aria-label=\"Which series\"]');"
        " box.value = 'llama/wide-lr/'; box.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for(f"location.hash.includes('series=llama%2Fwide-lr') && {DONE}")
    page.run(
        "(() => { const box = document.querySelector('#most'); box.value = '8';"
        " box.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for(f"location.hash.includes('limit=8') && {DONE} && document.querySelector('#moves canvas').width === 7")


def test_what_cannot_be_measured_is_a_sentence(page: Browser) -> None:
    show(page, "#/movement?filter=nobody", "document.querySelector('.alarm')")
    assert "at least two snapshots" in page.run("document.querySelector('.alarm').textContent")
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]
    show(
        page, "#/movement?leaves=nobody", "document.querySelector('#moves-status').textContent.startsWith('No tensor')"
    )


def test_the_server_stops_when_the_view_is_left(page: Browser, monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    ended = threading.Event()

    def measure(*_: object) -> Iterator[MeasuredBytes | PairMovement]:
        try:
            yield PairMovement(0, {"model.layers.0": 0.5}, 1)
            while not ended.wait(0.01):
                yield MeasuredBytes(1, 1, 2)
        finally:
            ended.set()

    hook(answers, "iter_movement", measure)
    monkeypatch.setattr(answers, "_REPORT_S", 0.0)
    show(
        page,
        "#/movement?filter=llama/base/",
        "document.querySelector('#stop') && document.querySelector('#moves canvas')",
    )
    assert not ended.is_set()
    page.click("[data-view=snapshots]")

    assert ended.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_long_name_fits_a_narrow_window(page: Browser) -> None:
    page.size(420, 900)
    show(page, "#/movement?filter=llama/base/", DONE)

    assert page.run("document.documentElement.scrollWidth") <= 420
