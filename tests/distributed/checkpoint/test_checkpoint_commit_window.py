"""Any rank is killed or stopped in the commit window of a collective save: nobody hangs, all are told the truth.

The window opens when all ranks have arrived at step `stale`, because the coordinator then sends the request that
creates the record. It closes when every rank has read the answer of step `commit`.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Final, NamedTuple

import pytest
import torch

import holdfast
from tests.distributed.checkpoint.test_checkpoint_dead_coordinator import find_wrong
from tests.distributed.conftest import World
from tests.distributed.cues import ARRIVED, BEFORE, COLLECTED, CREATED, WORKED, Moment, Signs, cueing, play_in_time
from tests.distributed.outcomes import report_outcome

SIZE: Final = 3
LEARNED: Final = Moment("done", BEFORE)
"""The rank has read the answer of the commit."""
UNKNOWN, RESULT = "CommitUnknown", ""


class Window(NamedTuple):
    """Where each rank is when one of them, the victim, is killed or stopped."""

    victim: int
    moments: tuple[Moment, ...]
    """By rank; rank 0 is the coordinator."""

    def __str__(self) -> str:
        return f"rank {self.victim} at " + " ".join(map(str, self.moments))

    def list_expected(self, rank: int) -> set[str]:
        """Return what this rank, which lives on, may be told: the class of its error, or an empty text for a result."""
        own, lost = self.moments[rank], self.moments[self.victim]
        if own == LEARNED:
            return {RESULT}
        if self.victim == 0:
            # The verdict may be set already, or be set by a coordinator that was only stopped.
            return {UNKNOWN, RESULT} if lost == LEARNED else {UNKNOWN}
        # Without the victim at step `commit` the step fails, on the coordinator too, although it has the record.
        return {UNKNOWN, RESULT} if lost in (Moment("commit", ARRIVED), LEARNED) else {UNKNOWN}


def list_windows(victim: int) -> list[Window]:
    """Return every combination that can happen. Of other ranks than the victim, those in between are left out."""
    stale, before, arrived = Moment("stale", ARRIVED), Moment("commit", BEFORE), Moment("commit", ARRIVED)
    windows = []
    for phase in (BEFORE, CREATED, WORKED, ARRIVED):
        # The coordinator has let all ranks go on from `stale`; it does not need them to create the record.
        places = [[stale, before, arrived] if rank == victim else [stale, arrived] for rank in range(1, SIZE)]
        windows += [Window(victim, (Moment("commit", phase), *each)) for each in itertools.product(*places)]
    windows.append(Window(victim, (Moment("commit", COLLECTED), *[arrived] * (SIZE - 1))))
    windows += [Window(victim, (LEARNED, *each)) for each in itertools.product([arrived, LEARNED], repeat=SIZE - 1)]
    return windows


def save_in_window(rank: int, folder: Path, window: Window, signal: Signals, timeout_s: float) -> None:
    """Save, with one rank halted in the window; write what this rank is told into a file."""
    signs = Signs(folder)
    others = [each for each in range(SIZE) if each != window.victim]

    def cue(_rank: int, moment: Moment) -> None:
        if moment == window.moments[rank]:
            signs.halt_in(window.victim, signal, rank=rank, others=others)

    def save() -> int:
        with holdfast.open(folder / "store") as store:
            return store.save("run", {"w": torch.ones(300)}, overwrite=True, timeout_s=timeout_s).generation

    with cueing(cue):
        outcome = report_outcome(save)
    (folder / f"outcome {rank}").write_text(outcome.kind, encoding="utf-8")
    signs.give("told", rank)
    if rank == window.victim:
        os._exit(0)  # it was resumed; nobody expects its answer
    if rank == others[0] and signal == SIGSTOP:
        signs.resume(window.victim, others=others)


def play(world: World, folder: Path, window: Window, signal: Signals) -> tuple[list[str | None], bool]:
    """Return what each rank was told, None if it was killed, and whether the name is new."""
    return play_in_time(partial(_play_once, world, window, signal), folder, window.victim)


def _play_once(
    world: World, window: Window, signal: Signals, folder: Path, timeout_s: float
) -> tuple[list[str | None], bool]:
    folder.mkdir()
    with holdfast.open(folder / "store") as store:
        store.save("run", {"w": torch.zeros(300)})
    # Other tests lose the store of the group with the coordinator; here the coordinator is lost alone.
    is_apart = window.victim == 0
    world(SIZE)(save_in_window, folder, window, signal, timeout_s, lost=[window.victim], hosted_apart=is_apart)
    files = [folder / f"outcome {rank}" for rank in range(SIZE)]
    told = [file.read_text(encoding="utf-8") if file.exists() else None for file in files]
    with holdfast.open(folder / "store") as store:
        (value,) = set(store.load("run")["w"].tolist())
        assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []
        store.save("run", {"w": torch.full((300,), 2.0)}, overwrite=True)
    return told, value == 1.0


def judge(window: Window, signal: Signals, told: list[str | None], *, is_new: bool) -> list[str]:
    """Return what was told and is not true, or not what the window demands."""
    wrong = find_wrong([kind for kind in told if kind is not None], is_new=is_new)
    survivors = [rank for rank in range(SIZE) if rank != window.victim]
    wrong += [f"rank {rank}: {told[rank]}" for rank in survivors if told[rank] not in window.list_expected(rank)]
    # The coordinator goes on to create the record, unless it was killed before.
    if not is_new and (window.victim, signal) != (0, SIGKILL):
        wrong.append("the record is missing")
    if (told[window.victim] is None) != (signal == SIGKILL):
        wrong.append("the victim was told nothing" if signal == SIGSTOP else "the victim lived on")
    return [f"{window}: {told}, {is_new=}, {why}" for why in wrong]


def test_a_rank_that_is_killed_before_it_arrives_at_the_commit_leaves_it_unknown(world: World, tmp_path: Path) -> None:
    window = Window(1, (Moment("commit", CREATED), Moment("stale", ARRIVED), Moment("commit", ARRIVED)))

    told, is_new = play(world, tmp_path / "0", window, SIGKILL)

    assert (told, is_new) == ([UNKNOWN, None, UNKNOWN], True)


@pytest.mark.slow  # in nearly every window the timeout has to pass
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP], ids=["killed", "stopped"])
def test_what_is_told_of_a_rank_that_is_lost_in_the_window_is_true(
    world: World, tmp_path: Path, signal: Signals, victim: int
) -> None:
    wrong: list[str] = []
    must_be_unknown, were_unknown = 0, 0
    for number, window in enumerate(list_windows(victim)):
        told, is_new = play(world, tmp_path / str(number), window, signal)
        wrong += judge(window, signal, told, is_new=is_new)
        survivors = [rank for rank in range(SIZE) if rank != victim]
        must_be_unknown += any(window.list_expected(rank) == {UNKNOWN} for rank in survivors)
        were_unknown += UNKNOWN in told
    assert wrong == []
    assert were_unknown >= must_be_unknown > 12


def test_an_answer_that_is_not_true_is_found() -> None:
    window = Window(1, (Moment("commit", CREATED), Moment("stale", ARRIVED), Moment("commit", ARRIVED)))

    assert judge(window, SIGKILL, [UNKNOWN, None, UNKNOWN], is_new=True) == []
    assert len(judge(window, SIGKILL, [UNKNOWN, None, "RankError"], is_new=True)) == 2
    assert len(judge(window, SIGKILL, [UNKNOWN, None, UNKNOWN], is_new=False)) == 1
    assert len(judge(window, SIGSTOP, [UNKNOWN, "RankError", UNKNOWN], is_new=True)) == 1
    assert len(judge(window, SIGSTOP, [UNKNOWN, None, UNKNOWN], is_new=True)) == 1
