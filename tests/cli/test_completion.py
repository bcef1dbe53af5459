"""The verb `completion`: a script for each shell."""

from __future__ import annotations

import pytest

from holdfast.cli.verbs.completion import SHELLS
from tests.cli.runs import Cli


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_without_a_store(empty: Cli, shell: str) -> None:
    ran = empty.bare("completion", shell)

    assert (ran.code, ran.err) == (0, "")
    assert "holdfast" in ran.out
    assert empty.bare("completion", shell, "--json").json == {"shell": shell, "script": ran.out}


def test_a_shell_must_be_named(empty: Cli) -> None:
    code, text = empty.end("completion")

    assert code == 2
    assert "the following arguments are required: SHELL" in text
