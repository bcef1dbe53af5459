"""A training that is told to leave saves, leaves with exit code 0, and goes on as if it had stayed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import holdfast

SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples/preempt.py"
STEPS: Final = 400


@contextmanager
def started(store: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", str(SCRIPT), str(store), "--steps", str(STEPS), "--save-every", "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def find_losses(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step ")]


@pytest.mark.slow
def test_a_training_that_was_told_to_leave_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    with started(tmp_path / "alone") as alone, started(tmp_path / "told") as told:
        assert told.stdout is not None
        before = [told.stdout.readline().strip() for _ in range(50)]
        told.send_signal(signal.SIGTERM)
        before += told.communicate()[0].splitlines()
        expected = find_losses(alone.communicate()[0].splitlines())
    with started(tmp_path / "told") as again:
        after = again.communicate()[0].splitlines()

    num_before = len(find_losses(before))
    assert told.returncode == 0
    assert 50 <= num_before < STEPS
    assert before[-1] == f"saved run/step-{num_before}"
    assert after[0] == f"resumed from run/step-{num_before}"
    assert find_losses(before) + find_losses(after) == expected
    _verify_same_end(tmp_path)


def _verify_same_end(folder: Path) -> None:
    name = f"run/step-{STEPS}"
    with holdfast.open(folder / "alone") as alone, holdfast.open(folder / "told") as told:
        assert alone.snapshot(name).digest == told.snapshot(name).digest
        assert told.check(read=True) == []  # nothing is left over, either


@pytest.mark.slow
def test_a_training_that_is_killed_again_and_again_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    with started(tmp_path / "alone") as alone:
        expected = find_losses(alone.communicate()[0].splitlines())
    seen: dict[str, str] = {}
    # Each life ends a few steps after a save has begun: while it is written, or soon after.
    for num_lines in (41, 42, 85, 3, 121):
        with started(tmp_path / "told") as child:
            assert child.stdout is not None
            lines = [child.stdout.readline().strip() for _ in range(num_lines)]
            child.kill()
            lines += child.communicate()[0].splitlines()
        assert child.returncode == -signal.SIGKILL
        _record(seen, find_losses(lines))
    with started(tmp_path / "told") as last:
        lines = last.communicate()[0].splitlines()
    _record(seen, find_losses(lines))

    assert last.returncode == 0
    assert lines[0].startswith("resumed from run/step-")
    assert [seen[line.split(" loss ")[0]] for line in expected] == expected
    _verify_same_end(tmp_path)


def _record(seen: dict[str, str], losses: list[str]) -> None:
    """Add the losses of one life; a step that was done twice must have the same loss both times."""
    for line in losses:
        assert seen.setdefault(line.split(" loss ")[0], line) == line
