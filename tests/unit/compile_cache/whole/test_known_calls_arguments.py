"""Arguments are equal if they differ only in the values of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.compile_cache.whole.known_calls import Arguments

X, Y = torch.zeros(2), torch.ones(2)


def test_tensors_are_listed_in_order() -> None:
    known = Arguments((X, [Y]), {"a": {"b": X}})

    found = known.match((Y, [X]), {"a": {"b": Y}})

    assert found is not None
    assert [each is Y for each in found] == [True, False, True]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, 0.0), {"a": "b"}),
        ((X, -0.0), {"a": "c"}),
        ((X, -0.0), {}),
        ((X, -0.0), {"b": "b"}),
        ((X, 0), {"a": "b"}),
        ((X, False), {"a": "b"}),
        (([X], -0.0), {"a": "b"}),
        ((X, -0.0, None), {"a": "b"}),
    ],
)
def test_other_values_do_not_match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert Arguments((X, -0.0), {"a": "b"}).match(args, kwargs) is None


def test_the_same_tensor_in_two_places_is_not_two_tensors() -> None:
    assert Arguments((X, Y), {}).match((X, X), {}) is None
    assert Arguments((X, X), {}).match((X, Y), {}) is None
