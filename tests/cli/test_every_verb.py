"""Every verb with every option: whole sentences, valid JSON, an answer without torch, and no write unless asked for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.frozen import list_cli_options
from tests.cli.every_verb import IMPORTING, PLACING, READING, STORELESS, WITH_TORCH, WRITING, make_files, make_store
from tests.cli.runs import Cli, Ran, digest_tree

ALL = [*STORELESS, *READING, *WITH_TORCH, *IMPORTING, *WRITING]

ONE_BY_ONE = """
import contextlib, io, json, shlex, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = sys.argv[1].split(",")
sys.meta_path.insert(0, Blocked())
from holdfast.cli.main import main
for command in sys.stdin.read().splitlines():
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command))
    out.flush()
    print(json.dumps([command, code, out.buffer.getvalue().decode(), err.getvalue()]), file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that every command finds something in."""
    path = tmp_path_factory.mktemp("made") / "ckpts"
    make_store(path)
    return path


@pytest.fixture
def filled(empty: Cli, made: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line on a copy of it, which the environment names."""
    shutil.copytree(made, empty.store)
    make_files(empty.folder)
    monkeypatch.setenv("HOLDFAST_STORE", str(empty.store))
    return empty


def find_cut_lines(printed: str) -> list[str]:
    """Return the lines on standard error that are not whole sentences, or not ours."""
    lines = printed.splitlines()
    # Of each line, whether an indented one follows.
    follows = [*(line.startswith("holdfast:   ") for line in lines[1:]), False]
    return [
        line
        for line, has_more in zip(lines, follows, strict=False)
        if not line.startswith("holdfast: ")
        or re.search(r"[,;(]$|^holdfast: *$", line)
        or line.endswith(":") != has_more
        if not (line.startswith("holdfast:   ") and not line.endswith((":", ",", ";")))
    ]


@pytest.mark.parametrize(
    ("printed", "is_whole"),
    [
        ("holdfast: 0.10 s in total; by stage:\nholdfast:   read  0.01 s\n", True),
        ("holdfast: 0.10 s in total; by stage:\n", False),
        ("holdfast: nothing was deleted,\n", False),
        ("Traceback\n", False),
    ],
)
def test_cut_lines_are_found(printed: str, is_whole: bool) -> None:
    assert (find_cut_lines(printed) == []) is is_whole


def test_every_option_of_every_verb_is_in_some_command() -> None:
    commands = [f"holdfast {command}" for command in ALL]
    lines = [line.partition(": ") for line in list_cli_options() if line.startswith("holdfast ")]

    missing = [
        f"{verb} {option}"
        for verb, _, option in lines
        if option.startswith("-")
        and not any(
            command.startswith(f"{verb} ") and set(re.findall(r"--?[a-z-]+", option)) & set(command.split())
            for command in commands
        )
    ]
    verbs = {verb for verb, _, option in lines if not option and verb not in ("holdfast cache", "holdfast run")}
    missing += [verb for verb in verbs if not any(f"{command} ".startswith(f"{verb} ") for command in commands)]
    assert missing == []


def verify(command: str, ran: Ran) -> None:
    assert ran.code in (0, 1), (command, ran)
    assert find_cut_lines(ran.err) == [], command
    if "--json" in command:
        # A verb that goes on printing has a document on each line.
        for document in ran.out.splitlines() if command.startswith("follow ") else [ran.out]:
            json.loads(document)


@pytest.mark.parametrize("place", ["packs/new", "new", "config", "config/00000000", "alias", "packs/../new"])
def test_no_command_writes_to_a_place_inside_the_store(filled: Cli, place: str) -> None:
    (filled.folder / "alias").symlink_to(filled.store / "manifests")
    inside = str(filled.folder / "alias" if place == "alias" else filled.store / place)
    before = digest_tree(filled.store)

    for command in PLACING:
        ran = filled.bare(*(inside if word == "PLACE" else word for word in shlex.split(command)))

        assert ran.code == 2, (command, ran)
        assert "is inside the store" in ran.err, (command, ran)
        assert digest_tree(filled.store) == before, command


@pytest.mark.parametrize("before", [[], ["--profile"]], ids=["plain", "--profile"])
def test_every_command_prints_whole_sentences_and_valid_json(filled: Cli, before: list[str]) -> None:
    for command in ALL:
        verify(command, filled.bare(*before, *shlex.split(command)))


def test_profile_says_so_where_no_stage_took_time(filled: Cli) -> None:
    ran = filled.bare("--profile", "ls")

    assert re.fullmatch(r"holdfast: \d+\.\d\d s in total; no chunks were read or written\n", ran.err)


def read_times(top: Path) -> dict[str, int]:
    """Return when each file and directory was last written: a file that came and went leaves its directory's time."""
    return {str(path): path.lstat().st_mtime_ns for path in [top, *top.rglob("*")]}


def test_reading_never_writes_not_even_for_a_moment(filled: Cli) -> None:
    for command in [*READING, *WITH_TORCH]:
        before = read_times(filled.store)
        filled(*shlex.split(command))
        assert read_times(filled.store) == before, command


def run_without(packages: str, store: Path, folder: Path) -> dict[str, Ran]:
    """Run all commands in a process in which these packages cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, packages],
        input="\n".join(ALL),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ | {"HOLDFAST_STORE": str(store)},
    )
    return {command: Ran(code, out, err) for command, code, out, err in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("packages", ["torch", pytest.param("torch,numpy", marks=pytest.mark.slow)])
def test_without_torch_a_verb_answers_or_says_that_it_needs_it(filled: Cli, packages: str) -> None:
    found = run_without(packages, filled.store, filled.folder)

    assert list(found) == ALL
    for command in [*STORELESS, *READING, *WRITING]:
        verify(command, found[command])
    for command in [*WITH_TORCH, *IMPORTING]:
        assert (found[command].code, found[command].out) == (2, ""), command
        assert re.fullmatch(
            r"holdfast: this needs (torch|numpy), which is not installed; install it with `pip install \1`\n",
            found[command].err,
        ), command
