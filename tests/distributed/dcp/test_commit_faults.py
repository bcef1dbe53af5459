"""The store fails, or the coordinator dies, during the commit of a DCP checkpoint: the reported outcome is true."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.dcp import StorageWriter
from holdfast.errors import StoreError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.names.snapshots import commit_snapshot
from holdfast.repo.write import transaction
from holdfast.testing.faults import Fault, FaultyStore
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.kit.dcp_calls import ALONE
from tests.kit.hooking import hooked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

dcp: Any = torch.distributed.checkpoint
FAULTS: Final = [Fault.ONCE, Fault.FOR_GOOD, Fault.REPLY_LOST]


def save(store: holdfast.Store, value: float, *, alone: bool = True) -> None:
    writer = StorageWriter(store, "run", overwrite=True)
    dcp.save({"w": torch.full((300,), value)}, storage_writer=writer, **(ALONE if alone else {}))


def read_value(store: holdfast.Store) -> float:
    (value,) = set(store.load("run")["w"].tolist())
    return float(value)


def save_with_fault(fault: Fault | None, at: int) -> tuple[str, float, int]:
    """Return what the save raised, by its class, the value that is in the store then, and the number of operations."""
    inner = MemoryStore()
    with holdfast.Store(inner) as store:
        save(store, 1.0)
    faulty = FaultyStore(inner, fault=fault, at=at)
    kind = ""
    try:
        with holdfast.Store(faulty) as store:
            save(store, 2.0)
    except CheckpointException as error:
        kind = type(error.failures[0][0]).__name__
    except StoreError:
        kind = "StoreError"  # it could not be opened
    with holdfast.Store(inner) as store:
        return kind, read_value(store), len(faulty.log)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_an_error_of_the_store_in_any_operation_is_told_truly(fault: Fault) -> None:
    kind, value, operations = save_with_fault(None, 1)
    assert (kind, value) == ("", 2.0)
    wrong = []
    kinds = set()
    for at in range(1, operations + 1):
        kind, value, _ = save_with_fault(fault, at)
        kinds.add(kind)
        if kind != "CommitUnknown" and value != (1.0 if kind else 2.0):
            wrong.append(f"at operation {at}: {kind or 'a result'}, and the value is {value}")
    assert wrong == []
    assert "CommitUnknown" in kinds or fault is not Fault.FOR_GOOD


def commit_and_die(rank: int, path: Path) -> ActOutcome:
    def commit(*args: Any) -> None:
        commit_snapshot(*args)
        os.kill(os.getpid(), SIGKILL)

    # Rank 0 commits, and is lost.
    with (
        hooked(transaction, "commit_snapshot", commit) if rank == 0 else nullcontext(),
        holdfast.open(path) as store,
    ):
        return report_outcome(lambda: save(store, 2.0, alone=False))


def test_the_death_of_a_coordinator_that_has_committed_is_no_error_of_holdfast(world: World, tmp_path: Path) -> None:
    """Torch's own error says nothing about the name."""
    with holdfast.open(tmp_path) as store:
        save(store, 1.0)

    _, outcome = world(2)(commit_and_die, tmp_path, lost=[0])

    with holdfast.open(tmp_path) as store:
        assert read_value(store) == 2.0
    assert outcome.kind
    assert not hasattr(holdfast, outcome.kind), outcome
