"""Sharing and prune plans in a real browser: series, pairs of snapshots, one snapshot and all others, rules."""

from __future__ import annotations

import pytest
import torch

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import fill, serving, show
from tests.browser.stores import fill_store

pytestmark = pytest.mark.timeout(900)


def list_names(page: Browser, title: str) -> list[str]:
    """Return the names in the table of a card, from top to bottom."""
    found: list[str] = page.run(
        f"[...document.querySelectorAll('[aria-labelledby={title}] .row:not([hidden])')]"
        ".sort((p, q) => p.dataset.at - q.dataset.at).map((row) => row.querySelector('.name').textContent)"
    )
    return found


def wait_for_rows(page: Browser, title: str, first: str) -> None:
    page.wait_for(
        f"[...document.querySelectorAll('[aria-labelledby={title}] .row:not([hidden])')]"
        f".find((row) => row.dataset.at === '0' && row.querySelector('.name').textContent === '{first}')"
    )


def test_sharing_shows_series_and_own_bytes(page: Browser) -> None:
    show(page, "#/sharing", "document.querySelector('#shared canvas') && document.querySelector('.row .name')")
    page.run("document.querySelector('#shared canvas').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('#tip').textContent").startswith("llama/base/ and llama/finetune/both use ")
    page.click("[aria-labelledby=own-title] [data-key=name] button")
    wait_for_rows(page, "own-title", "llama/base/step-100")
    page.click("#again")
    page.wait_for("!document.querySelector('#again').disabled")


@pytest.mark.slow
def test_pairs_of_snapshots_lead_to_what_one_shares_with_all(page: Browser) -> None:
    show(page, "#/sharing?pairs=llama/finetune/", "document.querySelector('#pairs canvas')")
    assert page.run("document.querySelector('#pairs-shown').textContent") == "3 snapshots"
    page.run("document.querySelector('#pairs canvas').focus()")
    page.press("ArrowDown")
    assert page.run("document.querySelector('#tip').textContent").startswith(
        "llama/finetune/step-1400 and llama/finetune/step-1300both use "
    )
    page.press("Enter")
    page.wait_for("document.querySelector('#shares-head').textContent.startsWith('llama/finetune/step-1400 uses ')")
    page.wait_for("location.hash.includes('with=llama')")
    names = list_names(page, "pairs-title")
    assert set(names[:2]) == {"llama/finetune/step-1300", "llama/finetune/step-1500"}
    assert "llama/base/step-1200" in names


@pytest.mark.slow
def test_an_address_opens_the_same_pairs_again(page: Browser) -> None:
    show(
        page,
        "#/sharing?pairs=llama/base/&with=llama/base/step-500",
        "document.querySelector('#shares-head a') && document.querySelector('#pairs canvas')",
    )

    assert page.run("document.querySelector('#pairs canvas').width") == 12
    assert page.run("document.querySelector('#shares-head a').textContent") == "llama/base/step-500"
    fill(page, "#pairs-filter", "loss <")
    page.wait_for("document.querySelector('[aria-labelledby=pairs-title] .alarm')")
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]


@pytest.mark.slow
def test_more_than_64_snapshots_are_shown_in_windows(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with holdfast.open(tmp_path_factory.mktemp("long") / "store") as store:
        for step in range(70):
            store.save(f"run/step-{step}", {"x": torch.full((500,), float(step // 2))})
        with serving(browser, store) as page:
            show(page, "#/sharing", "document.querySelector('#pairs canvas')")
            assert page.run("document.querySelector('#pairs-shown').textContent") == "1 to 64 of 70 snapshots"
            page.click("[data-turn='1']")
            page.wait_for("document.querySelector('#pairs canvas').width === 6")
            assert page.run("document.querySelector('[data-turn=\"1\"]').disabled")
            assert "from=64" in page.run("location.hash")


def test_recorded_runs_and_compiled_graphs_lead_to_their_views(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with holdfast.open(tmp_path_factory.mktemp("own") / "store") as store:
        store.save("run/step-1", {"x": torch.ones(500)})
        fill_store(store)
        with serving(browser, store) as page:
            for down, view in ((0, "cache"), (1, "runs")):
                show(page, "#/sharing", "document.querySelector('#shared canvas')?.height === 3")
                page.run("document.querySelector('#shared canvas').focus()")
                for _ in range(down):
                    page.press("ArrowDown")
                page.press("Enter")
                page.wait_for(f"location.hash === '#/{view}' && document.querySelector('.row .name')")


def test_a_plan_has_a_decision_for_each_snapshot(page: Browser) -> None:
    show(page, "#/sharing", "document.querySelector('input[name=keep_last]')")
    page.run("document.querySelector('input[name=keep_last]').focus()")
    page.type("2")
    page.press("Enter")
    page.wait_for("document.querySelector('#plan p').textContent.includes('delete 24 snapshots and keep 3')")
    assert "keep_last=2" in page.run("location.hash")
    wait_for_rows(page, "prune-title", "llama/base/step-100")
    page.click("[aria-labelledby=prune-title] [data-key=verdict] button")
    wait_for_rows(page, "prune-title", "llama/base/step-1200")


@pytest.mark.slow
def test_the_best_by_a_metric_are_kept(page: Browser) -> None:
    show(page, "#/sharing?prefix=llama/base/&keep_best=loss:2:max", "document.querySelector('#plan')")
    assert page.run("document.querySelector('select[name=best_mode]').value") == "max"
    page.run("document.querySelector('#plan').previousElementSibling.requestSubmit()")
    page.wait_for("document.querySelector('#plan p').textContent.includes('delete 9 snapshots and keep 3')")
    page.click("[aria-labelledby=prune-title] [data-key=verdict] button")
    page.wait_for("document.querySelector('#plan').textContent.includes('among the best 2 by loss (max)')")
    assert "keep_best=loss%3A2%3Amax" in page.run("location.hash")


@pytest.mark.slow
def test_a_rule_that_cannot_be_meant_is_a_sentence(page: Browser) -> None:
    show(page, "#/sharing?keep_within=soon", "document.querySelector('#plan')")
    page.run("document.querySelector('#plan').previousElementSibling.requestSubmit()")
    page.wait_for("document.querySelector('#plan .alarm')")

    assert "'soon' is not a duration" in page.run("document.querySelector('#plan').textContent")
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]
