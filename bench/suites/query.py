"""Measures how long a question about metadata takes in a store of many snapshots: cold, from a cache, as a command."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race
from bench.kit.stores import UnsyncedFiles, open_store, remove_store
from bench.suites.cli import run_program, verify_output
from holdfast.objects.local.local_store import LocalStore
from holdfast.query import stored
from holdfast.query.facts import make_facts
from holdfast.query.select import parse_query, select
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.listed import RecordCache, list_user_names
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.write.writer import Request, WriteOptions, save

_WHERE: Final = "val_loss < 0.1 and step >= 10"
_SORT: Final = "val_loss"
_GOAL_MS: Final = 200.0
_NO_CACHE, _FILE, _HANDLE = "no cache", "cache file", "same handle"
_COMMAND, _START = "command", "--version"


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Ask one question of a store: with nothing cached, from the cache file, again in one handle, and as a command."""
    root, folder, number = work / "store", work / "cache", max(sizes.growth)
    expected = _fill(root, number)
    repo = open_store(root)
    file = stored.CacheFile(str(folder), repo.identity.store_id)
    _ask(repo, repo.records)
    if number >= stored.MIN_NEW and not file.write_from(repo.records):
        raise WrongResult("the cache file was not written")
    questions = {
        _NO_CACHE: lambda: _ask(repo, RecordCache()),
        _FILE: lambda: _ask_file(repo, file),
        _HANDLE: lambda: _ask(repo, repo.records),
    }
    cpu_s: dict[str, float] = {}
    timings = race(_make_contestants(questions, expected, cpu_s), rounds=2 * sizes.rounds)
    programs = _time_programs(root, work, expected[0], rounds=sizes.starts)
    remove_store(root)
    return [_describe(name, timings[name], cpu_s[name], number) for name in questions] + [
        _describe_command(programs, number)
    ]


def _fill(root: Path, number: int) -> list[str]:
    """Save so many small snapshots with metrics; return the names that answer the question, in order."""
    repo = open_repository(LocalStore(root, files=UnsyncedFiles()), create=True)
    numbers = random.Random(0)
    losses: dict[str, float] = {}
    for step in range(number):
        name, loss = f"run/step-{step}", numbers.random()
        metadata = {"step": step, "metrics": {"val_loss": loss, "train_loss": numbers.random()}}
        environment = {"host": "node-1", "python": "3.11.7", "torch": "2.13.0", "world_size": 8}
        save(
            repo,
            Request(
                name, [BytesSource("x", b"%d" % step)], options=WriteOptions(metadata=metadata, environment=environment)
            ),
        )
        if loss < 0.1 and step >= 10:
            losses[name] = loss
    return sorted(losses, key=losses.__getitem__) or [""]


def _ask(repo: Repository, cache: RecordCache) -> list[str]:
    query = parse_query(where=_WHERE, sort=_SORT)
    records = [each for each in list_user_names(repo.store, "run/", cache) if isinstance(each, CommittedSnapshot)]
    facts = make_facts(records, (), now_s=repo.store.clock())
    return [each.snapshot.name for each in select(facts, query)] or [""]


def _ask_file(repo: Repository, file: stored.CacheFile) -> list[str]:
    cache = RecordCache()
    file.read_into(cache)
    return _ask(repo, cache)


def _make_contestants(
    questions: dict[str, Callable[[], list[str]]], expected: list[str], cpu_s: dict[str, float]
) -> dict[str, Contestant]:
    """Return a contestant for each way to ask; `cpu_s` gets the least CPU time of each: other processes add none."""

    def ask(name: str) -> list[str]:
        started = time.process_time()
        answer = questions[name]()
        cpu_s[name] = min(cpu_s.get(name, math.inf), time.process_time() - started)
        return answer

    def verify(result: object) -> None:
        if result != expected:
            raise WrongResult(f"a question was answered with {str(result)[:200]}, not {str(expected)[:200]}")

    return {name: Contestant(partial(ask, name), verify=verify) for name in questions}


def _time_programs(root: Path, work: Path, first: str, *, rounds: int) -> dict[str, Timings]:
    program = str(Path(sys.executable).with_name("holdfast"))
    start = partial(run_program, bytecode=work / "bytecode", XDG_CACHE_HOME=str(work / "user"))
    words = [program, "-s", str(root), "ls", "run/", "--where", _WHERE, "--sort", _SORT]
    contestants = {
        _COMMAND: Contestant(partial(start, words), verify=partial(verify_output, expected=first)),
        _START: Contestant(partial(start, [program, "--version"]), verify=partial(verify_output, expected="holdfast ")),
    }
    race(contestants, rounds=1)  # fills the byte-code cache, and writes the cache file
    return race(contestants, rounds=rounds)


def _describe(name: str, timings: Timings, cpu_s: float, number: int) -> Result:
    goal = None if name == _NO_CACHE else Goal("figure", "<=", _GOAL_MS)
    note = f"median {1e3 * timings.median:.0f} ms, CPU time {1e3 * cpu_s:.0f} ms"
    return Result(f"ask {number} snapshots, {name}", 1e3 * timings.best, "ms", goal=goal, note=note)


def _describe_command(programs: dict[str, Timings], number: int) -> Result:
    own, bare = programs[_COMMAND], programs[_START]
    note = f"{1e3 * bare.best:.0f} ms of that for `holdfast --version`; median {1e3 * own.median:.0f} ms"
    return Result(f"holdfast ls --where, {number} snapshots, whole process", 1e3 * own.best, "ms", note=note)
