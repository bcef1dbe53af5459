"""A coordinator process is killed or suspended at any moment of a save: what the other processes raise is true.

The grid of `test_checkpoint_dead_coordinator`, with real processes, a real TCPStore and the whole of `Store.save`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Final

import pytest
import torch

import holdfast
from tests.distributed.checkpoint.test_checkpoint_dead_coordinator import find_wrong
from tests.distributed.checkpoint.test_checkpoint_rank_faults import STEPS
from tests.distributed.conftest import World
from tests.distributed.cues import ARRIVED, CREATED, Cell, Moment, Signs, cueing, list_cells, play_in_time
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.kit.patience import PATIENCE_S

KNOWN: Final = Cell(Moment("commit", CREATED), (Moment("stale", ARRIVED),))
"""The record was created, and the other rank has not read the answer that lets the coordinator create it."""


def save_with_signs(rank: int, folder: Path, cell: Cell, signal: Signals, timeout_s: float) -> ActOutcome:
    """Save; halt the coordinator when all others are held; go on; resume a coordinator that was only stopped."""
    signs = Signs(folder)
    others = range(1, 1 + len(cell.holds))

    def cue(_rank: int, moment: Moment) -> None:
        if moment == (cell.holds[rank - 1] if rank else cell.death):
            signs.halt_in(0, signal, rank=rank, others=others)

    with cueing(cue), holdfast.open(folder / "store") as store:
        tree = {"w": torch.ones(300)}
        outcome = report_outcome(lambda: store.save("run", tree, overwrite=True, timeout_s=timeout_s).generation)
    signs.give("told", rank)
    if rank == 0:
        os._exit(0)  # it was resumed; nobody expects its answer
    if rank == 1 and signal == SIGSTOP:
        signs.resume(0, others=others)
    return outcome


def play(world: World, folder: Path, cell: Cell, signal: Signals) -> tuple[list[str], bool]:
    """Return what the others were told, by the class of what they raised, and whether the name is new."""
    if signal == SIGKILL:
        return _play_once(world, cell, signal, folder, PATIENCE_S)
    return play_in_time(partial(_play_once, world, cell, signal), folder, 0)


def _play_once(world: World, cell: Cell, signal: Signals, folder: Path, timeout_s: float) -> tuple[list[str], bool]:
    folder.mkdir()
    with holdfast.open(folder / "store") as store:
        store.save("run", {"w": torch.zeros(300)})
    outcome = world(1 + len(cell.holds))(save_with_signs, folder, cell, signal, timeout_s, lost=[0])
    with holdfast.open(folder / "store", read_only=True) as store:
        (value,) = set(store.load("run")["w"].tolist())
        assert [finding for finding in store.check() if finding.severity == "error"] == []
    return [each.kind for each in outcome[1:]], value == 1.0


def list_steps(rank: int, folder: Path) -> list[str]:
    seen: list[Moment] = []
    with cueing(lambda _rank, moment: seen.append(moment)), holdfast.open(folder / "store") as store:
        store.save("run", {"w": torch.ones(300)}, overwrite=True)
    return list(dict.fromkeys(moment.step for moment in seen))


def test_the_steps_are_all_that_there_are(world: World, tmp_path: Path) -> None:
    assert world(2)(list_steps, tmp_path) == [STEPS, STEPS]


def test_a_rank_whose_coordinator_was_killed_after_the_commit_does_not_say_that_nothing_changed(
    world: World, tmp_path: Path
) -> None:
    assert play(world, tmp_path / "0", KNOWN, SIGKILL) == (["CommitUnknown"], True)


@pytest.mark.slow  # hundreds of saves
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_what_the_others_are_told_of_a_killed_coordinator_is_true(
    world: World, tmp_path: Path, step: str, size: int
) -> None:
    wrong = []
    for number, cell in enumerate(cell for cell in list_cells(STEPS, size) if cell.death.step == step):
        outcome, is_new = play(world, tmp_path / str(number), cell, SIGKILL)
        if find_wrong(outcome, is_new=is_new) or outcome != cell.find_expected(STEPS):
            wrong.append(f"{cell}: {outcome}, {is_new=}")
    assert wrong == []


@pytest.mark.slow  # the timeout has to pass, again and again
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", STEPS)
def test_what_the_others_are_told_of_a_stopped_coordinator_is_true(world: World, tmp_path: Path, step: str) -> None:
    wrong = []
    for number, cell in enumerate(cell for cell in list_cells(STEPS, 2) if cell.death.step == step):
        outcome, is_new = play(world, tmp_path / str(number), cell, SIGSTOP)
        wrong += [f"{cell}: {outcome}, {is_new=}, {why}" for why in find_wrong(outcome, is_new=is_new)]
    assert wrong == []
