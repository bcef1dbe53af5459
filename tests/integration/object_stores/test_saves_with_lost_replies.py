"""Whole saves to a server that loses replies, fails after it has written, or reports a conflict: nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, NameInUse, StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.repo.format.layout import INDEX, LEASES, MANIFESTS, PACKS, SNAPSHOTS
from tests.kit.s3_server import Fault, Request, S3Server
from tests.kit.thinning import thin
from tests.unit.objects.cloud.servers import QUICK

OLD = {"weight": torch.arange(2000.0), "step": 1}


def make_new(number: int) -> dict[str, Any]:
    """Return a state that the store has no chunks of."""
    return {"weight": torch.arange(2000.0) + number + 1, "step": 2}


NEW = make_new(0)


def open_bucket(server: S3Server) -> holdfast.Store:
    return holdfast.open("s3://bucket/ckpts", storage_options={**server.options, "retry_config": QUICK})


def equals(loaded: Any, saved: dict[str, Any]) -> bool:
    return bool(loaded["step"] == saved["step"] and torch.equal(loaded["weight"], saved["weight"]))


def fail_put(server: S3Server, number: int, fault: Fault, *, below: str = "") -> list[Request]:
    """Let the put with a number, of those below a folder, go wrong; return the puts that were made since."""
    puts: list[Request] = []

    def choose(request: Request) -> Fault | None:
        if request.kind != "PUT" or f"/{below}" not in request.key:
            return None
        puts.append(request)
        return fault if len(puts) == number + 1 else None

    server.fault_of = choose
    return puts


@pytest.mark.parametrize("fault", thin(["lose reply", "lose request", "503 after", "503 before", "409"]))
def test_a_save_succeeds_whichever_put_goes_wrong(server: S3Server, fault: Fault) -> None:
    """Each put of a save in turn: lease, pack, index, manifest, renewed lease, record, release."""
    number = 0
    while True:
        store = open_bucket(server)
        store.save("run", OLD, overwrite=True)
        puts = fail_put(server, number, fault)

        store.save("run", make_new(number), overwrite=True)

        server.fault_of = lambda request: None
        assert equals(open_bucket(server).load("run"), make_new(number))
        if len(puts) <= number:
            break
        number += 1
    assert number >= 7
    assert [finding for finding in open_bucket(server).check() if finding.severity == "error"] == []


@pytest.mark.parametrize("fault", ["lose reply", "503 after", "409"])
def test_the_loser_of_a_race_is_told_so_even_if_replies_are_lost(
    server: S3Server, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = open_bucket(server), open_bucket(server)
    original, commits = CloudStore.put_once, list[str]()

    def put_once(self: CloudStore, key: str, parts: Sequence[memoryview]) -> None:
        if key.startswith("snapshots/") and not commits:
            commits.append(key)  # ours; theirs comes first
            theirs.save("run", OLD)
            fail_put(server, 0, fault)
        original(self, key, parts)

    monkeypatch.setattr(CloudStore, "put_once", put_once)

    with pytest.raises(NameInUse):
        ours.save("run", NEW)

    server.fault_of = lambda request: None
    assert equals(open_bucket(server).load("run"), OLD)


_REFUSED = [
    (LEASES, 0, "StoreError"),
    (PACKS, 0, "StoreError"),
    (INDEX, 0, "saved"),  # the index is a cache
    (MANIFESTS, 0, "StoreError"),
    (LEASES, 1, "StoreError"),
    (SNAPSHOTS, 0, "StoreError"),
    (LEASES, 2, "CommitUnknown"),
    (LEASES, 3, "saved"),  # there is no such put
]
"""Each put of a save by its folder and its number there, and how the save ends if it is refused."""


@pytest.mark.parametrize("fault", thin(["403", "bad signature", "damage"]))
def test_a_put_that_is_refused_leaves_the_old_state_or_the_new_one(server: S3Server, fault: Fault) -> None:
    for each, (folder, number, expected) in enumerate(_REFUSED):
        store = open_bucket(server)
        store.save("run", OLD, overwrite=True)
        fail_put(server, number, fault, below=folder)

        outcome = try_save(store, make_new(each))

        server.fault_of = lambda request: None
        assert outcome == expected, (folder, number)
        found = open_bucket(server).load("run")
        is_new = equals(found, make_new(each))
        assert is_new or equals(found, OLD)
        assert outcome == "CommitUnknown" or is_new == (outcome == "saved")


def try_save(store: holdfast.Store, state: dict[str, Any]) -> str:
    """Save over the old state; return the name of the error, or "saved"."""
    try:
        store.save("run", state, overwrite=True)
    except HoldfastError as error:
        return type(error).__name__
    return "saved"


def test_bytes_that_are_damaged_on_the_way_are_never_stored(server: S3Server) -> None:
    server.fault_of = lambda request: "damage" if "packs/" in request.key and request.kind == "PUT" else None

    with pytest.raises(StoreError, match="changed on their way"):
        open_bucket(server).save("run", OLD)

    assert not any("packs/" in key for key in server.objects)


def test_a_server_that_ignores_conditions_is_refused_by_the_first_save(server: S3Server) -> None:
    server.ignores_conditions = True

    with pytest.raises(StoreError, match=r"single_writer=True"):
        open_bucket(server).save("run", OLD)

    assert server.objects == {}


def test_a_single_writer_may_save_to_a_server_that_ignores_conditions(server: S3Server) -> None:
    server.ignores_conditions = True
    options = {**server.options, "retry_config": QUICK}
    store = holdfast.open("s3://bucket/ckpts", single_writer=True, storage_options=options)

    store.save("run", OLD)
    store.save("run", NEW, overwrite=True)
    with pytest.raises(NameInUse):
        store.save("run", OLD)

    assert equals(store.load("run"), NEW)
    objects = store.repository.store
    assert isinstance(objects, CloudStore)
    assert objects.is_exclusive is False
