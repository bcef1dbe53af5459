"""What a rank reads of the failures of a round, whatever the others have written by then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.distributed import HashStore  # type: ignore[attr-defined]  # there, and not declared as exported

from holdfast.distributed.talk import store_rounds
from holdfast.distributed.talk.collectives import Collectives
from holdfast.errors import RankError
from tests.distributed.thread_worlds import Connection, run_thread_ranks
from tests.kit.patience import PATIENCE_S


class Watched:
    """A store in memory that calls a function before a message is set, or after a counter was read."""

    def __init__(
        self,
        store: HashStore,
        *,
        before_set: Callable[[str], None] = lambda key: None,
        after_add: Callable[[str, int], None] = lambda key, count: None,
    ) -> None:
        self._store = store
        self._before_set, self._after_add = before_set, after_add

    def set(self, key: str, data: Any) -> None:
        self._before_set(key)
        self._store.set(key, data)

    def add(self, key: str, amount: int) -> int:
        count = self._store.add(key, amount)
        self._after_add(key, count)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_failure_that_is_counted_and_not_yet_written_is_waited_for() -> None:
    store, go_on, counted = HashStore(), threading.Event(), list[str]()

    def note_count(key: str, count: int) -> None:
        counted.extend([key] if key.endswith("/f") and count == 2 else [])
        if len(counted) > 2:  # rank 0 has read the full counter, and looks again
            go_on.set()

    def wait_with_failure(key: str) -> None:
        assert "/f/" not in key or go_on.wait(PATIENCE_S)

    def fail_together(ranks: Collectives) -> set[int]:
        def fail() -> None:
            raise OSError(f"disk of rank {ranks.rank} is full")

        try:
            ranks.all_gather("write", fail)
        except RankError as error:
            return set(error.failures)
        finally:
            go_on.set()
        return set()

    kept = time.sleep
    with (
        mock.patch.multiple(store_rounds, _SETTLE_S=PATIENCE_S, _MAX_SETTLE_S=PATIENCE_S),
        mock.patch("time.sleep", lambda seconds: kept(min(seconds, 0.01))),
    ):
        connections = [
            Connection(Watched(store, after_add=note_count)),
            Connection(Watched(store, before_set=wait_with_failure)),
        ]
        assert run_thread_ranks(connections, fail_together, timeout_s=PATIENCE_S) == [{0, 1}, {0, 1}]
