"""What every method of `Store` uses: the repository, the options, and the workers in the background."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self

from holdfast.errors import StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_chosen
from holdfast.query.lineage import LineageLog
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, HandleStatistics, Repository, open_repository

if TYPE_CHECKING:
    from holdfast.formats.background import ExportRunner
    from holdfast.mirror.mirror import Mirror
    from holdfast.mirror.views import Views
    from holdfast.snapshot.save.staging import AsyncSaver
    from holdfast.snapshot.view.lazy import Snapshot
    from holdfast.trees.registered import Types

StrPath = str | os.PathLike[str]
_REPOSITORY_OPTIONS: Final = ("change_hints", "create", "compression", "delta")


class OpenStore:
    """Opens the repository, reopens it after a fork, and closes it. `facade.Store` is the class to use."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        types: Sequence[type] = (),
        options: Mapping[str, Any] | None = None,
        store_id: str = "",
    ) -> None:
        """Open the repository in any object store. With `store_id`, refuse to change a store that has another id."""
        self._classes, self._budget_bytes = tuple(types), budget_bytes
        self._options = dict(options or {})
        self._environment = self._options.get("environment", True)
        self._attach(store, store_id)

    def _attach(self, store: ObjectStore, store_id: str) -> None:
        self._pid = os.getpid()
        chosen = {"create": True} | {name: self._options[name] for name in _REPOSITORY_OPTIONS if name in self._options}
        self._handle = open_repository(store, budget_bytes=self._budget_bytes, store_id=store_id, **chosen)
        self._saver: AsyncSaver | None = None
        self._lineage = LineageLog()
        self._exporter: ExportRunner | None = None
        make_mirror = self._options.get("mirror")
        self._named_mirrors: dict[str, Mirror] = {}
        self._mirror: Mirror | None = make_mirror(self._handle) if make_mirror else None

    @property
    def url(self) -> str:
        """The path or URL of the store."""
        return self._handle.store.url

    @property
    def mirror(self) -> Mirror | None:
        """The mirror that the store was opened with: its `state`, `sync` and `wait`; None without one."""
        return self._mirror

    @property
    def repository(self) -> Repository:
        """The underlying repository, for functions that take one."""
        if os.getpid() != self._pid:
            self._attach(open_chosen(self._verify_shared(), self._options), self._handle.identity.store_id)
        return self._handle

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<Store {self.url}>"

    def __bool__(self) -> bool:
        """Return True: an empty store is a store."""
        return True

    def _verify_shared(self) -> str:
        if self.url.startswith("memory://"):
            raise StoreError(f"{self.url} belongs to the process that opened it; use a path to share a store")
        return self.url

    def __enter__(self) -> Self:
        """Return this store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store; see `close`."""
        self.close()

    def statistics(self) -> HandleStatistics:
        """Return how many entries this handle mapped or could not map so far, and how long each stage took."""
        return self.repository.counters.read()

    def close(self) -> None:
        """Wait for background saves, exports and uploads; raise an error that no `wait` raised; free staging memory."""
        workers = (self._saver, self._exporter, self._mirror, *self._named_mirrors.values())
        for worker in workers if os.getpid() == self._pid else ():
            if worker is not None:
                worker.close()

    @cached_property
    def _types(self) -> Types:
        from holdfast.trees.registered import Types

        return Types(self._classes)

    @property
    def _views(self) -> Views:
        from holdfast.mirror.views import Views

        return Views(self.repository, self.mirror, self._types)

    def _open_snapshot(self, name: str | Snapshot) -> Snapshot:
        return self._views.open_named(name) if isinstance(name, str) else name
