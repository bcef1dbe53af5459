"""Find the code blocks of a Markdown page, and run them in order, as a reader would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

RUN: Final = ("python", "console", "bash")
# Other spellings of the same languages would slip through unrun.
MISSPELLED: Final = ("py", "python3", "pycon", "sh", "shell", "shell-session", "zsh")

_FENCE: Final = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[^\s`]*)[^`]*$")
_NOT_RUN: Final = re.compile(r"<!-- not run: \S.* -->")
_ENDED: Final = re.compile(r"--- ended with status (\d+)\n")


class BlockFailed(AssertionError):
    """A block failed, or its output is not what the page shows."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is that of its first line inside the fence."""

    language: str
    line: int
    code: str
    not_run: bool
    """Whether the line above the block gives a reason why it cannot be run."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block, or a whole bash block, with the output that the page shows below it."""

    line: int
    text: str
    output: str = ""
    """Empty if the page shows none: then the command only has to succeed."""
    is_strict: bool = False
    """Whether the first command that fails ends it, as in a bash block."""


@dataclass(frozen=True, slots=True)
class Shell:
    """The shell of one page. Its working directory and variables last from block to block."""

    process: subprocess.Popen[str]
    stdin: IO[str]
    stdout: IO[str]

    def run(self, name: str, command: Command) -> None:
        """Run a command; raise BlockFailed, with its text and output, if it fails or prints something else."""
        where = f"{name}:{command.line}: {command.text}"
        status, output = self._execute(command)
        if status != 0:
            raise BlockFailed(f"{where}\nended with status {status}:\n{output}")
        if self.process.poll() is not None:
            raise BlockFailed(f"{where}\nended the shell:\n{output}")
        if command.output.strip() and not matches(command.output, output):
            raise BlockFailed(f"{where}\nshows:\n{command.output}\nbut printed:\n{output}")

    def _execute(self, command: Command) -> tuple[int, str]:
        # The shell reads its own commands from stdin: `eval` with another stdin keeps those of the page away from it.
        run = f"eval {shlex.quote(command.text)} </dev/null"
        if command.is_strict:
            # `set -e` ends the shell if the block fails, so there is nothing to restore then.
            run = f"set -euo pipefail\n{run}\nset +euo pipefail"
        self.stdin.write(f"{run}\nprintf '\\n--- ended with status %d\\n' $?\n")
        self.stdin.flush()
        lines: list[str] = []
        for line in self.stdout:
            if ended := _ENDED.fullmatch(line):
                return int(ended[1]), "".join(lines).removesuffix("\n")
            lines.append(line)
        return self.process.wait(), "".join(lines)


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


def run_page(name: str, text: str, folder: Path, commands: Path | None = None) -> None:
    """Run the blocks of a page in `folder`, the working directory; raise BlockFailed at the first wrong one.

    The shell finds commands in the folder `commands` first.
    """
    namespace: dict[str, object] = {"__name__": "page"}
    with open_shell(folder, commands) as shell:
        for block in iter_blocks(text):
            if block.language in MISSPELLED:
                where = f"{name}:{block.line}"
                raise BlockFailed(f"{where}: {block.language!r} blocks are not run; write one of {', '.join(RUN)}")
            if block.not_run or block.language not in RUN:
                continue
            if block.language == "python":
                _run_python(name, block, namespace)
            for command in iter_commands(block):
                shell.run(name, command)


@contextmanager
def open_shell(folder: Path, commands: Path | None = None) -> Iterator[Shell]:
    """Start a shell in `folder`, and end it with the `with`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    folders = [*([str(commands)] if commands else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    # Unbuffered: a page shows output and errors in the order in which a terminal does.
    environment |= {"PATH": ":".join(folders), "COLUMNS": "100", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["bash"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield Shell(process, process.stdin, process.stdout)
        finally:
            process.kill()
            process.wait()


def _run_python(name: str, block: Block, namespace: dict[str, object]) -> None:
    # Empty lines in front make the traceback show the page's own line numbers.
    code = "\n" * (block.line - 1) + block.code
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise BlockFailed(f"{name}:{block.line}: {type(error).__name__}: {error}") from error


def iter_commands(block: Block) -> Iterator[Command]:
    """Yield what the shell has to run for a block: nothing for Python."""
    if block.language == "bash":
        yield Command(block.line, block.code, is_strict=True)
    elif block.language == "console":
        yield from parse_console(block)


def parse_console(block: Block) -> list[Command]:
    """Split a console block at its prompts; a backslash at the end of a line continues the command."""
    commands: list[Command] = []
    for number, line in enumerate(block.code.splitlines(), start=block.line):
        last = commands[-1] if commands else None
        if line.startswith("$ "):
            commands.append(Command(number, line[2:]))
        elif last is None:
            raise BlockFailed(f"line {number}: a console block starts with a command, after '$ '")
        elif last.text.endswith("\\") and not last.output:
            commands[-1] = Command(last.line, f"{last.text}\n{line.removeprefix('> ')}")
        else:
            commands[-1] = Command(last.line, last.text, f"{last.output}{line}\n")
    return commands


def matches(shown: str, printed: str) -> bool:
    """Compare output with what a page shows, where `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in _trim(shown).split("..."))
    return re.fullmatch(pattern, _trim(printed), re.DOTALL) is not None


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
