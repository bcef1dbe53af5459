"""Deferred digests are those of the bytes at the time of the call, whatever happens to the tensors afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.digest import hash_bytes
from holdfast.errors import DeviceFault, Unsupported
from holdfast.tensors.device_digest import deferred
from holdfast.tensors.device_digest.deferred import CollectedDigests, DeferredDigests, can_defer
from holdfast.tensors.device_digest.pieces import DeviceBytes
from holdfast.tensors.device_digest.torch_ops import TorchKernels
from tests.kit.device_digests import CPU
from tests.kit.hooking import hooked


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash tensors of the CPU as if it were a device without streams."""
    monkeypatch.setattr(deferred, "find_kernels", TorchKernels)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def _queue(queue: DeferredDigests, tensors: list[torch.Tensor]) -> list[Any]:
    expected = [hash_bytes(_bytes(tensor)) for tensor in tensors]
    assert [queue.queue(tensor) for tensor in tensors] == list(range(len(tensors)))
    return expected


def test_tensors_may_change_as_soon_as_their_digest_is_queued() -> None:
    queue = DeferredDigests()
    tensors = [torch.arange(4.0), torch.arange(700, dtype=torch.int16).view(7, 100).t(), torch.ones(0), torch.ones(())]
    expected = _queue(queue, tensors)
    for tensor in tensors:
        tensor.fill_(-1)

    assert queue.collect().wait() == expected


def test_nothing_is_queued_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceBytes, "from_tensor", lambda _: SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    queue = DeferredDigests()

    with pytest.raises(Unsupported, match="Record without CUDA graphs"):
        queue.queue(torch.ones(1))
    assert queue.collect().wait() == []


def test_large_tensors_are_hashed_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "SMALL_BYTES", 100)
    # The large ones do not fit into the slab.
    monkeypatch.setattr(deferred, "SLAB_BYTES", 1000)
    queue = DeferredDigests()
    tensors = [torch.arange(10.0), torch.arange(5000.0), torch.arange(11.0), torch.arange(3000.0).view(3, 1000).t()]

    assert queue.collect().wait() == []
    assert _queue(queue, tensors) == queue.collect().wait()


def test_more_than_the_slab_takes_is_hashed_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "SLAB_BYTES", 4096)
    queue = DeferredDigests()
    tensors = [torch.full((number,), float(number)) for number in range(1, 120)]

    assert _queue(queue, tensors) == queue.collect().wait()


def test_a_launch_has_a_bounded_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_MAX_PIECES", 3)
    queue = DeferredDigests()
    expected = _queue(queue, [torch.full((2,), float(number)) for number in range(7)])

    collected = queue.collect()

    assert collected.wait() == expected
    assert [len(numbers) for copy in collected.copies for _, numbers in copy.launches] == [3, 3, 1]


def test_digests_that_another_stream_may_collect_are_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "SMALL_BYTES", 100)
    queue = DeferredDigests()
    queue.queue(torch.arange(5000.0))

    (own,) = queue._queues.values()

    ((queued, _),) = own.launches
    assert any(queued.nodes is memory for memory in own.stream.kept)


def test_numbers_start_again_when_digests_are_collected() -> None:
    queue = DeferredDigests()
    first = _queue(queue, [torch.arange(3)])
    collected = queue.collect()
    second = _queue(queue, [torch.arange(4), torch.arange(5)])

    assert queue.collect().wait() == second
    assert collected.wait() == first
    assert CollectedDigests(0).wait() == []


def test_tensors_of_inference_mode_are_hashed_like_all_others() -> None:
    queue = DeferredDigests()
    with torch.inference_mode():
        inside = torch.arange(6.0)
        queue.queue(inside)
    outside = torch.arange(7.0, requires_grad=True)
    queue.queue(outside)

    assert queue.collect().wait() == [hash_bytes(_bytes(inside)), hash_bytes(_bytes(outside))]


def test_a_device_that_returns_wrong_digests_is_noticed_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = DeferredDigests()
    monkeypatch.setattr(TorchKernels, "hash_parts", lambda self, parts, link: torch.zeros(len(parts), 8).int())
    queue.queue(torch.arange(3))

    collected = queue.collect()

    with pytest.raises(DeviceFault, match="wrong digest of random bytes"):
        collected.wait()


def test_a_tensor_without_memory_of_its_own_is_refused_and_has_no_number() -> None:
    queue = DeferredDigests()
    with pytest.raises(Unsupported):
        queue.queue(torch.eye(3).to_sparse())

    assert queue.queue(torch.ones(3)) == 0


def test_tensors_of_the_cpu_and_of_devices_without_kernels_are_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_defer(CPU)
    assert can_defer(torch.device("cuda", 0))
    monkeypatch.setattr(deferred, "find_kernels", lambda device: None)
    assert not can_defer(torch.device("cuda", 0))


def test_after_an_error_later_digests_are_not_mixed_up_with_earlier_ones() -> None:
    queue = DeferredDigests()
    _queue(queue, [torch.arange(3), torch.arange(4)])
    with hooked(TorchKernels, "hash_parts", _fail):
        with pytest.raises(RuntimeError, match="the device is lost"):
            queue.collect()

    assert _queue(queue, [torch.arange(5)]) == queue.collect().wait()


def _fail(*_: object) -> None:
    raise RuntimeError("the device is lost")
