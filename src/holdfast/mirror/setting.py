"""What a user chooses about a mirror: where it is, how it is opened, and whether closing the store waits for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import BadName
from holdfast.mirror.recorded import MirrorScope
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import find_path, open_store
from holdfast.repo.files import is_below
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.texts import mask_url


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
