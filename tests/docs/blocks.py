"""Code blocks of a Markdown page: found, and run one after the other as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUN: Final = ("python", "console", "bash")
# Other spellings of the same languages would slip through unrun.
MISSPELLED: Final = ("py", "python3", "pycon", "sh", "shell", "shell-session", "zsh")

_FENCE: Final = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[^\s`]*)[^`]*$")
_NOT_RUN: Final = re.compile(r"<!-- not run: \S.* -->")
_ENDED: Final = "--- ended with status"


class BlockFailed(AssertionError):
    """A block did not run, or did not say what the page shows."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is that of its first line inside the fence."""

    language: str
    line: int
    code: str
    not_run: bool
    """The line above it gives a reason why it cannot be run."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block, and the output shown below it, which is empty if none is."""

    line: int
    text: str
    output: str


def iter_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if not opening:
            continue
        above = next((line for line in reversed(lines[: number - 1]) if line.strip()), "")
        first, indent = number, len(opening["indent"])
        while number < len(lines) and not lines[number].strip().startswith(opening["fence"]):
            number += 1
        code = "".join(f"{line[indent:]}\n" for line in lines[first:number])
        yield Block(opening["language"], first + 1, code, bool(_NOT_RUN.fullmatch(above.strip())))
        number += 1


def run_page(name: str, text: str, folder: Path) -> None:
    """Run the blocks of a page in `folder`, the working directory; raise BlockFailed at the first wrong one."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in iter_blocks(text):
        where = f"{name}:{block.line}"
        if block.language in MISSPELLED:
            raise BlockFailed(f"{where}: {block.language!r} blocks are not run; write one of {', '.join(RUN)}")
        if block.not_run or block.language not in RUN:
            continue
        if block.language == "python":
            _run_python(name, block, namespace)
        elif block.language == "bash":
            _run_commands(name, [Command(block.line, f"(\nset -euo pipefail\n{block.code})", "")], folder)
        else:
            _run_commands(name, parse_console(block), folder)


def _run_python(name: str, block: Block, namespace: dict[str, object]) -> None:
    # Empty lines in front make the traceback show the page's own line numbers.
    code = "\n" * (block.line - 1) + block.code
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise BlockFailed(f"{name}:{block.line}: {type(error).__name__}: {error}") from error


def parse_console(block: Block) -> list[Command]:
    """Split a console block at its prompts; a command goes on after a backslash."""
    commands: list[Command] = []
    for number, line in enumerate(block.code.splitlines(), start=block.line):
        last = commands[-1] if commands else None
        if line.startswith("$ "):
            commands.append(Command(number, line[2:], ""))
        elif last is None:
            raise BlockFailed(f"line {number}: a console block starts with a command, after '$ '")
        elif last.text.endswith("\\") and not last.output:
            commands[-1] = Command(last.line, f"{last.text}\n{line.removeprefix('> ')}", "")
        else:
            commands[-1] = Command(last.line, last.text, f"{last.output}{line}\n")
    return commands


def _run_commands(name: str, commands: list[Command], folder: Path) -> None:
    """Run commands in one shell, so that `cd` and `export` last until the end of the block."""
    script = "exec 2>&1\n" + "".join(f"{each.text}\nprintf '\\n%s %d\\n' '{_ENDED}' $?\n" for each in commands)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    parts = re.split(rf"\n{_ENDED} (\d+)\n", run.stdout)
    outputs, statuses = parts[::2], parts[1::2]
    for index, command in enumerate(commands):
        where = f"{name}:{command.line}: {command.text}"
        if index >= len(statuses):
            raise BlockFailed(f"{where}\nended the shell:\n{outputs[-1]}")
        if statuses[index] != "0":
            raise BlockFailed(f"{where}\nended with status {statuses[index]}:\n{outputs[index]}")
        if command.output.strip() and not matches(command.output, outputs[index]):
            raise BlockFailed(f"{where}\nshows:\n{command.output}\nbut said:\n{outputs[index]}")


def matches(shown: str, said: str) -> bool:
    """Compare output with what a page shows, where `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in _trim(shown).split("..."))
    return re.fullmatch(pattern, _trim(said), re.DOTALL) is not None


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
