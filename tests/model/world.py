"""The shared state of the model: a store of create-only files, without bytes, clocks or failures of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

LeaseFiles: TypeAlias = tuple[tuple[int, str], ...]
"""Generation and state ("live", "released", "fenced"), lowest first; empty: never taken, or ended and removed."""
Ident: TypeAlias = tuple[int, int]
"""Generation and author: tells records apart that once had the same key."""

NO_LEASE: Final = -1
"""Lease and author of what was there at the start, and lease of what nobody can withdraw."""
NOBODY: Final = -1
"""In place of the number of whoever holds the lock alone."""
NO_LOCK: Final = -2
"""In the same place: a store without a lock."""
WITHDRAWER: Final = 100
"""Added to a writer's number: author of the record with which it undoes its commit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; each field that is not the default is a way to get it wrong."""

    # Writer
    lists_marks: Literal["after lease", "before lease"] = "after lease"
    rechecks_marks: bool = True
    rechecks: Literal["after renewal", "before renewal"] = "after renewal"
    looks_for_files: Literal["after marks", "before marks"] = "after marks"
    renews: bool = True
    release: Literal["check", "ignore"] = "check"
    commits_last: bool = True
    random_names: bool = True
    restores: Literal["verified", "newest"] = "verified"
    repeats: Literal["settled", "any"] = "settled"
    trims_lease: bool = False
    forgets_fenced: bool = False
    bases: Literal["listed", "not listed", "listed, not checked again", "listed when written"] = "listed"
    """Whether a manifest lists the packs of the bases of its deltas, and whether the writer checks their marks again.

    "listed when written": not those of a delta that was found in the store and is used again.
    """
    looks_up: Literal["under the lease", "before the lease"] = "under the lease"
    """When a save that does not copy what the store has looks for it."""
    skipped: Literal["read from the marked copy", "kept, though marked"] = "read from the marked copy"
    """What such a save does with a chunk that is marked after it was looked up, and whose bytes it does not have."""
    chains: Literal["never", "of any length"] = "never"
    """Whether a chunk that is itself stored as a delta may be a base; the manifest lists the nearest base only."""
    # Collector
    lists_leases: Literal["after mark", "before mark"] = "after mark"
    waits: bool = True
    live_set: Literal["after waiting", "before waiting", "per key"] = "after waiting"
    relists_fence: bool = True
    spares_live_leases: bool = True
    mark_ends: Literal["when empty", "after deletes", "before deletes"] = "when empty"
    keeps_superseded: Literal["until released", "until ended", "until ended and complete", "never"] = "until released"
    sweep_reads: Literal["records first", "leases first"] = "records first"
    tombstones: Literal["floor", "no live lease", "at once"] = "floor"
    purges: Literal["lowest first", "names in turn", "highest first"] = "lowest first"
    """"names in turn": the lowest record of each name, then the next one of each."""
    deletes_in_any_order: bool = False
    removes_fenced: bool = False
    withdraws: Literal["alone", "beside sweeps"] = "alone"
    # The lock
    unlocked_leases: Literal["waited for", "forgotten", "not waited for"] = "waited for"
    """What becomes, while a collector holds the lock alone, of the leases of saves that went on without the lock."""
    sweeps_unlocked: bool = False


class Record(NamedTuple):
    """One generation of a name; `packs` stands for what its manifest says, and can be read only through that."""

    generation: int
    author: int
    is_live: bool
    lease: int = NO_LEASE
    manifest: str = ""
    packs: frozenset[str] = frozenset()
    content: str = ""

    @property
    def ident(self) -> Ident:
        """What makes this record itself."""
        return self.generation, self.author

    @property
    def keys(self) -> frozenset[str]:
        """The files that it needs."""
        return self.packs | {self.manifest} if self.is_live else frozenset()


BASES: Final = {"b": "a", "c": "b"}
"""The base of each chunk that may be stored as a delta. A pack "p:0:B" contains chunk b as a delta."""


Chain: TypeAlias = tuple[Record, ...]
"""The records of one name, lowest generation first."""


class Mark(NamedTuple):
    """What a collector is about to delete, and the leases that were alive after it had said so."""

    owner: int
    keys: frozenset[str]
    waiting: frozenset[int] | None = None


