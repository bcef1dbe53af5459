"""Digests of chunks on devices: what `read` would return is hashed, and none are computed without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import DeviceFault
from holdfast.repo.format.boxes import Box
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request
from holdfast.snapshot import save
from holdfast.snapshot.save import SaveOptions, add_digests, digest_sources, drop_digests, make_request
from holdfast.tensors.device_digest.choice import BackendChoice
from holdfast.tensors.shard_source import make_shard_source, pick_chunks
from holdfast.tensors.sharding import LocalBox, LocalLeaf
from holdfast.trees.registered import Types
from tests.kit.hooking import Hook


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tensors of the CPU for tensors of a device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(save, "is_on_device", lambda tensor: not tensor.is_meta)
    monkeypatch.setattr(save, "choose_backend", lambda _: BackendChoice("torch", "a test"))


def request_of(tree: object) -> Request:
    return make_request("x", tree, SaveOptions(), Types())


def test_without_a_device_a_request_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of({"w": torch.ones(1000)})
    assert add_digests(request) is request
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert add_digests(request) is request


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1000),
        torch.randn(600_000),
        torch.randn(300, 200)[:, ::2],
        torch.randn(300, 200).t(),
        torch.randn(300, 200)[10:50],
        torch.randn(300, 1).expand(300, 50),
        torch.randn(700, dtype=torch.complex64).conj(),
        torch.zeros(3),
        torch.zeros(0),
        torch.zeros(5, device="meta"),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.stride()}{tensor.device}",
)
def test_a_digest_is_that_of_the_bytes_that_would_be_read(tensor: torch.Tensor) -> None:
    request = request_of({"w": tensor})
    (source,) = request.sources

    found = add_digests(request).digests

    starts = (0, *source.cuts[:-1])
    chunks = [source.read(start, stop) for start, stop in zip(starts, source.cuts, strict=False)]
    expected = [hash_bytes(data) if len(data) > 512 else None for data in chunks]
    assert found == ({0: expected} if expected else {})


@pytest.mark.usefixtures("on_device")
def test_some_chunks_of_a_source_have_the_digests_of_those() -> None:
    request = request_of({"w": torch.randn(900_000)})
    (source,) = request.sources
    whole = digest_sources([(0, source)])[0]
    spans = [(0, source.cuts[0]), (source.cuts[1], source.cuts[2])]

    assert digest_sources([(5, pick_chunks(source, spans))]) == {5: [whole[0], whole[2]]}


@pytest.mark.usefixtures("on_device")
def test_what_is_known_is_not_computed_again() -> None:
    request = request_of({"w": torch.ones(1000)})
    known = {0: [hash_bytes(b"known")]}
    assert add_digests(Request("x", request.sources, digests=known)).digests == known
    assert digest_sources([(0, BytesSource("b", bytes(1000)))]) == {}


@pytest.mark.usefixtures("on_device")
def test_a_device_that_cannot_compute_digests_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "choose_backend", lambda _: BackendChoice("cpu", "a wrong kernel"))
    assert add_digests(request_of({"w": torch.ones(1000)})).digests == {}


class Streams:
    """A device module that notes for which device the current stream is waited for."""

    def __init__(self) -> None:
        self.waited: list[torch.device] = []

    def current_stream(self, device: torch.device) -> Streams:
        self.waited.append(device)
        return self

    def synchronize(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(save, "WITH_STREAMS", {"cpu"})
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


CPU = torch.device("cpu")


def fail_by(error: Exception) -> Callable[[object], list[Digest]]:
    def fail(_: object) -> list[Digest]:
        raise error

    return fail


@pytest.mark.usefixtures("on_device")
def test_a_device_that_hashes_nothing_is_waited_for(streams: Streams) -> None:
    # Stored in the manifest: it is read by other threads, whose copies do not wait for the caller's stream.
    assert add_digests(request_of({"step": torch.ones(1)})).digests == {0: [None]}
    assert streams.waited == [CPU]


@pytest.mark.usefixtures("on_device")
def test_a_device_that_hashes_is_waited_for_by_the_hashing(streams: Streams) -> None:
    assert add_digests(request_of({"w": torch.ones(1000)})).digests
    assert streams.waited == []


@pytest.mark.usefixtures("on_device")
@pytest.mark.filterwarnings("ignore:saved from copies")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), DeviceFault("a wrong digest")])
def test_devices_are_waited_for_if_one_fails(streams: Streams, hook: Hook, error: Exception) -> None:
    hook(save, "digest_pieces", fail_by(error))
    assert add_digests(request_of({"w": torch.ones(1000)})).digests == {}
    assert streams.waited == [CPU]


@pytest.mark.usefixtures("on_device")
def test_devices_are_waited_for_if_digests_are_not_wanted(streams: Streams) -> None:
    request = request_of({"w": torch.ones(1000)})
    known = Request("x", request.sources, digests={0: [hash_bytes(b"known")]})
    assert drop_digests(known).digests == {}
    assert streams.waited == [CPU]


@pytest.mark.usefixtures("on_device")
def test_a_source_that_is_only_partly_on_a_device_is_waited_for(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = torch.ones(500), torch.ones(500)
    monkeypatch.setattr(save, "is_on_device", lambda tensor: tensor is second)
    halves = (LocalBox(Box((0,), (500,)), first), LocalBox(Box((500,), (500,)), second))
    source = make_shard_source("w", None, LocalLeaf("shards", (1000,), torch.float32, halves))
    assert digest_sources([(0, pick_chunks(source, [(0, 2000)]))]) == {}
    assert streams.waited == [CPU]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["choose_backend", "_iter_pieces"])
def test_a_device_that_is_full_before_anything_is_hashed_is_read(streams: Streams, hook: Hook, name: str) -> None:
    hook(save, name, fail_by(torch.OutOfMemoryError("full")))
    assert add_digests(request_of({"w": torch.ones(1000)})).digests == {}
    assert streams.waited == [CPU]
