"""Values are computed once however many threads ask, and forgotten beyond the limit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.serving.remembered import RememberedValues


def test_threads_that_ask_for_one_value_compute_it_once() -> None:
    values: RememberedValues[str, list[int]] = RememberedValues(10)
    begun, go_on = threading.Event(), threading.Event()
    computed: list[int] = []

    def compute() -> list[int]:
        computed.append(1)
        begun.set()
        assert go_on.wait(30)
        return computed

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(values.find_or_compute, "a", compute)
        assert begun.wait(30)
        others = [pool.submit(values.find_or_compute, "a", compute) for _ in range(7)]
        go_on.set()
        found = [each.result(30) for each in (first, *others)]

    assert computed == [1]
    assert all(each is found[0] for each in found)


def test_after_an_error_the_next_one_tries_again() -> None:
    values: RememberedValues[str, int] = RememberedValues(10)

    def fail() -> int:
        raise KeyError("damaged")

    with pytest.raises(KeyError):
        values.find_or_compute("a", fail)

    assert values.find_or_compute("a", lambda: 3) == 3
    assert values.find("a") == 3
    assert values.find("b") is None


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    values: RememberedValues[str, str] = RememberedValues(5, size_of=len)
    for key in "abc":
        values.find_or_compute(key, lambda: "xx")

    assert values.find("a") is None
    assert values.find("c") == "xx"
    assert values.size == 4
