"""The content store does what PyTorch's does under the same names, and keeps properties that PyTorch's loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch.utils import _content_store as pytorch

import holdfast.content_store
from holdfast.content_store import (
    ContentStoreReader,
    ContentStoreWriter,
    TensorMetadata,
    hash_storage,
)
from holdfast.digest import hash_bytes
from holdfast.errors import BadName, DigestMismatch, NotAStore, NotFound, TensorNotFound, Unsupported
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.handle.repository import open_repository
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor


def stored_bytes(loc: Path) -> int:
    return sum(path.stat().st_size for path in (loc / "packs").iterdir())


# Hashing


def test_the_hash_is_the_blake3_of_the_bytes() -> None:
    tensor = torch.arange(1000, dtype=torch.int16)

    digest = hash_storage(tensor.untyped_storage())

    assert digest == hash_bytes(tensor.numpy().tobytes()).hex()
    assert digest == hash_storage(tensor.untyped_storage(), stable_hash=True)


def test_a_storage_does_not_hash_like_a_longer_one_that_goes_on_with_zeros() -> None:
    short, long = torch.tensor([1], dtype=torch.int16), torch.tensor([1, 0], dtype=torch.int16)

    assert hash_storage(short.untyped_storage()) != hash_storage(long.untyped_storage())


@pytest.mark.parametrize(
    "tensor", [torch.tensor(2), torch.empty(0), torch.tensor([True])], ids=["0-d", "empty", "bool"]
)
def test_small_storages_hash_the_same_each_time(tensor: torch.Tensor) -> None:
    digests = {hash_storage(tensor.untyped_storage()) for _ in range(4)}

    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_hashing_leaves_the_random_generator_alone() -> None:
    before = torch.random.get_rng_state()

    hash_storage(torch.ones(100).untyped_storage())

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_storage_without_bytes_is_refused_by_the_hash() -> None:
    with pytest.raises(Unsupported, match="a storage on the meta device has no bytes to hash"):
        hash_storage(torch.empty(3, device="meta").untyped_storage())


# Code written for PyTorch's


@pytest.mark.slow  # theirs imports the compiler
def test_code_written_for_pytorch_runs_with_the_import_changed(tmp_path: Path) -> None:
    def run(module: object, loc: str) -> list[object]:
        writer = module.ContentStoreWriter(loc, stable_hash=True)  # type: ignore[attr-defined]  # either module
        reader = module.ContentStoreReader(loc)  # type: ignore[attr-defined]  # either module
        base = torch.arange(24, dtype=torch.float32)
        for name, tensor in {"base": base, "dir/view": base.view(4, 6).t(), "tail": base[4:]}.items():
            writer.write_tensor(name, tensor)
        digest = writer.write_storage(torch.tensor([1, 2]).untyped_storage())
        found = []
        for name in ("base", "dir/view", "tail"):
            dtype, storage, offset, shape, stride, flags = reader.read_tensor_metadata(name)
            whole = torch.empty(0, dtype=dtype).set_(reader.read_storage(storage), offset, shape, stride)
            tensor = reader.read_tensor(name)
            assert torch.equal(whole, tensor)
            assert tuple(writer.compute_tensor_metadata(tensor))[2:] == (offset, shape, stride, flags)
            found += [dtype, offset, shape, stride, flags, tensor.tolist(), tensor.storage_offset()]
        return [*found, torch.empty(0, dtype=torch.int64).set_(reader.read_storage(digest)).tolist()]

    assert run(holdfast.content_store, str(tmp_path / "ours")) == run(pytorch, str(tmp_path / "theirs"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(12.0)[5:],
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0, 3),
        lambda: torch.ones(1).expand(5),
    ],
)
def test_metadata_is_that_of_pytorch_but_for_the_digest(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    tensor = make()
    ours = ContentStoreWriter(tmp_path).compute_tensor_metadata(tensor)
    theirs = pytorch.ContentStoreWriter(str(tmp_path)).compute_tensor_metadata(tensor, h="digest")

    assert (ours[0], *tuple(ours)[2:]) == (theirs[0], *theirs[2:])
    assert ours.digest == hash_storage(tensor.untyped_storage())
    assert len(ours) == 6


def test_metadata_takes_a_digest_that_is_known(tmp_path: Path) -> None:
    assert ContentStoreWriter(tmp_path).compute_tensor_metadata(torch.ones(2), h="known").digest == "known"


def test_metadata_says_where_the_tensor_was_and_whether_it_required_a_gradient(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path)
    writer.write_tensor("weight", torch.ones(3, requires_grad=True))
    writer.write_tensor("sparse", torch.eye(3).to_sparse())
    writer.write_tensor("meta", torch.empty(3, 4, device="meta"))
    reader = ContentStoreReader(tmp_path)

    assert reader.read_tensor_metadata("weight") == TensorMetadata(
        torch.float32, hash_bytes(torch.ones(3).numpy().tobytes()).hex(), 0, (3,), (1,), {}, requires_grad=True
    )
    assert reader.read_tensor_metadata("sparse").layout == torch.sparse_coo
    assert reader.read_tensor_metadata("sparse").digest == ""
    assert reader.read_tensor_metadata("meta").device == torch.device("meta")


# Names


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", "a//b", "a\\b", "a\nb"])
def test_a_name_that_could_lead_elsewhere_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    loc = tmp_path / "store"
    with ContentStoreWriter(loc) as writer, pytest.raises(BadName, match="tensor name"):
        writer.write_tensor(name, torch.ones(1))
    with pytest.raises(BadName, match="tensor name"):
        ContentStoreReader(loc).read_tensor(name)

    assert list(tmp_path.iterdir()) == []


def test_names_may_hold_slashes_dots_and_any_script(tmp_path: Path) -> None:
    names = ["a", "a/b", "a/b/c.d", "a.grad", "Ä", "x#2", "tensors", "weights.0"]
    with ContentStoreWriter(tmp_path) as writer:
        for number, name in enumerate(names):
            writer.write_tensor(name, torch.tensor(number))
    reader = ContentStoreReader(tmp_path)

    assert reader.names() == sorted(names)
    assert [reader.read_tensor(name).item() for name in names] == list(range(len(names)))


def test_a_missing_name_is_both_errors_and_says_where_it_looked(tmp_path: Path) -> None:
    reader = ContentStoreReader(tmp_path / "nothing yet")

    for kind in (FileNotFoundError, NotFound, TensorNotFound):
        with pytest.raises(kind, match=r"no tensor 'a/b' in .*nothing yet; `names\(\)` lists"):
            reader.read_tensor("a/b")
    with pytest.raises(TensorNotFound, match="no storage with digest '00'"):
        reader.read_storage("00")
    assert not (tmp_path / "nothing yet").exists()


def test_a_name_written_again_holds_the_newer_tensor_within_a_batch_and_across(tmp_path: Path) -> None:
    writer = ContentStoreWriter(tmp_path)
    reader = ContentStoreReader(tmp_path)
    found = []
    for value in range(4):
        writer.write_tensor("x", torch.tensor(value))
        if value % 2:
            writer.flush()
            found.append(ContentStoreReader(tmp_path).read_tensor("x").item())
        found.append(reader.read_tensor("x").item())

    assert found == [0, 1, 1, 2, 3, 3]


def test_batches_of_one_writer_are_in_order_though_the_clock_goes_back() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    writer = ContentStoreWriter(open_repository(store, create=True))
    for value in range(3):
        writer.write_tensor("x", torch.tensor(value))
        writer.flush()
        clock.advance(-60)

    assert ContentStoreReader(open_repository(store)).read_tensor("x").item() == 2


# What is kept


def write_and_read(kinds: Iterable[str]) -> None:
    """Write tensors in one batch, and fail unless each comes back as it was."""
    repo = open_repository(MemoryStore(), create=True)
    tensors = {f"a/{number}": TENSORS[kind]() for number, kind in enumerate(kinds)}
    with ContentStoreWriter(repo, types=SUBCLASSES) as writer:
        for name, tensor in tensors.items():
            writer.write_tensor(name, tensor)
    reader = ContentStoreReader(repo, types=SUBCLASSES)
    for name, tensor in tensors.items():
        assert_same_tensor(reader.read_tensor(name), tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", dict.fromkeys(kind.partition("/")[0] for kind in TENSORS))
def test_any_tensor_comes_back_as_it_was(group: str) -> None:
    write_and_read(kind for kind in TENSORS if kind.partition("/")[0] == group)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("kind", TENSORS)
def test_any_tensor_comes_back_alone(kind: str) -> None:
    write_and_read([kind])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_all_kinds_of_tensors_can_be_in_one_batch() -> None:
    write_and_read(TENSORS)


def test_a_parameter_keeps_its_gradient(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    weight.grad = torch.randn(3, 2)
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("weight", weight)
        writer.write_tensor("weight.grad", torch.zeros(1))
    reader = ContentStoreReader(tmp_path)

    found = reader.read_tensor("weight")

    assert_same_tensor(found, weight)
    assert reader.read_tensor("weight.grad").tolist() == [0]
    assert reader.read_tensor_metadata("weight").requires_grad


def test_what_cannot_be_written_is_named_and_does_not_spoil_the_batch(tmp_path: Path) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("good", torch.ones(1))
        with pytest.raises(Unsupported, match="layer/1: the memory of this tensor was freed"):
            writer.write_tensor("layer/1", freed)

    assert ContentStoreReader(tmp_path).names() == ["good"]


def test_empty_storages_are_written_and_read(tmp_path: Path) -> None:
    with ContentStoreWriter(tmp_path) as writer:
        digest = writer.write_storage(torch.empty(0).untyped_storage())
        writer.write_tensor("empty", torch.empty(0, 3))
    reader = ContentStoreReader(tmp_path)

    assert reader.read_storage(digest).nbytes() == 0
    assert reader.read_tensor("empty").shape == (0, 3)
    assert reader.read_tensor_metadata("empty").digest == digest


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("x", torch.ones(2))

    with pytest.raises(Unsupported, match=r"tensors\.x: the device cuda:7 is not available: .*pass device='cpu'"):
        ContentStoreReader(tmp_path).read_tensor("x", device="cuda:7")


# What is stored


def test_equal_storages_are_stored_once_in_any_batch_under_any_shape(tmp_path: Path) -> None:
    data = torch.randn(3000, 1000)
    writer = ContentStoreWriter(tmp_path)
    for name, tensor in {"a": data, "b": data.clone(), "c": data.clone().view(-1), "d": data.t()}.items():
        writer.write_tensor(name, tensor)
        writer.flush()

    assert stored_bytes(tmp_path) < 12_000_000 * 1.01
    assert torch.equal(ContentStoreReader(tmp_path).read_tensor("d"), data.t())


@pytest.mark.parametrize("cut", [lambda x: x[500:501], lambda x: x[:, 3], lambda x: x.flatten()[7:1031]])
def test_a_small_view_of_a_large_storage_stores_what_it_needs(
    cut: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    view = cut(torch.randn(1024, 1024))
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("view", view)
    reader = ContentStoreReader(tmp_path)

    found = reader.read_tensor("view")

    assert stored_bytes(tmp_path) < 16_384
    assert torch.equal(found, view)
    assert found.stride() == view.stride()
    assert found.storage_offset() == 0 == reader.read_tensor_metadata("view").offset


def test_a_view_and_its_base_share_one_stored_storage(tmp_path: Path) -> None:
    base = torch.randn(1024, 1024)
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("row", base[1000])
        writer.write_tensor("base", base)
        writer.write_tensor("column", base[:, 3])
    reader = ContentStoreReader(tmp_path)

    metadata = [reader.read_tensor_metadata(name) for name in ("base", "row", "column")]

    assert stored_bytes(tmp_path) < 4 * 1024 * 1024 + 20_000
    assert {found.digest for found in metadata} == {hash_storage(base.untyped_storage())}
    assert [found.offset for found in metadata] == [0, 1000 * 1024, 3]
    assert reader.read_tensor("row").storage_offset() == 1000 * 1024


def test_damage_is_found_and_not_returned(tmp_path: Path) -> None:
    with ContentStoreWriter(tmp_path) as writer:
        writer.write_tensor("x", torch.randn(10_000))
    (pack,) = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[8000] ^= 1
    pack.write_bytes(data)

    with pytest.raises(DigestMismatch, match=r"entry 'tensors\.x'"):
        ContentStoreReader(tmp_path).read_tensor("x")


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")

    with pytest.raises(NotAStore):
        ContentStoreWriter(tmp_path)
