"""Tensors are collected in batches, which are committed whole, in order, and at the latest when the process exits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from holdfast.content.catalog import Catalog
from holdfast.content_store import ContentStoreReader, ContentStoreWriter
from holdfast.errors import HoldfastError, NotFound, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.testing.faults import Fault, FaultyStore


def test_a_batch_is_committed_when_it_is_full(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path, budget_bytes=1 << 20)
    for number in range(5):
        writer.write_tensor(str(number), torch.full((50_000,), number))

    assert _names_seen_by_others(tmp_path) == ["0", "1", "2", "3"]


def _names_seen_by_others(loc: Path) -> list[str]:
    """Return what is committed; a reader of this process would make its writers flush first."""
    catalog = Catalog(open_repository(open_store(str(loc))))
    catalog.refresh()
    return catalog.names()


def test_a_tensor_larger_than_the_budget_is_committed_at_once_without_a_copy(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path, budget_bytes=1 << 20)
    large = torch.randn(300_000)
    writer.write_tensor("small", torch.ones(1))
    writer.write_tensor("large", large)

    assert _names_seen_by_others(tmp_path) == ["large", "small"]
    assert torch.equal(ContentStoreReader(tmp_path).read_tensor("large"), large)


def failing_after(count: int, fault: Fault) -> tuple[Repository, MemoryStore]:
    inner = MemoryStore()
    return open_repository(FaultyStore(inner, fault=fault, at=count), create=True), inner


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.REPLY_LOST])
def test_whatever_fails_in_the_background_is_raised_by_flush_and_nothing_is_lost(fault: Fault) -> None:
    tensors = [torch.full((2000,), float(number)) for number in range(6)]
    opening = FaultyStore(MemoryStore())
    open_repository(opening, create=True)
    errors = []
    for at in itertools.count(len(opening.log) + 1):
        inner = MemoryStore()
        store = FaultyStore(inner, fault=fault, at=at)
        writer = ContentStoreWriter(open_repository(store, create=True), budget_bytes=1 << 16)
        for number, tensor in enumerate(tensors):
            writer.write_tensor_async(str(number), tensor)
        try:
            writer.flush()
        except HoldfastError as error:
            errors.append(type(error))
            writer.flush()
        reader = ContentStoreReader(open_repository(inner))
        assert all(torch.equal(reader.read_tensor(str(number)), tensor) for number, tensor in enumerate(tensors))
        if at > len(store.log):
            break

    assert len(errors) > 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it fails when it is dropped, too
def test_a_full_disk_is_reported_by_every_write_that_meets_it() -> None:
    repo, _ = failing_after(1, Fault.NO_SPACE)
    writer = ContentStoreWriter(repo, budget_bytes=1 << 16)
    for number in range(3):
        writer.write_tensor(str(number), torch.zeros(2000))

    for number in range(3, 6):
        with pytest.raises(StoreFull):
            writer.write_tensor(str(number), torch.zeros(2000))
    with pytest.raises(StoreFull):
        writer.flush()


def test_the_store_can_be_opened_as_any_other(tmp_path: Path) -> None:
    with ContentStoreWriter(tmp_path) as writer:
        base = torch.randn(8)
        writer.write_tensor("base", base)
        writer.write_tensor("half", base[4:])
    repo = open_repository(open_store(str(tmp_path)))

    assert ContentStoreReader(repo).names() == ["base", "half"]


def test_writing_in_the_background_gives_what_writing_gives(tmp_path: Path) -> None:
    tensor = torch.zeros(20_000)
    with ContentStoreWriter(tmp_path, budget_bytes=1 << 20) as writer:
        for number in range(20):
            writer.write_tensor_async(str(number), tensor)
            tensor += 1
    reader = ContentStoreReader(tmp_path)

    assert [reader.read_tensor(str(number))[0].item() for number in range(20)] == list(range(20))


def test_the_background_holds_no_more_than_the_budget() -> None:
    held = threading.Event()
    inner = MemoryStore()

    class SlowStore(FaultyStore):
        def prepare(self, prefixes: Sequence[str]) -> None:
            held.wait()
            super().prepare(prefixes)

    writer = ContentStoreWriter(open_repository(SlowStore(inner), create=True), budget_bytes=1 << 20)
    written: list[int] = []

    def write() -> None:
        for number in range(40):
            writer.write_tensor_async(str(number), torch.zeros(20_000))
            written.append(number)

    blocked = threading.Event()

    class ToldCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            blocked.set()
            return super().wait(timeout)

    batches = writer._writer
    batches._room = ToldCondition(batches._lock)
    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive() and not blocked.is_set():
        blocked.wait(0.01)
    blocked_at = len(written)
    held.set()
    thread.join()
    writer.flush()

    assert 6 <= blocked_at <= 14
    assert len(ContentStoreReader(open_repository(inner)).names()) == 40


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *words], capture_output=True, text=True, check=False
    )


SCRIPT = """
    import os, sys
    import torch
    from holdfast.content_store import ContentStoreWriter
    writer = ContentStoreWriter(sys.argv[1])
    writer.write_tensor("first", torch.arange(3))
