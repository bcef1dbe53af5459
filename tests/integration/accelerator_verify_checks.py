"""`verify="device"` notices damaged copies to a device; `test_accelerator.py` runs this beside a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.dcp import StorageReader
from holdfast.errors import Corrupt, DigestMismatch
from holdfast.snapshot import batches
from holdfast.store import Store
from holdfast.tensors.device_digest.choice import choose_backend, digest_pieces
from holdfast.tensors.device_digest.pieces import digest_by_tree
from tests.integration.accelerator import ACCELERATOR, DEVICE, QuickKernels
from tests.integration.device_tree import assert_same_tree, make_tree
from tests.kit.exports import damage_packs

dcp: Any = torch.distributed.checkpoint
"""Its functions are not declared as exported."""
TREE = {"small": torch.arange(5.0), "large": torch.arange(3000.0).view(30, 100), "other": torch.ones(7)}
SIZE = TREE["large"].nbytes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(batches, "digest_pieces", partial(digest_by_tree, kernels=QuickKernels(), device=DEVICE))
    store = holdfast.open(tmp_path / "ckpts")
    store.save("x", TREE)
    yield store
    ACCELERATOR.damaged_bytes = 0


def make_target() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, -1).to(DEVICE) for name, tensor in TREE.items()}


def test_a_damaged_copy_of_a_load_is_noticed(store: Store) -> None:
    ACCELERATOR.damaged_bytes = SIZE

    with pytest.raises(Corrupt, match=f"'x', large: its bytes on {DEVICE} are not those .* not the store") as caught:
        store.load("x", device=DEVICE, verify="device")

    assert not isinstance(caught.value, DigestMismatch)
    assert caught.value.key == "large"


def test_the_ordinary_verification_ends_on_the_host(store: Store) -> None:
    ACCELERATOR.damaged_bytes = SIZE

    found = store.load("x", device=DEVICE)

    assert not torch.equal(found["large"].cpu(), TREE["large"])


@pytest.mark.parametrize("options", [{}, {"assign": True}, {"since": "never saved"}, {"atomic": True}], ids=str)
def test_a_damaged_copy_into_a_target_is_noticed(store: Store, options: dict[str, Any]) -> None:
    target = make_target()
    ACCELERATOR.damaged_bytes = SIZE

    with pytest.raises(Corrupt, match=r"large: its bytes on .* the copy to the device is damaged"):
        store.load_into("x", target, verify="device", **options)

    if options.keys() & {"since", "atomic"}:
        assert all(torch.equal(target[name].cpu(), torch.full_like(TREE[name], -1)) for name in TREE)
    store.load_into("x", target, verify="device", **options)
    assert_same_tree(target, TREE)


def test_an_error_names_what_was_overwritten(store: Store) -> None:
    target = make_target()
    ACCELERATOR.damaged_bytes = SIZE

    with pytest.raises(Corrupt) as caught:
        store.load_into("x", target, verify="device")

    assert set(caught.value.overwritten) == TREE.keys()


def test_every_kind_of_tensor_is_loaded(store: Store) -> None:
    tree = make_tree(DEVICE)
    store.save("all", tree)

    assert_same_tree(store.load("all", device="saved", verify="device"), tree)
    target = make_tree(DEVICE)
    del tree["expanded"], target["expanded"]
    store.save("all", tree, overwrite=True)
    store.load_into("all", target, verify="device")
    assert_same_tree(target, tree)


def test_nothing_but_digests_is_copied_to_the_host(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "digest_pieces", digest_pieces)
    choose_backend(DEVICE)
    ACCELERATOR.bytes_to_host = 0

    store.load("x", device=DEVICE, verify="device")

    assert ACCELERATOR.bytes_to_host == 32 * (len(TREE) + 1)


def test_values_that_are_cast_are_verified_on_the_host_alone(store: Store) -> None:
    found = store.load("x", device=DEVICE, dtype=torch.float64, verify="device")
    target = {name: tensor.double().to(DEVICE) for name, tensor in TREE.items()}
    store.load_into("x", target, cast=True, verify="device")

    for name, tensor in TREE.items():
        assert torch.equal(found[name].cpu(), tensor.double())
        assert torch.equal(target[name].cpu(), tensor.double())


def test_on_the_cpu_it_is_the_ordinary_verification(store: Store, tmp_path: Path) -> None:
    assert torch.equal(store.load("x", verify="device")["large"], TREE["large"])
    damage_packs(tmp_path / "ckpts")

    with pytest.raises(DigestMismatch):
        holdfast.open(tmp_path / "ckpts").load("x", verify="device")


def test_what_is_checked_on_the_device_is_read_and_not_mapped(store: Store, tmp_path: Path) -> None:
    found = store.load("x", device=DEVICE, mmap=True, verify="device")
    assert_same_tree(found, TREE)
    damage_packs(tmp_path / "ckpts")

    with pytest.raises(DigestMismatch):
        holdfast.open(tmp_path / "ckpts").load("x", device=DEVICE, mmap=True, verify="device")


def test_a_module_is_verified_where_it_is(store: Store) -> None:
    model = torch.nn.Linear(70, 30)
    store.save("model", model)
    target = torch.nn.Linear(70, 30).to(DEVICE)
    store.load_into("model", target, verify="device")
    assert torch.equal(target.weight.cpu(), model.weight)
    ACCELERATOR.damaged_bytes = model.weight.nbytes

    with pytest.raises(Corrupt, match="weight: its bytes on"):
        store.load_into("model", target, verify="device")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_notices_a_damaged_copy(store: Store) -> None:
    target = make_target()
    dcp.load(target, storage_reader=StorageReader(store, "x", verify="device"), no_dist=True)
    assert_same_tree(target, TREE)
    ACCELERATOR.damaged_bytes = SIZE
    dcp.load(target, storage_reader=StorageReader(store, "x"), no_dist=True)
    ACCELERATOR.damaged_bytes = SIZE

    with pytest.raises(CheckpointException, match=r"large: its bytes on .* the copy to the device is damaged"):
        dcp.load(target, storage_reader=StorageReader(store, "x", verify="device"), no_dist=True)
