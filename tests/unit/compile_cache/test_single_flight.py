"""One of many processes compiles. The others wait while it is alive, up to their time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.compile_cache import single_flight as flight
from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_variants
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.single_flight import Turn, WaitOptions, single_flight
from holdfast.digest import Buffer
from holdfast.errors import CompileCacheError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import LEASES
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_leases
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.compile_artifacts import make_artifact, make_key
from tests.kit.patience import PATIENCE_S
from tests.kit.saving import keys, new_repo

DIGEST = make_key().digest


class Time:
    """A clock that only `sleep` moves, with events at given times."""

    def __init__(self, **events: Callable[[], None]) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []
        self._events = {float(at.removeprefix("at_")): event for at, event in events.items()}

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds
        for at in [at for at in self._events if at <= self.now_s]:
            self._events.pop(at)()

    def waiting(self, wait_s: float = 300.0) -> WaitOptions:
        return WaitOptions(wait_s=wait_s, sleep=self.sleep, clock=lambda: self.now_s)


def _find_nothing() -> StoredVariant | None:
    return None


def _write(repo: Repository) -> None:
    write_artifact(repo, make_artifact(), secret=None)


def _finder(repo: Repository) -> Callable[[], StoredVariant | None]:
    return lambda: next(iter_variants(repo.store, DIGEST), None)


class Other:
    """Another process that compiles until `end` is called."""

    def __init__(self, repo: Repository) -> None:
        self._context = single_flight(repo, DIGEST, _find_nothing)
        assert self._context.__enter__().role == "first"

    def end(self) -> None:
        self._context.__exit__(None, None, None)


def test_the_first_process_compiles_and_deletes_its_lease() -> None:
    repo = new_repo()

    with single_flight(repo, DIGEST, _finder(repo)) as turn:
        assert (turn.role, turn.found) == ("first", None)
        assert len(keys(repo.store, LEASES)) == 1
        _write(repo)

    assert keys(repo.store, LEASES) == []
    assert list(Checker(repo.store).iter_findings()) == []


def test_the_second_process_waits_and_finds_the_result_of_the_first() -> None:
    repo = new_repo()
    other = Other(repo)

    def land() -> None:
        _write(repo)
        other.end()

    time = Time(at_10=land)
    with single_flight(repo, DIGEST, _finder(repo), time.waiting()) as turn:
        assert turn.role == "waited"
        assert turn.found is not None
        assert 10 <= turn.waited_s <= 11.5
        assert keys(repo.store, LEASES) == []


def test_the_lease_is_polled_less_and_less_often() -> None:
    repo = new_repo()
    other = Other(repo)
    time = Time(at_10=other.end)

    with single_flight(repo, DIGEST, _find_nothing, time.waiting()):
        assert time.naps[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


def test_other_keys_do_not_wait() -> None:
    repo = new_repo()
    other = Other(repo)

    with single_flight(repo, make_key("b").digest, _find_nothing) as turn:
        assert (turn.role, turn.waited_s) == ("first", 0.0)
    other.end()


def test_if_the_first_process_saves_nothing_the_others_compile_at_once() -> None:
    repo = new_repo()
    other = Other(repo)
    time = Time(at_10=other.end)

    with single_flight(repo, DIGEST, _find_nothing, time.waiting()) as turn:
        assert (turn.role, turn.found) == ("waited", None)
        assert keys(repo.store, LEASES) == []


def test_waiting_ends_while_the_first_process_still_compiles() -> None:
    repo = new_repo()
    other = Other(repo)
    time = Time()

    # Shorter than the silence after which it would be taken for dead.
    with single_flight(repo, DIGEST, _find_nothing, time.waiting(wait_s=20.0)) as turn:
        assert (turn.role, turn.waited_s) == ("alone", 20.0)
    other.end()


def test_a_process_that_stops_renewing_is_considered_dead_and_the_next_compiles() -> None:
    repo = new_repo()
    other = Other(repo)
    time = Time()

    with single_flight(repo, DIGEST, _find_nothing, time.waiting()) as turn:
        assert turn.role == "first"
        assert flight.SILENT_S <= turn.waited_s <= flight.SILENT_S + 1
        other.end()
        assert len(keys(repo.store, LEASES)) == 2, "the former owner must not release it"

    assert keys(repo.store, LEASES) == []


def test_a_process_that_renews_its_lease_is_waited_for() -> None:
    repo = new_repo()
    other = flight._CompileLease(repo, DIGEST, WaitOptions())
    assert other.take(other.read())
    beats = {f"at_{at}": lambda: other._advance("live") for at in range(20, 200, 20)}
    time = Time(**beats, at_200=other.end)

    with single_flight(repo, DIGEST, _find_nothing, time.waiting()) as turn:
        assert turn.role == "waited"
        assert 200 <= turn.waited_s <= 202


def test_a_process_of_this_host_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    Other(repo)
    monkeypatch.undo()

    with single_flight(repo, DIGEST, _find_nothing, Time().waiting()) as turn:
        assert (turn.role, turn.waited_s) == ("first", 0.0)


def test_a_graph_saved_just_before_the_lease_was_taken_is_found() -> None:
    repo = new_repo()
    _write(repo)

    with single_flight(repo, DIGEST, _finder(repo)) as turn:
        assert turn.found is not None
        assert keys(repo.store, LEASES) == []


def test_every_process_compiles_if_the_store_cannot_be_written(tmp_path: Path) -> None:
    _write(new_repo(LocalStore(tmp_path)))
    repo = new_repo(LocalStore(tmp_path, read_only=True))

    with single_flight(repo, make_key("b").digest, _find_nothing) as turn:
        assert (turn.role, turn.found) == ("alone", None)


def test_an_exception_releases_the_lease() -> None:
    repo = new_repo()

    with pytest.raises(ZeroDivisionError), single_flight(repo, DIGEST, _find_nothing):
        _ = 1 / 0

    assert keys(repo.store, LEASES) == []


def test_an_error_of_the_search_is_raised_and_releases_the_lease() -> None:
    repo = new_repo()

    def fail() -> StoredVariant | None:
        raise CompileCacheError("strict")

    with pytest.raises(CompileCacheError, match="strict"), single_flight(repo, DIGEST, fail):
        pytest.fail("it was entered")

    assert keys(repo.store, LEASES) == []


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.FOR_GOOD, Fault.REPLY_LOST, Fault.NO_SPACE])
@pytest.mark.parametrize("is_new", [True, False])
def test_if_any_operation_of_the_store_fails_some_process_compiles(fault: Fault, is_new: bool) -> None:
    for at in range(1, 40):
        inner = MemoryStore()
        if not is_new:
            _write(new_repo(inner))
        repo = new_repo(inner)
        store = FaultyStore(inner, fault=fault, at=at)
        faulty = Repository(store, repo.config)

        with single_flight(faulty, make_key("b").digest, _find_nothing) as turn:
            assert turn.found is None
            assert turn.role in ("first", "alone")

        if at > len(store.log):
            return
    pytest.fail("there is no end to it")


def test_an_empty_directory_becomes_a_store_before_the_lease_is_written(tmp_path: Path) -> None:
    with single_flight(new_repo(LocalStore(tmp_path)), DIGEST, _find_nothing):
        assert new_repo(LocalStore(tmp_path)).config is not None


def test_a_collector_treats_the_lease_as_that_of_a_running_save() -> None:
    repo = new_repo()
    other = Other(repo)

    (lease,) = read_leases(repo.store).values()
    assert (lease.purpose, lease.is_live) == (f"compile {DIGEST[:12]}", True)
    collect(repo.store, Rules(min_age_s=0.0))
    _write(repo)
    other.end()

    assert list(Checker(repo.store).iter_findings()) == []
    assert _finder(repo)() is not None


def test_a_process_that_a_collector_fenced_is_not_waited_for() -> None:
    repo = new_repo()
    Other(repo)
    collect(repo.store, Rules(min_age_s=0.0, expire_s=0.0))

    with single_flight(repo, DIGEST, _find_nothing, Time().waiting()) as turn:
        assert turn.role == "first"


def test_the_lease_is_renewed_during_the_compilation() -> None:
    repo = new_repo()
    seen = threading.Event()
    create = repo.store.create

    def spy(key: str, data: Buffer, *, durable: bool = True) -> None:
        create(key, data, durable=durable)
        if key.endswith("@00000002"):
            seen.set()

    repo.store.create = spy  # type: ignore[method-assign]  # a spy

    with single_flight(repo, DIGEST, _find_nothing, WaitOptions(beat_s=0.001)):
        assert seen.wait(10)

    assert keys(repo.store, LEASES) == []


def test_of_many_threads_one_compiles() -> None:
    repo = new_repo()
    started = threading.Barrier(6)
    turns: list[Turn[StoredVariant]] = []

    def work() -> None:
        started.wait()
        with single_flight(repo, DIGEST, _finder(repo)) as turn:
            turns.append(turn)
            if turn.found is None:
                _write(repo)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [turn.role for turn in turns].count("first") == 1
    assert sum(turn.found is None for turn in turns) == 1


PROGRAM = """
import sys
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.artifacts.catalog import iter_variants
from holdfast.compile_cache.single_flight import single_flight
from tests.kit.compile_artifacts import make_artifact, make_key
from tests.kit.saving import new_repo
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.testing.faults import Fault, FaultyStore

repo, digest = new_repo(LocalStore(sys.argv[1])), make_key().digest
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
with single_flight(repo, digest, lambda: next(iter_variants(repo.store, digest), None)) as turn:
    if turn.found is None:
        write_artifact(repo, make_artifact(), secret=None)
sys.stdout.write("found" if turn.found else "compiled")
"""


@pytest.mark.slow  # four processes that import torch
def test_of_four_processes_on_an_empty_store_one_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]  # by name
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()

    outcomes = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]

    assert sorted(outcomes) == ["compiled", "found", "found", "found"]
    assert keys(LocalStore(tmp_path), LEASES) == []
