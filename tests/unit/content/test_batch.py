"""How the tensors of a batch become sources: shared memory once, on one grid of chunks, under unique names."""

from __future__ import annotations

import torch

from holdfast.content.batch import Batch, SeenStorages
from holdfast.content.catalog import parse_storage_note
from holdfast.digest import hash_bytes
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import Source
from holdfast.trees.registered import Types


def plan(tensors: dict[str, torch.Tensor], *, copy: bool = True) -> dict[str, Source]:
    batch, seen = Batch("content/a-1"), SeenStorages("a")
    for name, tensor in tensors.items():
        batch.add_tensor(name, tensor, seen, Types(), copy=copy)
    return {source.name: source for source in batch.make_request({}).sources}


def read(source: Source) -> bytes:
    return bytes(source.read(0, source.size_bytes)) if source.size_bytes else b""


def test_a_tensor_alone_is_stored_with_the_digest_of_its_bytes() -> None:
    tensor = torch.arange(5.0)
    source = plan({"x": tensor})["tensors.x"]
    span = parse_storage_note(source.note, what="x")

    assert read(source) == tensor.numpy().tobytes()
    assert source.alias == 0
    assert span is not None
    assert (span.digest, span.first, span.size_bytes) == (hash_bytes(read(source)).hex(), 0, 20)


def test_a_view_begins_on_the_grid_of_chunks_of_its_base() -> None:
    base = torch.arange(1_000_000, dtype=torch.int32)
    sources = plan({"base": base, "view": base[600_000:600_010]})
    view = sources["tensors.view"]
    assert isinstance(view.spec, dict)

    assert view.alias == sources["tensors.base"].alias != 0
    assert view.spec["at"] == 2 * CHUNK_BYTES
    assert view.spec["offset"] == 600_000 - 2 * CHUNK_BYTES // 4
    assert read(view) == read(sources["tensors.base"])[2 * CHUNK_BYTES : 3 * CHUNK_BYTES]


def test_items_with_gaps_are_stored_without_them() -> None:
    base = torch.arange(10, dtype=torch.int16)
    source = plan({"x": base[::3]})["tensors.x"]
    assert isinstance(source.spec, dict)

    assert source.spec["packed"] is True
    assert read(source) == base[::3].contiguous().numpy().tobytes()


def test_a_copy_is_independent_and_memory_that_is_not_copied_is_not() -> None:
    for copy in (True, False):
        tensor, batch = torch.zeros(4), Batch("content/a-1")
        batch.add_tensor("x", tensor, SeenStorages("a"), Types(), copy=copy)
        tensor.fill_(1)
        (source,) = batch.make_request({}).sources

        assert (read(source) == bytes(16)) == copy


def test_a_gradient_and_a_tensor_of_the_same_name_are_two_entries() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)

    assert list(plan({"x": parameter, "x.grad": torch.ones(1)})) == ["tensors.x", "tensors.x.grad", "tensors.x.grad#2"]
