"""Completion in real shells: the script of each is loaded by that shell, and asked what it offers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import build_parser
from holdfast.cli.verbs.shell.scripts import SHELLS, render_script
from holdfast.cli.verbs.shell.words import iter_commands
from holdfast.objects.url import open_store
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.names.tags import set_tag
from holdfast.repo.write.writer import Request, save

CASES = [
    ("holdfast docto", ["doctor"]),
    ("holdfast cache pr", ["prune"]),
    ("holdfast ls --js", ["--json"]),
    ("holdfast -s {store} show run/s", ["run/step-1", "run/step-2"]),
    ("holdfast -s {store} show b", ["best"]),
    ("holdfast -s {store} diff run/step-1 run/step-2", ["run/step-2"]),
    ("holdfast --color al", ["always"]),
    ("holdfast completion z", ["zsh"]),
]
BASH = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# zsh completes only while a line is edited, so the two functions that offer words print them instead.
ZSH = """
_describe() {{ eval "print -rl -- \\"\\${{(@)${{2}}%%:*}}\\"" }}
compadd() {{ while [[ $1 != -- ]]; do shift; done; shift; print -rl -- "$@" }}
source {script}
words=({words})
CURRENT=$#words
_holdfast
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, the scripts of all shells, and a program `holdfast`."""
    folder = tmp_path_factory.mktemp("shells")
    repo = open_repository(open_store(str(folder / "ckpts")), create=True)
    for name in ("run/step-1", "run/step-2", "other"):
        save(repo, Request(name, [BytesSource("a", b"x")]))
    set_tag(repo.store, "best", read_snapshot(repo.store, "run/step-1"))
    commands = list(iter_commands(build_parser()))
    for shell in SHELLS:
        (folder / f"script.{shell}").write_text(render_script(shell, commands), encoding="utf-8")
    program = folder / "bin/holdfast"
    program.parent.mkdir()
    main = "import sys; from holdfast.cli.main import main; sys.exit(main())"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(main)} "$@"\n')
    program.chmod(0o755)
    return folder


def complete(shell: str, place: Path, line: str) -> list[str]:
    """Return what a shell offers for the last word of a line."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    script = place / f"script.{shell}"
    words = line.format(store=place / "ckpts")
    match shell:
        case "bash":
            program = ["bash", "--norc", "-c", BASH.format(script=script, words=words)]
        case "zsh":
            program = ["zsh", "-f", "-c", ZSH.format(script=script, words=words)]
        case _:
            program = ["fish", "-N", "-c", f"source {script}; complete -C {shlex.quote(words)}"]
    source = str(Path(holdfast.__file__).parents[1])
    variables = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "PYTHONPATH": source}
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=place, env=variables)
    assert done.stderr == ""
    last = words.rpartition(" ")[2]
    # fish adds a tab and the help text of each word.
    offered = [text.partition("\t")[0] for text in done.stdout.splitlines()]
    return sorted(text for text in offered if text.startswith(last))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "offered"), CASES, ids=[line for line, _ in CASES])
def test_a_shell_offers_verbs_options_choices_and_names(place: Path, shell: str, line: str, offered: list[str]) -> None:
    assert complete(shell, place, line) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_is_in_the_script(place: Path, shell: str) -> None:
    script = (place / f"script.{shell}").read_text(encoding="utf-8")

    for command in iter_commands(build_parser()):
        assert command.words in script
        for option in command.options:
            assert option.spellings[-1].lstrip("-") in script


def test_a_shell_without_a_store_offers_no_names(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bin", tmp_path / "bin")
    shutil.copy(place / "script.bash", tmp_path)

    assert complete("bash", tmp_path, "holdfast show r") == []


def test_a_name_with_a_space_is_quoted_for_bash(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bin", tmp_path / "bin")
    shutil.copy(place / "script.bash", tmp_path)
    repo = open_repository(open_store(str(tmp_path / "ckpts")), create=True)
    save(repo, Request("a name $(touch made)", [BytesSource("a", b"x")]))

    offered = complete("bash", tmp_path, "holdfast -s {store} show a")

    assert offered == ["a\\ name\\ \\$\\(touch\\ made\\)"]
    assert not (tmp_path / "made").exists()
