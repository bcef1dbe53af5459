"""A directory is swapped for a link at every moment of a call: the call acts inside the store, or fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from attacks.kernel_watch import KernelWatch
from holdfast.errors import HoldfastError
from holdfast.objects.local.local_store import LocalStore

DATA: Final = b"bytes of the store"
PRECIOUS: Final = b"bytes outside"
SYSTEM_CALLS: Final = ("open", "stat", "lstat", "listdir", "scandir", "link", "unlink", "mkdir", "rename")
KEYS: Final = {"packs": "packs/one", "snapshots": "snapshots/1c/one", "snapshots/1c": "snapshots/1c/one"}
"""Which directory is swapped, and a key that lies in it."""
CALLS: Final[dict[str, Callable[[LocalStore, str], object]]] = {
    "read": lambda store, key: store.read(key, limit_bytes=100),
    "read_into": lambda store, key: store.read_into(key, 0, memoryview(bytearray(len(PRECIOUS)))),
    "stat": lambda store, key: store.stat(key),
    "list": lambda store, key: store.list(key.rpartition("/")[0] + "/"),
    "create": lambda store, key: store.create(key + "-new", DATA, durable=False),
    "delete": lambda store, key: store.delete(key),
    "remove_debris": lambda store, key: store.remove_debris(older_than_s=0.0),
}


class Swap:
    """Puts a link in the place of a directory just before the n-th system call, and takes it back in the end."""

    def __init__(self, directory: Path, target: Path, aside: Path, *, at: int) -> None:
        self.happened = False
        self._directory = directory
        self._target = target
        self._aside = aside
        self._left = at

    def meet(self) -> None:
        """Count a system call; the swap's own are not counted, for they come when the count is used up."""
        self._left -= 1
        if self._left == -1:
            self._directory.rename(self._aside)
            self._directory.symlink_to(self._target)
            self.happened = True

    def undo(self) -> None:
        if self.happened:
            self._directory.unlink()
            self._aside.rename(self._directory)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    for name in ("one", "1c/one", ".tmp-1", "1c/.tmp-1"):
        (tmp_path / "outside" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "outside" / name).write_bytes(PRECIOUS)
    return tmp_path / "outside"


def swap_at_every_moment(place: str, call: str, outside: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make a call once for each moment at which the swap can come; yield what the kernel saw happen outside."""
    root, key = outside.parent / "store", KEYS[place]
    for moment in count():
        store = LocalStore(root)
        for other in (key, key + "-new"):
            store.delete(other)
        store.create(key, DATA, durable=False)
        target = outside / "1c" if place.endswith("1c") else outside
        swap = Swap(root / place, target, outside.parent / "aside", at=moment)
        with KernelWatch(outside) as watch:
            with monkeypatch.context() as patch, suppress(HoldfastError):
                watch_calls(patch, swap)
                assert CALLS[call](store, key) != PRECIOUS
            yield watch.read_events()
        swap.undo()
        if not swap.happened:
            return


def watch_calls(patch: pytest.MonkeyPatch, swap: Swap) -> None:
    """Let the swap meet every system call that takes a name."""
    for name in SYSTEM_CALLS:
        patch.setattr(os, name, meeting(getattr(os, name), swap))


def meeting(call: Callable[..., Any], swap: Swap) -> Callable[..., Any]:
    def meet(*arguments: Any, **options: Any) -> Any:
        swap.meet()
        return call(*arguments, **options)

    return meet


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", KEYS)
def test_a_directory_that_becomes_a_link_meanwhile_leads_nowhere(
    outside: Path, place: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = list(swap_at_every_moment(place, call, outside, monkeypatch))

    assert len(moments) > 2
    assert [events for events in moments if events] == []
