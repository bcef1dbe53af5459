"""Health in a real browser: a save at work, the marks of a collector, and the requests to an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.write.transaction import Transaction
from tests.browser.chromium import Browser
from tests.browser.looking import serving, show
from tests.kit.s3_server import BUCKET, serve_s3

pytestmark = pytest.mark.timeout(900)

ACTIVITY = "document.querySelector('#activity').textContent"


def test_a_save_at_work_and_the_marks_of_a_collector_are_shown(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("old", {"x": torch.arange(100_000.0)})
        store.delete("old")
        store.save("a", {"x": torch.ones(1000)})
        with serving(browser, store) as page:
            show(page, "#/health", f"{ACTIVITY}.includes('No process is saving.')")
            assert "No collector is at work." in page.run(ACTIVITY)
            with Transaction(store.repository, purpose="save 'slow'") as transaction:
                collect(store.repository.store, Rules(min_age_s=0.0))
                show(page, "#/snapshots", "document.querySelector('#filter')")
                show(page, "#/health", "document.querySelector('#activity table')")
                shown = page.run(ACTIVITY)
                assert transaction.lease_id in shown
                assert "save 'slow'" in shown
                assert "A collector has marked" in shown
            page.wait_for(f"{ACTIVITY}.includes('No process is saving.')")


@pytest.mark.slow
def test_requests_to_an_object_store_are_counted(browser: Browser) -> None:
    with serve_s3() as bucket:
        with holdfast.open(f"s3://{BUCKET}/store", storage_options=bucket.options) as store:
            store.save("a", {"x": torch.arange(10_000.0)})
            with serving(browser, store) as page:
                show(
                    page,
                    "#/health",
                    "document.querySelector('[data-kind=get] .num') && document.querySelector('.pill')",
                )
                numbers = page.run(
                    "Object.fromEntries([...document.querySelectorAll('tr[data-kind]')]"
                    ".map((row) => [row.dataset.kind, Number(row.querySelector('.num').textContent)]))"
                )

    assert set(numbers) == {"get", "head", "list", "put", "delete"}
    assert numbers["put"] == 0
    assert numbers["list"] > 0
    assert numbers["get"] > 0


@pytest.mark.slow
def test_a_store_on_a_disk_makes_no_requests(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store, serving(browser, store) as page:
        show(page, "#/health", f"{ACTIVITY}.includes('No process is saving.')")
        assert page.run("document.querySelector('[aria-labelledby=requests-title]').hidden")
