"""A store that is opened on first use, and snapshot names made from checkpoint ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from holdfast.errors import BadName, HoldfastError
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import verify_name
from holdfast.repo.handle.repository import Repository, open_repository

CheckpointId = str | os.PathLike[str]
_PLAIN: Final = (str, int, float, type(None))


class HasRepository(Protocol):
    """A store that is already open, such as a `holdfast.Store`."""

    @property
    def repository(self) -> Repository:
        """The repository of the store."""


StoreLike = HasRepository | str | os.PathLike[str]


class LazyStore:
    """A store that is opened on first use. It can be pickled and opened by another process."""

    def __init__(self, store: StoreLike) -> None:
        """Open nothing yet: an error here would be raised on one rank only, and the others would wait for it."""
        self._store = os.fspath(store) if isinstance(store, str | os.PathLike) else store
        self._opened: Repository | None = None

    @property
    def repository(self) -> Repository:
        """The repository, opened on first use."""
        if not isinstance(self._store, str):
            return self._store.repository
        if self._opened is None:
            self._opened = open_repository(open_store(self._store), create=True)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open repository."""
        return {"_store": self._store, "_opened": None}


def clean_id(checkpoint_id: CheckpointId) -> str:
    """Return a checkpoint id as a name: without slashes at its ends."""
    return os.fspath(checkpoint_id).strip("/")


def choose_name(checkpoint_id: CheckpointId | None, rank: int | None) -> str:
    """Return the snapshot name for a checkpoint id, or for one rank of it if `rank` is given; raise BadName."""
    if checkpoint_id is None:
        raise BadName("this checkpoint has no name; pass one to the storage writer or reader, or as checkpoint_id=")
    name = verify_name(clean_id(checkpoint_id))
    return name if rank is None else f"{name}/rank-{rank}"


def is_name(checkpoint_id: CheckpointId) -> bool:
    """Return whether a checkpoint id can be the name of a snapshot."""
    try:
        return bool(choose_name(checkpoint_id, None))
    except BadName:
        return False


@contextmanager
def raising_picklable() -> Iterator[None]:
    """Replace exceptions that may not be picklable by RuntimeError; torch pickles them to report them to all ranks.

    If pickling failed, the other ranks would wait for ever.
    """
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        kind = type(error)
        if kind.__module__ == "builtins" and all(isinstance(each, _PLAIN) for each in error.args):
            raise
        raise RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {error}") from error
