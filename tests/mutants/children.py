"""Runs pytest in processes that are forked from this one, which has torch loaded and `holdfast` not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

import pytest

from tests.matrix.environments import ROOT

TIMED_OUT: Final = -1
"""The status of a process that was killed because its time was over."""
_SHARED: Final = Path("/dev/shm")
_PRELOADED: Final = (
    *("torch", "torch.distributed", "numpy", "blosc2", "obstore", "hypothesis.stateful"),
    *("_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin"),
)
_NO_PLUGINS: Final = ("cacheprovider", "anyio", "typeguard")


@dataclass(frozen=True, slots=True)
class Job:
    """A run of pytest in a forked process: `prepare` changes the slot's copy of the source before it."""

    name: str
    arguments: Sequence[str]
    limit_s: float
    prepare: Callable[[Path], None] = lambda copy: None
    plugins: Callable[[Path], Sequence[object]] = lambda copy: ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the status of pytest, what `Recorder` saw, and the file with the output."""

    status: int
    tests: Mapping[str, Mapping[str, Any]]
    seconds: float
    output: Path

    @property
    def failed(self) -> list[str]:
        """The tests that failed or timed out, in the order in which they ran."""
        return [name for name, seen in self.tests.items() if seen["outcome"] in ("failed", "timed out")]


class Recorder:
    """Writes for each test its outcome, its seconds and its CPU seconds, those of its ended processes included."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test."""
        seen = self.tests[item.nodeid] = {"outcome": "passed"}
        start, cpu = time.monotonic(), _read_cpu_s()
        result = yield
        seen |= {"s": round(time.monotonic() - start, 4), "cpu_s": round(_read_cpu_s() - cpu, 4)}
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure; write at once, since the process may be killed at its limit."""
        if report.failed:
            timed_out = "from pytest-timeout" in str(report.longrepr)
            self.tests[report.nodeid]["outcome"] = "timed out" if timed_out else "failed"
            self.write()
        elif report.skipped:
            self.tests[report.nodeid]["outcome"] = "skipped"

    def pytest_sessionfinish(self) -> None:
        """Write all tests."""
        self.write()

    def write(self) -> None:
        """Write the tests seen so far."""
        self.file.write_text(json.dumps(self.tests), encoding="utf-8")


def _read_cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def preload() -> None:
    """Import what takes long to import and is not changed by a mutant."""
    for name in _PRELOADED:
        import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "holdfast"]
    assert not loaded, f"forked processes would not see the mutant: {loaded}"


def run_jobs(jobs: Iterable[Job], copies: Sequence[Path]) -> Iterator[tuple[Job, Ended]]:
    """Run jobs, one at a time with each copy of the source, and yield each when it has ended."""
    waiting, free = iter(jobs), list(copies)
    running: dict[int, tuple[Job, Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="hm-", dir=_SHARED if _SHARED.is_dir() else None) as scratch:
        try:
            while True:
                while free and (job := next(waiting, None)) is not None:
                    copy = free.pop()
                    job.prepare(copy)
                    running[_fork(job, copy, Path(scratch, copy.name))] = (job, copy, time.monotonic())
                if not running:
                    return
                for pid, status in _wait(running):
                    job, copy, start = running.pop(pid)
                    free.append(copy)
                    yield job, _read(Path(scratch, copy.name), status, time.monotonic() - start)
        finally:
            for pid in running:
                _kill(pid)
                os.waitpid(pid, 0)


def _wait(running: Mapping[int, tuple[Job, Path, float]]) -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while not ended:
        time.sleep(0.05)
        for pid, (job, _, start) in running.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            late = not done and time.monotonic() - start > job.limit_s
            if late:
                _kill(pid)
                os.waitpid(pid, 0)
            if done or late:
                _kill(pid)
                ended.append((pid, TIMED_OUT if late else os.waitstatus_to_exitcode(status)))
    return ended


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _read(folder: Path, status: int, seconds: float) -> Ended:
    report = folder.with_suffix(".json")
    tests = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return Ended(status, tests, seconds, folder.with_suffix(".out"))


def _fork(job: Job, copy: Path, folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".json").unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(job, copy, folder)
    return pid


def _run_child(job: Job, copy: Path, folder: Path) -> NoReturn:
    status = 3
    try:
        os.setsid()
        output = os.open(folder.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        # Processes that `multiprocessing` starts would import the main module again.
        sys.modules["__main__"] = ModuleType("__main__")
        # Before the folder of the editable install. A compiled module of a mutant must not outlive it.
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        # Plugins of pytest are among the preloaded modules.
        common = ["-q", *(f"-pno:{name}" for name in _NO_PLUGINS), "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        common += ["--hypothesis-profile=ci", "-m", "not slow", f"--basetemp={folder}"]
        recorder = Recorder(folder.with_suffix(".json"))
        status = int(pytest.main([*common, *job.arguments], plugins=[recorder, *job.plugins(copy)]))
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
