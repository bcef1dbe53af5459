"""Thread pools: every task runs, on a thread or, if none can start, in the caller that waits for it."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from holdfast.objects import thread_pool
from holdfast.objects.thread_pool import BackgroundThread, Task, ThreadPool, let_end
from tests.kit.patience import PATIENCE_S


@pytest.fixture
def pool() -> ThreadPool:
    return ThreadPool("test", 3)


def cannot_start(function: Callable[[], None], args: tuple[object, ...]) -> int:
    raise RuntimeError("can't start new thread")


def ends_at_once(function: Callable[[], None], args: tuple[object, ...]) -> int:
    """Simulates a thread that gets no memory for its first frame: no error is reported."""
    return 0


def test_results_and_errors_come_back(pool: ThreadPool) -> None:
    right, wrong = pool.submit(lambda: 6 * 7), pool.submit(lambda: 1 // 0)

    assert right.result() == 42
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    pool.shutdown()


def test_no_more_threads_work_than_there_may_be(pool: ThreadPool) -> None:
    here = threading.Semaphore(0)
    go_on = threading.Event()

    def work() -> None:
        here.release()
        go_on.wait(PATIENCE_S)

    tasks = [pool.submit(work) for _ in range(10)]
    for _ in range(3):
        assert here.acquire(timeout=PATIENCE_S)
    assert not here.acquire(timeout=0.05)
    go_on.set()
    for task in tasks:
        task.result()
    pool.shutdown()


def test_idle_threads_end_and_others_begin_with_the_next_work(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "_IDLE_S", 0.01)
    for _ in range(3):
        thread = Path("/proc/self/task", str(pool.submit(threading.get_native_id).result()))
        end_s = time.monotonic() + PATIENCE_S
        while thread.exists():
            assert time.monotonic() < end_s, "the thread does not end"

        assert pool._slots == []
    pool.shutdown()


def test_every_task_runs_once_while_threads_end_and_begin(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "_IDLE_S", 0.0005)
    monkeypatch.setattr(thread_pool, "_CHECK_S", 0.001)
    dice = random.Random(0)
    ran: list[int] = []
    counts = [dice.randrange(10) for _ in range(300)]
    for turn, count in enumerate(counts):
        tasks = [pool.submit(partial(ran.append, 10 * turn + number)) for number in range(count)]
        for task in tasks:
            task.result()
        threading.Event().wait(dice.choice([0.0, 0.0005, 0.002]))
    pool.shutdown()

    assert sorted(ran) == [10 * turn + number for turn, count in enumerate(counts) for number in range(count)]


def test_a_pool_ends_while_its_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "_IDLE_S", 0.0005)
    monkeypatch.setattr(thread_pool, "_CHECK_S", 0.001)
    for number in range(200):
        pool = ThreadPool("test", 3)
        tasks = [pool.submit(get_ident) for _ in range(3)]
        for task in tasks:
            task.result()
        if number % 2:
            threading.Event().wait(0.0005)
        pool.shutdown()

        assert pool._slots == []


class SleepyQueue:
    """A queue whose first message to end is lost, and which waits for ever, whatever the timeout."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[object] = SimpleQueue()
        self._has_lost_one = False

    def put(self, message: object) -> None:
        if message is None and not self._has_lost_one:
            self._has_lost_one = True
            return
        self._messages.put(message)

    def get(self, timeout: float) -> object:
        return self._messages.get()

    def get_nowait(self) -> object:
        return self._messages.get_nowait()


