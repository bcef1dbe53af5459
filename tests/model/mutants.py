"""The mutants: each breaks one rule, and names the scene that shows it and the invariant that falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.model.world import Rules


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule broken."""

    title: str
    rules: Rules
    scene: str
    breaks: str
    ends: bool = True
    """Whether to look at what is left in the end; without, the exploration goes on to worse."""


MUTANTS: Final = (
    Mutant(
        "marks are listed before the lease is taken", Rules(lists_marks="before lease"), "first save, collector", "I1"
    ),
    Mutant(
        "packs are looked for before the marks are listed",
        Rules(looks_for_files="before marks"),
        "first save, collector",
        "I1",
    ),
    Mutant(
        "packs are looked for before the marks are listed, at once",
        Rules(looks_for_files="before marks"),
        "first save at once, collector",
        "I1",
    ),
    Mutant(
        "marks are checked again before the renewal",
        Rules(rechecks="before renewal"),
        "first save, collector",
        "I7",
    ),
    Mutant(
        "the snapshot comes before its manifest, at once",
        Rules(commits_last=False),
        "first save at once, collector",
        "I1",
    ),
    Mutant("marks are not checked again", Rules(rechecks_marks=False), "first save, collector", "I7"),
    Mutant("the lease is not renewed before the commit", Rules(renews=False), "first save, collector", "I7"),
    Mutant("a fence is not noticed at the release", Rules(release="ignore"), "first save, collector", "I1"),
    Mutant("the snapshot comes before its manifest", Rules(commits_last=False), "first save, collector", "I1"),
    Mutant("files are named by their content", Rules(random_names=False), "first save, collector", "I1"),
    Mutant("leases are listed before the mark", Rules(lists_leases="before mark"), "first save, collector", "I1"),
    Mutant("nobody is waited for", Rules(waits=False), "first save, collector", "I1"),
    Mutant("the live set is older than the wait", Rules(live_set="before waiting"), "first save, collector", "I1"),
    Mutant("files of live leases are marked", Rules(spares_live_leases=False), "first save, collector", "I8"),
    Mutant("the mark goes before the files", Rules(mark_ends="before deletes"), "first save, collector", "I1"),
    Mutant("the mark goes though a file stays", Rules(mark_ends="after deletes"), "overwrite, two collectors", "I1"),
    Mutant(
        "the mark goes though a file stays, and nobody is fenced",
        Rules(mark_ends="after deletes"),
        "delete, two collectors that adopt, save under another name",
        "I1",
    ),
    Mutant(
        "a mark is withdrawn beside a sweep",
        Rules(withdraws="beside sweeps"),
        "delete, two collectors that adopt and withdraw, save under another name",
        "I1",
    ),
    Mutant(
        "who holds the lock alone removes the lease of a save without it",
        Rules(unlocked_leases="forgotten"),
        "first save, collector that uses the lock",
        "I8",
    ),
    Mutant(
        "who holds the lock alone does not wait for a save without it",
        Rules(unlocked_leases="not waited for"),
        "first save, collector that uses the lock",
        "I1",
    ),
    Mutant(
        "a sweep goes on without the lock",
        Rules(sweeps_unlocked=True),
        "delete, two collectors that adopt and withdraw, save under another name",
        "I1",
    ),
    Mutant(
        "lease files go during life and a fence is not looked at again",
        Rules(trims_lease=True, relists_fence=False),
        "save of many renewals, collector",
        "I1",
    ),
    Mutant("a superseded record is no root", Rules(keeps_superseded="never"), "overwrite, two collectors", "I5"),
    Mutant(
        "a superseded record is a root until the lease after it has ended",
        Rules(keeps_superseded="until ended"),
        "overwrite, two collectors",
        "I5",
    ),
    Mutant(
        "a superseded record is a root until its successor is fenced and complete",
        Rules(keeps_superseded="until ended and complete", mark_ends="after deletes"),
        "overwrite, two collectors on their own",
        "I5",
        ends=False,
    ),
    Mutant(
        "a superseded record is a root while its successor is incomplete",
        Rules(keeps_superseded="until ended and complete"),
        "overwrite, collector",
        "I4",
    ),
    Mutant(
        "a withdrawal restores what was there, whatever it is",
        Rules(restores="newest"),
        "overwrite of a doomed save, collector",
        "I5",
    ),
    Mutant(
        "a repeated save is content with what may be withdrawn",
        Rules(repeats="any"),
        "first save, the same again, collector",
        "I2",
    ),
    Mutant(
        "a sweep reads leases before records",
        Rules(sweep_reads="leases first"),
        "overwrite beside a mark on what it replaces, two collectors",
        "I5",
    ),
    Mutant(
        "a save that withdrew removes its lease",
        Rules(forgets_fenced=True),
        "overwrite beside a mark on what it replaces, two collectors",
        "I5",
    ),
    Mutant("a fenced lease is removed by a collector", Rules(removes_fenced=True), "overwrite, collector", "I1"),
    Mutant(
        "a tombstone goes while no lease is alive",
        Rules(tombstones="no live lease"),
        "two first saves after a delete, purger",
        "I3",
    ),
    Mutant("a tombstone goes at once", Rules(tombstones="at once"), "two first saves after a delete, purger", "I3"),
    Mutant("dead records go highest first", Rules(purges="highest first"), "delete, first save, collector", "I2"),
    Mutant(
        "a manifest does not list the packs of its bases",
        Rules(bases="not listed"),
        "delete of a base, save of a delta, collector",
        "I1",
        ends=False,
    ),
    Mutant(
        "a save checks the marks of its chunks again, and not those of their bases",
        Rules(bases="listed, not checked again"),
        "delete of a base, save of a delta, collector",
        "I7",
    ),
    Mutant(
        "a save that finds a delta does not list its base",
        Rules(bases="listed when written"),
        "deletes of a delta and its base, save that finds the delta, collector",
        "I1",
        ends=False,
    ),
    Mutant(
        "a repack keeps a delta and drops its base",
        Rules(bases="listed when written"),
        "repack of a base, save of a delta, collector",
        "I1",
        ends=False,
    ),
    Mutant(
        "a save looks up what it does not copy before it has a lease",
        Rules(looks_up="before the lease"),
        "delete, save that skips under another name, collector",
        "I9",
    ),
    Mutant(
        "a save keeps a chunk that it did not copy, though it is marked",
        Rules(skipped="kept, though marked"),
        "delete, save that skips under another name, collector",
        "I7",
    ),
    Mutant(
        "a delta is the base of a delta, and its own base is not listed",
        Rules(chains="of any length"),
        "delete of a delta, save of a delta on it, collector",
        "I1",
        ends=False,
    ),
)
