"""Work on a side stream starts after the caller's and is waited for; work on the caller's stream is not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from holdfast.tensors.device_digest import side_stream
from holdfast.tensors.device_digest.side_stream import CallerStream, HostLink, SideStream
from tests.kit.hooking import Hook

DEVICE = torch.device("cuda", 0)


class _Streams:
    """A device module that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: object = None

    def current_stream(self, device: torch.device) -> object:
        return self.current or f"current stream of {device}"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"enter {device}")
        yield
        self.log.append(f"leave {device}")

    def Event(self) -> _Streams:
        return self

    def record(self, stream: object) -> None:
        self.log.append(f"record an event on {stream}")

    def Stream(self, *, device: torch.device) -> _Streams:
        self.log.append(f"new stream of {device}")
        return self

    def wait_stream(self, other: object) -> None:
        self.log.append(f"wait for {other}")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Streams]:
    found = _Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    side_stream._find_stream.cache_clear()
    yield found
    side_stream._find_stream.cache_clear()


def test_work_waits_for_the_current_stream_and_is_waited_for(streams: _Streams) -> None:
    for _ in range(2):
        with SideStream(DEVICE):
            streams.log.append("work")

    once = ["wait for current stream of cuda:0", "enter", "work", "synchronize", "leave"]
    assert streams.log == ["new stream of cuda:0", *once, *once]


def test_an_error_leaves_nothing_running(streams: _Streams) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), SideStream(DEVICE):
        raise RuntimeError("out of memory")

    assert streams.log[-2:] == ["synchronize", "leave"]


@pytest.mark.usefixtures("streams")
def test_gradients_are_off_inside_only() -> None:
    with SideStream(DEVICE):
        assert not torch.is_grad_enabled()

    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [SideStream, CallerStream])
def test_a_stream_that_cannot_be_entered_leaves_gradients_on(
    streams: _Streams, hook: Hook, kind: type[SideStream | CallerStream]
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("the stream is captured")

    hook(streams, "current_stream", fail)

    with pytest.raises(RuntimeError, match="captured"), kind(DEVICE):
        pass

    assert torch.is_grad_enabled()


class _Stream:
    """A stream that notes which other it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def __str__(self) -> str:
        return self._name

    def wait_stream(self, other: object) -> None:
        self._log.append(f"{self} waits for {other}")


class _Memory:
    """Memory that notes which streams use it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record_stream(self, stream: object) -> None:
        self._log.append(f"memory is used on {stream}")


def test_work_on_the_callers_stream_is_never_waited_for(streams: _Streams) -> None:
    stream = CallerStream(DEVICE)
    streams.current = _Stream("first", streams.log)

    for _ in range(2):
        with stream:
            streams.log.append("work")

    once = ["enter cuda:0", "work", "leave cuda:0"]
    assert streams.log == [*once, *once]


def test_on_another_stream_work_comes_after_that_on_the_first_one(streams: _Streams) -> None:
    stream = CallerStream(DEVICE)
    stream.kept.append(_Memory(streams.log))  # type: ignore[arg-type]  # what is used of a tensor
    for name in ("first", "second"):
        streams.current = _Stream(name, streams.log)
        with stream:
            streams.log.append("work")

    order = [line for line in streams.log if "cuda:0" not in line]
    assert order == ["work", "second waits for first", "memory is used on second", "work"]
    assert stream.mark() is streams
    assert streams.log[-1] == "record an event on second"


def test_memory_that_is_taken_in_inference_mode_can_be_written_outside() -> None:
    stream = CallerStream(torch.device("cpu"))
    with torch.inference_mode(), stream:
        memory = torch.zeros(3)

    memory.add_(1)

    assert not memory.is_inference()
    assert stream.mark() is None


def test_a_device_without_streams_copies_at_once() -> None:
    link = HostLink(torch.device("cpu"))

    found = link.download(link.upload(np.arange(3)))

    assert found.tolist() == [0, 1, 2]
