"""The queue passes pieces from the caller to the writing thread, within a budget or all at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.errors import SourceChanged
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import BytesSource, cut_sources
from holdfast.snapshot import staging
from holdfast.snapshot.staging import Queue
from tests.kit.saving import noise

MIB = 1 << 20


class Interrupted(BytesSource):
    """Raises as if the user had lost patience, in the middle."""

    def read(self, start: int, stop: int) -> memoryview:
        if start >= 2 * MIB:
            raise KeyboardInterrupt
        return super().read(start, stop)


def sources(*sizes: int) -> list[BytesSource]:
    return [BytesSource(f"s{number}", noise(size, number)) for number, size in enumerate(sizes)]


def test_the_queue_gives_every_piece_and_never_holds_more_than_its_budget() -> None:
    given = sources(5 * CHUNK_BYTES, 10, 3 * CHUNK_BYTES + 5)
    queue = Queue(2 * CHUNK_BYTES)
    staged = queue.stage(given)
    most = 0
    found: dict[str, bytes] = {}

    def take() -> None:
        nonlocal most
        for piece in cut_sources(staged):
            data = piece.source.read(piece.start, piece.stop)
            most = max(most, queue.count_buffered_bytes())
            found[piece.source.name] = found.get(piece.source.name, b"") + bytes(data)

    thread = threading.Thread(target=take)
    thread.start()
    queue.fill(cut_sources(given))
    thread.join()

    assert found == {source.name: bytes(source.data) for source in given}
    assert most <= 2 * CHUNK_BYTES
    assert queue.count_buffered_bytes() == 0


def test_a_piece_larger_than_the_budget_passes_alone() -> None:
    given = sources(CHUNK_BYTES)
    queue = Queue(10)

    queue.fill(cut_sources(given))

    assert bytes(queue.stage(given)[0].read(0, CHUNK_BYTES)) == bytes(given[0].data)


def test_the_memory_of_a_piece_is_free_only_when_its_last_view_is_gone() -> None:
    given = sources(100)
    queue = Queue(1000)
    queue.fill(cut_sources(given))
    view = queue.stage(given)[0].read(0, 100)
    part = view[10:20]
    del view
    assert queue.count_buffered_bytes() == 100

    del part

    assert queue.count_buffered_bytes() == 0


def test_a_piece_that_is_asked_for_twice_is_an_error_and_no_hang() -> None:
    given = sources(100)
    queue = Queue(1000)
    (staged,) = queue.stage(given)
    queue.fill(cut_sources(given))
    staged.read(0, 100)

    with pytest.raises(
        SourceChanged,
        match=r"'s0': bytes 0 to 100 are needed again, and staging='budget' has released them; nothing was"
        r" committed. Save again, or with staging='full'",
    ):
        staged.read(0, 100)


def test_whoever_waits_for_a_piece_hears_why_it_does_not_come() -> None:
    given: list[Any] = [Interrupted("s0", noise(4 * MIB))]
    queue = Queue(MIB)
    (staged,) = queue.stage(given)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            for piece in cut_sources([staged]):
                staged.read(piece.start, piece.stop)
        except SourceChanged as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(KeyboardInterrupt), queue.failing():
        queue.fill(cut_sources(given))
    thread.join()

    assert "'s0': it was not copied completely" in str(errors[0])


def test_whoever_fills_a_queue_for_a_thread_that_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RECHECK_S", 0.01)
    queue = Queue(MIB)

    queue.fill(cut_sources(sources(MIB, MIB, MIB)), is_wanted=lambda: False)

    assert queue._pieces


def test_without_a_budget_a_piece_can_be_taken_again() -> None:
    given = sources(100, 200)
    queue = Queue(None)
    staged = queue.stage(given)

    queue.add_last(cut_sources(given))

    for source, copy in zip(given, staged, strict=True):
        assert [bytes(copy.read(0, source.size_bytes)) for _ in range(2)] == [source.data] * 2


def test_a_chunk_that_was_not_missing_is_not_waited_for() -> None:
    given = sources(100, 200)
    queue = Queue(None)
    staged = queue.stage(given)
    thread = threading.Thread(target=queue.note_missing, args=[cut_sources(given)[1:]])
    thread.start()

    queue.add_last(queue.wait_for_missing(lambda: True))
    thread.join()

    assert bytes(staged[1].read(0, 200)) == given[1].data
    with pytest.raises(SourceChanged, match=r"'s0': bytes 0 to 100 were not copied from the device"):
        staged[0].read(0, 100)


def test_missing_chunks_are_not_waited_for_when_the_save_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RECHECK_S", 0.01)
    assert Queue(None).wait_for_missing(lambda: False) == ()
    ended = Queue(None)
    ended.end()
    assert ended.wait_for_missing(lambda: True) == ()
