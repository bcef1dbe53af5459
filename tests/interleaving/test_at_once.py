"""Saves that make many requests at once, as on a bucket, beside collectors; the order of the requests is reversed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

import pytest

from holdfast.repo.format.layout import LEASES, MANIFESTS, PACKS
from holdfast.repo.names.leases import Lease, read_marked
from holdfast.repo.write.transaction import Transaction
from tests.interleaving.at_once import BusyMemoryStore, run_backwards
from tests.interleaving.scenes import CROWDS, PATIENT, REUSE, SCENES, Scene, collect_part, prepare_dead
from tests.interleaving.schedule import Bounds, Stretch, direct
from tests.interleaving.theatre import Theatre, explore

QUICK_BOUNDS: Final = Bounds((1, 2))
DEEP_BOUNDS: Final = Bounds((1, 1, 3))
CROWD_BOUNDS: Final = Bounds((1, 1, 20, 9_000))
BY_TITLE: Final = {scene.title: scene for scene in SCENES}
QUICK: Final = ("save, eager collector", "save, patient collector", "overwrite, eager collector")


def _begin_too_late(transaction: Transaction, locks: ExitStack) -> tuple[str, list[str]]:
    avoid = read_marked(transaction._store)
    is_locked = locks.enter_context(transaction._store.hold(exclusive=False))
    transaction._lease = Lease(transaction._store, purpose="test", is_locked=is_locked)
    return transaction._lease.lease_id, sorted(avoid)


@pytest.mark.parametrize("title", QUICK)
def test_requests_at_once_in_another_order_keep_every_promise(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    report = explore(BY_TITLE[title], QUICK_BOUNDS, monkeypatch, base=BusyMemoryStore())
    assert not report.broken, "\n".join(report.broken)
    assert report.runs > 20


def collect_beside_the_beginning(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a collector mark and delete a pack while a save takes its lease; return what is wrong."""
    run_backwards(monkeypatch)
    base = BusyMemoryStore()
    prepare_dead(base)
    theatre = Theatre(base, monkeypatch)
    parts = [REUSE, collect_part(PATIENT)]
    script = [
        Stretch(0, "create", LEASES),
        Stretch(1, "delete", PACKS),
        Stretch(0, "create", MANIFESTS),
        Stretch(1),
        Stretch(0),
    ]
    return theatre.judge(parts, direct(theatre.play(parts), script))


def test_a_save_sees_the_mark_of_a_collector_that_did_not_see_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_beside_the_beginning(monkeypatch) == []


def test_marks_that_are_read_beside_the_lease_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "_begin", _begin_too_late)
    assert any("'new' shows" in wrong for wrong in collect_beside_the_beginning(monkeypatch))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_two_that_interrupt_each_other_twice_keep_every_promise(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    report = explore(scene, DEEP_BOUNDS, monkeypatch, base=BusyMemoryStore())
    assert not report.broken, "\n".join(report.broken)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_three_that_interrupt_each_other_keep_every_promise(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    report = explore(scene, CROWD_BOUNDS, monkeypatch, base=BusyMemoryStore())
    assert not report.broken, "\n".join(report.broken)
