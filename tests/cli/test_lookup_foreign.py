"""Files and folders of other tools, given where a store is meant: every verb says what they are and what to do."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import NotAStore
from tests.cli.every_verb import READING, WITH_TORCH, WRITING
from tests.cli.foreign_places import FILES, FOLDERS, write_notes
from tests.cli.runs import Cli, digest_tree
from tests.kit.thinning import thin

PLACES = FILES | FOLDERS
# A receipt is compared with files, without a store.
STORELESS = re.compile(r"init|copy|verify-.* --receipt ")
VERBS = [command for command in [*READING, *WITH_TORCH, *WRITING] if not STORELESS.match(command)]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A file or folder of another tool, and what it is."""
    write, what = PLACES[request.param]
    path = tmp_path / request.param
    write(path)
    return path, what


def verify_told(told: str, path: Path, what: str) -> None:
    assert told.startswith(f"{path} is {what}, not a store; "), told
    command = re.search(r"`(holdfast -s STORE put NAME [^`]+)`", told)
    assert command, told


@pytest.mark.parametrize("place", thin(PLACES, 4), indirect=True)
def test_every_verb_says_what_it_is_and_leaves_it_as_it_is(empty: Cli, place: tuple[Path, str]) -> None:
    path, what = place
    before = digest_tree(empty.folder)

    for command in VERBS:
        ran = empty.bare("-s", str(path), *shlex.split(command))
        assert (ran.code, ran.out) == (2, ""), command
        assert ran.err.count("\n") == 1, command
        verify_told(ran.err.removeprefix("holdfast: "), path, what)

    assert digest_tree(empty.folder) == before


def test_no_store_is_made_of_it(cli: Cli, place: tuple[Path, str]) -> None:
    path, what = place
    cli.ok("put", "snap", "data/config.json")
    before = digest_tree(cli.folder)

    for words in (["init", str(path)], ["-s", str(path), "init"], ["-s", "ckpts", "copy", "snap", "--to", str(path)]):
        ran = cli.bare(*words)
        assert (ran.code, ran.out) == (2, ""), words
        verify_told(ran.err.removeprefix("holdfast: "), path, what)

    assert digest_tree(cli.folder) == before


def test_the_library_says_so_when_it_is_opened(place: tuple[Path, str]) -> None:
    path, what = place
    for read_only in (False, True):
        with pytest.raises(NotAStore) as raised:
            holdfast.open(path, read_only=read_only)
        verify_told(str(raised.value), path, what)


def test_what_it_says_to_do_works(cli: Cli, place: tuple[Path, str]) -> None:
    path, _ = place
    told = cli.bare("-s", str(path), "ls").err
    commands = re.findall(r"`(holdfast -s STORE [^`]+)`", told)

    for number, command in enumerate(commands):
        words = command.replace("STORE", str(cli.store)).replace("NAME", f"name-{number}").split()[1:]
        assert cli.bare(*words).code == 0, command

    assert commands
    assert cli("check", "--read").code == 0


def test_a_folder_above_a_store_and_one_inside_it_name_the_store(cli: Cli) -> None:
    cli.ok("put", "snap", "data")
    above = cli.bare("-s", str(cli.folder), "ls")
    inside = cli.bare("-s", str(cli.store / "packs"), "ls")

    assert (above.code, inside.code) == (2, 2)
    assert above.err == f"holdfast: {cli.folder} is not a store, but ckpts in it is; use {cli.store}\n"
    assert (
        inside.err == f"holdfast: {cli.store}/packs is a part of the store {cli.store}, not a store; use {cli.store}\n"
    )


@pytest.mark.parametrize("verb", ["ls", "check", "doctor", "init"])
def test_any_other_folder_is_no_store_and_names_a_file_in_it(empty: Cli, verb: str) -> None:
    write_notes(empty.folder / "other")

    ran = empty.bare("-s", "other", verb)

    assert (ran.code, ran.out) == (2, "")
    assert "is not empty and has no config, so it is no store: 'notes.txt' is there" in ran.err


def test_a_pipe_is_not_waited_for(empty: Cli) -> None:
    os.mkfifo(empty.folder / "pipe")

    ran = empty.bare("-s", "pipe", "ls")

    assert ran.code == 2
    assert "pipe is neither a file nor a directory, not a store; give the path of a directory" in ran.err
