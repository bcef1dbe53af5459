"""A function in the place of another one counts as a hook only if it is called."""

from __future__ import annotations

import pytest

from tests.kit.hooking import forbidden, hooked


class Owner:
    """Has a method to replace."""

    def act(self, value: int) -> int:
        return value


def test_the_hook_gets_the_call_and_the_attribute_comes_back() -> None:
    owner = Owner()

    with hooked(Owner, "act", lambda self, value: -value):
        assert owner.act(3) == -3

    assert owner.act(3) == 3


def test_a_hook_that_is_not_called_fails() -> None:
    with pytest.raises(AssertionError, match="nothing has called 'act'"), hooked(Owner, "act", lambda self, value: 0):
        pass


def test_the_error_of_a_test_is_not_hidden_by_a_hook_that_is_not_called() -> None:
    with pytest.raises(ValueError, match="on cue"), hooked(Owner, "act", lambda self, value: 0):
        raise ValueError("on cue")


def test_what_is_forbidden_fails_even_if_the_error_is_caught() -> None:
    with pytest.raises(AssertionError, match="was called"), forbidden(Owner, "act"):
        with pytest.raises(AssertionError, match="must not be called"):
            Owner().act(1)

    with forbidden(Owner, "act"):
        pass
