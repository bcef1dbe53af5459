"""Completion in real shells: each loads its script, and is asked what it offers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.verbs.completion import SHELLS
from holdfast.objects.url import open_store
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from holdfast.repo.write.writer import Request, save
from tests.kit.thinning import thin

CASES = [
    ("holdfast docto", ["doctor"]),
    ("holdfast cache pr", ["prune"]),
    ("holdfast ls --js", ["--json"]),
    ("holdfast -s {store} show run/s", ["run/step-1", "run/step-2"]),
    ("holdfast -s {store} show b", ["best"]),
    ("holdfast -s {store} diff run/step-1 run/step-2", ["run/step-2"]),
    ("holdfast --color al", ["always"]),
    ("holdfast completion z", ["zsh"]),
    ("holdfast -s {store} run events r", []),
    ("holdfast init ckp", ["ckpts/"]),
]
BASH = """
source <(holdfast completion bash)
COMP_LINE={line}
COMP_POINT=${{#COMP_LINE}}
_python_argcomplete holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# zsh completes only while a line is edited, so the function that offers words prints them instead.
ZSH = """
compdef() {{ }}
_describe() {{ print -rl -- "${{(@)${{(P@)2}}%%:*}}" }}
source <(holdfast completion zsh)
BUFFER={line}
CURSOR=$#BUFFER
words=(holdfast)
_python_argcomplete
"""
FISH = """
holdfast completion fish | source
complete -C {line}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a program `holdfast`."""
    folder = tmp_path_factory.mktemp("shells")
    repo = open_repository(open_store(str(folder / "ckpts")), create=True)
    for name in ("run/step-1", "run/step-2", "other"):
        save(repo, Request(name, [BytesSource("a", b"x")]))
    set_tag(repo.store, "best", read_snapshot(repo.store, "run/step-1"))
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
    words = line.format(store=place / "ckpts")
    programs = {
        "bash": ["bash", "--norc", "-c", BASH],
        "zsh": ["zsh", "-f", "-c", ZSH],
        "fish": ["fish", "-N", "-c", FISH],
    }
    *program, script = programs[shell]
    source = str(Path(holdfast.__file__).parents[1])
    variables = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "PYTHONPATH": source}
    command = [*program, script.format(line=shlex.quote(words))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=variables)
    assert done.stderr == ""
    last = words.rpartition(" ")[2]
    # bash gets a space after the only word, and fish a tab and the help text of each.
    offered = [text.partition("\t")[0].removesuffix(" ") for text in done.stdout.splitlines()]
    return sorted(text for text in offered if text.startswith(last))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "offered"), thin(CASES), ids=[line for line, _ in CASES])
def test_a_shell_offers_verbs_options_choices_and_names(place: Path, shell: str, line: str, offered: list[str]) -> None:
    assert complete(shell, place, line) == offered


def test_a_shell_without_a_store_offers_no_names(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bin", tmp_path / "bin")

    assert complete("bash", tmp_path, "holdfast show r") == []


def test_a_name_with_a_space_is_quoted_for_bash(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bin", tmp_path / "bin")
    repo = open_repository(open_store(str(tmp_path / "ckpts")), create=True)
    save(repo, Request("a name $(touch made)", [BytesSource("a", b"x")]))

    offered = complete("bash", tmp_path, "holdfast -s {store} show a")

    assert offered == ["a\\ name\\ \\$\\(touch\\ made\\)"]
    assert not (tmp_path / "made").exists()
