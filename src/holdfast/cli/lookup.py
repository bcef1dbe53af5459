"""Finds the repository and the snapshots that a user typed: names first, then tags, then globs, then suggestions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from holdfast.cli.output import Output, count
from holdfast.errors import AmbiguousName, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.query.globs import Glob, is_glob, split_literal
from holdfast.query.stored import CacheFile
from holdfast.repo.format.layout import PREFIXES, is_reserved, natural_order
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.handle.config import verify_empty
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.listed import Listed, list_user_names
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    DamagedName,
    iter_names,
    iter_tags,
    iter_user_names,
    read_name,
    read_snapshot,
    read_tag,
)
from holdfast.texts import list_some


def open_to_read(url: str, output: Output) -> Repository:
    """Open a repository read-only; `output` gets the time of each stage."""
    store = open_store(url, read_only=True)
    store.use_cache(output.cache)
    return open_repository(store, stages=output.stages)


def open_to_write(
    url: str, output: Output, *, compression: Compression = "default", delta: DeltaChoice = "auto"
) -> Repository:
    """Open a repository that this version may write to; `output` gets the time of each stage."""
    repo = open_repository(open_store(url), stages=output.stages, compression=compression, delta=delta)
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
    """Return the snapshot of a name, a tag, or a glob that matches one name; raises NotFound with close matches.

    `swapped` is another argument that the user may have typed in place of the name, and the correct usage.
    """
    snapshot = read_name(store, name, likely=0).snapshot
    if snapshot:
        return snapshot
    tag = read_tag(store, name)
    if tag is None:
        other, usage = swapped
        if other and read_name(store, other).snapshot:
            text = f"no snapshot or tag {name!r} in {store.url}; {other!r} is one: {usage}"
            raise NotFound(text, name=name)
        return _read_only_match(store, name)
    snapshot = read_name(store, tag.snapshot_name, likely=0).snapshot
    if snapshot is None:
        raise NotFound(
            f"tag {name!r} points to {tag.snapshot_name!r}, which no longer exists;"
            f" move it (`holdfast tag {name} NAME --move`) or delete it (`holdfast tag --delete {name}`)",
            name=name,
        )
    if snapshot.digest != tag.digest:
        output.note(f"{snapshot.name!r} was overwritten after the tag {name!r} was set; this is the newer content")
    return snapshot


def list_names(repo: Repository, prefix: str, cache_folder: str) -> list[Listed]:
    """Return the user's snapshots under a prefix; a file in the cache folder remembers their records."""
    file = CacheFile(cache_folder, repo.identity.store_id)
    file.read_into(repo.records)
    found = list_user_names(repo.store, prefix, repo.records)
    file.write_from(repo.records)
    return found


def list_chosen(repo: Repository, text: str, cache_folder: str) -> list[Listed]:
    """Return the user's snapshots whose names begin with a text, or if there are none, match it as a glob.

    Damaged names are included if they may be meant.
    """
    found = list_names(repo, split_literal(text), cache_folder)
    damaged = [each for each in found if isinstance(each, DamagedName)]
    snapshots = [each for each in found if not isinstance(each, DamagedName)]
    glob = Glob(text)
    literal = [each for each in snapshots if each.name.startswith(text)]
    return [*(literal or [each for each in snapshots if glob.matches(each.name)]), *damaged]


def read_matching(store: ObjectStore, pattern: str) -> list[str]:
    """Return the names that match a glob, in natural order; damaged ones cannot be matched."""
    return _find_matching(_read_names(store, is_own=is_reserved(pattern)), pattern)


def _read_names(store: ObjectStore, *, is_own: bool) -> list[str]:
    """Return all names, or with `is_own` also Holdfast's own; without damaged ones."""
    names = iter_names(store) if is_own else iter_user_names(store)
    return [each.name for each in names if not isinstance(each, DamagedName)]


def _find_matching(names: Sequence[str], pattern: str) -> list[str]:
    return sorted(filter(Glob(pattern).matches, names), key=natural_order)


def expand_names(store: ObjectStore, texts: Sequence[str]) -> list[str]:
    """Return the names that the user typed, with each glob replaced by its matches; raises NotFound for one without.

    A name that exists is meant literally, whatever characters it contains.
    """
    expanded: list[str] = []
    listed: dict[bool, list[str]] = {}
    for text in texts:
        if not is_glob(text) or read_name(store, text).snapshot or read_tag(store, text):
            expanded.append(text)
            continue
        is_own = is_reserved(text)
        names = listed[is_own] if is_own in listed else listed.setdefault(is_own, _read_names(store, is_own=is_own))
        expanded += _find_matching(names, text) or _raise_unmatched(store, text)
    return list(dict.fromkeys(expanded))


def choose_tag(store: ObjectStore, text: str) -> str:
    """Return a tag that exists, or the only one that matches a glob; any other text as it is."""
    if not is_glob(text) or read_tag(store, text):
        return text
    glob = Glob(text)
    found = [tag.name for tag in iter_tags(store) if not isinstance(tag, DamagedName) and glob.matches(tag.name)]
    if len(found) > 1:
        raise _make_ambiguous(text, found, "tags")
    return found[0] if found else text


def _read_only_match(store: ObjectStore, text: str) -> CommittedSnapshot:
    if not is_glob(text):
        raise explain_missing(store, text)
    found = read_matching(store, text) or _raise_unmatched(store, text)
    if len(found) > 1:
        raise _make_ambiguous(text, found, "snapshots")
    return read_snapshot(store, found[0])


def _make_ambiguous(text: str, found: Sequence[str], what: str) -> AmbiguousName:
    return AmbiguousName(f"{text!r} matches {len(found)} {what}, and one is needed: {list_some(found, 10)}")


def _raise_unmatched(store: ObjectStore, text: str) -> NoReturn:
    raise NotFound(f"no snapshot matches {text!r} in {store.url}; `holdfast ls` lists the snapshots", name=text)


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
