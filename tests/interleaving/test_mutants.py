"""Each step of the protocol taken away: the exploration notices, so it can fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest

from holdfast.errors import LeaseLost
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import LEASES, SNAPSHOTS, generation_key
from holdfast.repo.names import roots
from holdfast.repo.names.leases import Lease
from holdfast.repo.names.roots import Live
from holdfast.repo.upkeep import collect
from holdfast.repo.upkeep import collect as collecting
from holdfast.repo.write.transaction import Transaction
from tests.interleaving.scenes import COLLECT, OVERWRITE, SCENES, prepare_dead
from tests.interleaving.schedule import Bounds, Stretch, direct
from tests.interleaving.theatre import Theatre, explore

ONE_SWITCH: Final = Bounds((1, 1))
_SWEEP: Final = collect.sweep


def _sweep_without_mark(store: ObjectStore, mark: collect.Mark, live: Live) -> list[str]:
    for generation in (1, 0):
        store.delete(generation_key(mark.stem, generation))
    return _SWEEP(store, mark, live)


def _wait_for_nobody(_store: ObjectStore, _waiting: object, *, expire_s: float) -> list[object]:
    return []


def _release_and_hope(_transaction: Transaction, lease: Lease, *_rest: Any) -> None:
    with suppress(LeaseLost):
        lease.release()


def _keep_records(_collection: object, _plan: object) -> None:
    return


def _keep_newest(chain: Any, _leases: object, live: Live) -> set[int]:
    everything = Live()
    _KEEP_ROOTS(chain, {}, everything)
    live.current += everything.current
    return {chain[0][0]} if chain else set()


_KEEP_ROOTS: Final = roots._keep_roots


@dataclass(frozen=True, slots=True)
class Mutant:
    """One step that is left out, the scene that shows it, and what is then seen."""

    title: str
    target: object
    name: str
    instead: Callable[..., object]
    scene: str
    seen: str

    def __str__(self) -> str:
        return self.title


MUTANTS: Final = (
    Mutant(
        "nobody is waited for",
        collecting,
        "fence_stale_leases",
        _wait_for_nobody,
        "save, patient collector",
        "'new' shows",
    ),
    Mutant(
        "the mark goes before the files", collecting, "sweep", _sweep_without_mark, "save, eager collector", "'new'"
    ),
    Mutant(
        "a fence is not noticed at the release",
        Transaction,
        "_release_or_withdraw",
        _release_and_hope,
        "save, eager collector",
        "'new' shows",
    ),
    Mutant(
        "dead records stay",
        collecting._Collection,
        "_remove_records",
        _keep_records,
        "overwrite, eager collector",
        "snapshots/",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_step_that_is_left_out_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.target, mutant.name, mutant.instead)
    scene = next(scene for scene in SCENES if scene.title == mutant.scene)
    report = explore(scene, ONE_SWITCH, monkeypatch)
    assert report.broken
    assert report.broken[0].startswith(mutant.seen)


def withdraw_beside_a_collector(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let an overwrite lose its bytes, commit, and find out only after another collection; return what is wrong."""
    base = MemoryStore()
    prepare_dead(base)
    theatre = Theatre(base, monkeypatch)
    parts = [OVERWRITE, COLLECT, COLLECT]
    script = [Stretch(0, "create", SNAPSHOTS), Stretch(1), Stretch(0, "create", LEASES), Stretch(2), Stretch(0)]
    run = direct(theatre.play(parts), script)
    assert isinstance(run.outcomes[0].error, LeaseLost)
    return theatre.judge(parts, run)


def test_what_a_withdrawal_brings_back_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert withdraw_beside_a_collector(monkeypatch) == []


def test_without_what_was_replaced_a_withdrawal_is_noticed_to_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_keep_roots", _keep_newest)
    assert any("'old' shows SnapshotGone" in wrong for wrong in withdraw_beside_a_collector(monkeypatch))
