"""Judges one run: what was promised holds, nothing is damaged, and a quiet collection leaves only what is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.errors import CommitUnknown, HoldfastError, LeaseLost, NameInUse
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import LEASES, MANIFESTS, MARKS, PACKS, SNAPSHOTS, TAGS
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.generations import iter_stems
from holdfast.repo.names.roots import is_present, iter_needed, read_leases
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names
from holdfast.repo.upkeep.collect import collect, iter_marks
from holdfast.repo.upkeep.repair import rebuild_index
from tests.faults.scenario import Content, check_store, read_content, save_content
from tests.interleaving.scenes import EAGER, Part
from tests.interleaving.schedule import Outcome, Run

Held = dict[str, Content | str | None]
"""What each name shows: its content, or why that cannot be read."""
_REFUSALS: Final = (LeaseLost, NameInUse)


def read_held(store: ObjectStore) -> Held:
    """Read all that names show."""
    held: Held = {}
    for found in iter_names(store):
        if not isinstance(found, CommittedSnapshot):
            held[found.stem] = str(found.error)
            continue
        try:
            held[found.name] = read_content(store, found)
        except HoldfastError as error:
            held[found.name] = f"{type(error).__name__}: {error}"
    return held


def iter_wrong(parts: Sequence[Part], run: Run, before: Held, store: MemoryStore) -> Iterator[str]:
    """Yield all that is wrong after a run; collects what is left, so the store is changed."""
    for part, outcome in zip(parts, run.outcomes, strict=True):
        allowed = (*_REFUSALS, CommitUnknown) if part.effects or part.restates else ()
        if outcome.error and not isinstance(outcome.error, allowed):
            yield f"{part.title}: {outcome.error!r}"
    after = read_held(store)
    dead = _find_doubtful(parts, run)
    for name in sorted(before.keys() | after.keys()):
        yield from _iter_wrong_name(name, parts, run.outcomes, before, after)
    if not dead:
        yield from (found.message for found in check_store(store) if found.severity == "error")
    yield from iter_left(store, is_exact=not dead)
    if read_held(store) != after:
        yield f"a quiet collection changed what is there: {read_held(store)}"
    if dead:
        yield from _iter_wrong_afterwards(store, dead)


def _find_doubtful(parts: Sequence[Part], run: Run) -> set[str]:
    """Return names whose saves died or cannot tell: these may be unreadable until they are saved again."""
    return {
        name
        for part, outcome in zip(parts, run.outcomes, strict=True)
        if outcome.killed or isinstance(outcome.error, CommitUnknown)
        for name in (("old",) if part.restates else part.effects)
    }


def _iter_wrong_name(
    name: str, parts: Sequence[Part], outcomes: Sequence[Outcome], before: Held, after: Held
) -> Iterator[str]:
    allowed: list[Content | str | None] = []
    is_replaced = may_be_broken = False
    for part, outcome in zip(parts, outcomes, strict=True):
        states = part.effects.get(name, ())
        has_returned = outcome.error is None and not outcome.killed
        is_doubtful = outcome.killed or isinstance(outcome.error, CommitUnknown)
        may_be_broken |= is_doubtful and (bool(states) or part.restates)
        # Who was overtaken is refused, but what it committed comes back if the one that overtook it withdraws.
        may_show = is_doubtful or isinstance(outcome.error, NameInUse)
        # Of several steps the earlier ones may have been done before one was refused.
        allowed += states[-1:] if has_returned else states if may_show else states[:-1]
        is_replaced |= has_returned and bool(states)
    if not is_replaced:
        allowed.append(before.get(name))
    found = after.get(name)
    if found not in allowed and not (may_be_broken and isinstance(found, str)):
        shown = found if isinstance(found, str) or found is None else sorted(found)
        yield f"{name!r} shows {shown}, not one of {[state and sorted(state) for state in allowed]}"


def iter_left(store: MemoryStore, *, is_exact: bool = True) -> Iterator[str]:
    """Collect while nobody else acts, and yield whatever is left that nothing needs."""
    collect(store, EAGER)
    # A mark stays while anything that it names does, for some save may have needed that after all.
    useful = {mark.stem for mark in iter_marks(store) if any(is_present(store, key) for key in mark.keys)}
    yield from (f"{stem} is left" for stem, _ in iter_stems(store, MARKS) if stem not in useful)
    if any(lease.state != "fenced" for lease in read_leases(store).values()):
        yield f"{list(iter_stems(store, LEASES))} are left"
    if not is_exact:
        return
    needed = {
        key for found in iter_names(store) if isinstance(found, CommittedSnapshot) for key in iter_needed(store, found)
    }
    present = {info.key for prefix in (PACKS, MANIFESTS) for info in store.list(prefix)}
    yield from (f"{key} is left" for key in sorted(present - needed))
    for prefix in (SNAPSHOTS, TAGS):
        yield from (f"{stem} has {held}" for stem, held in iter_stems(store, prefix) if len(held) > 1)
    if rebuild_index(open_repository(store)):
        yield "the index does not know every chunk"


def _iter_wrong_afterwards(store: MemoryStore, names: set[str]) -> Iterator[str]:
    """After a death the name can be saved again, and then all is as it should be."""
    content = {"last": b"x" * 900}
    for name in sorted(names):
        save_content(store, name, content, overwrite=True)
        if read_held(store)[name] != content:
            yield f"after a death {name!r} cannot be saved"
    yield from (found.message for found in check_store(store) if found.severity == "error")
    yield from iter_left(store)
