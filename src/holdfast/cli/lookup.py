"""Finds the repository and the snapshot that a user typed: names first, then tags, then an error with suggestions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from holdfast.cli.output import Output, count
from holdfast.errors import NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import PREFIXES, is_reserved
from holdfast.repo.handle.config import verify_empty
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, iter_names, iter_user_names, read_name
from holdfast.repo.names.tags import iter_tags, read_tag


def open_to_read(url: str, output: Output) -> Repository:
    """Open a repository read-only; `output` gets the time of each stage."""
    return open_repository(open_store(url, read_only=True), stages=output.stages)


def open_to_write(url: str, output: Output) -> Repository:
    """Open a repository that this version may write to; `output` gets the time of each stage."""
    repo = open_repository(open_store(url), stages=output.stages)
    repo.verify_may_write()
    return repo


def open_for_plan(url: str, output: Output, *, is_applied: bool) -> Repository:
    """Open a repository to make a plan: read-only, unless the plan is also carried out."""
    return open_to_write(url, output) if is_applied else open_to_read(url, output)


def verify_possible(store: ObjectStore) -> None:
    """Raise NotAStore if the directory is not empty and nothing in it can be part of a store, however damaged."""
    if not any(store.list(prefix, limit=1) for prefix in PREFIXES):
        verify_empty(store)


def read_named_snapshot(
    store: ObjectStore, name: str, output: Output, *, swapped: tuple[str, str] = ("", "")
) -> CommittedSnapshot:
    """Return the snapshot of a name or tag; raises NotFound with close matches.

    `swapped` is another argument that the user may have typed in place of the name, and the correct usage.
    """
    snapshot = read_name(store, name).snapshot
    if snapshot:
        return snapshot
    tag = read_tag(store, name)
    if tag is None:
        other, usage = swapped
        if other and read_name(store, other).snapshot:
            text = f"no snapshot or tag {name!r} in {store.url}; {other!r} is one: {usage}"
            raise NotFound(text, name=name)
        raise explain_missing(store, name)
    snapshot = read_name(store, tag.snapshot_name).snapshot
    if snapshot is None:
        raise NotFound(
            f"tag {name!r} points to {tag.snapshot_name!r}, which no longer exists;"
            f" move it (`holdfast tag {name} NAME --move`) or delete it (`holdfast tag --delete {name}`)",
            name=name,
        )
    if snapshot.digest != tag.digest:
        output.note(f"{snapshot.name!r} was overwritten after the tag {name!r} was set; this is the newer content")
    return snapshot


def explain_missing(store: ObjectStore, name: str) -> NotFound:
    """Return the error for a name that is neither a snapshot nor a tag."""
    names = list(_iter_spellings(store, name))
    below = sum(1 for each in names if each.startswith(f"{name}/"))
    if below:
        begin = f"{count(below, 'name')} {'begins' if below == 1 else 'begin'}"
        hint = f"{begin} with '{name}/', see `holdfast ls {name}/`"
    else:
        hint = suggest(name, names) or "`holdfast ls` lists the snapshots"
    return NotFound(f"no snapshot or tag {name!r} in {store.url}; {hint}", name=name)


def suggest(name: str, names: Sequence[str]) -> str:
    """Return a question that names the closest of `names`; empty if none is close."""
    close = get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def _iter_spellings(store: ObjectStore, name: str) -> Iterator[str]:
    names = iter_names(store) if is_reserved(name) else iter_user_names(store)
    for found in (*names, *iter_tags(store)):
        if not isinstance(found, DamagedName):
            yield found.name
