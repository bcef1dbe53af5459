"""Lineage in a real browser: lanes of runs, links between them, the list below, keys, and names that are markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import fill, serving, show

pytestmark = pytest.mark.timeout(900)

LINKS = "[...document.querySelectorAll('#links li')].map((line) => line.textContent)"
DRAWN = "document.querySelector('#lineage svg')"
TIP = "[...document.querySelector('#tip').children].map((line) => line.textContent)"
EVIL = "<img src=x onerror=alert(1)>"


def train(path: Path, prefix: str, steps: range, *, loaded: str = "") -> None:
    """Save the steps of a run by a handle of its own, as a process does that loads something first."""
    with holdfast.open(path) as store:
        if loaded:
            store.load(loaded)
        for step in steps:
            store.save(f"{prefix}/step-{step}", {"w": torch.full((4,), float(step))}, metadata={"loss": 1.0 / step})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    """A run that was resumed, two that continue it, one of which lost its first snapshots, and one apart."""
    path = tmp_path_factory.mktemp("lineage") / "ckpts"
    train(path, "base", range(100, 400, 100))
    train(path, "base", range(400, 700, 100), loaded="base/step-300")
    train(path, "tuned", range(700, 1000, 100), loaded="base/step-600")
    train(path, EVIL, range(700, 900, 100), loaded="base/step-500")
    train(path, "apart", range(100, 300, 100))
    with holdfast.open(path) as opened:
        opened.delete("tuned/step-700")
        yield opened


def test_runs_are_lanes_and_each_load_before_a_save_is_a_link(page: Browser) -> None:
    page.wait_for(DRAWN)

    assert page.run(LINKS) == [
        f"{EVIL}/step-700 continues base/step-500",
        "tuned/step-800 continues base/step-600",
        "base/step-400 resumed from base/step-300",
    ]
    assert page.run("[...document.querySelectorAll('.lane-name')].map((text) => text.textContent)") == [
        "base/",
        "tuned/",
        f"{EVIL}/",
    ]
    assert page.run("document.querySelectorAll('#lineage .link').length") == 2
    assert page.run("document.querySelectorAll('#lineage .resumed').length") == 1
    assert page.run("document.querySelector('#lineage summary').textContent") == (
        "Lineage 2 runs continue another one; 1 was resumed"
    )
    assert page.run("document.querySelectorAll('img').length") == 0


def test_a_run_that_continues_another_one_appears_by_itself(browser: Browser, tmp_path: Path) -> None:
    train(tmp_path / "ckpts", "base", range(1, 3))
    with holdfast.open(tmp_path / "ckpts") as store, serving(browser, store) as page:
        page.wait_for("document.querySelector('#timeline svg')")
        assert page.run("document.querySelector('#lineage').hidden")
        train(tmp_path / "ckpts", "tuned", range(3, 4), loaded="base/step-2")
        page.wait_for(DRAWN)

        assert page.run(LINKS) == ["tuned/step-3 continues base/step-2"]


@pytest.mark.slow
def test_a_lane_has_the_colour_of_its_run_in_the_plot_above(page: Browser) -> None:
    page.wait_for(DRAWN)

    lanes = page.run(
        "[...document.querySelectorAll('#lineage path.line')].map((lane) => getComputedStyle(lane).stroke)"
    )
    first = page.run("getComputedStyle(document.querySelector('#timeline path.line')).stroke")
    assert lanes[0] == first
    assert len(set(lanes)) == 3


@pytest.mark.slow
def test_keys_follow_the_lanes_and_open_a_snapshot(page: Browser) -> None:
    page.wait_for(DRAWN)
    page.run("document.querySelector('#lineage svg').focus()")
    page.press("End")
    assert page.run(TIP) == ["tuned/step-900", "step 900"]
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.run(TIP) == ["tuned/step-800", "step 800", "after loading base/step-600"]
    page.press("Enter")
    page.wait_for("location.hash.startsWith('#/snapshot?')")
    page.run("history.back()")
    page.wait_for(DRAWN)


@pytest.mark.slow
def test_the_list_leads_to_both_snapshots(page: Browser) -> None:
    page.wait_for(DRAWN)
    page.click("#links li:nth-child(2) a:last-child")
    page.wait_for("location.hash === '#/snapshot?name=base%2Fstep-600'")


@pytest.mark.slow
def test_what_the_filter_hides_is_named_and_not_drawn(page: Browser) -> None:
    fill(page, "#filter", "tuned/")
    page.wait_for("document.querySelectorAll('.lane-name').length === 1")

    assert page.run(LINKS) == ["tuned/step-800 continues base/step-600 (not in this list)"]
    fill(page, "#filter", "apart/")
    page.wait_for("document.querySelector('#lineage').hidden")


@pytest.mark.slow
def test_a_closed_card_stays_closed_when_the_store_changes(page: Browser, store: holdfast.Store) -> None:
    page.wait_for(DRAWN)
    page.click("#lineage summary")
    page.wait_for("!document.querySelector('#lineage details').open")
    store.save("apart/step-300", {"w": torch.zeros(4)})
    page.wait_for("document.querySelector('#shown').textContent.startsWith('13')")

    assert page.run("document.querySelector('#lineage details').open") is False
    assert page.run("location.hash") == "#/snapshots?lineage=closed"
    page.run("location.reload()")
    page.wait_for("document.querySelector('#lineage details') && !document.querySelector('#lineage details').open")


@pytest.mark.slow
def test_it_fits_a_narrow_window(page: Browser) -> None:
    page.size(420, 900)
    show(page, "#/snapshots?by=time", DRAWN)

    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
