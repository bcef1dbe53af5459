"""The actors that change names: a save (first, overwriting or repacking) and a delete, one store operation a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple

from tests.model.world import (
    BASES,
    NO_LOCK,
    NOBODY,
    WITHDRAWER,
    Ident,
    Record,
    Rules,
    Steps,
    World,
    add_lease,
    chunks_of,
    create_record,
    has_generation,
    lease_state,
    list_marked,
    move,
    newest,
    owner_of,
    set_lease,
    walk_unsettled,
)

EMPTY: Final[frozenset[str]] = frozenset()


class Copy(NamedTuple):
    """Where a writer gets one chunk from."""

    pack: str
    """The pack that contains it, as it is or as a delta; empty: the writer writes it."""
    base: str = ""
    """The pack of the base, if the chunk is a delta, or will be written as one."""


@dataclass(frozen=True, slots=True)
class Save:
    """What a writer is asked to do."""

    kind: Literal["first", "overwrite", "repack", "repeat"]
    """A repeat is a first save that takes what it finds for its own earlier try, if the content is the same."""
    name: int = 0
    content: str = "a"
    """Its chunks; a repack keeps those that it finds."""
    avoid: frozenset[str] = EMPTY
    """Packs that it is to get rid of."""
    keeps_alive: int = 0
    """How often it renews its lease while it writes."""
    forgets: bool = False
    """Removes the files of its lease in the end."""
    deltas: bool = False
    """Writes a chunk as a delta if it finds the base."""
    skips: bool = False
    """Does not have the bytes of chunks that it reuses: they were on a device, and have changed since."""
    at_once: bool = False
    """Makes requests that do not depend on each other at the same time: their order is open."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a name, without a lease."""

    name: int = 0


class Writer(NamedTuple):
    """Where a save is, and what it remembers."""

    at: str = "name"
    generation: int = -1
    seen: Ident | None = None
    """The live record that it is about to replace."""
    options: tuple[Record, ...] = ()
    """What a withdrawal may have to restore, best first; after "choose" the one that it will."""
    skipped: frozenset[int] = frozenset()
    """Authors of records that cannot be restored any more."""
    content: str = ""
    marked: frozenset[str] = EMPTY
    found: frozenset[str] = EMPTY
    """Files that it found before it listed the marks: only a mutant does. Or marked files that it has to read."""
    packs: frozenset[str] = EMPTY
    bases: frozenset[str] = EMPTY
    """Packs of the bases of deltas."""
    manifest: int = -1
    lease_generation: int = -1
    is_stale: bool = False
    """Not known to the writer: its commit replaced something that it had not seen."""
    is_warned: bool = False
    """Not known to it, unless it looks: it was fenced before it should renew, or then reused what is marked."""
    is_unlocked: bool = False
    """It went on without the lock that somebody else held alone; its lease says so."""
    outcome: str = ""


class Deleter(NamedTuple):
    """Where a delete is."""

    at: str = "name"
    generation: int = -1
    outcome: str = ""


def step_delete(world: World, number: int, order: Delete) -> Steps:
    deleter = world.actors[number]
    assert isinstance(deleter, Deleter)
    if deleter.at == "name":
        top = newest(world.names[order.name])
        if not (top and top.is_live):
            return [("finds nothing", move(world, number, Deleter("done", outcome="not found")))]
        return [("reads the name", move(world, number, Deleter("tombstone", top.generation + 1)))]
    if deleter.at == "tombstone":
        created = create_record(world, order.name, Record(deleter.generation, number, is_live=False))
        outcome = "deleted" if created else "lost"
        return [
            (
                f"creates tombstone {deleter.generation}",
                move(created or world, number, Deleter("done", outcome=outcome)),
            )
        ]
    return []


