"""The quick command does what the installed one does: arguments, folder, environment, streams and exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.quick_command import provide_command


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    with provide_command() as folder:
        yield folder


_VARIES = re.compile(rb"[0-9a-f]{12,}|[0-9.]+ s;|[0-9]{4}-[0-9]{2}-[0-9T:.Z-]+")
"""Ids, digests, durations and times."""
COMMANDS = {
    "init": ["init", "store"],
    "put": ["put", "x", "a.txt"],
    "tag": ["tag"],
    "cat": ["cat", "x", "a.txt"],
    "not found": ["show", "y"],
    "unknown verb": ["fly"],
    "help": ["--help"],
}


def run_all(folder: Path, path: str) -> dict[str, tuple[int, bytes, bytes]]:
    """Run the commands in a new store, and return the exit code and the output of each."""
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"abc\0\n")
    environment = {**os.environ, "PATH": path, "HOLDFAST_STORE": "store", "COLUMNS": "77", "NO_COLOR": "1"}
    results = {}
    for name, words in COMMANDS.items():
        done = subprocess.run(["holdfast", *words], cwd=folder, env=environment, capture_output=True, check=False)
        printed, told = (_VARIES.sub(b"", text.replace(bytes(folder), b"")) for text in (done.stdout, done.stderr))
        results[name] = (done.returncode, printed, told)
    return results


@pytest.mark.slow
def test_it_does_what_the_installed_command_does(quick: Path, tmp_path: Path) -> None:
    installed = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    expected = run_all(tmp_path / "a", installed)
    found = run_all(tmp_path / "b", f"{quick}:{installed}")

    assert found == expected
    assert [code for code, _, _ in found.values()] == [0, 0, 0, 0, 2, 2, 0]
    assert found["cat"][1] == b"abc\0\n"


def test_commands_run_at_the_same_time(quick: Path, tmp_path: Path) -> None:
    path = {"PATH": f"{quick}:{os.environ['PATH']}"}
    save = "for n in 1 2 3; do (echo $n > f$n; holdfast -s s put run/$n f$n) & done; wait"
    command = f"holdfast init s; {save}; holdfast -s s ls --json"

    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=path, capture_output=True, text=True, check=True)

    assert all(f'"run/{number}"' in done.stdout for number in (1, 2, 3)), done.stdout + done.stderr
