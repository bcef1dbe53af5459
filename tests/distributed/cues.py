"""Acts at a chosen moment of a collective save: on a given rank, in a given step, before or after its work."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, Signals
from typing import Any, Final, NamedTuple, TypeVar
from unittest import mock

from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.store_rounds import StoreRounds
from holdfast.repo.names.snapshots import commit_snapshot
from holdfast.repo.write import transaction
from holdfast.testing.ranks import RanksFailed
from tests.kit.patience import PATIENCE_S

BEFORE: Final = "before"
"""The rank has not begun its part of the step."""
WORKED: Final = "worked"
"""It has done its part, and the others cannot see that yet."""
ARRIVED: Final = "arrived"
"""The others can see that it takes part; it has not read the answer."""
COLLECTED: Final = "collected"
"""The coordinator has seen that all have arrived, and has not answered."""
CREATED: Final = "created"
"""In step `commit`: the coordinator has created the snapshot record, and the lease is live."""


TIMEOUTS_S: Final = (1.0, 5.0, 25.0)
"""How long ranks wait for each other in a scene in which the timeout has to pass: the next one if that is too short."""
Result = TypeVar("Result")


class Moment(NamedTuple):
    """How far a rank has come."""

    step: str
    phase: str

    def __str__(self) -> str:
        return f"{self.step}-{self.phase}"


Cue = Callable[[int, Moment], None]
"""Told the rank and the moment that it has come to."""


@contextmanager
def cueing(cue: Cue) -> Iterator[None]:
    """Call `cue` at every moment of every rank of this process."""
    arrive, collect = StoreRounds.arrive, StoreRounds.collect

    def begin(name: str) -> Callable[..., Any]:
        inner = getattr(Collectives, name)

        def take_part(self: Collectives, step: str, *given: Any) -> Any:
            cue(self.rank, Moment(step, BEFORE))
            return inner(self, step, *given)

        return take_part

    def arrive_with_cue(self: StoreRounds, call: Any, message: Any) -> None:
        cue(self._rank, Moment(call.step, WORKED))
        arrive(self, call, message)
        cue(self._rank, Moment(call.step, ARRIVED))

    def collect_with_cue(self: StoreRounds) -> list[bytes]:
        messages = collect(self)
        cue(self._rank, Moment(self._call.step, COLLECTED))
        return messages

    def create_with_cue(*args: Any) -> None:
        commit_snapshot(*args)
        cue(0, Moment("commit", CREATED))

    begins: dict[str, Any] = {name: begin(name) for name in ("gathering", "all_to_all", "broadcast")}
    with (
        mock.patch.multiple(Collectives, **begins),
        mock.patch.multiple(StoreRounds, arrive=arrive_with_cue, collect=collect_with_cue),
        mock.patch.object(transaction, "commit_snapshot", create_with_cue),
    ):
        yield


class Cell(NamedTuple):
    """One cell of the grid: the coordinator dies at a moment, while each other rank is held at another."""

    death: Moment
    holds: tuple[Moment, ...]
    """Of ranks 1, 2, ..."""

    def __str__(self) -> str:
        return " ".join([str(self.death), "with", *map(str, self.holds)])

    def find_expected(self, steps: Sequence[str]) -> list[str]:
        """Return what each of the other ranks has to be told, by the class of what it raises."""
        first_unknown = steps.index("stale")
        return [
            "" if hold.step == "done" else "RankError" if steps.index(hold.step) < first_unknown else "CommitUnknown"
            for hold in self.holds
        ]


def list_cells(steps: Sequence[str], size: int) -> list[Cell]:
    """Return every combination that can happen.

    Before the coordinator has collected a step, another rank has read the answer of the step before or has not, and
    has arrived or has not. Once the coordinator has collected, all have arrived; they have not read what it has not
    answered. Nobody is anywhere else: no step begins before all have arrived at the one before.
    """
    cells = []
    for number, step in enumerate(steps):
        places = [Moment(step, BEFORE), Moment(step, ARRIVED)]
        if number:
            places.insert(0, Moment(steps[number - 1], ARRIVED))
        deaths = [BEFORE, WORKED, CREATED] if step == "commit" else [BEFORE, WORKED]
        for phase, holds in itertools.product(deaths, itertools.product(places, repeat=size - 1)):
            cells.append(Cell(Moment(step, phase), holds))
        cells.append(Cell(Moment(step, COLLECTED), (Moment(step, ARRIVED),) * (size - 1)))
    return cells


class Signs:
    """Files by which the processes of a test know how far the others are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, sign: str, rank: int) -> None:
        path = self._folder / f"{sign} {rank}"
        path.with_suffix(".new").write_text(str(os.getpid()), encoding="utf-8")
        path.with_suffix(".new").rename(path)

    def has_given(self, sign: str, rank: int) -> bool:
        """Return whether a rank has given a sign."""
        return (self._folder / f"{sign} {rank}").exists()

    def wait(self, sign: str, rank: int) -> int:
        """Wait for a sign of a rank and return its process."""
        wait_until(lambda: self.has_given(sign, rank))
        return self._read(sign, rank)

    def is_halted(self, rank: int) -> bool:
        """Return whether a rank has given the sign "halting" and is dead or stopped."""
        return self.has_given("halting", rank) and is_halted(self._read("halting", rank))

    def _read(self, sign: str, rank: int) -> int:
        return int((self._folder / f"{sign} {rank}").read_text(encoding="utf-8"))

    def halt_in(self, victim: int, signal: Signals, *, rank: int, others: Collection[int]) -> None:
        """Halt this process if it is the victim, when all others are here; hold any other until the victim is halted.

        Each rank of the test calls this once, at its moment.
        """
        if rank == victim:
            for other in others:
                self.wait("held", other)
            self.give("halting", rank)
            os.kill(os.getpid(), signal)
        else:
            self.give("held", rank)
            pid = self.wait("halting", victim)
            wait_until(lambda: is_halted(pid))

    def resume(self, victim: int, *, others: Collection[int]) -> None:
        """Continue a stopped victim when all others have given the sign "told"; return when it has given it, too."""
        for other in others:
            self.wait("told", other)
        os.kill(self.wait("halting", victim), SIGCONT)
        self.wait("told", victim)


def play_in_time(play: Callable[[Path, float], Result], folder: Path, victim: int) -> Result:
    """Play a scene in a new folder with a longer timeout each time, until the victim was halted at its moment.

    On a busy machine, a short timeout passes before the ranks have come to their moments.
    """
    for number, timeout_s in enumerate(TIMEOUTS_S):
        place = folder.with_name(f"{folder.name}-{number}")
        try:
            played = play(place, timeout_s)
        except RanksFailed:
            if Signs(place).has_given("halting", victim):
                raise
        else:
            if Signs(place).has_given("halting", victim):
                return played
    raise AssertionError(f"rank {victim} did not come to its moment, even with a timeout of {TIMEOUTS_S[-1]} s")


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return as soon as something is so; fail if it never is."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "a rank did not come to its moment"
        time.sleep(0.002)


def is_halted(pid: int) -> bool:
    """Return whether a process is dead or stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between the open and the read
        return True
    return stat.rpartition(")")[2].split()[0] in "TtZX"
