"""The queue passes each piece once from the caller to the writing thread, within a budget."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.errors import SourceChanged
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import BytesSource, cut_sources
from holdfast.snapshot.save.staging import Queue
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
    queue.fill(given)
    thread.join()

    assert found == {source.name: bytes(source.data) for source in given}
    assert most <= 2 * CHUNK_BYTES
    assert queue.count_buffered_bytes() == 0


def test_a_piece_larger_than_the_budget_passes_alone() -> None:
    given = sources(CHUNK_BYTES)
    queue = Queue(10)

    queue.fill(given)

    assert bytes(queue.stage(given)[0].read(0, CHUNK_BYTES)) == bytes(given[0].data)


def test_the_memory_of_a_piece_is_free_only_when_its_last_view_is_gone() -> None:
    given = sources(100)
    queue = Queue(1000)
    queue.fill(given)
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
    queue.fill(given)
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
    with pytest.raises(KeyboardInterrupt):
        queue.fill(given)
    thread.join()

    assert "'s0': it was not copied completely" in str(errors[0])
