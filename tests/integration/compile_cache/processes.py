"""New processes, each with an empty inductor directory and a C++ compiler whose runs are counted, or none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
TIMEOUT_S: Final = 580


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a process."""

    cases: dict[str, Any]
    compiler_runs: int
    stderr: str


class Place:
    """The folder for the files of a test's processes."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.variables = dict(variables or {})
        """More variables for the environment of each process."""
        self._number = 0

    def start(
        self, cases: Sequence[str], store: Path | str | None, *, has_compiler: bool = True, **request: Any
    ) -> Started:
        """Start a process; each has an empty inductor directory."""
        self._number += 1
        own = self.folder / f"process-{self._number}"
        (own / "bin").mkdir(parents=True)
        (own / "inductor").mkdir()
        (own / "runs").touch()
        if has_compiler:
            _write_counting_compiler(own / "bin" / "g++", own / "runs")
        environment = {
            "PATH": f"{own / 'bin'}:{os.environ['PATH']}" if has_compiler else str(own / "bin"),
            "HOME": str(own),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        asked = {"cases": list(cases), "store": str(store) if store else "", "options": {}, **request}
        command = [sys.executable, "-m", "tests.integration.compile_cache.worker", json.dumps(asked)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        return Started(process, own / "runs")

    def run(self, cases: Sequence[str], store: Path | str | None, **request: Any) -> Outcome:
        """Run a process to its end."""
        return finish_all([self.start(cases, store, **request)])[0]

    def copy(self, store: Path, name: str) -> Path:
        """Copy a store to another path, as another machine would see it."""
        target = self.folder / name
        shutil.copytree(store, target)
        return target


class Started:
    """A running process."""

    def __init__(self, process: subprocess.Popen[str], runs: Path) -> None:
        self._process = process
        self._runs = runs

    def finish(self) -> Outcome:
        """Wait for its end, and return its output."""
        try:
            stdout, stderr = self._process.communicate(timeout=TIMEOUT_S)
        finally:
            self.stop()
        assert self._process.returncode == 0, stderr[-4000:]
        return Outcome(json.loads(stdout.splitlines()[-1]), len(self._runs.read_text().splitlines()), stderr)

    def stop(self) -> None:
        """End it, if it has not ended by itself."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def finish_all(started: Sequence[Started]) -> list[Outcome]:
    """Wait for all processes; if one fails, end the others."""
    try:
        return [each.finish() for each in started]
    finally:
        for each in started:
            each.stop()


@dataclass(frozen=True, slots=True)
class Trial:
    """The same cases compiled by torch alone, with an empty store, and with a copy of that store without a compiler."""

    plain: Outcome
    cold: Outcome
    warm: Outcome
    store: Path


def try_cases(
    folder: Path, cases: Sequence[str], variables: Mapping[str, str] | None = None, *, in_one_process: bool = False
) -> Trial:
    """Run cases in three processes, the first two of which run at the same time; or the first two in one."""
    place, store = Place(folder, variables), folder / "store"
    if in_one_process:
        cold = place.run(cases, store, plain=True)
        plain = Outcome({name: {"digest": case["plain"]} for name, case in cold.cases.items()}, 0, "")
    else:
        plain, cold = finish_all([place.start(cases, None), place.start(cases, store)])
    warm = place.run(cases, place.copy(store, "elsewhere"), has_compiler=False)
    return Trial(plain, cold, warm, store)


def _write_counting_compiler(path: Path, log: Path) -> None:
    real = shutil.which("g++")
    assert real, "these tests compile; install g++"
    path.write_text(f'#!/bin/sh\necho "$$" >> {log}\nexec {real} "$@"\n')
    path.chmod(0o755)
