"""Ranks that read the beats of others often, by a clock that may run fast, so that long timeouts pass quickly.

Only the silence of other ranks is measured by that clock. Replies of the group's store keep the whole timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from unittest import mock

from holdfast.distributed.talk import store_rounds
from holdfast.distributed.talk.call_ids import PeerWatch
from holdfast.errors import RankFailure

_INTERVAL_S: Final = 0.02


@contextmanager
def looking_often(*, speed: float = 1.0) -> Iterator[None]:
    """Let this rank read the beats of others every 20 ms; for it, `speed` seconds of silence pass in each second."""

    class OftenWatch(PeerWatch):
        def __init__(self, *, timeout_s: float) -> None:
            super().__init__(timeout_s=timeout_s, clock=lambda: speed * time.monotonic())
            self.interval_s = speed * _INTERVAL_S

    with mock.patch.object(store_rounds, "PeerWatch", OftenWatch):
        yield


@contextmanager
def noticing(victim: int, is_lost: Callable[[], bool]) -> Iterator[None]:
    """Let this rank notice soon that `victim` is lost; no timeout passes before that, and none for any other rank."""

    class KeenWatch(PeerWatch):
        def __init__(self, *, timeout_s: float) -> None:
            super().__init__(timeout_s=timeout_s, clock=lambda: timeout_s / (2 * _INTERVAL_S) * time.monotonic())
            self.interval_s = timeout_s / 2

        def observe(self, beats: Mapping[int, bytes | None]) -> list[RankFailure]:
            return super().observe({victim: beats[victim]} if victim in beats and is_lost() else {})

    with mock.patch.object(store_rounds, "PeerWatch", KeenWatch):
        yield
