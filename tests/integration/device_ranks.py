"""Functions that ranks run in processes of their own, each with a fake accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import holdfast
from holdfast.snapshot import save
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.choice import BackendChoice
from tests.kit import fake_accelerator

Way = Literal["save", "full", "budget"]
WAYS: Final[tuple[Way, ...]] = ("save", "full", "budget")


class Device:
    """A fake accelerator of this rank that hashes by a kernel of its own."""

    def __init__(self) -> None:
        # Here: the import installs the device, in the process of this rank.
        from tests.integration.accelerator import ACCELERATOR, digest_quickly

        self.accelerator = ACCELERATOR
        # For good: the process is a rank's own. The choice would try torch's operations, which takes seconds.
        patch = pytest.MonkeyPatch()
        for module in (choice, save):
            patch.setattr(module, "choose_backend", lambda _: BackendChoice("torch", "a test"))
        patch.setattr(choice, "find_backend", lambda *_: digest_quickly)

    def count_copied(self, folder: Path, name: str, tree: Any, way: Way) -> int:
        """Save a tree, and return the bytes that were copied to the host."""
        self.accelerator.bytes_to_host = 0
        with holdfast.open(folder) as store:
            if way == "save":
                store.save(name, tree)
            else:
                store.save_async(name, tree, staging=way).wait()
        return self.accelerator.bytes_to_host


def make_tree(device: str, rank: int) -> dict[str, Any]:
    """Make a replica of 2 MB, a value that each rank has for itself, and a tensor of which each rank has a shard."""
    generator = torch.Generator().manual_seed(0)
    replicas = {f"w{at}": torch.randn(100, 100, generator=generator).to(device) for at in range(50)}
    own = torch.full((2000,), float(rank)).to(device)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.randn(128, 100, generator=generator.manual_seed(1 + rank)).to(device)
    whole = (128 * dist.get_world_size(), 100)
    # By its parts: `from_local` would move it to the device of the mesh.
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size(whole), (100, 1), local.dtype))
    shard = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return {"replicas": replicas, "own": holdfast.per_rank(own), "shard": shard}


def save_three_times(rank: int, folder: Path) -> dict[Way, tuple[int, int, int]]:
    """Save a tree, the same tree, and one with a change; return the bytes copied each time, for each way to save."""
    device = Device()
    copied: dict[Way, tuple[int, int, int]] = {}
    for way in WAYS:
        tree = make_tree(fake_accelerator.NAME, rank)
        first = device.count_copied(folder / way, "run/1", tree, way)
        second = device.count_copied(folder / way, "run/2", tree, way)
        tree["replicas"]["w7"].add_(1)
        copied[way] = first, second, device.count_copied(folder / way, "run/3", tree, way)
    mixed = {"w": torch.arange(5000.0).to(fake_accelerator.NAME if rank else "cpu")}
    device.count_copied(folder / "mixed", "mixed", mixed, "save")
    return copied


def list_changed(rank: int, folder: Path) -> list[list[str]]:
    """Load each snapshot on as many ranks, and return which replicas are not what was saved first."""
    found = []
    for way in WAYS:
        for name in ("run/1", "run/2", "run/3"):
            expected, tree = make_tree("cpu", rank), make_tree("cpu", rank)
            for tensor in tree["replicas"].values():
                tensor.zero_()
            tree["shard"].to_local().zero_()
            with holdfast.open(folder / way) as store:
                store.load_into(name, tree)
            assert torch.equal(tree["shard"].to_local(), expected["shard"].to_local())
            pairs = ((name, tensor, expected["replicas"][name]) for name, tensor in tree["replicas"].items())
            found.append([name for name, tensor, saved in pairs if not torch.equal(tensor, saved)])
    return found
