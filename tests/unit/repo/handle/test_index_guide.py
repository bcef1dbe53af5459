"""The guide: a fragment with a digest is always among those that it finds, and others seldom are."""

from __future__ import annotations

import random

import pytest

from holdfast.repo.handle.index import Guide

TOP = (1 << 32) - 1


def prefixes(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1 << 32) for _ in range(count)]


def test_an_empty_guide_finds_no_fragment() -> None:
    assert Guide(16).find(0) == Guide(16).find(TOP) == ()


def test_a_guide_finds_the_fragment_with_the_prefix() -> None:
    guide = Guide(1 << 16)
    guide.add("a", [0, 5 << 20])
    guide.add("b", [TOP])
    assert (guide.find(0), guide.find(5 << 20), guide.find(TOP)) == (("a",), ("a",), ("b",))
    assert guide.find(9 << 20) == ()


def test_it_leads_to_everybody_where_two_have_prefixes_in_one_range() -> None:
    guide = Guide(1 << 16)
    guide.add("a", [7])
    guide.add("b", [8])
    guide.add("c", [TOP])
    assert set(guide.find(7)) == set(guide.find(8)) >= {"a", "b"}
    assert guide.find(TOP) == ("c",)


def test_a_range_that_one_fragment_has_twice_finds_only_that_fragment() -> None:
    guide = Guide(1 << 16)
    guide.add("a", [7, 7, 8])
    assert guide.find(7) == ("a",)


def test_it_forgets_and_gives_the_place_to_the_next() -> None:
    guide = Guide(1 << 16)
    guide.add("a", [7])
    guide.forget("a")
    assert guide.find(7) == ()
    guide.add("b", [7])
    assert guide.find(7) == ("b",)


def test_to_forget_what_was_never_there_changes_nothing() -> None:
    guide = Guide(1 << 16)
    guide.add("a", [7])
    guide.forget("b")
    assert guide.find(7) == ("a",)


def test_a_single_range_leads_everywhere() -> None:
    guide = Guide(1)
    guide.add("a", [0])
    guide.add("b", [TOP])
    assert set(guide.find(1 << 31)) == {"a", "b"}


@pytest.mark.parametrize("num_slots", [1, 64, 1 << 16])
def test_no_fragment_with_the_prefix_is_missed_however_fragments_change(num_slots: int) -> None:
    rng = random.Random(num_slots)
    guide = Guide(num_slots)
    held: dict[str, list[int]] = {}
    for number in range(600):
        if held and rng.random() < 0.4:
            gone = rng.choice(sorted(held))
            guide.forget(gone)
            del held[gone]
        held[f"f{number}"] = prefixes(5, seed=number)
        guide.add(f"f{number}", held[f"f{number}"])
    assert len(held) > 300
    assert all(key in guide.find(prefix) for key, found in held.items() for prefix in found)
    assert {key for prefix in prefixes(100, seed=99_999) for key in guide.find(prefix)} <= held.keys()


def test_merging_for_long_does_not_make_it_lead_everywhere() -> None:
    guide = Guide(1 << 20)
    for number in range(2000):
        for part in range(4):
            guide.add(f"{number}.{part}", prefixes(2, seed=4 * number + part))
        for part in range(4):
            guide.forget(f"{number}.{part}")
        guide.add(f"{number}", [prefix for part in range(4) for prefix in prefixes(2, seed=4 * number + part)])
        guide.forget(f"{number - 50}")
    assert sum(len(guide.find(prefix)) > 1 for prefix in prefixes(10_000, seed=99_999)) < 100
