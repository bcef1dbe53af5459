"""`holdfast help VERB` prints the page of --help, and needs no store."""

from __future__ import annotations

import pytest

from docs.generate import iter_verbs
from holdfast.cli.main import build_parser
from tests.cli.runs import Cli


@pytest.mark.parametrize("words", [words for words, _ in iter_verbs(build_parser())])
def test_help_prints_the_page_of_every_verb_and_action(empty: Cli, words: str) -> None:
    verb = words.split()[1:]
    _, page = empty.end(*verb, "--help") if verb else (0, build_parser().format_help())

    ran = empty.bare("help", *verb)

    assert (ran.code, ran.err) == (0, "")
    assert ran.out == page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shw"], "unknown verb 'shw': did you mean 'show'?"),
        (["cache", "lsx"], "unknown action of 'cache' 'lsx': did you mean 'ls'?"),
        (["ls", "more"], "unknown action of 'ls' 'more': it has none"),
        (["zzzz"], "unknown verb 'zzzz': there are init, ls, "),
    ],
)
def test_an_unknown_verb_is_answered_with_the_closest(empty: Cli, words: list[str], said: str) -> None:
    ran = empty.bare("help", *words)

    assert ran.code == 2
    assert ran.err.startswith(f"holdfast: {said}")


def test_help_as_json_describes_verbs_and_options(empty: Cli) -> None:
    found = {command["command"]: command for command in empty.bare("help", "cache", "--json").json}

    assert set(found) == {f"holdfast cache{each}" for each in ("", " ls", " show", " stat", " prune", " clear", " why")}
    assert found["holdfast cache prune"]["summary"] == "delete graphs that are over a limit"
    options = {option["spellings"][0]: option["takes_value"] for option in found["holdfast cache prune"]["options"]}
    assert options["--max-size"] is True
    assert options["--yes"] is False
