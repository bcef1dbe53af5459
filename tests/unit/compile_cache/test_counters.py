"""What a cache did is told in numbers, and in one line."""

from __future__ import annotations

import pickle

from holdfast.compile_cache.counters import CacheCounters


def test_all_that_was_counted_is_told_in_one_line() -> None:
    counters = CacheCounters()
    counters.count_hit(seconds_saved=12.34)
    counters.count("waited")
    counters.count("miss")
    counters.count("saved")
    counters.count_bypass("a reason")
    counters.count_bypass("a reason")
    counters.add_seconds("load", 0.25)
    counters.add_seconds("key", 0.001)

    told = str(counters.read())

    assert told == ("1 hit, 1 miss, 1 saved, 2 bypassed, 1 waited for, 12.3 s of compiling saved, load 0.25 s")


def test_reasons_are_counted_apart() -> None:
    counters = CacheCounters()
    for reason in ("one", "two", "two"):
        counters.count_bypass(reason)
        counters.count_not_saved(reason)

    told = counters.read()

    assert told.bypass == {"one": 1, "two": 2}
    assert told.not_saved == {"one": 1, "two": 2}


def test_a_stage_that_fails_is_timed_as_well() -> None:
    counters = CacheCounters()

    try:
        with counters.timed("compile"):
            raise KeyError
    except KeyError:
        pass

    assert counters.read().seconds.keys() == {"compile"}


def test_statistics_can_travel_and_do_not_change() -> None:
    counters = CacheCounters()
    told = counters.read()
    counters.count_bypass("later")

    assert pickle.loads(pickle.dumps(told)) == told
    assert told.bypass == {}
