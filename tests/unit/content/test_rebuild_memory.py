"""Tensors that shared memory when they were written share it after reading, and others do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.content_store import ContentStoreReader, ContentStoreWriter, hash_storage
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot as Record
from holdfast.repo.names.snapshots import iter_names
from holdfast.snapshot.lazy import Snapshot
from holdfast.trees.registered import Types


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


def is_one_storage(*tensors: torch.Tensor) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def write(repo: Repository, *batches: dict[str, torch.Tensor]) -> ContentStoreReader:
    writer = ContentStoreWriter(repo)
    for batch in batches:
        for name, tensor in batch.items():
            writer.write_tensor(name, tensor)
        writer.flush()
    return ContentStoreReader(repo)


def spread(tensors: dict[str, torch.Tensor], *, apart: bool) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor} for name, tensor in tensors.items()] if apart else [tensors]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x.view(10, 300),
    "tail": lambda x: x[2000:],
    "column": lambda x: x.view(10, 300)[:, 7],
    "bytes from the second on": lambda x: x.view(torch.uint8)[1:2000],
    "doubles": lambda x: x.view(torch.float64)[3:50],
}


@pytest.mark.parametrize("apart", [False, True], ids=["in one batch", "in batches of their own"])
@pytest.mark.parametrize("order", list(itertools.permutations(["base", "view"])), ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_and_its_base_share_memory(repo: Repository, view: str, order: tuple[str, ...], *, apart: bool) -> None:
    base = torch.randn(3000)
    tensors = {"base": base, "view": VIEWS[view](base)}
    reader = write(repo, *spread({name: tensors[name] for name in order}, apart=apart))

    found = {name: reader.read_tensor(name) for name in reversed(order)}

    assert is_one_storage(*found.values())
    assert all(torch.equal(found[name], tensors[name]) for name in order)
    assert torch.equal(VIEWS[view](found["base"]), found["view"])


def test_views_that_overlap_share_memory_though_nobody_wrote_their_base(repo: Repository) -> None:
    base = torch.arange(100)
    reader = write(repo, {"low": base[10:60], "high": base[50:90]}, {"askew": base.view(torch.uint8)[333:500]})

    low, high, askew = (reader.read_tensor(name) for name in ("low", "high", "askew"))
    high[0] = -1

    assert low.tolist() == [*range(10, 50), -1, *range(51, 60)]
    assert is_one_storage(low, high, askew)
    assert torch.equal(askew[67:75], torch.tensor([-1]).view(torch.uint8))


def test_an_unchanged_storage_written_twice_is_one_after_reading(repo: Repository) -> None:
    x = torch.randn(6)
    reader = write(repo, {"first": x}, {"second": x})

    first = reader.read_tensor("first")

    assert is_one_storage(first, reader.read_tensor("second"), reader.read_tensor("first"))


@pytest.mark.parametrize("apart", [False, True], ids=["in one batch", "in batches of their own"])
def test_a_storage_that_was_changed_behind_the_version_counter_is_another_one(repo: Repository, *, apart: bool) -> None:
    writer = ContentStoreWriter(repo)
    x = torch.zeros(1000)
    writer.write_tensor("before", x)
    if apart:
        writer.flush()
    x.data.add_(1)
    writer.write_tensor("after", x)
    writer.write_tensor("view", x[10:20])
    reader = ContentStoreReader(repo)

    before, after, view = (reader.read_tensor(name) for name in ("before", "after", "view"))

    assert (set(before.tolist()), set(after.tolist())) == ({0}, {1})
    assert is_one_storage(after, view)
    assert not is_one_storage(before, after)


def test_a_change_that_is_taken_back_does_not_mix_two_contents(repo: Repository) -> None:
    x = torch.zeros(1_000_000)
    writer = ContentStoreWriter(repo)
    writer.write_tensor("start", x[:10])
    x[700_000] = 5
    writer.write_tensor("end", x[600_000:])
    x[700_000] = 0
    writer.write_tensor("whole", x)
    reader = ContentStoreReader(repo)

    assert reader.read_tensor("end").sum().item() == 5
    assert reader.read_tensor("whole").sum().item() == 0


def test_two_storages_of_equal_content_come_back_as_two(repo: Repository) -> None:
    reader = write(repo, {"a": torch.ones(5), "b": torch.ones(5)}, {"c": torch.ones(5)})

    a, b, c = (reader.read_tensor(name) for name in "abc")
    a.zero_()

    assert (b.tolist(), c.tolist()) == ([1] * 5, [1] * 5)
    assert reader.read_tensor_metadata("a").digest == reader.read_tensor_metadata("c").digest


def test_a_tensor_may_change_once_it_was_written(repo: Repository) -> None:
    writer = ContentStoreWriter(repo)
    for number in range(5):
        x = torch.full((3,), number)
        writer.write_tensor(str(number), x)
        x.fill_(-1)

    assert [ContentStoreReader(repo).read_tensor(str(n)).tolist() for n in range(5)] == [[n] * 3 for n in range(5)]


def test_memory_of_a_storage_that_died_is_not_mistaken_for_it(repo: Repository) -> None:
    writer = ContentStoreWriter(repo)
    for number in range(50):
        writer.write_tensor(str(number), torch.full((64,), 7))
    reader = ContentStoreReader(repo)

    found = [reader.read_tensor(str(number)) for number in range(50)]

    assert len({tensor.data_ptr() for tensor in found}) == 50


def test_what_is_changed_after_reading_stays_changed_as_long_as_it_is_used(repo: Repository) -> None:
    base = torch.arange(10)
    reader = write(repo, {"base": base, "column": base.view(5, 2)[:, 1]})

    found = reader.read_tensor("base")
    found[1] = 100
    column = reader.read_tensor("column")

    assert column.tolist() == [100, 3, 5, 7, 9]
    del found, column
    assert reader.read_tensor("base").tolist() == list(range(10))


def test_without_a_cache_nothing_is_shared(repo: Repository) -> None:
    write(repo, {"x": torch.ones(4)})
    reader = ContentStoreReader(repo, cache=False)

    first, second = reader.read_tensor("x"), reader.read_tensor("x")

    assert not is_one_storage(first, second)


def test_a_storage_and_the_tensors_over_it_are_one(repo: Repository) -> None:
    x = torch.randn(20)
    writer = ContentStoreWriter(repo)
    digest = writer.write_storage(x.untyped_storage())
    writer.write_tensor("x", x[5:])
    reader = ContentStoreReader(repo)

    storage, tensor = reader.read_storage(digest), reader.read_tensor("x")

    assert digest == hash_storage(storage) == reader.read_tensor_metadata("x").digest
    assert storage.data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor.storage_offset() == 5


@pytest.mark.parametrize("cut", [lambda x: x[7:90], lambda x: x.view(50, 60)[:, 1:3], lambda x: x[:: -1 % 5]])
def test_the_storage_of_a_part_can_be_read_by_the_digest_in_its_metadata(
    repo: Repository, cut: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    view = cut(torch.randn(3000))
    reader = write(repo, {"view": view})
    metadata = reader.read_tensor_metadata("view")

    storage = reader.read_storage(metadata.digest)
    found = torch.empty(0, dtype=metadata.dtype).set_(storage, metadata.offset, metadata.shape, metadata.stride)

    assert hash_storage(storage) == metadata.digest
    assert torch.equal(found, view)


def test_a_device_is_the_same_however_it_is_named(repo: Repository) -> None:
    reader = write(repo, {"x": torch.ones(4)})

    kept = reader.read_tensor("x")

    assert is_one_storage(
        kept, reader.read_tensor("x", device=torch.device("cpu")), reader.read_tensor("x", device="cpu")
    )


def test_a_batch_is_a_snapshot_like_any_other(repo: Repository) -> None:
    base = torch.randn(600_000)
    tensors = {"base": base, "part": base[300_000:300_010], "bytes": base.view(torch.uint8)[5:9], "two": base[::300]}
    write(repo, tensors)
    (record,) = iter_names(repo.store, "content/")
    assert isinstance(record, Record)

    loaded = Snapshot(repo, record, Types(())).load()["tensors"]

    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert is_one_storage(*loaded.values())


Piece = tuple[int, int, int]


@given(
    pieces=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=6),
    changes=st.lists(st.booleans(), min_size=6, max_size=6),
    flushes=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_any_views_written_around_any_changes_have_the_values_that_they_had(
    pieces: list[Piece], changes: list[bool], flushes: list[bool]
) -> None:
    repo = open_repository(MemoryStore(), create=True)
    writer = ContentStoreWriter(repo)
    base = torch.arange(300)
    wanted = []
    for number, (start, length, step) in enumerate(pieces):
        view = base[start : start + length * step : step]
        writer.write_tensor(str(number), view)
        wanted.append(view.clone())
        if flushes[number]:
            writer.flush()
        if changes[number]:
            base[start] += 1000
    reader = ContentStoreReader(repo)

    found = [reader.read_tensor(str(number)) for number in range(len(pieces))]

    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
