"""The journal reports which leaves a load has written, also those that share memory, in any exception."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from holdfast.errors import StoreError
from holdfast.snapshot.into.plan import AddressRange, Journal, Overwritten, WrittenLeaf


def leaf(key: str, *spans: tuple[int, int], is_tensor: bool = True) -> WrittenLeaf:
    return WrittenLeaf(key, key, tuple(AddressRange("cpu", *span) for span in spans), is_tensor=is_tensor)


def write(journal: Journal, *keys: str) -> None:
    with journal.writing(keys):
        pass


def test_a_leaf_is_whole_when_all_its_parts_have_ended() -> None:
    journal = Journal()
    journal.expect("a", 2)
    journal.begin("a")
    journal.end("a")
    assert journal.find_overwritten([leaf("a"), leaf("b")]) == Overwritten((), ("a",))

    journal.end("a")

    assert journal.find_overwritten([leaf("a"), leaf("b")]) == Overwritten(("a",), ())


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ([leaf("a", (0, 10)), leaf("tie", (0, 10))], Overwritten(("a", "tie"), ())),
        ([leaf("a", (0, 10)), leaf("inside", (2, 4))], Overwritten(("a",), ("inside",))),
        ([leaf("a", (0, 10)), leaf("beside", (10, 20))], Overwritten(("a",), ())),
        ([leaf("a", (0, 10)), leaf("owner", (0, 10), is_tensor=False)], Overwritten(("a",), ("owner",))),
        ([leaf("a", (0, 10)), leaf("half", (5, 15))], Overwritten(("half",), ("a",))),
    ],
)
def test_memory_that_leaves_share_counts_for_all_of_them(leaves: list[WrittenLeaf], expected: Overwritten) -> None:
    journal = Journal()
    written = expected.whole[0]
    write(journal, written)

    assert journal.find_overwritten(leaves) == expected


def test_a_whole_leaf_is_a_mixture_again_if_a_write_to_its_memory_has_begun() -> None:
    journal = Journal()
    write(journal, "a")
    journal.expect("b")
    journal.begin("b")

    assert journal.find_overwritten([leaf("a", (0, 10)), leaf("b", (5, 15))]) == Overwritten((), ("a", "b"))


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute."""

    text: str


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), Frozen("x"), StoreError("it failed.")])
def test_any_exception_says_what_was_overwritten_and_stays_what_it_is(error: BaseException) -> None:
    journal = Journal()
    journal.list_leaves = lambda: [leaf("a"), leaf("b")]
    write(journal, "a")

    for _ in range(2):  # a second report changes nothing
        journal.report(error)

    assert vars(error)["overwritten"] == ("a",)
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    sentence = "Before this error, the load had written to the target. New values: a. Everything else is unchanged"
    assert text.count(sentence) == 1
    assert not isinstance(error, StoreError) or str(error) == f"it failed. {sentence}"


def test_an_error_before_any_write_is_left_alone() -> None:
    with pytest.raises(KeyError) as caught, Journal().reporting():
        raise KeyError("x")

    assert not vars(caught.value)
