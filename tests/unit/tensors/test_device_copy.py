"""Bytes come from a device through two pinned buffers in turn; none is filled again before it is empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from holdfast.tensors import device_copy
from holdfast.tensors.device_copy import StreamCopier, copy_into, copy_to_host

CPU = torch.device("cpu")


@dataclass(slots=True)
class FakeEvent:
    """Notes when it is waited for."""

    log: list[str]
    number: int

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")


@dataclass(slots=True)
class FakeStream:
    """Notes what is queued on it, and may fail to."""

    log: list[str]
    fails_at: int = -1
    number: int = 0

    def wait_stream(self, other: object) -> None:
        self.log.append(f"after {other}")

    def record_event(self) -> FakeEvent:
        if self.number == self.fails_at:
            raise RuntimeError("the device is lost")
        self.log.append(f"copy {self.number}")
        self.number += 1
        return FakeEvent(self.log, self.number - 1)

    def synchronize(self) -> None:
        self.log.append("wait for all")


@dataclass(slots=True)
class FakeStreams:
    """Stands for torch.cuda, with copies that are done at once."""

    log: list[str] = field(default_factory=list)
    made: list[FakeStream] = field(default_factory=list)

    def Stream(self, *, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(self.log))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> str:
        return "what the caller has queued"

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    monkeypatch.setattr(device_copy, "PINNED_BYTES", 100)
    monkeypatch.setattr(device_copy, "_new_pinned", lambda: torch.zeros(100, dtype=torch.uint8))
    return FakeStreams()


def make_bytes(size: int) -> torch.Tensor:
    return torch.arange(size).to(torch.uint8)


@pytest.mark.parametrize("size", [1, 99, 100, 101, 250, 1000])
def test_the_copy_is_whole(streams: FakeStreams, size: int) -> None:
    target = bytearray(size)

    StreamCopier(CPU, streams).copy(memoryview(target), make_bytes(size))

    assert target == make_bytes(size).numpy().tobytes()


def test_while_one_buffer_is_emptied_the_other_one_is_filled(streams: FakeStreams) -> None:
    StreamCopier(CPU, streams).copy(memoryview(bytearray(350)), make_bytes(350))

    assert streams.log == [
        "after what the caller has queued",
        *("copy 0", "copy 1", "wait 0", "copy 2", "wait 1", "copy 3", "wait 2", "wait 3"),
    ]


def test_after_an_error_the_stream_is_waited_for_and_the_buffers_are_not_used_again(streams: FakeStreams) -> None:
    copier = StreamCopier(CPU, streams)
    streams.made[0].fails_at = 1

    with pytest.raises(RuntimeError, match="the device is lost"):
        copier.copy(memoryview(bytearray(350)), make_bytes(350))

    assert streams.log[-1] == "wait for all"
    assert copier._pairs == []


def test_buffers_are_kept_for_the_next_copy(streams: FakeStreams) -> None:
    copier = StreamCopier(CPU, streams)
    for _ in range(3):
        copier.copy(memoryview(bytearray(10)), make_bytes(10))
    assert len(copier._pairs) == 1


def test_buffers_of_a_copy_in_inference_mode_serve_outside_of_it(streams: FakeStreams) -> None:
    copier = StreamCopier(CPU, streams)
    with torch.inference_mode():
        copier.copy(memoryview(bytearray(10)), make_bytes(10))

    target = bytearray(150)
    copier.copy(memoryview(target), make_bytes(150))

    assert target == bytes(range(150))


def test_a_device_without_streams_copies_directly() -> None:
    target = bytearray(5)
    copy_into(memoryview(target), make_bytes(5))
    assert bytes(target) == bytes(copy_to_host(make_bytes(5))) == bytes(range(5))
    assert len(copy_to_host(make_bytes(0))) == 0


def test_a_device_with_streams_has_one_copier(monkeypatch: pytest.MonkeyPatch, streams: FakeStreams) -> None:
    monkeypatch.setattr(device_copy, "WITH_STREAMS", frozenset({"cpu"}))
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    device_copy._find_copier.cache_clear()
    try:
        assert [bytes(copy_to_host(make_bytes(size))) for size in (3, 4)] == [bytes(range(3)), bytes(range(4))]
    finally:
        device_copy._find_copier.cache_clear()
    assert len(streams.made) == 1
