"""The cache of recently used values: what is dropped, and when."""

from __future__ import annotations

from holdfast.lru import LruCache


def list_present(cache: LruCache[str, str], keys: str) -> str:
    """Return the keys that are in the cache, asking for each in order."""
    return "".join(key for key in keys if cache.get(key) is not None)


def test_the_value_that_was_not_used_for_longest_is_dropped() -> None:
    cache: LruCache[str, str] = LruCache(2)
    cache.put("a", "1")
    cache.put("b", "2")
    assert cache.get("a") == "1"
    cache.put("c", "3")
    assert list_present(cache, "abc") == "ac"


def test_an_absent_key_is_none_and_stays_absent() -> None:
    cache: LruCache[str, str] = LruCache(2)
    assert cache.get("a") is None
    assert len(cache) == 0


def test_sizes_add_up_to_the_limit() -> None:
    cache: LruCache[str, str] = LruCache(10, size_of=len)
    for key, size in (("a", 4), ("b", 4), ("c", 2)):
        cache.put(key, "x" * size)
    assert list_present(cache, "abc") == "abc"
    cache.put("d", "x" * 5)
    assert list_present(cache, "abcd") == "cd"
    assert cache.size == 7


def test_a_value_larger_than_the_limit_is_kept_until_the_next_one() -> None:
    cache: LruCache[str, str] = LruCache(10, size_of=len)
    cache.put("a", "x")
    cache.put("b", "x" * 99)
    assert list_present(cache, "ab") == "b"
    cache.put("c", "x")
    assert list_present(cache, "abc") == "c"


def test_a_replaced_value_counts_once_and_is_the_most_recent() -> None:
    cache: LruCache[str, str] = LruCache(10, size_of=len)
    cache.put("a", "x" * 6)
    cache.put("b", "x" * 2)
    cache.put("a", "y" * 8)
    assert list_present(cache, "ab") == "ab"
    assert cache.size == 10
    cache.put("a", "y" * 2)
    cache.put("c", "x" * 7)
    assert list_present(cache, "abc") == "ac"


def test_values_that_are_false_are_values() -> None:
    cache: LruCache[str, dict[str, int]] = LruCache(1)
    cache.put("a", {})
    assert cache.get("a") == {}


def test_each_value_that_leaves_the_cache_is_passed_on() -> None:
    dropped: list[str] = []
    cache: LruCache[int, str] = LruCache(2, on_drop=dropped.append)
    for key, value in ((1, "a"), (2, "b"), (1, "c"), (3, "d")):
        cache.put(key, value)
    assert dropped == ["a", "b"]
    cache.clear()

    assert sorted(dropped) == ["a", "b", "c", "d"]
    assert (len(cache), cache.size) == (0, 0)