class Turn(NamedTuple):
    """One writer about to take one step."""

    world: World
    number: int
    order: Save
    rules: Rules
    me: Writer

    def to(self, label: str, world: World | None = None, **changes: object) -> Steps:
        """Return the one step that this place allows."""
        return [(label, move(world or self.world, self.number, self.me._replace(**changes)))]  # type: ignore[arg-type]  # fields by name

    def end(self, label: str, outcome: str, world: World | None = None) -> Steps:
        """Finish; whatever no longer matters is dropped, so that equal futures are equal states."""
        me, world = self.me, world or self.world
        # A lease without files counts as released: one that was fenced stays, or what it made would look settled.
        has_released = lease_state(world.leases, self.number) == "released" or self.rules.forgets_fenced
        at = "forget" if self.order.forgets and has_released else "done"
        done = Writer(at, me.generation, skipped=me.skipped, is_stale=me.is_stale, outcome=outcome)
        return [(label, move(world, self.number, done))]

    def is_taken(self) -> bool:
        return has_generation(self.world.leases[self.number], self.me.lease_generation + 1)

    def find_stale(self) -> frozenset[str]:
        """Return what is reused and marked; own files do not count, for they are not marked while the lease lives."""
        used = self.me.packs | self.me.bases
        if self.rules.bases == "listed, not checked again":
            used = self.me.packs
        return frozenset(key for key in used & list_marked(self.world) if owner_of(key) != self.number)

    def record(self) -> Record:
        me = self.me
        manifest = f"m:{self.number}:{me.manifest}"
        packs = me.packs if self.rules.bases == "not listed" else me.packs | me.bases
        return Record(me.generation, self.number, True, self.number, manifest, packs, me.content)


def step_save(world: World, number: int, order: Save, rules: Rules) -> Steps:
    me = world.actors[number]
    assert isinstance(me, Writer)
    act = _ACTS.get(me.at)
    return act(Turn(world, number, order, rules, me)) if act else []


def _name(turn: Turn) -> Steps:
    chain = turn.world.names[turn.order.name]
    top = newest(chain)
    is_held = top is not None and top.is_live
    if top and is_held and turn.order.kind == "repeat" and top.content == turn.order.content:
        return _find_same(turn, top)
    if is_held == (turn.order.kind in ("first", "repeat")):
        return turn.end("finds the name in use, or gone", "in use")
    return turn.to(
        "reads the name",
        at="lock" if turn.world.alone != NO_LOCK else _find_first(turn),
        generation=top.generation + 1 if top else turn.world.floor,
        seen=top.ident if top and is_held else None,
        options=walk_unsettled(chain, turn.world.leases),
        content=top.content if top and turn.order.kind == "repack" else turn.order.content,
    )


def _find_first(turn: Turn) -> str:
    if turn.order.skips and turn.rules.looks_up == "before the lease":
        return "look"
    return "lease" if turn.rules.lists_marks == "after lease" else "marks"


def _lock(turn: Turn) -> Steps:
    """Take the lock together with others; whoever finds it taken waits in vain and goes on without."""
    label = "takes the lock" if turn.world.alone == NOBODY else "goes on without the lock"
    return turn.to(label, at=_find_first(turn), is_unlocked=turn.world.alone != NOBODY)


def _find_same(turn: Turn, top: Record) -> Steps:
    """Be content with what is there, unless that may yet be withdrawn."""
    if turn.rules.repeats == "settled" and lease_state(turn.world.leases, top.lease) != "released":
        return turn.end("finds the same, but unsettled", "busy")
    found = turn._replace(me=turn.me._replace(skipped=frozenset([top.author])))
    return found.end("finds the same", "existed")


def _lease(turn: Turn) -> Steps:
    world = add_lease(turn.world, turn.number, 0, "live")
    after = "marks" if turn.rules.lists_marks == "after lease" else "choose"
    if turn.rules.looks_for_files == "before marks":
        after = "look"
    return turn.to("takes a lease", world, at=after, lease_generation=0)


def _look(turn: Turn) -> Steps:
    after = "lease" if turn.me.lease_generation < 0 else "marks"
    return turn.to("looks for files", at=after, found=turn.world.files)


def _marks(turn: Turn) -> Steps:
    after = "choose" if turn.rules.lists_marks == "after lease" else "lease"
    return turn.to("lists marks", at=after, marked=list_marked(turn.world))


