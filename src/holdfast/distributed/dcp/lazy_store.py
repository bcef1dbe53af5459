"""Where checkpoints are kept: a store that is opened when it is first needed, and names made of checkpoint ids."""

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
    """A store that is open already: `holdfast.Store` is one."""

    @property
    def repository(self) -> Repository:
        """The repository below."""


StoreLike = HasRepository | str | os.PathLike[str]


class LazyStore:
    """A store, opened when it is first needed; pickles as what opens it, so that another process can."""

    def __init__(self, store: StoreLike) -> None:
        """Touch nothing: what fails here would fail on one rank, and leave the others waiting."""
        self._store = os.fspath(store) if isinstance(store, str | os.PathLike) else store
        self._opened: Repository | None = None

    @property
    def repository(self) -> Repository:
        """The repository; raises what opening it raises."""
        if not isinstance(self._store, str):
            return self._store.repository
        if self._opened is None:
            self._opened = open_repository(open_store(self._store), create=True)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open."""
        return {"_store": self._store, "_opened": None}


def clean_id(checkpoint_id: CheckpointId) -> str:
    """Return the name that a checkpoint id stands for: a path, without the slashes at its ends."""
    return os.fspath(checkpoint_id).strip("/")


def choose_name(checkpoint_id: CheckpointId | None, rank: int | None) -> str:
    """Return the name of a snapshot: that of all ranks or, without collectives, of one of them; raises BadName."""
    if checkpoint_id is None:
        raise BadName("this checkpoint has no name yet; give one to the storage writer or reader, or as checkpoint_id=")
    name = verify_name(clean_id(checkpoint_id))
    return name if rank is None else f"{name}/rank-{rank}"


def is_name(checkpoint_id: CheckpointId) -> bool:
    """Tell whether a checkpoint id can be the name of a snapshot."""
    try:
        return bool(choose_name(checkpoint_id, None))
    except BadName:
        return False


@contextmanager
def raising_plainly() -> Iterator[None]:
    """Turn whatever may not survive being pickled into a plain error: it would leave the other ranks waiting."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        kind = type(error)
        if kind.__module__ == "builtins" and all(isinstance(each, _PLAIN) for each in error.args):
            raise
        raise RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {error}") from error
