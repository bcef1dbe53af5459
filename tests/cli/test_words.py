"""What can be typed after each verb is read from the parser, so that new verbs are completed without more code."""

from __future__ import annotations

from argparse import ArgumentParser

from holdfast.cli.main import build_parser
from holdfast.cli.verbs.shell.words import Command, Value, iter_commands


def read_commands() -> dict[str, Command]:
    return {command.words: command for command in iter_commands(build_parser())}


def test_every_verb_and_action_is_a_command() -> None:
    found = read_commands()

    assert {"", "ls", "cache", "cache prune", "run diff", "completion"} <= set(found)
    assert ("ls", "list snapshots") in found[""].verbs
    assert "prune" in dict(found["cache"].verbs)


def test_a_new_verb_is_found_with_its_options_and_arguments() -> None:
    parser = ArgumentParser(prog="holdfast")
    verb = parser.add_subparsers().add_parser("fresh", help="do something new")
    verb.add_argument("name", metavar="NAME")
    verb.add_argument("--mode", choices=["fast", "slow"], help="how")

    _, found = iter_commands(parser)

    assert (found.words, found.summary, found.value) == ("fresh", "do something new", Value("names"))
    assert found.options[-1].spellings == ("--mode",)
    assert found.options[-1].value == Value("choices", ("fast", "slow"))


def test_arguments_are_names_files_or_neither() -> None:
    found = read_commands()

    assert found["show"].value.kind == "names"
    assert found["put"].value.kind == "names"
    assert found["init"].value.kind == "files"
    assert found["run diff"].value.kind == "nothing"
    assert found["gc"].value.kind == "nothing"


def test_a_hidden_option_is_not_offered() -> None:
    spelled = [name for option in read_commands()["completion"].options for name in option.spellings]

    assert "--names" not in spelled
