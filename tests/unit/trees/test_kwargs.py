"""Arguments are packed and unpacked unchanged, and changed ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mismatch
from holdfast.trees.apply import pack_kwargs, unpack_kwargs


@given(st.lists(st.integers()), st.dictionaries(st.text(), st.integers()))
def test_unpacking_gives_back_what_was_packed(args: list[int], kwargs: dict[str, int]) -> None:
    flat, keys = pack_kwargs(*args, **kwargs)

    unpacked_args, unpacked_kwargs = unpack_kwargs(flat, keys)

    assert unpacked_args == tuple(args)
    assert list(unpacked_kwargs.items()) == list(kwargs.items())


def test_values_by_keyword_come_last_and_in_order() -> None:
    assert pack_kwargs(1, 2, z=3, a=4) == ((1, 2, 3, 4), ("z", "a"))


@pytest.mark.parametrize("name", ["args", "kwargs", "flat", "keys", "self"])
def test_no_keyword_is_reserved(name: str) -> None:
    assert unpack_kwargs(*pack_kwargs(**{name: 1})) == ((), {name: 1})


def test_values_may_come_as_a_list() -> None:
    assert unpack_kwargs([1, 2], ["a"]) == ((1,), {"a": 2})


def test_more_keywords_than_values_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"^2 keywords for 1 values: pass both results of pack_kwargs") as caught:
        unpack_kwargs((1,), ("a", "b"))
    assert caught.value.problems == ("no value for keyword 'a'",)


def test_a_keyword_that_is_there_twice_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"^keyword 'a' occurs twice: pass both results of pack_kwargs") as caught:
        unpack_kwargs((1, 2, 3), ("a", "b", "a"))
    assert caught.value.problems == ("keyword 'a' occurs twice",)
