"""Tensors that are not on the CPU are saved, loaded, filled and compared like all others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


# A device cannot be unregistered, so it gets a process of its own, and the checks are collected there.
def test_all_that_is_promised_of_tensors_holds_on_an_accelerator(tmp_path: Path) -> None:
    checks = sorted(FOLDER.glob("accelerator_*checks.py"))
    # Nothing there is for Hypothesis, which takes its time to start.
    words = ["-q", "--tb=short", "--noconftest", "-p", "no:hypothesispytest", "-p", "no:cacheprovider"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--basetemp={tmp_path / 'checks'}", *map(str, checks)],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parents[1],
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(checks) == 4
    assert " passed" in done.stdout
