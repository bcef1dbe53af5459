"""Real Collectives between threads of one process, over a group store in memory that can be cut off or stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # there, and not declared as exported

from holdfast.distributed.talk.collectives import Collectives

Result = TypeVar("Result")
_LIMIT_S: Final = 60.0


class Connection:
    """One rank's connection to a group's store in memory."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_cut = False
        self._goes_on = threading.Event()
        self._goes_on.set()

    def cut(self) -> None:
        """Have every call fail from now on, as it does when the host of the store is dead."""
        self._is_cut = True

    def stop(self) -> None:
        """Have every call wait until `resume`, as it does when the host of the store is stopped."""
        self._goes_on.clear()

    def resume(self) -> None:
        """Have the calls done that wait, and all later ones."""
        self._goes_on.set()

    def clone(self) -> Connection:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._inner, name)

        def connected(*args: Any) -> Any:
            assert self._goes_on.wait(_LIMIT_S), "nobody has resumed it"
            if self._is_cut:
                raise RuntimeError("Connection reset by peer")
            return call(*args)

        return connected


def connect(size: int) -> list[Connection]:
    """Return the connections of all ranks to a new store."""
    store = HashStore()
    return [Connection(store) for _ in range(size)]


@dataclass(frozen=True)
class _ThreadGroup:
    """What Collectives need to know of a process group, for one thread."""

    rank: int
    size: int
    store: Connection
    group_name: str = "threads"

    def get_group_store(self) -> Connection:
        return self.store


def run_thread_ranks(
    connections: Sequence[Connection], act: Callable[[Collectives], Result], *, timeout_s: float
) -> list[Result | BaseException]:
    """Let each rank act in a thread of its own; return what each returned or raised."""

    def run(rank: int) -> Result | BaseException:
        group: Any = _ThreadGroup(rank, len(connections), connections[rank])
        try:
            with Collectives(group, timeout_s=timeout_s) as ranks:
                return act(ranks)
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            return error

    with (
        mock.patch.object(dist, "get_rank", lambda group: group.rank),
        mock.patch.object(dist, "get_world_size", lambda group: group.size),
        ThreadPoolExecutor(len(connections)) as pool,
    ):
        return list(pool.map(run, range(len(connections))))
