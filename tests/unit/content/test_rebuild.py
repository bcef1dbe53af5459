"""Batches that another program wrote: read if they are consistent, refused or left out otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from holdfast.content_store import ContentStoreReader, ContentStoreWriter
from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.write.writer import Request, save


def forge(repo: Repository, note: Mapping[str, Json], *, spec: Mapping[str, Json] | None = None) -> ContentStoreReader:
    """Write a batch of one float tensor with any note."""
    own = {"type": "tensor", "dtype": "float32", "shape": [4], **(spec or {})}
    source = BytesSource("tensors.x", bytes(16), own, dict(note))
    tree = ["dict", "tensors", ["dict", "x", ["@tensor", 0]], "storages", ["dict"]]
    save(repo, Request("content/forged-00000001", [source], {"tree": tree}))
    return ContentStoreReader(repo)


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


DIGEST = hash_bytes(bytes(16)).hex()


def test_a_batch_by_another_program_is_read(repo: Repository) -> None:
    assert forge(repo, {}).read_tensor("x").tolist() == [0, 0, 0, 0]
    assert ContentStoreReader(repo).read_tensor_metadata("x").digest == ""


@pytest.mark.parametrize("storage", [f"a.1:0:{DIGEST}:0:{1 << 50}", f"a.1:{1 << 40}:{DIGEST}:{-(1 << 40)}:16", "x"])
def test_a_batch_that_claims_more_memory_than_it_has_bytes_is_left_out_and_reported(
    repo: Repository, storage: str
) -> None:
    with ContentStoreWriter(repo) as writer:
        writer.write_tensor("good", torch.ones(1))
    reader = forge(repo, {"storage": storage})

    with pytest.raises(NotFound, match=r"no tensor 'x' in memory:.* \(1 damaged batches could not be read"):
        reader.read_tensor("x")
    assert reader.read_tensor("good").item() == 1


def test_a_tensor_that_reaches_out_of_its_storage_is_refused(repo: Repository) -> None:
    reader = forge(repo, {"storage": f"a.1:0:{DIGEST}:0:8"})

    with pytest.raises(Corrupt, match="beyond the storage"):
        reader.read_tensor("x")


def test_an_unknown_device_is_refused(repo: Repository) -> None:
    with pytest.raises(Corrupt, match=r"'tensors\.x' was on 'moon', which is not a device"):
        forge(repo, {"device": "moon"}).read_tensor("x")


def test_a_tensor_that_was_on_a_device_that_is_not_here_can_be_read_to_another(repo: Repository) -> None:
    reader = forge(repo, {"device": "cuda:3", "storage": f"a.1:0:{DIGEST}:0:16"})

    assert reader.read_tensor_metadata("x").device == torch.device("cuda:3")
    assert reader.read_tensor("x", device="cpu").device == torch.device("cpu")
    with pytest.raises(Exception, match="cuda:3"):
        reader.read_tensor("x")
