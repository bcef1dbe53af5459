"""Measures the time of each command on a small store, above the start-up time of bare Python.

All programs find compiled modules, as in an installed package: this run has its own byte-code cache, regardless of
the environment's settings for writing byte code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race, random_entries
from bench.kit.stores import open_store, remove_store, save_entries

_BARE: Final = "bare Python"
_GOAL_MS: Final = 120.0
_NO_GOAL: Final = {"put"}
_ENTRY_BYTES: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Command:
    """A command line, where {n} is replaced by an unused number, and the text that its output must contain."""

    arguments: tuple[str, ...]
    expected: str
    needs_snapshot: str = ""


_COMMANDS: Final = {
    "--version": _Command(("--version",), "holdfast "),
    "init": _Command(("init", "{root}-{n}"), "an empty store in "),
    "ls": _Command(("-s", "{root}", "ls", "run/"), "run/step-9"),
    "show": _Command(("-s", "{root}", "show", "run/step-3"), "entry-0001"),
    "cat": _Command(("-s", "{root}", "cat", "run/step-3", "entry-0001"), ""),
    "tag": _Command(("-s", "{root}", "tag", "tag-{n}", "run/step-3"), "run/step-3"),
    "rm": _Command(("-s", "{root}", "rm", "--yes", "doomed/{n}"), "deleted doomed/", needs_snapshot="doomed/{n}"),
    "check": _Command(("-s", "{root}", "check"), ""),
    "doctor": _Command(("-s", "{root}", "doctor"), ""),
    "put": _Command(("-s", "{root}", "put", "new/{n}", "{file}"), "new/"),
}


class _Runner:
    """Runs one command repeatedly, each time with a new number."""

    def __init__(self, command: _Command, root: Path, numbers: count[int]) -> None:
        self._command = command
        self._root = root
        self._cache = root.with_name("bytecode")
        self._numbers = numbers
        self._n = 0

    def prepare(self) -> None:
        self._n = next(self._numbers)
        if self._command.needs_snapshot:
            name = self._command.needs_snapshot.format(n=self._n)
            save_entries(open_store(self._root), name, random_entries(_ENTRY_BYTES, 1, seed=self._n))

    def run(self) -> subprocess.CompletedProcess[bytes]:
        program = str(Path(sys.executable).with_name("holdfast"))
        fields = {"root": self._root, "n": self._n, "file": __file__}
        words = [word.format(**fields) for word in self._command.arguments]
        return run_program([program, *words], bytecode=self._cache)

    def contestant(self) -> Contestant:
        return Contestant(self.run, self.prepare, partial(verify_output, expected=self._command.expected))


def run_program(words: list[str], *, bytecode: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, with its byte-code cache in that folder and these variables in its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode), **variables}
    return subprocess.run(words, capture_output=True, check=False, env=environment)


def verify_output(result: object, *, expected: str) -> None:
    """Raise unless the command succeeded and printed the expected text."""
    if not isinstance(result, subprocess.CompletedProcess) or result.returncode:
        raise WrongResult(f"a command failed: {result}")
    if expected.encode() not in result.stdout:
        raise WrongResult(f"{expected!r} is not in the output of {result.args}: {result.stdout[:500]!r}")


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure every verb on a store of ten snapshots of ten entries."""
    root = work / "store"
    repo = open_store(root)
    for number in range(10):
        save_entries(repo, f"run/step-{number}", random_entries(10 * _ENTRY_BYTES, 10, seed=number))
    numbers = count()
    contestants = {name: _Runner(command, root, numbers).contestant() for name, command in _COMMANDS.items()}
    start = partial(run_program, [sys.executable, "-c", ""], bytecode=root.with_name("bytecode"))
    contestants[_BARE] = Contestant(start, verify=partial(verify_output, expected=""))
    race(contestants, rounds=1)  # fills the byte-code cache
    timings = race(contestants, rounds=sizes.starts)
    remove_store(root)
    return [_compare(name, timings[name], timings[_BARE]) for name in _COMMANDS]


def _compare(name: str, own: Timings, bare: Timings) -> Result:
    goal = None if name in _NO_GOAL else Goal("figure", "<=", _GOAL_MS)
    note = f"{1e3 * own.best:.0f} ms in all, median {1e3 * own.median:.0f}; bare Python {1e3 * bare.best:.0f}"
    samples = {name: own.seconds, _BARE: bare.seconds}
    return Result(
        f"holdfast {name}, over bare Python", 1e3 * (own.best - bare.best), "ms", "", None, goal, note, samples
    )
