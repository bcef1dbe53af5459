"""The verb `bisect`: what the command gets, what its exit code means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import Cli, digest_tree


@pytest.fixture
def series(cli: Cli) -> Cli:
    """Ten steps of a run, saved in another order."""
    for step in (3, 1, 2, 10, 9, 8, 7, 6, 5, 4):
        cli.ok("put", f"run/step-{step}", "data/config.json", "--meta", f"n={step}")
    return cli


def fails_from(step: int, *, before: str = "") -> list[str]:
    return ["sh", "-c", f'{before} test "${{HOLDFAST_SNAPSHOT#run/step-}}" -lt {step}']


def test_bisect_finds_the_first_that_fails(series: Cli) -> None:
    before = digest_tree(series.store)

    out = series.ok("bisect", "run/", "--", *fails_from(7))

    assert out == (
        "bisecting 10 snapshots in the order of their steps: about 6 tests\n"
        "run/step-1: good (exit code 0)\n"
        "run/step-10: bad (exit code 1)\n"
        "run/step-5: good (exit code 0)\n"
        "run/step-7: bad (exit code 1)\n"
        "run/step-6: good (exit code 0)\n"
        "first bad: run/step-7\n"
        "last good: run/step-6\n"
        "tested 5 of 10 snapshots, skipped 0\n"
    )
    assert digest_tree(series.store) == before


def test_bisect_as_json(series: Cli) -> None:
    found = series("bisect", "run/step-*", "--where", "step <= 8", "--json", "--", *fails_from(3)).json

    assert (found["first_bad"], found["last_good"], found["candidates"]) == ("run/step-3", "run/step-2", ["run/step-3"])
    assert (found["snapshots"], found["order"], found["skipped"]) == (8, "step", [])
    assert found["tried"][:2] == ["run/step-1", "run/step-8"]


def test_a_skipped_snapshot_may_be_the_first_bad_one(series: Cli) -> None:
    skip = 'case "$HOLDFAST_SNAPSHOT" in *-6|*-7) exit 125;; esac;'

    out = series.ok("bisect", "run/", "--", *fails_from(7, before=skip))

    assert "run/step-6: skipped (exit code 125)" in out
    assert "first bad: run/step-8, or one that was skipped before it: run/step-6, run/step-7\n" in out
    assert "last good: run/step-5\n" in out


def test_the_command_gets_the_name_and_the_store(series: Cli, tmp_path: Path) -> None:
    script = 'echo "$HOLDFAST_STORE $HOLDFAST_SNAPSHOT $1 $2 $3" >> seen; test $1 = run/step-1'

    series.ok("bisect", "run/", "--", "sh", "-c", script, "x", "{}", "--name={name}", "{other}")

    first = (tmp_path / "seen").read_text().splitlines()[0]
    assert first == f"{series.store} run/step-1 run/step-1 --name=run/step-1 {{other}}"


def test_the_command_keeps_dashes_of_its_own(series: Cli, tmp_path: Path) -> None:
    script = 'echo "$@" > seen; test $2 = run/step-1'

    series.ok("bisect", "run/", "--", "sh", "-c", script, "x", "--", "{}", "--sort", "-y", "--json")

    assert (tmp_path / "seen").read_text() == "-- run/step-2 --sort -y --json\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["false"], "'run/step-1', the first of the series, fails already; begin with an earlier one"),
        (["true"], "'run/step-10', the last of the series, passes, so no snapshot is the first that fails"),
        (["sh", "-c", "exit 125"], "the test skipped every snapshot of the series, so there is no result"),
        (["sh", "-c", "exit 128"], "the command ended with exit code 128 for 'run/step-1', which ends the search"),
        (["sh", "-c", "kill -9 $$"], "the command was killed by signal 9 for 'run/step-1', which ends the search"),
        (["no-such-command"], "the command 'no-such-command' cannot be run: No such file or directory"),
        (["a\0b"], "cannot be run: embedded null byte"),
    ],
)
def test_what_cannot_be_bisected_is_one_sentence(series: Cli, command: list[str], reason: str) -> None:
    ran = series("bisect", "run/", "--json", "--", *command)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["none/", "--", "true"], "no snapshot begins with 'none/', so there is nothing to bisect"),
        (["run/step-9", "--", "true"], "'run/step-9' is the only snapshot here; a series to bisect has at least two"),
        (["run/", "--where", "n <", "--", "true"], "expected a field or a value"),
    ],
)
def test_a_series_that_is_none_is_refused_before_a_test(series: Cli, words: list[str], reason: str) -> None:
    ran = series("bisect", *words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err


@pytest.mark.parametrize("words", [["run/"], ["run/", "--"]])
def test_without_a_command_one_is_asked_for(series: Cli, words: list[str]) -> None:
    ran = series("bisect", *words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "holdfast: bisect needs a command after two dashes: holdfast bisect PREFIX -- COMMAND\n"


def test_two_dashes_of_another_verb_are_no_command(series: Cli) -> None:
    series.ok("put", "--", "-bisect", "data/config.json")

    assert series.ok("show", "--", "-bisect") == series.ok("show", "-b*".replace("-", "[-]"))
