"""Silence is measured by the clock of the rank that waits, and only while it reads the beats."""

from __future__ import annotations

import pytest

from holdfast.distributed.talk.call_ids import PeerWatch, Pulse, format_closed
from holdfast.distributed.talk.collectives import Collectives
from holdfast.errors import RankError
from holdfast.testing.faults import Crashed
from tests.distributed.thread_worlds import connect, run_thread_ranks


class FakeClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_pulse_beats_at_once_then_not_before_its_time_and_never_twice_the_same() -> None:
    clock = FakeClock()
    pulse = Pulse(timeout_s=300, clock=clock)

    beats = []
    for now in (1000.0, 1001.0, 1004.9, 1005.0, 1006.0, 1011.0):
        clock.now = now
        beats.append(pulse.find_due("write"))

    assert [beat is not None for beat in beats] == [True, False, False, True, False, True]
    assert len({beat for beat in beats if beat is not None}) == 3


def test_a_short_timeout_makes_the_pulse_faster() -> None:
    clock = FakeClock()
    pulse = Pulse(timeout_s=2, clock=clock)
    pulse.find_due("write")

    clock.now += 0.5

    assert pulse.find_due("write") is not None


def watch_for(watch: PeerWatch, clock: FakeClock, seconds: float, beat: bytes | None) -> list[str]:
    """Look at rank 1 again and again; return the names of what it is given up for."""
    end = clock.now + seconds
    found = []
    while clock.now < end:
        clock.now += watch.interval_s
        found += [failure.type_name for failure in watch.observe({1: beat})]
    return found


def test_a_rank_that_is_silent_for_the_timeout_is_gone() -> None:
    clock = FakeClock()
    watch = PeerWatch(timeout_s=10, clock=clock)

    assert watch_for(watch, clock, 10, b"1 write") == []
    assert watch_for(watch, clock, 2, b"1 write") == ["RankGone", "RankGone"]


def test_a_rank_that_beats_is_never_gone() -> None:
    clock = FakeClock()
    watch = PeerWatch(timeout_s=10, clock=clock)

    for count in range(20):
        assert watch_for(watch, clock, 9, b"%d write" % count) == []


def test_the_time_that_the_watcher_itself_was_stopped_does_not_count() -> None:
    clock = FakeClock()
    watch = PeerWatch(timeout_s=10, clock=clock)
    watch_for(watch, clock, 3, b"1 write")

    clock.now += 3600

    assert watch.observe({1: b"1 write"}) == []


def test_the_text_says_where_a_rank_was_last_seen() -> None:
    texts = []
    for beat in (b"7 write parts", b"1 ", None):
        clock = FakeClock()
        watch = PeerWatch(timeout_s=1, clock=clock)
        watch.observe({1: beat})
        while not (found := watch.observe({1: beat})):
            clock.now += watch.interval_s
        texts.append(found[0].message)

    assert "last seen at step 'write parts'" in texts[0]
    assert "last seen before its first step" in texts[1]
    assert "it has not started" in texts[2]


def test_a_rank_that_has_left_is_reported_at_once() -> None:
    watch = PeerWatch(timeout_s=10, clock=FakeClock())

    (failure,) = watch.observe({1: format_closed()})

    assert (failure.rank, failure.type_name) == (1, "RankLeft")


def test_a_pulse_beats_out_of_time_when_the_step_changes() -> None:
    pulse = Pulse(timeout_s=300, clock=FakeClock())

    beats = [pulse.find_due(step) for step in ("", "write", "write", "marks", "write")]

    assert beats == [b"1 ", b"2 write", None, b"3 marks", b"4 write"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_dies_in_a_step_was_last_seen_in_that_step(is_first: bool) -> None:
    connections = connect(2)

    def act(ranks: Collectives) -> None:
        def die() -> None:
            ranks.check_failures()  # its connection is used in order: the sign of life was given before this returns
            connections[1].cut()
            raise Crashed("in write")

        if not is_first:
            ranks.all_gather("begin", lambda: None)
        ranks.all_gather("write", die if ranks.rank == 1 else lambda: None)

    outcome, dead = run_thread_ranks(connections, act, timeout_s=0.5)

    assert isinstance(dead, Crashed)
    assert isinstance(outcome, RankError)
    assert "last seen at step 'write'" in outcome.failures[1].message
