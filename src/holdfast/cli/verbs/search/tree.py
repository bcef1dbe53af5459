"""The names of snapshots as a tree of folders, each with the number and size of the snapshots in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.cli.output import format_bytes, format_time, format_utc
from holdfast.json_text import Json
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot

_SHOWN: Final = 3
"""Of many snapshots in one folder, so many of the first and of the last are shown."""


@dataclass(slots=True)
class _Folder:
    name: str
    path: str = ""
    """The whole name, with a slash at the end; empty for the top."""
    depth: int = -1
    folders: dict[str, _Folder] = field(default_factory=dict)
    snapshots: list[tuple[str, CommittedSnapshot]] = field(default_factory=list)
    """Snapshots directly in this folder, with the last part of their names."""
    num_snapshots: int = 0
    """Snapshots in this folder and in those below it."""
    logical_bytes: int = 0
    newest_s: float = float("-inf")

    def add(self, snapshot: CommittedSnapshot) -> None:
        *folders, last = snapshot.name.split("/")
        folder = self
        folder._count(snapshot)
        for name in folders:
            folder = folder.folders.setdefault(name, _Folder(name, f"{folder.path}{name}/", folder.depth + 1))
            folder._count(snapshot)
        folder.snapshots.append((last, snapshot))

    def _count(self, snapshot: CommittedSnapshot) -> None:
        self.num_snapshots += 1
        self.logical_bytes += snapshot.logical_bytes
        self.newest_s = max(self.newest_s, snapshot.time_s)


def list_tree(snapshots: Iterable[CommittedSnapshot], *, is_long: bool) -> list[list[str]]:
    """Return the rows of a tree: name, number of snapshots, size, newest. Long folders are folded unless `is_long`."""
    return list(_iter_rows(_make_tree(snapshots), is_long=is_long))


def describe_tree(snapshots: Iterable[CommittedSnapshot]) -> list[Json]:
    """Return every folder of a tree as JSON, each before those below it."""
    return [_describe(folder) for folder in _iter_folders(_make_tree(snapshots)) if folder.path]


def _make_tree(snapshots: Iterable[CommittedSnapshot]) -> _Folder:
    root = _Folder("")
    for snapshot in snapshots:
        root.add(snapshot)
    return root


def _iter_rows(top: _Folder, *, is_long: bool) -> Iterator[list[str]]:
    for folder in _iter_folders(top):
        if folder.path:
            size = format_bytes(folder.logical_bytes)
            name = f"{'  ' * folder.depth}{folder.name}/"
            yield [name, str(folder.num_snapshots), size, format_time(folder.newest_s)]
        yield from _iter_own(folder, is_long=is_long)


def _iter_folders(top: _Folder) -> Iterator[_Folder]:
    # Not recursive: a name may have 2,000 parts.
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        yield folder
        waiting += sorted(folder.folders.values(), key=lambda each: natural_order(each.name), reverse=True)


def _iter_own(folder: _Folder, *, is_long: bool) -> Iterator[list[str]]:
    indent = "  " * (folder.depth + 1)
    own = sorted(folder.snapshots, key=lambda pair: natural_order(pair[0]))
    is_folded = not is_long and len(own) > 2 * _SHOWN + 1
    for name, snapshot in own[:_SHOWN] if is_folded else own:
        yield _make_row(indent + name, snapshot)
    if is_folded:
        between = own[_SHOWN:-_SHOWN]
        size = format_bytes(sum(snapshot.logical_bytes for _, snapshot in between))
        yield [f"{indent}... {len(between)} more; -l shows them", "", size, ""]
        for name, snapshot in own[-_SHOWN:]:
            yield _make_row(indent + name, snapshot)


def _make_row(name: str, snapshot: CommittedSnapshot) -> list[str]:
    return [name, "", format_bytes(snapshot.logical_bytes), format_time(snapshot.time_s)]


def _describe(folder: _Folder) -> Json:
    return {
        "folder": folder.path,
        "snapshots": folder.num_snapshots,
        "logical_bytes": folder.logical_bytes,
        "newest": format_utc(folder.newest_s),
    }
