"""Laws of names: escapes are keys, tell names apart, keep prefixes, and no listing misses a name."""

from __future__ import annotations

import unicodedata

from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast.errors import BadName
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import verify_key
from holdfast.repo.format.layout import (
    SNAPSHOTS,
    escape_name,
    escape_prefix,
    generation_key,
    may_start_with,
    natural_order,
    snapshot_stem,
    split_generation,
    verify_name,
)
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.snapshots import iter_names

# Weighted towards what escaping treats specially: separators, dots, case, percent, combining marks, all of Unicode.
CHARS = st.one_of(st.sampled_from("aA0./%_@-~ e\u0301\u00e9\u0338="), st.characters(exclude_categories=["Cs"]))
TEXTS = st.text(CHARS, max_size=90)


def is_name(text: str) -> bool:
    try:
        verify_name(text)
    except BadName:
        return False
    return True


NAMES = TEXTS.filter(is_name).map(verify_name)
ANY_TEXT = st.text(st.one_of(CHARS, st.characters()), max_size=20)


@given(ANY_TEXT)
def test_any_text_is_a_name_or_refused(text: str) -> None:
    if is_name(text):
        name = verify_name(text)
        assert verify_name(name) == name
        assert unicodedata.is_normalized("NFC", name)


@given(NAMES)
def test_an_escaped_name_is_one_component_of_a_key(name: str) -> None:
    escaped = escape_name(name)
    assert "/" not in escaped
    key = generation_key(snapshot_stem(name), 0)
    verify_key(key)
    assert split_generation(key) == (snapshot_stem(name), 0)


@given(NAMES, NAMES)
@example("A", "%41")
@example(".a", "%2ea")
def test_two_names_never_share_a_key_even_where_case_is_ignored(one: str, other: str) -> None:
    assume(one != other)
    assert escape_name(one).casefold() != escape_name(other).casefold()


@given(NAMES, st.integers(0, 90))
@example("." + "a" * 10, 1)
@example("a" * 201, 3)
@example("\u00e9" * 40, 20)
def test_every_prefix_of_a_name_leads_to_its_key(name: str, length: int) -> None:
    prefix = name[:length]
    stem = snapshot_stem(name)
    assert may_start_with(stem, prefix)
    if not escape_name(name).startswith("%_"):
        assert escape_name(name).startswith(escape_prefix(prefix))


@given(ANY_TEXT)
def test_whatever_is_looked_for_can_be_listed(prefix: str) -> None:
    may_start_with(snapshot_stem("a"), prefix)
    verify_key(generation_key(snapshot_stem(prefix or "a"), 0))
    assert list(iter_names(MemoryStore(), prefix)) == []


@given(st.lists(NAMES, unique=True, max_size=5), TEXTS)
def test_a_listing_by_prefix_reaches_every_name_that_starts_with_it(names: list[str], prefix: str) -> None:
    store = MemoryStore()
    for name in names:
        create_generation(store, snapshot_stem(name), 0, {"write_id": name})
    for wanted in (prefix, *(name[: len(name) // 2] for name in names)):
        listed = {info.key for info in store.list(SNAPSHOTS) if may_start_with(info.key, wanted)}
        assert {generation_key(snapshot_stem(name), 0) for name in names if name.startswith(wanted)} <= listed


@given(ANY_TEXT, ANY_TEXT)
def test_names_have_one_natural_order(one: str, other: str) -> None:
    assert (natural_order(one) == natural_order(other)) == (one == other)
    assert natural_order(one) <= natural_order(other) or natural_order(other) <= natural_order(one)


@given(st.text("abc/-", max_size=5), st.integers(0, 10**12), st.integers(0, 10**12))
def test_numbers_count_by_value(start: str, low: int, high: int) -> None:
    assume(low < high)
    assert natural_order(f"{start}{low}") < natural_order(f"{start}{high}")
