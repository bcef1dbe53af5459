"""The counters of a cache, and their summary in one line."""

from __future__ import annotations

import pickle

from holdfast.compile_cache.counters import CacheCounters


def test_the_summary_is_one_line() -> None:
    counters = CacheCounters()
    counters.count_hit(seconds_saved=12.34)
    counters.count("waited")
    counters.count("miss")
    counters.count("saved")
    counters.count_bypass("a reason")
    counters.count_bypass("a reason")
    counters.count_restart("another reason")
    counters.add_seconds("load", 0.25)
    counters.add_seconds("key", 0.001)

    statistics = str(counters.read())

    assert statistics == (
        "1 hit, 1 miss, 1 saved, 2 bypassed, 1 traced again, 1 waited for, 12.3 s of compiling saved, load 0.25 s"
    )


def test_each_reason_is_counted() -> None:
    counters = CacheCounters()
    for reason in ("one", "two", "two"):
        counters.count_bypass(reason)
        counters.count_not_saved(reason)
        counters.count_restart(reason)

    statistics = counters.read()

    assert statistics.bypass == {"one": 1, "two": 2}
    assert statistics.not_saved == {"one": 1, "two": 2}
    assert statistics.restart == {"one": 1, "two": 2}


def test_a_stage_that_fails_is_timed_too() -> None:
    counters = CacheCounters()

    try:
        with counters.timed("compile"):
            raise KeyError
    except KeyError:
        pass

    assert counters.read().seconds.keys() == {"compile"}


def test_statistics_can_be_pickled_and_do_not_change() -> None:
    counters = CacheCounters()
    statistics = counters.read()
    counters.count_bypass("later")

    assert pickle.loads(pickle.dumps(statistics)) == statistics
    assert statistics.bypass == {}
