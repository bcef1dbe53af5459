"""What a user chooses about a mirror, and the mirrors that a store has on record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from holdfast.errors import BadName, Corrupt, NameInUse
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import find_path, open_store
from holdfast.repo.files import is_below
from holdfast.repo.format.layout import RESERVED
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.writer import Request, WriteOptions, save
from holdfast.texts import mask_url

MIRRORS: Final = f"{RESERVED}mirrors"
"""The name of the snapshot without entries whose metadata lists the mirrors."""
_FIELD: Final = "mirrors"
"""Maps the URL of each mirror to what it receives."""
_PLACES: Final = "places"
"""Maps the URL of a mirror to the rest of what is known of it. Lists that were written without it are read as well."""
_ATTEMPTS: Final = 8
"""How often a writer tries again after another process has changed the list first."""

MirrorScope = Literal["all", "named"]
"""What a mirror receives: every snapshot, or those that were saved with `mirror=`."""


@dataclass(frozen=True, slots=True)
class RecordedMirror:
    """What a store remembers of one of its mirrors. No option's value is among it: values may be secrets."""

    scope: MirrorScope = "all"
    store_id: str = ""
    """The id of the store that was last uploaded to; empty if none was."""
    options: tuple[str, ...] = ()
    """The names of the options that it was opened with. A process that lacks them cannot reach it."""


def read_mirrors(store: ObjectStore) -> dict[str, RecordedMirror]:
    """Return the recorded mirrors by their URL; raises Corrupt if the list cannot be read."""
    snapshot = read_name(store, MIRRORS).snapshot
    if snapshot is None:
        return {}
    found, places = snapshot.metadata.get(_FIELD), snapshot.metadata.get(_PLACES, {})
    if not isinstance(found, dict) or not isinstance(places, dict):
        raise Corrupt(f"the list of mirrors in {store.url} is not one; delete it with `holdfast rm {MIRRORS}`")
    return {url: _parse(scope, places.get(url)) for url, scope in found.items()}


def _parse(scope: Json, place: Json) -> RecordedMirror:
    parsed: MirrorScope = "named" if scope == "named" else "all"
    if place is None:
        return RecordedMirror(parsed)
    fields = Fields(MIRRORS, place if isinstance(place, dict) else {})
    return RecordedMirror(parsed, fields.text("store_id"), fields.texts("options"))


def record_mirror(
    repo: Repository, url: str, scope: MirrorScope, *, store_id: str = "", options: Iterable[str] = ()
) -> bool:
    """Add a mirror to the list, or what was learned of it since; return whether the list was changed.

    Once recorded, options are needed until the mirror is forgotten, and a mirror of all snapshots stays one.
    """
    for _ in range(_ATTEMPTS):
        known = read_mirrors(repo.store)
        old = known.get(url, RecordedMirror(scope))
        new = RecordedMirror(
            "all" if old.scope == "all" else scope, store_id or old.store_id, tuple(sorted(options)) or old.options
        )
        if known.get(url) == new:
            return False
        try:
            _write(repo, {**known, url: new})
        except NameInUse:
            continue  # another process has changed the list: read it again
        return True
    raise NameInUse(f"other processes keep changing the mirrors of {repo.store.url}; try again", name=MIRRORS)


def forget_mirror(repo: Repository, url: str) -> bool:
    """Remove a mirror from the list; return whether it was there. The mirror itself is kept."""
    for _ in range(_ATTEMPTS):
        known = read_mirrors(repo.store)
        if url not in known:
            return False
        try:
            _write(repo, {each: mirror for each, mirror in known.items() if each != url})
        except NameInUse:
            continue
        return True
    raise NameInUse(f"other processes keep changing the mirrors of {repo.store.url}; try again", name=MIRRORS)


def _write(repo: Repository, mirrors: Mapping[str, RecordedMirror]) -> None:
    scopes: dict[str, Json] = {url: each.scope for url, each in mirrors.items()}
    places: dict[str, Json] = {
        url: {"store_id": each.store_id, "options": list(each.options)} for url, each in mirrors.items()
    }
    save(repo, Request(MIRRORS, [], options=WriteOptions(metadata={_FIELD: scopes, _PLACES: places}, overwrite=True)))


@dataclass(frozen=True, slots=True)
class MirrorSetting:
    """One mirror of a store. Neither a text nor a pickle of it contains a secret."""

    url: str
    wait: bool | float = True
    """Whether closing the store waits until the mirror has everything; a number is the longest time in seconds."""
    options: StorageOptions = field(default_factory=StorageOptions, repr=False)
    scope: MirrorScope = "all"

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of the options, also of those that a pickle has left out."""
        return tuple(sorted({*self.options, *self.options.withheld}))

    def open_objects(self, *, read_only: bool = False) -> ObjectStore:
        """Open the object store of the mirror, without I/O."""
        return open_store(self.url, read_only=read_only, storage_options=self.options or None)

    def open(self, budget_bytes: int) -> Repository:
        """Open the mirror; the first upload creates it if there is none."""
        return open_repository(self.open_objects(), budget_bytes=budget_bytes, create=True)


def make_setting(
    url: str | os.PathLike[str], *, store_url: str, wait: bool | float = True, options: Mapping[str, Any] | None = None
) -> MirrorSetting:
    """Check what a user passed as `mirror=`; raises BadName for a URL that is refused, or that is the store itself."""
    text = os.fspath(url)
    if text.startswith("memory:"):
        raise BadName(f"{mask_url(text)} exists only while it is open; a mirror is a path or the URL of a bucket")
    path = find_path(text)
    setting = MirrorSetting(text if path is None else path, wait, StorageOptions(options))
    opened = setting.open_objects()
    if opened.url == store_url or (path is not None and path == find_path(store_url)):
        raise BadName(f"{text} is the store itself; a mirror is another store")
    directory = find_path(store_url)
    if path is not None and directory is not None and is_below(path, directory):
        raise BadName(f"{path} is inside the store {directory}; a mirror is another store, outside of it")
    if isinstance(wait, float) and not wait >= 0:
        raise ValueError(f"mirror_wait= is True, False or a number of seconds, not {wait!r}")
    return replace(setting, url=opened.url)
