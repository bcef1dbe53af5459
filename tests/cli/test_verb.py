"""Help pages, and words that the parser does not know, which are answered with what was meant."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from holdfast.cli.verb import add_verb, document, join_descending, split_command
from tests.cli.runs import Cli


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with two snapshots."""
    cli.ok("put", "run1/step-1", "data/config.json")
    cli.ok("put", "run1/step-2", "data/sub")
    return cli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lst"], "error: unknown verb 'lst': did you mean 'ls'?"),
        (["shwo"], "error: unknown verb 'shwo': did you mean 'show'?"),
        (["cache", "lst"], "error: unknown action 'lst': did you mean 'ls'?"),
        (["--color", "alwys", "ls"], "error: argument --color: invalid choice 'alwys': did you mean 'always'?"),
        (["ls", "-s", "ckpts"], "unrecognized arguments: -s (write it before the verb: holdfast -s STORE VERB)"),
        (["ls", "--profile"], "unrecognized arguments: --profile (write it before the verb: holdfast --profile VERB)"),
        (["ls", "--jsn"], "unrecognized arguments: --jsn (did you mean '--json'?)"),
        (["ls", "--zzzzz"], "unrecognized arguments: --zzzzz"),
    ],
)
def test_a_word_out_of_place_is_explained(
    saved: Cli, capsysbinary: pytest.CaptureFixture[bytes], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        saved.bare(*words)

    assert ended.value.code == 2
    assert capsysbinary.readouterr().err.decode().endswith(f"{said}\n")


def test_a_choice_that_is_like_none_lists_them_all(saved: Cli, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(SystemExit):
        saved.bare("zzzzzz")

    err = capsysbinary.readouterr().err.decode()
    assert "unknown verb 'zzzzzz': choose from " in err
    assert "doctor" in err


def test_a_help_page_has_the_summary_then_the_text_and_examples_at_the_end() -> None:
    verbs = ArgumentParser(prog="holdfast").add_subparsers()
    parser = add_verb(verbs, "ls", "list snapshots")

    document(parser, "In natural order.", examples=["holdfast ls", "holdfast ls run1/"])

    text = parser.format_help()
    assert "\nList snapshots.\n\nIn natural order.\n" in text
    assert text.endswith("\nExample:\n\n    holdfast ls\n    holdfast ls run1/\n")


def test_a_descending_sort_key_is_joined_to_its_option() -> None:
    assert join_descending(["ls", "--sort", "-loss", "-l"]) == ["ls", "--sort=-loss", "-l"]
    assert join_descending(["ls", "--sort", "loss", "-l"]) == ["ls", "--sort", "loss", "-l"]
    assert join_descending(["ls", "--sort", "--json"]) == ["ls", "--sort", "--json"]
    assert join_descending(["show", "--", "--sort", "-x"]) == ["show", "--", "--sort", "-x"]


def test_a_command_begins_after_the_first_two_dashes() -> None:
    assert split_command(["-s", "x", "bisect", "run/", "--", "a", "--", "b"], "bisect") == (
        ["-s", "x", "bisect", "run/"],
        ["a", "--", "b"],
    )
    assert split_command(["bisect", "run/"], "bisect") == (["bisect", "run/"], [])
    assert split_command(["show", "--", "bisect"], "bisect") == (["show", "--", "bisect"], [])
