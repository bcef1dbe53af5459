"""A coordinator process is killed or suspended at any moment of a save: what the other processes raise is true.

The grid of `test_checkpoint_dead_coordinator`, with real processes, a real TCPStore and the whole of `Store.save`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Final

import pytest
import torch

import holdfast
from tests.distributed.checkpoint.test_checkpoint_dead_coordinator import find_wrong
from tests.distributed.checkpoint.test_checkpoint_rank_faults import STEPS
from tests.distributed.conftest import World
from tests.distributed.cues import ARRIVED, CREATED, Cell, Moment, cueing, list_cells
from tests.distributed.outcomes import ActOutcome, report_outcome

KNOWN: Final = Cell(Moment("commit", CREATED), (Moment("stale", ARRIVED),))
"""The record was created, and the other rank has not read the answer that lets the coordinator create it."""
LIMIT_S: Final = 30.0
TIMEOUT_S: Final = 1.0
"""Where it has to pass."""


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "a rank did not come to where it was to be"
        time.sleep(0.002)


def is_halted(pid: int) -> bool:
    """Tell whether a process is dead or stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "TtZX"


class Signs:
    """Files by which the ranks of a test know how far the others are."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._others = range(1, size)

    def give(self, sign: str, rank: int) -> None:
        path = self._folder / f"{sign} {rank}"
        path.with_suffix(".new").write_text(str(os.getpid()), encoding="utf-8")
        path.with_suffix(".new").rename(path)

    def wait_others(self, sign: str) -> None:
        wait_until(lambda: all((self._folder / f"{sign} {rank}").exists() for rank in self._others))

    def wait_coordinator(self, sign: str) -> int:
        """Wait for a sign of the coordinator and return its process."""
        path = self._folder / f"{sign} 0"
        wait_until(path.exists)
        return int(path.read_text(encoding="utf-8"))


def save_with_signs(rank: int, folder: Path, cell: Cell, signal: Signals) -> ActOutcome:
    """Save; halt the coordinator when all others are held; go on; resume a coordinator that was only stopped."""
    signs = Signs(folder, 1 + len(cell.holds))

    def cue(_rank: int, moment: Moment) -> None:
        if rank == 0 and moment == cell.death:
            signs.wait_others("held")
            signs.give("halting", rank)
            os.kill(os.getpid(), signal)
        if rank > 0 and moment == cell.holds[rank - 1]:
            signs.give("held", rank)
            pid = signs.wait_coordinator("halting")
            wait_until(lambda: is_halted(pid))

    timeout_s = TIMEOUT_S if signal == SIGSTOP else LIMIT_S
    with cueing(cue), holdfast.open(folder / "store") as store:
        tree = {"w": torch.ones(300)}
        outcome = report_outcome(lambda: store.save("run", tree, overwrite=True, timeout_s=timeout_s).generation)
    signs.give("told", rank)
    if rank == 1 and signal == SIGSTOP:
        signs.wait_others("told")
        os.kill(signs.wait_coordinator("halting"), SIGCONT)
        signs.wait_coordinator("told")
    return outcome


def play(world: World, folder: Path, cell: Cell, signal: Signals) -> tuple[list[str], bool]:
    """Return what the others were told, by the class of what they raised, and whether the name is new."""
    folder.mkdir()
    with holdfast.open(folder / "store") as store:
        store.save("run", {"w": torch.zeros(300)})
    outcome = world(1 + len(cell.holds))(save_with_signs, folder, cell, signal, lost=[0])
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