def _choose(turn: Turn) -> Steps:
    """Choose what to restore if need be, then what to reuse; write the rest."""
    judged = _judge_options(turn)
    if judged is None:
        return _give_up(turn, "cannot tell what it would replace", "busy")
    before, skipped = judged
    files = turn.world.files if turn.rules.looks_for_files == "after marks" else turn.me.found
    if turn.order.skips and turn.me.found and _find_missing(turn, files - turn.me.marked, EMPTY):
        return turn.end("does not find again what it did not copy", "robbed")
    usable = sorted(files - turn.me.marked - turn.order.avoid)
    copies = [_find_copies(turn, chunk, usable) for chunk in turn.me.content]
    steps = []
    after = "keep alive" if turn.order.keeps_alive else _find_last_writes(turn)
    for choice in sorted(set(product(*copies))):
        kept = frozenset(copy.pack for copy in choice) - {""}
        bases = frozenset(copy.base for copy in choice) - {""}
        own = "".join(
            chunk.upper() if copy.base else chunk
            for chunk, copy in zip(turn.me.content, choice, strict=True)
            if not copy.pack
        )
        world, packs = _write_packs(turn, kept, own)
        me = turn.me._replace(
            at=after,
            marked=EMPTY,
            found=EMPTY,
            packs=packs,
            bases=bases,
            options=before,
            skipped=skipped,
            manifest=turn.me.manifest + 1,
        )
        steps.append((f"reuses {sorted(kept | bases)}, has {sorted(packs)}", move(world, turn.number, me)))
    return steps


def _find_copies(turn: Turn, chunk: str, usable: list[str]) -> list[Copy]:
    """Return where a chunk can be had: stored as it is, stored as a delta, or written now, as a delta if possible."""
    copies = [Copy(key) for key in usable if chunk in chunks_of(key)]
    bases = _find_bases(turn, chunk, usable)
    deltas = [key for key in usable if chunk.upper() in chunks_of(key)]
    if turn.rules.bases == "listed when written":
        copies += [Copy(key) for key in deltas]
    else:
        copies += [Copy(key, base) for key, base in product(deltas, bases)]
    if copies:
        return copies
    return [Copy("", base) for base in bases if turn.order.deltas] or [Copy("")]


def _find_bases(turn: Turn, chunk: str, usable: list[str]) -> list[str]:
    base = BASES.get(chunk)
    if base is None:
        return []
    forms = base if turn.rules.chains == "never" else base + base.upper()
    return [key for key in usable if set(forms) & set(chunks_of(key))]


def _find_last_writes(turn: Turn) -> str:
    if not turn.rules.commits_last:
        return "renew"
    return "manifest and renewal" if turn.order.at_once else "manifest"


def _judge_options(turn: Turn) -> tuple[tuple[Record, ...], frozenset[int]] | None:
    """Return the record that a withdrawal would restore, and the authors of those passed over; None if in doubt.

    A record that was visible before the marks were listed, that is not marked then and is all there later, stays
    so as long as it is a root.
    """
    options = turn.me.options
    if turn.rules.restores == "newest":
        return options[:1], frozenset()
    skipped: set[int] = set()
    for record in options:
        is_settled = lease_state(turn.world.leases, record.lease) == "released"
        if is_settled or (record.keys <= turn.world.files and not record.keys & turn.me.marked):
            return (record,), frozenset(skipped)
        if record.keys <= turn.world.files:
            return None
        skipped.add(record.author)
    return (), frozenset(skipped)


def _write_packs(turn: Turn, kept: frozenset[str], chunks: str) -> tuple[World, frozenset[str]]:
    """Write one pack with `chunks`, unless there are none; returns all packs in use."""
    if not chunks:
        return turn.world, kept
    own = frozenset([f"p:{turn.number}:{chunks}"])
    if not turn.rules.random_names:
        own = frozenset(f"p:old:{chunk}" for chunk in chunks)
    return turn.world._replace(files=turn.world.files | own), kept | own