class World(NamedTuple):
    """All files, and the place at which each actor is."""

    files: frozenset[str]
    names: tuple[Chain, ...]
    leases: tuple[LeaseFiles, ...]
    marks: frozenset[Mark]
    actors: tuple[NamedTuple, ...]
    floor: int = 0
    """Below it no generation of a name without records may be created."""
    alone: int = NO_LOCK
    """Who holds the lock alone; saves and sweeps that are under way hold it together, unless they went on without."""
    past: frozenset[tuple[int, int, int]] = frozenset()
    """Not in the store: name, generation and author of each record that was the newest once and has been replaced."""


Steps: TypeAlias = list[tuple[str, World]]


@cache
def owner_of(key: str) -> int:
    """Return the lease under which a pack or manifest was written."""
    owner = key.split(":")[1]
    return NO_LEASE if owner == "old" else int(owner)


@cache
def chunks_of(key: str) -> str:
    """Return the chunks in a pack; none for a manifest."""
    kind, _, chunks = key.split(":")
    return chunks if kind == "p" else ""


def replace_at(items: tuple[T, ...], position: int, item: T) -> tuple[T, ...]:
    return (*items[:position], item, *items[position + 1 :])


def move(world: World, number: int, actor: NamedTuple) -> World:
    """Put one actor at its next place."""
    return world._replace(actors=replace_at(world.actors, number, actor))


def list_marked(world: World) -> frozenset[str]:
    return frozenset().union(*(mark.keys for mark in world.marks))


def lease_state(leases: tuple[LeaseFiles, ...], lease: int) -> str:
    """Return the state of a lease; one without files has ended well, for those of a fenced one stay."""
    return leases[lease][-1][1] if lease != NO_LEASE and leases[lease] else "released"


def list_live_leases(world: World) -> frozenset[int]:
    return frozenset(number for number in range(len(world.leases)) if lease_state(world.leases, number) == "live")


def has_generation(files: LeaseFiles, generation: int) -> bool:
    return any(found == generation for found, _ in files)


def set_lease(world: World, lease: int, files: Iterable[tuple[int, str]]) -> World:
    return world._replace(leases=replace_at(world.leases, lease, tuple(sorted(files))))


def add_lease(world: World, lease: int, generation: int, state: str) -> World:
    return set_lease(world, lease, (*world.leases[lease], (generation, state)))


def newest(chain: Chain) -> Record | None:
    return chain[-1] if chain else None


def create_record(world: World, name: int, record: Record) -> World | None:
    """Create one generation of a name; None if it is taken."""
    chain = world.names[name]
    if any(found.generation == record.generation for found in chain):
        return None
    top = newest(chain)
    past = world.past
    if top and top.generation < record.generation:
        past |= {(name, *top.ident)}
    chain = tuple(sorted((*chain, record)))
    return world._replace(names=replace_at(world.names, name, chain), past=past)


def delete_record(world: World, name: int, generation: int) -> World:
    chain = tuple(record for record in world.names[name] if record.generation != generation)
    return world._replace(names=replace_at(world.names, name, chain))


def is_complete(world: World, record: Record) -> bool:
    """Tell whether all files of a record are there, and the bases of its deltas in any file."""
    return record.keys <= world.files and (
        not record.is_live or all(_is_readable(world, chunk, record.packs) for chunk in record.content)
    )


def _is_readable(world: World, chunk: str, packs: frozenset[str]) -> bool:
    """Tell whether a chunk can be read from `packs`, with bases from any file."""
    if any(chunk in chunks_of(key) for key in packs):
        return True
    base = BASES.get(chunk, "")
    is_delta = any(chunk.upper() in chunks_of(key) for key in packs)
    return is_delta and bool(base) and _is_readable(world, base, world.files)


def walk_unsettled(chain: Chain, leases: tuple[LeaseFiles, ...]) -> tuple[Record, ...]:
    """Return the records from the newest down to the first that is settled: its lease was released, by its owner.

    All above that one may yet be undone, and any of these is then what the name holds again.
    """
    walked: list[Record] = []
    for record in reversed(chain):
        walked.append(record)
        if lease_state(leases, record.lease) == "released":
            break
    return tuple(walked)
