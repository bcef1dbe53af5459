"""Decides how many bytes one reader may bring into the page cache, by the memory that is available."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

_MEMORY: Final = "/proc/meminfo"
_GROUPS: Final = "/proc/self/cgroup"
_GROUP_ROOT: Final = "/sys/fs/cgroup"
_SHARE: Final = 4
"""A reader may use a quarter of the available memory: the tensors that it fills need as much again, and the rest stays
with what others have in the page cache."""


class CacheShare:
    """The bytes that one reader may still bring into the page cache. Thread-safe."""

    def __init__(self, find_available: Callable[[], int | None]) -> None:
        """Read the available memory when the first bytes are taken; if it is unknown, there is no room."""
        self._find_available = find_available
        self._left_bytes: int | None = None
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Reserve room for bytes, and return whether there is any."""
        with self._lock:
            if self._left_bytes is None:
                self._left_bytes = (self._find_available() or 0) // _SHARE
            if size_bytes > self._left_bytes:
                # Nothing smaller may follow: the end of a large state would replace its beginning in the cache.
                self._left_bytes = 0
                return False
            self._left_bytes -= size_bytes
            return True


def find_available_memory(memory: str = _MEMORY, groups: str = _GROUPS, group_root: str = _GROUP_ROOT) -> int | None:
    """Return how many bytes this process could still use without swapping, by all its control groups; None if unknown.

    The page cache counts as available: the kernel drops it when memory is needed.
    """
    found = _read_numbers(memory).get("MemAvailable:")
    limits = [] if found is None else [found << 10, *_list_group_limits(groups, group_root)]
    return max(0, min(limits)) if limits else None


def _list_group_limits(groups: str, root: str) -> list[int]:
    """Return what each limited control group of this process leaves, in version 2 and in version 1 of the hierarchy."""
    limits = []
    for line in _read_text(groups).splitlines():
        number, controllers, name = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            limits += _list_parent_limits(root, name.strip("/"), "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            folder, total = os.path.join(root, "memory"), "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limits += _list_parent_limits(folder, name.strip("/"), *names, total)
    return limits


def _list_parent_limits(root: str, name: str, limit: str, usage: str, prefix: str) -> list[int]:
    """Return what a group and the groups above it leave; a container may not see all of them."""
    found = []
    while True:
        folder = os.path.join(root, name)
        most, used = _read_text(os.path.join(folder, limit)), _read_text(os.path.join(folder, usage))
        if most.isdecimal() and used.isdecimal():
            counts = _read_numbers(os.path.join(folder, "memory.stat"))
            cached = sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            found.append(int(most) - int(used) + cached)
        if not name:
            return found
        name = os.path.dirname(name)


def _read_numbers(path: str) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    fields = [line.split() for line in _read_text(path).splitlines()]
    return {each[0]: int(each[1]) for each in fields if len(each) > 1 and each[1].isdecimal()}


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