def _find_missing(turn: Turn, packs: frozenset[str], bases: frozenset[str]) -> str:
    """Return the chunks that `packs` contains neither as they are nor as deltas with a base in `packs` or `bases`."""
    missing = ""
    for chunk in turn.me.content:
        is_delta = any(chunk.upper() in chunks_of(key) for key in packs)
        has_base = any(BASES.get(chunk, "-") in chunks_of(key) for key in packs | bases)
        if not any(chunk in chunks_of(key) for key in packs) and not (is_delta and has_base):
            missing += chunk
    return missing


def _manifest(turn: Turn) -> Steps:
    key = turn.record().manifest
    world = turn.world._replace(files=turn.world.files | {key})
    if not turn.rules.commits_last:
        return turn.to(f"writes {key}", world, at="release")
    if turn.rules.rechecks == "before renewal":
        return turn.to(f"writes {key}", world, at="early recheck")
    if turn.rules.renews:
        return turn.to(f"writes {key}", world, at="renew")
    return turn.to(f"writes {key}", world, at="recheck", is_warned=turn.is_taken())


def _write_at_once(turn: Turn) -> Steps:
    """Write the manifest and renew the lease in either order; the marks are listed again after both."""
    return [*_manifest(turn), *_renew(turn, "late manifest")]


def _write_late(turn: Turn) -> Steps:
    key = turn.record().manifest
    return turn.to(f"writes {key}", turn.world._replace(files=turn.world.files | {key}), at="recheck")


def _keep_alive(turn: Turn) -> Steps:
    after = "keep alive" if turn.me.lease_generation + 1 < turn.order.keeps_alive else _find_last_writes(turn)
    return _renew(turn, after)


def _renew(turn: Turn, after: str = "recheck") -> Steps:
    if turn.is_taken():
        return turn.end("finds its lease fenced, and stops", "fenced")
    generation = turn.me.lease_generation + 1
    world = add_lease(turn.world, turn.number, generation, "live")
    if turn.rules.trims_lease:
        world = set_lease(world, turn.number, [(generation, "live")])
    return turn.to("renews its lease", world, at=after, lease_generation=generation)


def _recheck_early(turn: Turn) -> Steps:
    """Read the marks again before the renewal: a mutant."""
    if not turn.find_stale():
        return turn.to("lists marks again", at="late renewal")
    return _recheck(turn)


def _renew_late(turn: Turn) -> Steps:
    steps = _renew(turn, "commit")
    if turn.find_stale():
        turn = turn._replace(me=turn.me._replace(is_warned=True))
        steps = _renew(turn, "commit")
    return steps


def _recheck(turn: Turn) -> Steps:
    stale = turn.find_stale()
    if not turn.rules.rechecks_marks:
        return turn.to("goes on", at="commit", is_warned=turn.me.is_warned or bool(stale))
    if not stale or not turn.rules.random_names:
        is_overlooked = bool(turn.me.bases & list_marked(turn.world) - stale)
        return turn.to("lists marks again", at="commit", is_warned=turn.me.is_warned or is_overlooked)
    if turn.order.skips and turn.rules.skipped == "kept, though marked":
        return turn.to("lists marks again, and goes on", at="commit", is_warned=True)
    if turn.order.skips:
        return turn.to("lists marks again", at="read again", found=stale)
    return _write_again(turn, stale, f"lists marks again, writes {sorted(stale)} anew")


def _write_again(turn: Turn, stale: frozenset[str], label: str) -> Steps:
    kept, bases = turn.me.packs - stale, turn.me.bases - stale
    world, packs = _write_packs(turn, kept, _find_missing(turn, kept, bases))
    me = {"packs": packs, "bases": bases, "manifest": turn.me.manifest + 1, "found": EMPTY}
    return turn.to(label, world, at=_find_last_writes(turn), **me)


