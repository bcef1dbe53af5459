"""Keys and prefixes: which are valid."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName
from holdfast.objects.protocol import MAX_COMPONENT_BYTES, MAX_KEY_BYTES, verify_key, verify_prefix
from holdfast.testing.store_contract import BAD_KEYS, BAD_PREFIXES


@pytest.mark.parametrize("key", ["a", "packs/0", "snapshots/1f/a%2fb@00000001", "a.b", "-", "=", "_", "a/b/c/d"])
def test_a_valid_key_is_returned(key: str) -> None:
    assert verify_key(key) == key
    assert verify_prefix(key) == key


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_a_bad_key_is_refused(key: str) -> None:
    with pytest.raises(BadName, match="is refused"):
        verify_key(key)


@pytest.mark.parametrize("prefix", BAD_PREFIXES.values(), ids=BAD_PREFIXES.keys())
def test_a_bad_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(BadName, match="is refused"):
        verify_prefix(prefix)


@pytest.mark.parametrize("prefix", ["", "packs/", "packs/ab", "snapshots/1f/"])
def test_the_start_of_a_key_is_a_valid_prefix(prefix: str) -> None:
    assert verify_prefix(prefix) == prefix


def test_lengths_are_limited_per_component_and_in_total() -> None:
    longest = "a" * MAX_COMPONENT_BYTES
    assert verify_key(longest) == longest
    with pytest.raises(BadName):
        verify_key(longest + "a")
    with pytest.raises(BadName):
        verify_key("/".join(["a" * 200] * (MAX_KEY_BYTES // 200 + 1)))
