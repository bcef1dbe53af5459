"""All names of the installed torch that may change compiled code were reviewed for the compile cache.

A test fails with a version of torch that adds a name. `tests/kit/torch_review.py` says what to do then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from tests.kit import torch_review as review


def list_unknown(found: Collection[str], reviewed: Collection[str]) -> list[str]:
    """Return the names that nobody has reviewed; all of them if nothing was found."""
    return sorted(set(found) - set(reviewed)) if found else ["nothing was found: torch has another structure"]


@pytest.mark.parametrize(
    ("find", "reviewed"),
    [
        (review.find_config_modules, review.CONFIG_MODULES),
        (review.find_dynamo_settings, review.DYNAMO_SETTINGS),
        (review.find_compiler_settings, review.COMPILER_SETTINGS),
        (review.find_trace_settings, review.TRACE_SETTINGS),
        (review.find_getters, review.GETTERS),
        (review.find_global_state, review.GLOBAL_STATE),
        (review.find_metadata, review.METADATA),
        (review.find_operator_attributes, review.OPERATOR_ATTRIBUTES),
        (review.find_registry_attributes, review.REGISTRY_ATTRIBUTES),
        (review.find_registrations, review.REGISTRATIONS),
        (review.find_torchs_keys, review.TORCHS_KEYS),
    ],
    ids=lambda value: value.__name__.removeprefix("find_") if callable(value) else "",
)
def test_every_name_was_reviewed(find: Callable[[], set[str]], reviewed: Collection[str]) -> None:
    assert list_unknown(find(), reviewed) == []


def test_a_name_that_nobody_has_reviewed_is_reported() -> None:
    assert list_unknown({"a", "b"}, {"a", "c"}) == ["b"]
    assert len(list_unknown([], {"a"})) == 1
