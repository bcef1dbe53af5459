"""The collector: mark, wait for or fence whoever might not have seen the mark, sweep, remove dead records."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, zip_longest
from typing import Final

from tests.model.collecting import EMPTY, FLOOR, Collect, Collector, Turn
from tests.model.world import (
    NOBODY,
    Chain,
    LeaseFiles,
    Mark,
    Record,
    Rules,
    Steps,
    World,
    add_lease,
    delete_record,
    has_generation,
    lease_state,
    list_live_leases,
    list_marked,
    owner_of,
    set_lease,
    walk_unsettled,
)
from tests.model.writer import Writer


def step_collect(world: World, number: int, order: Collect, rules: Rules) -> Steps:
    me = world.actors[number]
    assert isinstance(me, Collector)
    act = _ACTS.get(me.at)
    return act(Turn(world, number, order, rules, me)) if act else []


def find_roots(world: World, chain: Chain, leases: tuple[LeaseFiles, ...], rules: Rules) -> tuple[Record, ...]:
    """Return the records of one name that count, or may count again."""
    if rules.keeps_superseded == "until released":
        return walk_unsettled(chain, leases)
    roots = list(chain[-1:])
    for record, successor in pairwise(chain):
        may_be_undone = lease_state(leases, successor.lease) == "live" or (
            rules.keeps_superseded == "until ended and complete"
            and bool(successor.keys - world.files or successor.keys & list_marked(world))
        )
        if may_be_undone and rules.keeps_superseded != "never":
            roots.append(record)
    return tuple(roots)


def find_needed(world: World, names: tuple[Chain, ...], leases: tuple[LeaseFiles, ...], rules: Rules) -> frozenset[str]:
    """Return what the roots lead to; whose manifest is gone leads nowhere."""
    roots = (root for chain in names for root in find_roots(world, chain, leases, rules))
    return frozenset().union(*(root.keys for root in roots if root.manifest in world.files))


def _start(turn: Turn) -> Steps:
    if not turn.order.sweeps:
        return turn.after_sweep("starts")
    if turn.order.clears and turn.world.alone == NOBODY and _is_alone(turn):
        return [*_begin(turn), *_take_lock(turn, "clear")]
    return _begin(turn)


def _take_lock(turn: Turn, at: str) -> Steps:
    return turn.to("takes the lock alone", turn.world._replace(alone=turn.number), at=at)


def _release(world: World) -> World:
    return world._replace(alone=NOBODY)


def _clear(turn: Turn) -> Steps:
    """Read the leases, to see whether any save goes on without the lock, and which leases are of dead saves."""
    if _find_unlocked(turn) and turn.rules.unlocked_leases != "forgotten":
        return turn.to("sees a save without the lock", _release(turn.world), at="begin")
    leases = turn.world.leases
    dead = frozenset(lease for lease, files in enumerate(leases) if files and files[-1][1] != "fenced")
    return turn.to(f"takes the saves of {sorted(dead)} for dead", at="forget", leases=dead)


def _forget(turn: Turn) -> Steps:
    if not turn.me.leases:
        return turn.to("releases the lock", _release(turn.world), at="begin")
    lease = min(turn.me.leases)
    return turn.to(f"removes lease {lease}", set_lease(turn.world, lease, ()), leases=turn.me.leases - {lease})


def _find_unlocked(turn: Turn) -> frozenset[int]:
    """Return the live leases that tell of a save without the lock."""
    actors = enumerate(turn.world.actors)
    unlocked = {number for number, actor in actors if isinstance(actor, Writer) and actor.is_unlocked}
    return list_live_leases(turn.world) & unlocked


def _begin(turn: Turn) -> Steps:
    steps = _start_fences(turn, list_live_leases(turn.world)) if turn.order.expires else []
    steps += turn.to("lists files", at="leases", keys=turn.world.files)
    for mark in sorted(turn.world.marks) if turn.order.adopts else ():
        steps += turn.to(f"adopts the mark of {mark.owner}", at="waiting", mark=mark.owner)
    return steps


def _leases(turn: Turn) -> Steps:
    return turn.to("lists leases", at="plan", leases=list_live_leases(turn.world))


def _plan(turn: Turn) -> Steps:
    world, me = turn.world, turn.me
    needed = find_needed(world, world.names, world.leases, turn.rules)
    spared = me.leases if turn.rules.spares_live_leases else frozenset()
    dead = frozenset(key for key in me.keys - needed if owner_of(key) not in spared)
    if not dead:
        return turn.after_sweep("finds nothing dead")
    early = list_live_leases(world) if turn.rules.lists_leases == "before mark" else frozenset()
    return turn.to(f"finds {sorted(dead)} dead", at="mark", keys=dead, leases=early)


def _mark(turn: Turn) -> Steps:
    waiting = turn.me.leases if turn.rules.lists_leases == "before mark" else None
    mark = Mark(turn.number, turn.me.keys, waiting)
    world = turn.world._replace(marks=turn.world.marks | {mark})
    return turn.to("publishes the mark", world, at="waiting", mark=turn.number, keys=EMPTY, leases=frozenset())


def _waiting(turn: Turn) -> Steps:
    """Settle whom to wait for, once for each mark."""
    mark, world = turn.find_mark(), turn.world
    if mark is None:
        return turn.after_sweep("finds the mark gone")
    if mark.waiting is None:
        noted = mark._replace(waiting=list_live_leases(world) if turn.rules.waits else frozenset())
        world = world._replace(marks=world.marks - {mark} | {noted})
        mark = noted
    assert mark.waiting is not None
    keys = EMPTY
    if turn.rules.live_set == "before waiting":
        keys = mark.keys - find_needed(world, world.names, world.leases, turn.rules)
    return turn.to(f"waits for leases {sorted(mark.waiting)}", world, at="wait", leases=mark.waiting, keys=keys)


def _wait(turn: Turn) -> Steps:
    alive = turn.me.leases & list_live_leases(turn.world)
    if not alive:
        return _end_wait(turn)
    steps = _start_fences(turn, alive)
    if turn.order.hurries and turn.world.alone == NOBODY and _is_alone(turn):
        steps += _take_lock(turn, "hurry")
    return steps


def _hurry(turn: Turn) -> Steps:
    """Wait no longer if nobody is at work, for whoever began before the mark has ended."""
    if _find_unlocked(turn) and turn.rules.unlocked_leases != "not waited for":
        return turn.to("sees a save without the lock", _release(turn.world), at="wait")
    return turn.to("is alone, releases the lock", _release(turn.world), at="wait", leases=frozenset())


def _start_fences(turn: Turn, alive: frozenset[int]) -> Steps:
    steps: Steps = []
    for lease in sorted(alive) if turn.order.fences else ():
        generation = turn.world.leases[lease][-1][0] + 1
        steps += turn.to(f"takes {lease} for dead", at="fence", fencing=(lease, generation))
    return steps


def _end_wait(turn: Turn) -> Steps:
    """Take the lock together with others, and keep it until all is deleted; a mark that is gone by now is not swept."""
    if turn.find_mark() is None:
        return turn.after_sweep("finds the mark gone")
    if turn.world.alone >= 0:
        if not turn.rules.sweeps_unlocked:
            return turn.after_sweep("finds the lock taken, leaves the mark")
        turn = turn._replace(me=turn.me._replace(is_unlocked=True))
    if turn.rules.live_set == "before waiting":
        return turn.to("has waited", at="delete", leases=frozenset())
    if turn.rules.sweep_reads == "leases first":
        return turn.to("reads all leases", at="sweep", leases=frozenset(), lease_view=turn.world.leases)
    return turn.to("has waited, reads all records", at="sweep", leases=frozenset(), names=turn.world.names)


def _fence(turn: Turn) -> Steps:
    lease, generation = turn.me.fencing
    if has_generation(turn.world.leases[lease], generation):
        return turn.to("finds the fence taken", at=turn.before_fence, fencing=(-1, -1))
    world = add_lease(turn.world, lease, generation, "fenced")
    if turn.rules.relists_fence:
        return turn.to(f"fences {lease}", world, at="fenced")
    left = turn.me.leases - {lease}
    return turn.to(f"fences {lease}", world, at=turn.before_fence, fencing=(-1, -1), leases=left)


def _fenced(turn: Turn) -> Steps:
    """Look whether the fence counts: the live generation below it is there, and none above."""
    lease, generation = turn.me.fencing
    files = turn.world.leases[lease]
    world = turn.world
    if files[-1:] != ((generation, "fenced"),) or (generation - 1, "live") not in files:
        # It had renewed, or ended and been removed, before we came: our file says nothing and goes.
        world = set_lease(world, lease, (file for file in files if file != (generation, "fenced")))
    return turn.to("lists the lease again", world, at=turn.before_fence, fencing=(-1, -1))


def _sweep(turn: Turn) -> Steps:
    """Decide what to delete: leases are read after records, so whoever made one of these has ended or is seen."""
    mark = turn.find_mark()
    if mark is None:
        return turn.after_sweep("finds the mark gone")
    names, leases = turn.world.names, turn.world.leases
    if turn.rules.sweep_reads == "leases first":
        leases = turn.me.lease_view
    else:
        names = turn.me.names
    dead = mark.keys & turn.world.files - find_needed(turn.world, names, leases, turn.rules)
    world = turn.world
    if turn.rules.mark_ends == "before deletes":
        world = world._replace(marks=world.marks - {mark})
    return turn.to(f"will delete {sorted(dead)}", world, at="delete", keys=dead, names=(), lease_view=())


def _delete(turn: Turn) -> Steps:
    left = turn.me.keys & turn.world.files
    if turn.rules.live_set == "per key":
        left -= find_needed(turn.world, turn.world.names, turn.world.leases, turn.rules)
    if not left:
        return _end_mark(turn)
    steps: Steps = []
    for key in sorted(left) if turn.rules.deletes_in_any_order else (min(left),):
        world = turn.world._replace(files=turn.world.files - {key})
        steps += turn.to(f"deletes {key}", world, keys=left - {key})
    return steps


def _end_mark(turn: Turn) -> Steps:
    mark = turn.find_mark()
    if mark and (turn.rules.mark_ends == "after deletes" or not mark.keys & turn.world.files):
        return turn.after_sweep("removes the mark", turn.world._replace(marks=turn.world.marks - {mark}))
    if turn.order.withdraws:
        return turn.to("leaves the mark", at="withdraw", keys=EMPTY)
    return turn.after_sweep("leaves the mark")


def _withdraw(turn: Turn) -> Steps:
    """Take the lock alone, to remove the mark; others may go on without the lock meanwhile."""
    if turn.find_mark() is None or turn.world.alone != NOBODY or not _is_alone(turn):
        return turn.after_sweep("is not alone")
    return _take_lock(turn, "withdraw leases")


def _withdraw_leases(turn: Turn) -> Steps:
    if _find_unlocked(turn):
        return turn.after_sweep("sees a save without the lock", _release(turn.world))
    return turn.to("sees no save", at="withdraw mark")


def _withdraw_mark(turn: Turn) -> Steps:
    marks = turn.world.marks - {turn.find_mark()}
    return turn.after_sweep("withdraws the mark", _release(turn.world._replace(marks=marks)))


def _is_alone(turn: Turn) -> bool:
    """Tell whether nobody holds the lock: saves do from before their lease to their end, and so do sweeps."""
    others = [actor for number, actor in enumerate(turn.world.actors) if number != turn.number]
    is_swept = any(
        isinstance(other, Collector) and other.at in ("sweep", "delete") and not other.is_unlocked for other in others
    )
    is_saved = any(
        isinstance(other, Writer) and other.at not in ("name", "lock", "done") and not other.is_unlocked
        for other in others
    )
    return not is_saved and not (is_swept and turn.rules.withdraws == "alone")


def _purge_list(turn: Turn) -> Steps:
    return turn.to("reads all records", at="purge plan", names=turn.world.names)


def _purge_plan(turn: Turn) -> Steps:
    purge: list[list[tuple[int, int]]] = []
    for name, chain in enumerate(turn.me.names):
        kept = find_roots(turn.world, chain, turn.world.leases, turn.rules)
        dead = [(name, record.generation) for record in chain if record not in kept]
        if chain and not chain[-1].is_live and len(kept) == 1 and _may_forget_name(turn):
            if turn.rules.tombstones == "floor":
                dead.append((FLOOR, chain[-1].generation + 1))
            dead.append((name, chain[-1].generation))
        purge.append(dead if turn.rules.purges != "highest first" else dead[::-1])
    in_turn = zip_longest(*purge) if turn.rules.purges == "names in turn" else purge
    ordered = tuple(record for records in in_turn for record in records if record is not None)
    return turn.to("finds dead records", at="purge", names=(), purge=ordered)


def _may_forget_name(turn: Turn) -> bool:
    return turn.rules.tombstones != "no live lease" or not list_live_leases(turn.world)


def _purge(turn: Turn) -> Steps:
    if not turn.me.purge:
        return _remove_fenced(turn) if turn.rules.removes_fenced else turn.to("is done", at="done")
    (name, generation), *rest = turn.me.purge
    if name == FLOOR:
        world = turn.world._replace(floor=max(turn.world.floor, generation))
        return turn.to(f"raises the floor to {generation}", world, purge=tuple(rest))
    world = delete_record(turn.world, name, generation)
    return turn.to(f"removes record {generation} of {name}", world, purge=tuple(rest))


def _remove_fenced(turn: Turn) -> Steps:
    """Remove fenced leases that no record names: a mutant, for a record may yet appear."""
    named = {record.lease for chain in turn.world.names for record in chain}
    world = turn.world
    for lease in range(len(world.leases)):
        if lease not in named and lease_state(world.leases, lease) == "fenced":
            world = set_lease(world, lease, ())
    return turn.to("removes fenced leases", world, at="done")


_ACTS: Final[dict[str, Callable[[Turn], Steps]]] = {
    "start": _start,
    "clear": _clear,
    "forget": _forget,
    "begin": _begin,
    "leases": _leases,
    "plan": _plan,
    "mark": _mark,
    "waiting": _waiting,
    "wait": _wait,
    "hurry": _hurry,
    "fence": _fence,
    "fenced": _fenced,
    "sweep": _sweep,
    "delete": _delete,
    "withdraw": _withdraw,
    "withdraw leases": _withdraw_leases,
    "withdraw mark": _withdraw_mark,
    "purge list": _purge_list,
    "purge plan": _purge_plan,
    "purge": _purge,
}
