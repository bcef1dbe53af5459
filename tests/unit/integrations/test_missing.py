"""A framework that is not installed: the error says what to install."""

from __future__ import annotations

import pytest

from holdfast.integrations.missing import RequiredLibrary


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    with (
        pytest.raises(ImportError, match=r"needs Some Library.*pip install 'holdfast\[some\]'"),
        RequiredLibrary("Some Library", "some"),
    ):
        import no_such_library_at_all  # type: ignore[import-not-found]  # noqa: F401


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), RequiredLibrary("Some Library", "some"):
        raise ZeroDivisionError
