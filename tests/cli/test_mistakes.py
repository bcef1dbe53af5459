"""Mistakes that people make at a terminal: each is answered with what was meant, or what to type instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import BadName
from tests.cli.runs import Cli
from tests.kit.recordings import Recording, write_recorded

PROGRAM = "import sys; from holdfast.cli.main import main; sys.exit(main())"


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with two snapshots."""
    cli.ok("put", "run1/step-1", "data/config.json")
    cli.ok("put", "run1/step-2", "data/sub")
    return cli


def test_a_store_given_as_an_argument_is_recognised(saved: Cli) -> None:
    ran = saved.bare("ls", "ckpts")

    assert ran.code == 2
    assert ran.err.endswith("; ckpts is a store, so type `holdfast -s ckpts ls`\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["put", "data/config.json", "run9"], "no file 'run9'; the name comes first: `holdfast put NAME PATH ...`"),
        (
            ["get", "out", "run1/step-1"],
            "no snapshot or tag 'out' in {store}; 'run1/step-1' is one: the name comes first",
        ),
        (
            ["tag", "run1/step-1", "best"],
            "no snapshot or tag 'best' in {store}; 'run1/step-1' is one: the tag comes first",
        ),
        (["show", "run1"], "no snapshot or tag 'run1' in {store}; 2 names begin with 'run1/', see `holdfast ls run1/`"),
        (
            ["rm", "run1/"],
            "'run1/' is refused: it begins or ends with '/', or has '//' in it",
        ),
        (["put", "a/../b", "data"], "'a/../b' is refused: it has '.' or '..' between slashes"),
        (["prune"], "give at least one rule: --keep-last, --keep-every, --keep-within or --keep-best"),
    ],
    ids=" ".join,
)
def test_arguments_in_the_wrong_order_and_names_that_are_none(saved: Cli, words: list[str], said: str) -> None:
    ran = saved(*words)

    assert (ran.code, ran.out) == (2, "")
    assert said.format(store=saved.store) in ran.err
    assert ran.err.count("\n") == 1


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadName, match=r"^a snapshot name is a text such as 'step-3', not the int 3$"):
        holdfast.open("memory://").save(3, {})  # type: ignore[arg-type]  # the mistake


def test_a_lost_manifest_is_named_with_what_to_do(saved: Cli) -> None:
    for path in (saved.store / "manifests").iterdir():
        path.unlink()

    ran = saved("show", "run1/step-1")

    assert (ran.code, ran.out) == (2, "")
    assert "no object manifests/" in ran.err
    assert ran.err.endswith(
        "; the snapshot was deleted just now, or its manifest is lost: `holdfast check` reports which\n"
    )


@pytest.mark.parametrize("words", [["du"], ["gc"]], ids=" ".join)
def test_damage_points_to_check(saved: Cli, words: list[str]) -> None:
    for path in (saved.store / "snapshots").rglob("*@*"):
        path.write_bytes(path.read_bytes()[:-5] + b"~~~~\n")

    ran = saved(*words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("; run `holdfast check`\n")


def test_rm_says_what_would_be_freed(saved: Cli) -> None:
    assert "repeat with --yes to delete 1 snapshot and free " in saved.ok("rm", "run1/step-1")


def run_closed(cli: Cli, *words: str, closed: str) -> subprocess.CompletedProcess[str]:
    """Run a command with standard output or standard error closed, as some daemons run programs."""
    command = f'exec "$@" {closed}'
    return subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-c", PROGRAM, "-s", str(cli.store), *words],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_nothing_but_what_is_seen(saved: Cli, closed: str) -> None:
    ran = run_closed(saved, "put", "new", "data/config.json", closed=closed)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("saved new" if closed == "2>&-" else "")

    missing = run_closed(saved, "show", "nope", closed=closed)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert saved.ok("cat", "new", "config.json") == '{"lr": 1}\n'


def test_every_page_of_help_is_printed_where_there_is_nothing_to_print_to(saved: Cli, tmp_path: Path) -> None:
    assert run_closed(saved, "ls", "--help", closed=">&-").returncode == 0


def test_run_events_that_fit_nothing_and_a_report_without_a_directory(empty: Cli) -> None:
    write_recorded(holdfast.open(empty.store).repository, Recording("good"))

    events = empty("run", "events", "good", "zz*")
    report = empty("run", "report", "good", "good", "nowhere/page.html")

    assert (events.code, events.out) == (0, "")
    assert events.err == "holdfast: no tensor of 'good' matches; `holdfast run events good` lists them all\n"
    assert (report.code, report.out) == (2, "")
    assert report.err == (
        "holdfast: nowhere/page.html cannot be written:"
        f" there is no directory {empty.folder}/nowhere; create it first\n"
    )