"""


@pytest.mark.slow
def test_what_is_left_is_committed_when_the_interpreter_exits(tmp_path: Path) -> None:
    done = run_python(SCRIPT + "    writer.write_tensor_async('second', torch.arange(4))", str(tmp_path))

    assert (done.returncode, done.stderr) == (0, "")
    assert ContentStoreReader(tmp_path).names() == ["first", "second"]


@pytest.mark.slow
def test_of_a_writer_that_is_killed_committed_batches_stay_and_the_rest_is_invisible(tmp_path: Path) -> None:
    code = SCRIPT + "    writer.flush()\n    writer.write_tensor('lost', torch.ones(2))\n    os.kill(os.getpid(), 9)"
    done = run_python(code, str(tmp_path))
    reader = ContentStoreReader(tmp_path)

    assert done.returncode == -signal.SIGKILL
    assert reader.names() == ["first"]
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("after", torch.ones(1))
    assert reader.read_tensor("after").item() == 1


def test_what_a_dropped_writer_holds_is_committed(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path)
    writer.write_tensor("x", torch.ones(1))

    del writer

    assert _names_seen_by_others(tmp_path) == ["x"]


def _write_many(loc: str, worker: int) -> None:
    with ContentStoreWriter(loc, budget_bytes=1 << 18) as writer:
        for number in range(20):
            writer.write_tensor(f"{worker}/{number}", torch.full((2000,), worker * 100 + number))
        writer.write_tensor("shared", torch.tensor(worker))


@pytest.mark.slow
def test_many_processes_write_to_one_place_and_it_can_be_opened_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), number)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    _write_many(str(tmp_path), 2)
    reader = ContentStoreReader(tmp_path)

    assert [worker.exitcode for worker in workers] == [0, 0]
    assert reader.read_tensor("shared").item() == 2
    for first in range(3):
        for second in range(20):
            assert set(reader.read_tensor(f"{first}/{second}").tolist()) == {first * 100 + second}


def test_a_forked_child_does_not_commit_what_its_parent_holds(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path)
    writer.write_tensor("parent", torch.ones(1))
    child = os.fork()
    if child == 0:
        writer.write_tensor("child", torch.ones(1))
        writer.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)

    seen_before = _names_seen_by_others(tmp_path)
    writer.flush()

    assert status == 0
    assert seen_before == ["child"]
    assert _names_seen_by_others(tmp_path) == ["child", "parent"]


def test_a_reader_works_on_in_a_forked_child(tmp_path: Path) -> None:
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("x", torch.ones(1_000_000))
    reader = ContentStoreReader(tmp_path)
    reader.read_tensor("x")
    child = os.fork()
    if child == 0:
        # The threads of torch itself stayed with the parent as well, and it does not notice.
        torch.set_num_threads(1)
        os._exit(0 if reader.read_tensor("x").min() == 1 else 1)

    assert os.waitpid(child, 0)[1] == 0


def test_a_reader_sees_what_other_processes_wrote_when_it_misses_a_name_or_is_refreshed(tmp_path: Path) -> None:
    reader = ContentStoreReader(tmp_path)
    with pytest.raises(NotFound):
        reader.read_tensor("0/7")
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(str(tmp_path), 0))
    writer.start()
    writer.join()
    found = [reader.read_tensor("0/7")[0].item(), reader.read_tensor("shared").item()]
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(str(tmp_path), 1))
    writer.start()
    writer.join()

    found.append(reader.read_tensor("shared").item())
    reader.refresh()
    found.append(reader.read_tensor("shared").item())

    assert found == [7, 0, 0, 1]


@pytest.mark.slow
def test_ten_thousand_small_writes_take_seconds(tmp_path: Path) -> None:
    tensors = [torch.full((8,), number) for number in range(10_000)]
    started = time.process_time()
    with ContentStoreWriter(tmp_path) as writer:
        for number, tensor in enumerate(tensors):
            writer.write_tensor(f"step/{number}", tensor)
    spent_s = time.process_time() - started

    assert spent_s < 5
    assert ContentStoreReader(tmp_path).read_tensor("step/9999").tolist() == [9999] * 8
