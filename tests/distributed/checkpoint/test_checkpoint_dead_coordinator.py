"""The coordinator dies at any moment of a save, in threads of one process: what the other ranks raise is true."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Literal

import pytest

from holdfast.distributed.talk.collectives import Collectives
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, SaveResult, WriteOptions, save
from holdfast.testing.faults import Crashed
from tests.distributed.cues import ARRIVED, BEFORE, COLLECTED, CREATED, WORKED, Cell, Moment, cueing, list_cells
from tests.distributed.thread_worlds import connect, run_thread_ranks
from tests.faults.hooked_store import HookedStore
from tests.kit.saving import load_bytes, new_repo, noise, save_bytes

STEPS: Final = ["prepare", "name", "room", "open", "begin", "share", "write", "marks", "stale", "commit", "done"]
"""Every step of `repo.writer.save` that overwrites."""
OLD, NEW = noise(600, 1), noise(600, 2)
LIMIT_S: Final = 60.0
SHORT_S: Final = 0.5
"""The timeout where it has to pass. If a busy machine makes it pass elsewhere, too, what is told must be true still."""

Death = Literal["killed", "killed apart", "stopped", "stopped apart", "raises"]
"""What happens to the coordinator: it is killed, or stopped until the others were told, or raises an error.

It hosts the group's store, or somebody else does ("apart").
"""
APART: Final[list[Death]] = ["killed apart", "stopped apart"]


class Scene:
    """One save whose coordinator dies on cue, while the others are held on theirs."""

    def __init__(self, cell: Cell, death: Death) -> None:
        self._cell = cell
        self._death = death
        self._store = MemoryStore()
        self._connections = connect(1 + len(cell.holds))
        self._held = [threading.Event() for _ in cell.holds]
        self._left = [threading.Event() for _ in cell.holds]
        """Set when the others were told."""
        self._struck = threading.Event()
        self._is_dead = False
        save_bytes(new_repo(self._store), "run", {"x": OLD})

    def play(self) -> tuple[list[str], bool]:
        """Return what each rank was told, by the class of what it raised, and whether the name is new."""
        timeout_s = SHORT_S if self._death in (*APART, "stopped") else LIMIT_S
        with cueing(self._cue):
            ends = run_thread_ranks(self._connections, self._save, timeout_s=timeout_s)
        outcome = ["" if isinstance(end, SaveResult) else type(end).__name__ for end in ends]
        return outcome, load_bytes(new_repo(self._store), "run")["x"] == NEW

    def _save(self, ranks: Collectives) -> SaveResult:
        root = ManifestPart(None, [Entry("x", 600, (), dims=1)])
        places = {0: Placement(600, 0, (), ranks.rank)}
        request = Request(
            "run", [BytesSource("x", NEW)], places=places, root=root, options=WriteOptions(overwrite=True)
        )
        if ranks.is_coordinator:
            return save(new_repo(HookedStore(self._store, before=self._touch)), request, ranks=ranks)
        try:
            return save(new_repo(self._store), request, ranks=ranks)
        finally:
            self._left[ranks.rank - 1].set()

    def _touch(self, name: str, key: str) -> None:
        if self._is_dead:
            raise Crashed(f"{name} {key}")

    def _cue(self, rank: int, moment: Moment) -> None:
        if rank == 0 and moment == self._cell.death and not self._struck.is_set():
            _wait_all(self._held)
            self._strike()
        if rank > 0 and moment == self._cell.holds[rank - 1]:
            self._held[rank - 1].set()
            _wait_all([self._struck])

    def _strike(self) -> None:
        if self._death == "raises":
            self._struck.set()
            raise ValueError("on cue")
        hurt = self._connections[:1] if self._death in APART else self._connections
        if self._death.startswith("killed"):
            self._is_dead = True
            for connection in hurt:
                connection.cut()
            self._struck.set()
            raise Crashed(str(self._cell.death))
        for connection in hurt:
            connection.stop()
        self._struck.set()
        _wait_all(self._left)
        for connection in hurt:
            connection.resume()


def _wait_all(events: Sequence[threading.Event]) -> None:
    assert all(event.wait(LIMIT_S) for event in events), "a rank did not come to where it was to be"


def find_wrong(outcome: Sequence[str], *, is_new: bool) -> list[str]:
    """Return which ranks were told what the store does not bear out; by the class of what they raised.

    RankError says that the name holds what it held before, a result that it holds the new state. What a dead rank
    and one that raised by itself were told is nobody's.
    """
    wrong = {"": not is_new, "RankError": is_new, "CommitUnknown": False, "Crashed": False, "ValueError": False}
    return [f"rank {rank}: {kind or 'a result'}" for rank, kind in enumerate(outcome) if wrong.get(kind, True)]


def test_the_steps_are_all_that_there_are() -> None:
    seen: list[Moment] = []
    cell = Cell(Moment("none", BEFORE), (Moment("none", BEFORE),))

    with cueing(lambda rank, moment: seen.append(moment) if rank == 0 else None):
        outcome, _ = Scene(cell, "killed").play()

    assert outcome == ["", ""]
    assert [moment.step for moment in seen if moment.phase == BEFORE] == STEPS
    assert {moment.phase for moment in seen} == {BEFORE, WORKED, ARRIVED, COLLECTED, CREATED}


@pytest.mark.parametrize("cell", list_cells(STEPS, 2), ids=str)
def test_what_the_other_rank_is_told_is_true(cell: Cell) -> None:
    outcome, is_new = Scene(cell, "killed").play()

    assert find_wrong(outcome, is_new=is_new) == []
    assert outcome == ["Crashed", *cell.find_expected(STEPS)]


@pytest.mark.parametrize("cell", [cell for cell in list_cells(STEPS, 3) if cell.death.phase == CREATED], ids=str)
def test_what_each_of_two_others_is_told_after_the_record_was_created_is_true(cell: Cell) -> None:
    outcome, is_new = Scene(cell, "killed").play()

    assert is_new
    assert outcome == ["Crashed", *cell.find_expected(STEPS)]


def test_an_error_of_the_coordinator_before_the_commit_is_told_as_a_rank_error() -> None:
    cell = Cell(Moment("stale", WORKED), (Moment("stale", ARRIVED),))

    assert Scene(cell, "raises").play() == (["RankError", "RankError"], False)


def test_an_error_of_the_coordinator_after_the_record_was_created_is_told_as_unknown() -> None:
    cell = Cell(Moment("commit", CREATED), (Moment("stale", ARRIVED),))

    assert Scene(cell, "raises").play() == (["CommitUnknown", "CommitUnknown"], True)


@pytest.mark.slow  # hundreds of saves
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", STEPS)
def test_what_each_of_two_others_is_told_is_true(step: str) -> None:
    wrong = []
    for cell in [cell for cell in list_cells(STEPS, 3) if cell.death.step == step]:
        outcome, is_new = Scene(cell, "killed").play()
        if find_wrong(outcome, is_new=is_new) or outcome != ["Crashed", *cell.find_expected(STEPS)]:
            wrong.append(f"{cell}: {outcome}, {is_new=}")
    assert wrong == []


@pytest.mark.slow  # the timeout has to pass, again and again
@pytest.mark.timeout(600)
@pytest.mark.parametrize("death", ["killed apart", "stopped", "stopped apart", "raises"])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_told_is_true_however_the_coordinator_dies(step: str, death: Death) -> None:
    cells = [cell for cell in list_cells(STEPS, 2) if cell.death.step == step]
    if step in ("stale", "commit"):
        cells += [cell for cell in list_cells(STEPS, 3) if cell.death.step == step and len(set(cell.holds)) > 1]
    wrong = []
    for cell in cells:
        outcome, is_new = Scene(cell, death).play()
        wrong += [f"{cell}: {outcome}, {is_new=}, {why}" for why in find_wrong(outcome, is_new=is_new)]
    assert wrong == []
