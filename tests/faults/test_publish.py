"""A publisher that fails or dies at any step: the series has the old versions or also the new one, each whole."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from holdfast.testing.faults import Crashed, Fault, FaultyStore
from tests.faults.thinning import THINNED, find_first

_LEFT_BEHIND = frozenset(
    {"pack-unused", "manifest-unused", "record-torn", "pack-damaged", "manifest-damaged", "index-damaged"}
)
"""What a publisher that dies may leave, some of it torn: no version needs it."""
_QUICK = (Fault.CRASH, Fault.TORN_WRITE, Fault.REPLY_LOST)


def make_values(number: int) -> torch.Tensor:
    """Return values that differ from version to version."""
    values = torch.arange(20_000, dtype=torch.float32)
    values[0] = number
    return values


def publish(store: Store, number: int) -> str:
    return store.publish("p", {"a": make_values(number)}, metadata={"n": number}).name


@pytest.fixture(scope="module")
def base() -> MemoryStore:
    """A store with two versions; the next publish deletes the first."""
    objects = MemoryStore()
    with Store(objects) as store:
        publish(store, 1)
        publish(store, 2)
    return objects


def read_numbers(objects: MemoryStore) -> set[int]:
    """Return the numbers of the versions that are there; all of them must be whole, and the store healthy."""
    with Store(objects) as store:
        assert {finding.code for finding in store.check(read=True)} <= _LEFT_BEHIND
        found: dict[Any, torch.Tensor] = {each.metadata["n"]: store.load(each)["a"] for each in store.snapshots("p/")}
    assert all(torch.equal(values, make_values(number)) for number, values in found.items())
    return set(found)


def verify_goes_on(objects: MemoryStore) -> None:
    """Check that a follower loads the newest version, and that the next publisher takes a higher number."""
    newest = max(read_numbers(objects))
    target = {"a": torch.zeros(20_000)}
    with Store(objects) as store:
        (snapshot,) = store.follow("p/", timeout_s=0.0).iter_into(target)
        assert snapshot.metadata == {"n": newest}
        assert torch.equal(target["a"], make_values(newest))
        assert publish(store, 9) > snapshot.name
    assert read_numbers(objects) == {newest, 9}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name.lower(), marks=[] if each in _QUICK else pytest.mark.slow) for each in Fault],
)
@THINNED
def test_a_publisher_that_fails_or_dies_at_any_operation_leaves_whole_versions(
    base: MemoryStore, fault: Fault, step: int
) -> None:
    seen = set()
    for at in count(find_first(list(Fault).index(fault), step), step):
        objects = base.clone()
        faulty = FaultyStore(objects, fault=fault, at=at)
        try:
            publish(Store(faulty), 3)
            outcome = "published"
        except CommitUnknown:
            outcome = "unknown"
        except (HoldfastError, Crashed) as error:
            outcome = "died" if isinstance(error, Crashed) else "failed"
        numbers = read_numbers(objects)
        assert numbers in ({1, 2}, {1, 2, 3}, {2, 3})
        assert outcome not in ("published", "failed") or (3 in numbers) == (outcome == "published")
        seen.add((outcome, 3 in numbers))
        verify_goes_on(objects)
        if len(faulty.log) < at:
            break
    assert at > 15
    assert ("published", True) in seen
    assert len(seen) > 1