def test_a_thread_that_misses_its_message_is_told_again_to_end(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "_CHECK_S", 0.01)
    monkeypatch.setattr(pool, "_queue", SleepyQueue())
    threads = [pool.submit(get_ident) for _ in range(2)]
    for task in threads:
        task.result()

    shutdown = threading.Thread(target=pool.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(PATIENCE_S)

    assert not shutdown.is_alive()


@pytest.mark.parametrize("start", [cannot_start, ends_at_once])
def test_without_any_thread_the_caller_does_the_work(
    pool: ThreadPool, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "start_new_thread", start)
    monkeypatch.setattr(thread_pool, "_BEGIN_S", 0.01)
    done: list[int] = []
    tasks = [pool.submit(lambda number=number: done.append(number)) for number in range(5)]  # type: ignore[misc]

    for task in tasks[:3]:
        task.result()
    assert done == [0, 1, 2]
    tasks[3].abandon()
    pool.shutdown()

    assert done == [0, 1, 2, 4]


def test_a_thread_that_begins_after_the_end_does_nothing(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(thread_pool, "start_new_thread", lambda function, args: late.append(partial(function, *args)))
    monkeypatch.setattr(thread_pool, "_BEGIN_S", 0.01)
    pool.submit(lambda: None).result()
    pool.shutdown()

    for serve in late:
        serve()


def test_a_task_that_no_thread_takes_is_done_by_the_caller(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the thread that took it had got no memory to begin it."""
    monkeypatch.setattr(thread_pool, "_CHECK_S", 0.01)
    go_on = threading.Event()
    first = [pool.submit(lambda: go_on.wait(PATIENCE_S)) for _ in range(3)]
    while not pool._queue.empty():
        os.sched_yield()
    lost = pool.submit(get_ident)
    pool._queue.get_nowait()

    assert lost.result() == get_ident()
    go_on.set()
    assert all(task.result() for task in first)
    pool.shutdown()


def test_an_abandoned_task_does_not_run_and_a_running_one_is_waited_for(pool: ThreadPool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        done.append("begun")

    running = pool.submit(work)
    assert begun.wait(PATIENCE_S)
    waiting = Task(pool, lambda: done.append("abandoned"))
    waiting.abandon()
    pool.enqueue(waiting)
    threading.Timer(0.02, go_on.set).start()
    running.abandon()

    assert done == ["begun"]
    pool.shutdown()
    assert done == ["begun"]


def test_a_task_whose_claim_was_interrupted_can_be_abandoned(pool: ThreadPool) -> None:
    """The interrupt came when the caller had claimed it, and before the work began."""
    task = Task(pool, lambda: None)
    assert task._is_claimed_here()

    task.abandon()
    task.run()

    assert not task._is_done


def test_an_error_does_not_hold_the_task_that_it_came_from(pool: ThreadPool) -> None:
    task = pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        task.result()
    assert task._error is None
    pool.shutdown()


def test_a_lone_thread_works_and_can_be_waited_for() -> None:
    go_on, done = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(PATIENCE_S)
        done.set()

    thread = BackgroundThread(work, "test")
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    thread.join(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join()

    assert done.is_set()
    assert not thread.is_alive()


def test_a_lone_thread_keeps_what_its_work_raises() -> None:
    thread = BackgroundThread(lambda: 1 // 0, "test")
    thread.start()
    thread.join()

    assert isinstance(thread.error, ZeroDivisionError)


@pytest.mark.parametrize(("start", "kind"), [(cannot_start, RuntimeError), (ends_at_once, MemoryError)])
def test_a_lone_thread_that_does_not_begin_is_an_error_and_never_begins(
    start: Callable[..., int], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "start_new_thread", start)
    monkeypatch.setattr(thread_pool, "_START_S", 0.01)
    done: list[int] = []
    thread = BackgroundThread(lambda: done.append(1), "test")

    with pytest.raises(kind):
        thread.start()
    thread._serve()
    thread.join()

    assert (done, thread.is_alive()) == ([], False)


def test_a_lone_thread_is_not_alive_in_a_forked_child() -> None:
    go_on = threading.Event()
    thread = BackgroundThread(lambda: go_on.wait(PATIENCE_S), "test")
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(int(thread.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.join()


def test_what_a_background_thread_refers_to_is_freed_when_it_can_be_joined() -> None:
    class Held:
        """Something whose end is observed."""

    held = Held()
    ended = weakref.ref(held)
    thread = BackgroundThread(partial(isinstance, held, Held), "holdfast-test", stop=let_end)
    del held
    thread.start()
    thread.join()

    assert ended() is None
    assert thread.error is None
