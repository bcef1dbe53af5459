"""Runs real code in threads of which exactly one moves, and explores the orders in which their operations can fall."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from holdfast.errors import HoldfastError
from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import Crashed
from tests.faults.hooked_store import HookedStore
from tests.kit.patience import PATIENCE_S

Act = Callable[[ObjectStore], object]
Choice = int | Literal["kill"]
"""Which actor goes on from here, or that the one at work dies."""

_WRITES: Final = frozenset({"create", "commit", "delete"})


@dataclass(frozen=True, slots=True)
class Step:
    """One operation that an actor was about to do."""

    actor: int
    name: str
    key: str

    @property
    def writes(self) -> bool:
        return self.name in _WRITES

    def conflicts(self, other: Step) -> bool:
        """Tell whether the order of the two can matter."""
        if not (self.writes or other.writes):
            return False
        if self.name == "list" or other.name == "list":
            listing, touched = (self, other) if self.name == "list" else (other, self)
            # What lists everything looks for prefixes that nobody here makes.
            return bool(listing.key) and touched.key.startswith(listing.key)
        return self.key == other.key


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who begins, and before which steps (by number) somebody else goes on."""

    first: int = 0
    switches: tuple[tuple[int, Choice], ...] = ()

    def then(self, at: int, choice: Choice) -> Schedule:
        return Schedule(self.first, (*self.switches, (at, choice)))

    @property
    def kills(self) -> int:
        return sum(choice == "kill" for _, choice in self.switches)


@dataclass(slots=True)
class Outcome:
    """What became of one actor: its result, its error, or neither if it was killed."""

    result: object = None
    error: HoldfastError | None = None
    killed: bool = False


@dataclass(slots=True)
class Run:
    """One schedule, carried out."""

    schedule: Schedule
    steps: list[Step]
    outcomes: list[Outcome]

    def show(self) -> str:
        lines = [f"{number:3} {step.actor} {step.name} {step.key}" for number, step in enumerate(self.steps)]
        return "\n".join([str(self.schedule), *lines, *map(repr, self.outcomes)])


class _Actor:
    """A thread that moves only while it is its turn."""

    def __init__(self, number: int, act: Act, stage: Stage) -> None:
        self.outcome = Outcome()
        self.ids = random.Random(number)
        self.is_done = False
        self.number = number
        self._act = act
        self._stage = stage
        self._store = HookedStore(stage.store, before=self._meet)
        self._turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=f"actor-{number}", daemon=True)

    def resume(self) -> None:
        self._turn.release()

    def rest(self) -> None:
        self._turn.acquire()

    def _run(self) -> None:
        self.rest()
        try:
            self.outcome.result = self._act(self._store)
        except HoldfastError as error:
            self.outcome.error = error
        except Crashed:
            self.outcome.killed = True
        except BaseException as error:  # noqa: BLE001  # whoever runs the stage raises it
            self._stage.broken = error
        self.is_done = True
        self._stage.go_on()

    def _meet(self, name: str, key: str) -> None:
        # An actor's own pool only reads what the actor chose: its order is not what is explored.
        if threading.current_thread() is self.thread and not self.outcome.killed:
            self._stage.take_turn(self, Step(self.number, name, key))
        if self.outcome.killed:
            raise Crashed(f"dead before {name} {key}")


class Stage:
    """The actors of one run, and random ids that are the same in every run."""

    def __init__(self, acts: Sequence[Act], store: ObjectStore) -> None:
        self.store = store
        self.broken: BaseException | None = None
        self._actors = [_Actor(number, act, self) for number, act in enumerate(acts)]
        self._others = random.Random("nobody")
        self._steps: list[Step] = []
        self._switches: dict[int, Choice] = {}
        self._ended = threading.Event()

    def urandom(self, size: int) -> bytes:
        """Stand in for os.urandom."""
        current = threading.current_thread()
        ids = next((actor.ids for actor in self._actors if actor.thread is current), self._others)
        return ids.randbytes(size)

    def run(self, schedule: Schedule) -> Run:
        """Carry out a schedule: whoever ends is followed by the first who has not."""
        self._switches = dict(schedule.switches)
        for actor in self._actors:
            actor.thread.start()
        self._actors[schedule.first].resume()
        assert self._ended.wait(PATIENCE_S), f"{schedule} hangs after {self._steps[-1:]}"
        for actor in self._actors:
            actor.thread.join()
        if self.broken is not None:
            raise self.broken
        return Run(schedule, self._steps, [actor.outcome for actor in self._actors])

    def take_turn(self, actor: _Actor, step: Step) -> None:
        """Let others go first if the schedule says so; return when `actor` may do the step, or is dead."""
        while (choice := self._switches.pop(len(self._steps), None)) is not None:
            if choice == "kill":
                actor.outcome.killed = True
                return
            other = self._actors[choice]
            if other is not actor and not other.is_done:
                other.resume()
                actor.rest()
        self._steps.append(step)

    def go_on(self) -> None:
        """Pass the turn on to the first who has not ended."""
        following = next((actor for actor in self._actors if not actor.is_done), None)
        if following:
            following.resume()
        else:
            self._ended.set()


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far to explore."""

    every: tuple[int, ...] = (1, 1)
    """By the number of switches against the actors' will: of so many schedules one is run."""
    kills: int = 1
    """How many of the switches may be deaths."""


@dataclass(slots=True)
class Explorer:
    """Finds the schedules worth running: a switch matters only before a step that conflicts with another's."""

    actors: int
    bounds: Bounds
    _footprints: dict[int, set[Step]] = field(default_factory=dict)

    def explore(self, perform: Callable[[Schedule], Run]) -> Iterator[Run]:
        """Perform schedules, those with the fewest switches first, and yield each run."""
        waiting = [Schedule(first) for first in range(self.actors)]
        for depth, every in enumerate(self.bounds.every):
            following: list[Schedule] = []
            for schedule in waiting[depth % every :: every]:
                run = perform(schedule)
                for step in run.steps:
                    self._footprints.setdefault(step.actor, set()).add(step)
                yield run
                if depth + 1 < len(self.bounds.every):
                    following += self._extend(run)
            waiting = following

    def _extend(self, run: Run) -> Iterator[Schedule]:
        schedule = run.schedule
        start = schedule.switches[-1][0] + 1 if schedule.switches else 0
        last = {step.actor: number for number, step in enumerate(run.steps)}
        for number in range(start, len(run.steps)):
            step = run.steps[number]
            for other in range(self.actors):
                is_waiting = other != step.actor and last.get(other, -1) > number
                if is_waiting and any(step.conflicts(theirs) for theirs in self._footprints[other]):
                    yield schedule.then(number, other)
            if step.writes and schedule.kills < self.bounds.kills:
                yield schedule.then(number, "kill")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Let one actor go on until it is about to do an operation below `prefix`, or to its end."""

    actor: int
    name: str = ""
    prefix: str = ""


def direct(perform: Callable[[Schedule], Run], script: Sequence[Stretch]) -> Run:
    """Carry out a script, then let whoever is left run to the end, in order."""
    schedule = Schedule(script[0].actor)
    start = 0
    for stretch, following in pairwise(script):
        start = _find_stop(perform(schedule).steps, start, stretch)
        schedule = schedule.then(start, following.actor)
    return perform(schedule)


def _find_stop(steps: Sequence[Step], start: int, stretch: Stretch) -> int:
    own = [number for number in range(start, len(steps)) if steps[number].actor == stretch.actor]
    if not stretch.name:
        return own[-1] + 1
    return next(
        number for number in own if steps[number].name == stretch.name and steps[number].key.startswith(stretch.prefix)
    )
