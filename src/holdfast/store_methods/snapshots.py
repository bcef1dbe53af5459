"""The methods of `Store` for snapshots and their names: list, find, compare, tag and delete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.query.bisect import Bisection
from holdfast.query.select import BestMode, SortFields, parse_query
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.names.tags import Tag, delete_tag, iter_tags
from holdfast.store_methods.opened import OpenStore

if TYPE_CHECKING:
    from holdfast.diff.changes import Diff
    from holdfast.snapshot.view.lazy import Snapshot


class SnapshotMethods(OpenStore):
    """Find, compare, tag and delete snapshots."""

    def __getitem__(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, without loading tensors; raises NotFound."""
        if not isinstance(name, str):
            raise TypeError(f"the keys of a store are names of snapshots, not {type(name).__name__}: {name!r:.80}")
        return self._open_snapshot(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a snapshot with that name or tag."""
        return self._views.is_named(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the snapshots, in natural order, without Holdfast's own ("@...")."""
        return (snapshot.name for snapshot in self.snapshots())

    def __len__(self) -> int:
        """Return the number of snapshots, without Holdfast's own."""
        return len(self.snapshots())

    def _repr_html_(self) -> str:
        """Return a card for notebooks: the snapshots, the newest first."""
        from holdfast.snapshot.view.display import render_store

        return render_store(self.url, [snapshot.record for snapshot in self.snapshots()], self.tags())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys that a notebook offers after `store["`: the names of snapshots, and tags."""
        return [*self, *(tag.name for tag in self.tags())]

    def snapshot(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, without loading tensors; raises NotFound."""
        return self._open_snapshot(name)

    def snapshots(
        self, prefix: str = "", *, where: str | None = None, sort: SortFields = None, limit: int | None = None
    ) -> list[Snapshot]:
        """Return the snapshots whose names begin with `prefix`, in natural order, without Holdfast's own ("@...").

        `where` is a condition such as "loss < 0.3 and step >= 1000" (docs/reference/expressions.md). `sort` is a field,
        or several; "-loss" sorts descending. Snapshots without the field come last.
        """
        return self._views.list_snapshots(prefix, parse_query(where=where, sort=sort, limit=limit))

    def latest(self, prefix: str = "") -> Snapshot | None:
        """Return the snapshot with the latest commit time whose name begins with `prefix`, or None."""
        return self._views.open_latest(prefix)

    def best(self, prefix: str, metric: str, *, mode: BestMode = "min", where: str | None = None) -> Snapshot:
        """Return the snapshot with the best value of a metric, not NaN; of equal ones the newest. Raises NotFound."""
        return self._views.open_best(prefix, metric=metric, mode=mode, query=parse_query(where=where))

    def bisect(self, prefix: str, test: Callable[[Snapshot], bool | None]) -> Bisection[Snapshot]:
        """Return the first snapshot of a series for which `test` returns False, found by halving the series.

        They are ordered by step if each has another one, else by time; those after a bad one must be bad, too. `test`
        returns True for good, False for bad, None to skip. Raises NotBisectable if the first is bad or the last good.
        """
        return self._views.bisect(prefix, test)

    def diff(
        self, a: str | Snapshot, b: object, *, values: bool = False, only: str | Sequence[str] | None = None
    ) -> Diff:
        """Return what was added, removed and changed from `a` to `b`; with `values`, by how much tensors differ.

        `b` is a snapshot, or a tree in memory, such as `save` takes. Of such a tree, tensors on a GPU are hashed there,
        and those that are equal are not copied to the host. `only`: patterns of leaf names, such as "model.*".
        """
        from holdfast.diff.compare import compare
        from holdfast.diff.live import compare_with_tree
        from holdfast.diff.values import measure
        from holdfast.snapshot.view.lazy import Snapshot

        repo, before = self.repository, self._views.open_here(a).record
        patterns = (only,) if isinstance(only, str) else tuple(only or ())
        if not isinstance(b, str | Snapshot):
            return compare_with_tree(repo, before, b, types=self._types, only=patterns, values=values)
        found = compare(repo, before, self._views.open_here(b).record, only=patterns)
        return measure(repo, found) if values else found

    def delete(self, name: str) -> None:
        """Delete a snapshot. `gc` then frees the bytes that no other snapshot uses. Raises NotFound."""
        delete_snapshot(self.repository.verify_same(), name)

    def tag(self, tag: str, name: str | Snapshot, *, move: bool = False) -> Tag:
        """Point a tag to a snapshot. Raises NameInUse if the tag points to another one and `move` is False."""
        verify_user_name(tag, what="tag")
        return self._views.set_tag(tag, name, move=move)

    def tags(self) -> list[Tag]:
        """Return all tags."""
        return [tag for tag in iter_tags(self.repository.store) if isinstance(tag, Tag)]

    def untag(self, tag: str) -> None:
        """Delete a tag; its snapshot is kept, and so is a copy of the tag in a mirror."""
        delete_tag(self.repository.verify_same(), tag)
