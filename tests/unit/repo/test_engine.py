"""The engine: order, budget, first errors, an end that is an end, and no more threads than cores allow."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.objects import thread_pool as crew
from holdfast.repo import engine as engine_module
from holdfast.repo.engine import Engine, count_cores, read_core_quota
from holdfast.repo.format.chunk import UNIT_BYTES
from tests.kit.hooking import Hook
from tests.kit.patience import PATIENCE_S

MIB = 1 << 20


def weigh(items: list[int], size: int = MIB) -> list[tuple[int, int]]:
    return [(item, size) for item in items]


def test_results_come_in_order_however_long_each_takes() -> None:
    gate = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            gate.wait(10)
        else:
            gate.set()
        return number * number

    with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
        assert list(engine.iter_results(work, weigh(list(range(20))))) == [n * n for n in range(20)]


@pytest.mark.parametrize("budget", [1, 4 * MIB, 64 * MIB])
def test_no_more_is_under_way_than_the_budget_allows(budget: int) -> None:
    lock = threading.Lock()
    now = most = 0

    def work(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        with lock:
            now -= 1

    with Engine("test", budget_bytes=budget, waits=True) as engine:
        engine.run(work, weigh(list(range(50))))
        assert most <= max(1, min(budget // MIB, engine.threads))


def test_an_item_larger_than_the_budget_is_worked_on_alone() -> None:
    with Engine("test", budget_bytes=MIB, waits=False) as engine:
        assert list(engine.iter_results(lambda item: item, weigh([1, 2, 3], 10 * MIB))) == [1, 2, 3]


def test_the_number_of_items_taken_ahead_is_bounded() -> None:
    taken: list[int] = []

    def feed() -> Iterator[tuple[int, int]]:
        for number in range(100):
            taken.append(number)
            yield number, MIB

    with Engine("test", budget_bytes=UNIT_BYTES, waits=True) as engine:
        results = engine.iter_results(lambda item: item, feed())
        next(results)
        assert len(taken) <= 2 * engine.threads + 2


def test_the_first_error_in_order_is_raised_and_ends_the_work() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number in (3, 5):
            raise ValueError(f"number {number}")
        done.append(number)

    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        with pytest.raises(ValueError, match="number 3"):
            engine.run(work, weigh(list(range(100))))
        assert len(done) < 20
        before = list(done)
        engine.run(lambda _: None, weigh([1]))
        assert done == before


def test_when_it_ends_by_an_error_nothing_is_going_on() -> None:
    entered, release = threading.Event(), threading.Event()
    finished: list[str] = []

    def work(number: int) -> None:
        if number == 0:
            entered.wait(10)
            threading.Timer(0.05, release.set).start()
            raise ValueError("the first")
        entered.set()
        release.wait(10)
        finished.append("late")

    with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
        with pytest.raises(ValueError, match="the first"):
            engine.run(work, weigh([0, 1]))
        assert finished == ["late"]


def test_no_work_remains_when_the_caller_stops_taking_results() -> None:
    done: list[int] = []
    with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
        results = engine.iter_results(done.append, weigh(list(range(100))))
        next(results)
        results.close()  # type: ignore[attr-defined]  # an iterator by its type, a generator in truth
        count = len(done)
        assert count < 20
    assert len(done) == count


def test_no_thread_is_there_before_the_work_and_none_after_it() -> None:
    before = set(threading.enumerate())
    with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
        assert set(threading.enumerate()) == before
        engine.run(lambda _: None, weigh([1, 2, 3]))
    assert set(threading.enumerate()) == before


def test_one_engine_can_do_two_things_at_once() -> None:
    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        outer = engine.iter_results(lambda item: item, weigh(list(range(10))))
        total = sum(sum(engine.iter_results(lambda item: item, weigh([first, 1]))) for first in outer)
    assert total == 45 + 10


def test_threads_are_as_many_as_cores_and_budget_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda: 64)
    assert Engine("test", budget_bytes=1 << 40, waits=False).threads == 64
    assert Engine("test", budget_bytes=1 << 40, waits=True).threads == 68
    assert Engine("test", budget_bytes=256 * MIB, waits=True).threads == 32
    monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda: 1)
    assert Engine("test", budget_bytes=16 * MIB, waits=False).threads == 1


def test_a_forked_child_uses_its_own_threads() -> None:
    with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
        engine.run(lambda _: None, weigh([1, 2, 3]))
        child = os.fork()
        if child == 0:
            os._exit(0 if list(engine.iter_results(lambda item: item, weigh([1, 2]))) == [1, 2] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b": "max 100000", "a": "150000 100000"}, 1.5),
        ({"a/b": "400000 100000", "a": "250000 100000", "": "800000 100000"}, 2.5),
        ({"a/b": "max 100000"}, None),
        ({"a/b": "nonsense"}, None),
        ({"a/b": "100000 0"}, None),
        ({}, None),
    ],
)
def test_the_least_quota_of_all_groups_above_counts(
    tmp_path: Path, limits: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "cgroup").write_text("4:cpu:/old\n0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    for name, text in limits.items():
        (tmp_path / "root" / name / "cpu.max").write_text(text + "\n")
    assert read_core_quota(str(tmp_path / "cgroup"), str(tmp_path / "root")) == expected


def test_where_there_are_no_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert read_core_quota(str(tmp_path / "absent"), str(tmp_path)) is None


def test_there_is_at_least_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_cores() >= 1
    monkeypatch.setattr("holdfast.repo.engine.read_core_quota", lambda *_: 0.1)
    assert count_cores() == 1


def test_when_an_interrupt_ends_it_no_work_is_going_on_any_more() -> None:
    has_ended = threading.Event()
    seen: list[bool] = []

    def work(item: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # If the engine waits for this, as it must, the event is never set; then this is all that it waits for.
        seen.append(has_ended.wait(0.3))

    with Engine("test", budget_bytes=UNIT_BYTES, waits=False) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.run(work, [(0, 1)])
        is_over = bool(seen)
        has_ended.set()

    assert is_over
    assert seen == [False]


def sweep_allocations(numbers: range) -> int:
    """Be a child: run an engine with one failing allocation for each number; return an exit code."""
    testcapi = importlib.import_module("_testcapi")
    for number in numbers:
        results: list[int] = []
        running = [0]

        def work(item: int, running: list[int] = running) -> int:
            running[0] += 1
            try:
                return sum(range(item))
            finally:
                running[0] -= 1

        try:
            with Engine("test", budget_bytes=64 * MIB, waits=True) as engine:
                testcapi.set_nomemory(number, number + 1)
                results.extend(engine.iter_results(work, weigh(list(range(1000, 1012)))))
        except MemoryError:
            is_right = True
        except RuntimeError as error:
            is_right = "can't allocate lock" in str(error)
        except SystemError as error:  # what Python 3.10 makes of some failed allocations
            is_right = "returned NULL without setting an exception" in str(error)
        else:
            is_right = results == [sum(range(item)) for item in range(1000, 1012)]
        finally:
            testcapi.remove_mem_hooks()
        if not is_right or running[0]:
            return 1
    return 0


def test_whichever_allocation_fails_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("_testcapi", reason="this build of Python cannot make allocations fail")
    for name in ("_BEGIN_S", "_CHECK_S", "_IDLE_S"):
        monkeypatch.setattr(crew, name, 0.02)

    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))  # ends a child that hangs
        os._exit(sweep_allocations(range(1, 500)))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_requests_to_a_server_have_a_thread_each_however_few_cores_there_are() -> None:
    with Engine("test", budget_bytes=16 * MIB, waits=True, requests=48) as engine:
        everybody = threading.Barrier(48)
        engine.run(lambda _: everybody.wait(timeout=PATIENCE_S), weigh(list(range(48)), size=1))
        assert engine.threads == 48


class TestRequests:
    """Requests to a server: each has its own time."""

    def open(self, *, at_once: int = 4, budget: int = 64 * MIB) -> Engine:
        return Engine("test", budget_bytes=budget, waits=True, requests=at_once)

    def test_a_slow_request_does_not_stop_the_others(self) -> None:
        others = threading.Event()
        done: list[int] = []

        def work(number: int) -> None:
            if number == 0:
                assert others.wait(PATIENCE_S)
            done.append(number)
            if len(done) == 99:
                others.set()

        with self.open() as engine:
            engine.run(work, weigh(list(range(100))))

        assert done[-1] == 0
        assert sorted(done) == list(range(100))

    @pytest.mark.parametrize("budget", [1, 2 * MIB, 64 * MIB])
    def test_no_more_are_in_flight_than_budget_and_threads_allow(self, budget: int) -> None:
        lock = threading.Lock()
        now = most = 0

        def work(_: int) -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            with lock:
                now -= 1

        with self.open(at_once=8, budget=budget) as engine:
            engine.run(work, weigh(list(range(60))))

        assert most <= max(1, min(8, budget // MIB))

    def test_a_failure_is_raised_when_nothing_is_in_progress_any_more(self) -> None:
        begun, ended = [], []

        def work(number: int) -> None:
            begun.append(number)
            if number == 3:
                raise ValueError("three")
            ended.append(number)

        with self.open() as engine, pytest.raises(ValueError, match="three"):
            engine.run(work, weigh(list(range(100))))

        assert set(begun) == {*ended, 3}

    def test_a_caller_without_threads_does_the_work(self, monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
        def refuse(*args: object) -> None:
            raise RuntimeError("can't start new thread")

        hook(crew, "start_new_thread", refuse)
        monkeypatch.setattr(engine_module, "_PATIENCE_S", 0.0)
        done: list[int] = []
        with self.open() as engine:
            engine.run(done.append, weigh([1, 2, 3]))

        assert done == [1, 2, 3]

    def test_a_forked_child_starts_its_own_threads(self) -> None:
        with self.open() as engine:
            engine.run(lambda _: None, weigh([1]))
            child = os.fork()
            if child == 0:
                done: list[int] = []
                engine.run(done.append, weigh([1, 2]))
                os._exit(0 if sorted(done) == [1, 2] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
