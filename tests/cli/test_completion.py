"""The verb `completion`: a script for each shell, and the names that the scripts ask for."""

from __future__ import annotations

import pytest

from holdfast.cli.verbs.shell.scripts import SHELLS
from tests.cli.runs import Cli


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_without_a_store(empty: Cli, shell: str) -> None:
    ran = empty.bare("completion", shell)

    assert (ran.code, ran.err) == (0, "")
    assert "holdfast" in ran.out
    assert empty.bare("completion", shell, "--json").json == {"shell": shell, "script": ran.out}


def test_names_that_begin_with_a_text_are_listed_in_natural_order(filled: Cli) -> None:
    assert filled("completion", "--names", "run/").out == "run/step-99\nrun/step-100\n"
    assert filled("completion", "--names", "b").out == "best\n"
    assert filled("completion", "--names", "", "--json").json == {
        "names": ["best", "other", "run/step-99", "run/step-100"]
    }


def test_without_a_store_there_are_no_names_and_no_error(empty: Cli) -> None:
    ran = empty.bare("completion", "--names", "")

    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_a_shell_must_be_named(empty: Cli) -> None:
    ran = empty.bare("completion")

    assert (ran.code, ran.err) == (2, "holdfast: completion needs the name of a shell: bash, zsh, fish\n")
