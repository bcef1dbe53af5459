"""The explorer: every interleaving of a few actors, with what must hold in each state and in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from tests.model.collecting import Collect, Collector
from tests.model.collector import step_collect
from tests.model.world import (
    NO_LOCK,
    NOBODY,
    WITHDRAWER,
    LeaseFiles,
    Mark,
    Record,
    Rules,
    Steps,
    World,
    is_complete,
    lease_state,
    move,
    newest,
    owner_of,
    set_lease,
)
from tests.model.writer import Delete, Deleter, Save, Writer, step_delete, step_save

Order: TypeAlias = Save | Delete | Collect

OLD_FILES: Final = frozenset(["m:old:0", "p:old:a"])


@dataclass(frozen=True, slots=True)
class Scene:
    """Who acts, and on what."""

    title: str
    orders: tuple[Order, ...]
    files: frozenset[str] = OLD_FILES
    names: tuple[tuple[Record, ...], ...] = ((),)
    marks: frozenset[Mark] = frozenset()
    under_way: tuple[tuple[int, Writer, LeaseFiles], ...] = ()
    """Saves that have come some way already: their number, place and lease."""
    has_lock: bool = False

    def start(self) -> World:
        """Return the first state; there is a lease for each actor, and one for a save of each name in the end."""
        actors = tuple(_enter(order) for order in self.orders)
        leases: tuple[LeaseFiles, ...] = tuple(() for _ in range(len(self.orders) + len(self.names)))
        past = frozenset((name, *record.ident) for name, chain in enumerate(self.names) for record in chain[:-1])
        alone = NOBODY if self.has_lock else NO_LOCK
        world = World(self.files, self.names, leases, self.marks, actors, alone=alone, past=past)
        for number, writer, files in self.under_way:
            world = set_lease(move(world, number, writer), number, files)
        return world


@dataclass(slots=True)
class Report:
    """What an exploration found."""

    states: int = 0
    ends: int = 0
    broken: str = ""
    """The invariant that does not hold, or nothing."""
    trace: list[str] = field(default_factory=list)


def _enter(order: Order) -> NamedTuple:
    match order:
        case Save():
            return Writer()
        case Delete():
            return Deleter()
        case Collect():
            return Collector()


def step(world: World, number: int, order: Order, rules: Rules) -> Steps:
    """Return each thing that an actor may do next, as its label and the state after it."""
    match order:
        case Save():
            return step_save(world, number, order, rules)
        case Delete():
            return step_delete(world, number, order)
        case Collect():
            return step_collect(world, number, order, rules)


def explore(scene: Scene, rules: Rules, *, limit: int = 5_000_000, crash_every: int = 0, ends: bool = True) -> Report:
    """Visit every state, nearest first, and stop at the first that breaks an invariant.

    With `crash_every` = n, one state in n is also taken as the moment at which all actors die. Without `ends`, what is
    left when all have finished is not looked at.
    """
    start = scene.start()
    before: dict[World, tuple[World, str] | None] = {start: None}
    queue = deque([start])
    report = Report()
    while queue:
        world = queue.popleft()
        report.states += 1
        following = [
            (f"{number}: {label}", after)
            for number, order in enumerate(scene.orders)
            for label, after in step(world, number, order, rules)
        ]
        report.broken = find_broken(scene, world)
        report.ends += not following
        if not report.broken and not following and ends:
            report.broken = find_broken_end(scene, world, rules)
        if not report.broken and crash_every and report.states % crash_every == 0:
            report.broken = find_broken_after_crash(scene, world, rules)
        if report.broken:
            report.trace = _list_trace(before, world)
            return report
        assert report.states <= limit, f"{scene.title}: more than {limit} states"
        for label, after in following:
            if after not in before:
                before[after] = (world, label)
                queue.append(after)
    return report


def _list_trace(before: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels = []
    while (link := before[world]) is not None:
        world, label = link
        labels.append(label)
    return labels[::-1]


def find_broken(scene: Scene, world: World) -> str:
    """Return the first invariant of every state that does not hold, or nothing."""
    return next(_iter_broken(scene, world), "")


def _iter_broken(scene: Scene, world: World) -> Iterator[str]:
    for name, chain in enumerate(world.names):
        top = newest(chain)
        if top and not is_complete(world, top) and not _may_be_withdrawn(world, top):
            is_restored = top.author >= WITHDRAWER
            yield (
                "I5: a withdrawal restored what is not all there"
                if is_restored
                else "I1: the newest record is not all there"
            )
        if top and (name, *top.ident) in world.past:
            yield "I2: a record that had been replaced is the newest again"
    for number, order in enumerate(scene.orders):
        actor = world.actors[number]
        if isinstance(order, Save) and isinstance(actor, Writer):
            yield from _iter_broken_save(world, number, order, actor)
    if any(lease_state(world.leases, owner_of(key)) == "live" for mark in world.marks for key in mark.keys):
        yield "I8: a file of a save under way is marked"


def _may_be_withdrawn(world: World, record: Record) -> bool:
    if record.author < 0 or record.author >= WITHDRAWER or lease_state(world.leases, record.lease) != "fenced":
        return False
    author = world.actors[record.author]
    return isinstance(author, Writer) and not author.outcome


def _iter_broken_save(world: World, number: int, order: Save, writer: Writer) -> Iterator[str]:
    if writer.is_warned and writer.at == "relist":
        yield "I7: a save that should have known that it is doomed has become visible"
    if writer.outcome == "robbed":
        yield "I9: a save with a live lease cannot read again what it did not copy"
    if writer.outcome == "returned":
        top = newest(world.names[order.name])
        is_newest = top is not None and top.ident == (writer.generation, number)
        if not is_newest and (order.name, writer.generation, number) not in world.past:
            yield "I2: a save that returned is gone, and nobody replaced it"
        if writer.is_stale:
            yield "I3: a save won over another that it had not seen"
    for author in writer.skipped:
        other = world.actors[author % WITHDRAWER] if author >= 0 else Writer(outcome="returned")
        end = other.outcome if isinstance(other, Writer) else ""
        if (writer.outcome, end) in (("withdrawn", "returned"), ("existed", "withdrawn")):
            yield "I2: what a save had returned for was undone by a withdrawal"


def find_broken_end(scene: Scene, world: World, rules: Rules) -> str:
    """Return what does not hold when all have finished and one more collection has run."""
    if any(getattr(actor, "at", "done") != "done" for actor in world.actors):
        return "I6: somebody waits for ever"
    return _find_leak(_collect_all(scene, world, rules))


def find_broken_after_crash(scene: Scene, world: World, rules: Rules) -> str:
    """Let all actors die here, collect, save each name once more, and collect again."""
    broken = ""
    for name in range(len(world.names)):
        world = _collect_all(scene, world, rules)
        world = _save_again(world, len(scene.orders) + name, name, rules)
        broken = broken or find_broken(scene, world)
        top = newest(world.names[name])
        if not broken and not (top and top.content == "z"):
            broken = "I6: after a crash a name cannot be saved any more"
    return broken or _find_leak(_collect_all(scene, world, rules))


def _save_again(world: World, number: int, name: int, rules: Rules) -> World:
    """Overwrite a name; if what it holds is in doubt, delete it first, as the error says."""
    actors = world.actors
    for order in (Save("overwrite", name, "z"), Delete(name), Save("first", name, "z")):
        padding = (Deleter("done"),) * (number - len(actors))
        world = _run(world._replace(actors=(*actors, *padding, _enter(order))), number, order, rules)
        world = world._replace(actors=actors)
        top = newest(world.names[name])
        if top and top.content == "z":
            break
        world = set_lease(world, number, ())
    return world


def _collect_all(scene: Scene, world: World, rules: Rules) -> World:
    """Run one collection that fences whoever is in its way."""
    # Nobody else acts any more, and the lock of the dead is free: whether there is one makes no difference.
    added = world._replace(actors=(*world.actors, Collector()), alone=NO_LOCK)
    done = _run(added, len(scene.orders), Collect(expires=True, purges=True), rules)
    return done._replace(actors=world.actors)


def _run(world: World, number: int, order: Order, rules: Rules) -> World:
    while steps := step(world, number, order, rules):
        world = steps[0][1]
    return world


def _find_leak(world: World) -> str:
    tops = [top for chain in world.names if (top := newest(chain))]
    if not all(is_complete(world, top) for top in tops):
        return "I5: in the end the newest record is not complete"
    if world.files - frozenset().union(*(top.keys for top in tops)):
        return "I4: a dead file is never deleted"
    if any(len(chain) > 1 for chain in world.names):
        return "I4: a dead record is never deleted"
    return ""
