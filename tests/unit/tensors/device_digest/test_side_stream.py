"""Work beside the caller's stream begins after what the caller has queued, and is waited for, also after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.tensors.device_digest import side_stream
from holdfast.tensors.device_digest.side_stream import SideStream

DEVICE = torch.device("cuda", 0)


class _Streams:
    """A device module that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self, device: torch.device) -> str:
        return f"current stream of {device}"

    def Stream(self, *, device: torch.device) -> _Streams:
        self.log.append(f"new stream of {device}")
        return self

    def wait_stream(self, other: str) -> None:
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