def _read_again(turn: Turn) -> Steps:
    """Read from marked files what was not copied: their collector waits for this save, unless it was fenced."""
    if turn.me.found <= turn.world.files:
        return _write_again(turn, turn.me.found, f"reads {sorted(turn.me.found)}, and writes their chunks anew")
    return turn.end("finds a marked file gone", "fenced" if turn.is_taken() else "robbed")


def _commit(turn: Turn) -> Steps:
    top = newest(turn.world.names[turn.order.name])
    world = create_record(turn.world, turn.order.name, turn.record())
    if world is None:
        return _give_up(turn, "finds its generation taken", "lost")
    is_stale = (top.ident if top and top.is_live else None) != turn.me.seen
    return turn.to(f"creates snapshot {turn.me.generation}", world, at="relist", is_stale=is_stale, seen=None)


def _relist(turn: Turn) -> Steps:
    if turn.world.names[turn.order.name][-1].generation != turn.me.generation:
        return _give_up(turn, "finds a higher generation", "lost")
    return turn.to("lists the name again", at="release" if turn.rules.commits_last else "manifest")


def _release(turn: Turn) -> Steps:
    if not turn.is_taken():
        world = add_lease(turn.world, turn.number, turn.me.lease_generation + 1, "released")
        return turn.end("releases its lease, returns", "returned", world)
    if turn.rules.release == "ignore":
        return turn.end("returns, though fenced", "returned")
    return turn.to("finds its lease fenced", at="check marks")


def _check_marks(turn: Turn) -> Steps:
    return turn.to("lists marks", at="check files", marked=list_marked(turn.world))


def _check_files(turn: Turn) -> Steps:
    used = turn.record().keys
    if used <= turn.world.files and not used & turn.me.marked:
        return turn.to("finds all there", at="accept", marked=EMPTY, options=())
    return turn.to("finds something marked or gone", at="withdraw", marked=EMPTY)


def _accept(turn: Turn) -> Steps:
    world = add_lease(turn.world, turn.number, turn.me.lease_generation + 2, "released")
    return turn.end("releases its lease above the fence, returns", "returned", world)


def _withdraw(turn: Turn) -> Steps:
    generation, author = turn.me.generation + 1, turn.number + WITHDRAWER
    record = Record(generation, author, is_live=False)
    if turn.me.options and turn.me.options[0].is_live:
        record = turn.me.options[0]._replace(generation=generation, author=author, lease=-1)
    world = create_record(turn.world, turn.order.name, record)
    if world is None:
        # The fence stays: what we made was replaced, and must not look as if we stood by it.
        return turn.end("cannot withdraw: replaced already", "unknown")
    return turn.end(f"withdraws by snapshot {generation}", "withdrawn", world)


def _give_up(turn: Turn, label: str, outcome: str) -> Steps:
    world = turn.world
    if not turn.is_taken():
        world = add_lease(world, turn.number, turn.me.lease_generation + 1, "released")
    return turn.end(label, outcome, world)


def _forget(turn: Turn) -> Steps:
    files = turn.world.leases[turn.number]
    if not files:
        return turn.to("is done", at="done")
    # The highest goes last, for a live one must not be left alone; the others in any order, if at once.
    going = files[: len(files) - 1 if turn.order.at_once else 1] or files
    return [
        step
        for gone in going
        for step in turn.to(
            f"removes lease file {gone[0]}",
            set_lease(turn.world, turn.number, (file for file in files if file != gone)),
        )
    ]


_ACTS: Final[dict[str, Callable[[Turn], Steps]]] = {
    "name": _name,
    "lock": _lock,
    "lease": _lease,
    "marks": _marks,
    "look": _look,
    "choose": _choose,
    "keep alive": _keep_alive,
    "manifest": _manifest,
    "manifest and renewal": _write_at_once,
    "late manifest": _write_late,
    "early recheck": _recheck_early,
    "late renewal": _renew_late,
    "renew": _renew,
    "recheck": _recheck,
    "read again": _read_again,
    "commit": _commit,
    "relist": _relist,
    "release": _release,
    "check marks": _check_marks,
    "check files": _check_files,
    "accept": _accept,
    "withdraw": _withdraw,
    "forget": _forget,
}
