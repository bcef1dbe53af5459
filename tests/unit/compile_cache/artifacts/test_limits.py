"""Keys are deleted by size, age or system, and the records of their use with them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.compile_cache.artifacts.catalog import DAY_S, StoredVariant, artifact_name, iter_variants
from holdfast.compile_cache.artifacts.limits import (
    CacheLimits,
    StoredKey,
    apply_limits,
    group_keys,
    plan_clear,
    plan_limits,
    read_stored,
)
from holdfast.compile_cache.artifacts.storing import KeyUses, read_uses, record_use
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, read_name
from tests.kit.compile_artifacts import find_variant, forge, make_artifact, make_key, store_artifact
from tests.kit.saving import new_repo, record_key

START_S = 1_700_000_000.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_s=START_S)


@pytest.fixture
def repo(clock: VirtualClock) -> Repository:
    return new_repo(MemoryStore(clock=clock))


def _key(digest: str, used_s: float, size_bytes: int, *, system: str = "mine") -> StoredKey:
    found = Sized(f"@compiled/{digest}/0", digest, None, digests={"system": system})
    found.held_bytes[found.name] = size_bytes
    return StoredKey(digest, (found,), used_s)


class Sized(StoredVariant):
    """A variant of any size."""

    __slots__ = ()
    held_bytes: ClassVar[dict[str, int]] = {}

    @property
    def size_bytes(self) -> int:
        return self.held_bytes[self.name]


def _delete(keys: list[StoredKey], limits: CacheLimits, now_s: float = 100.0) -> dict[str, str]:
    return {v.key.digest: v.reason for v in plan_limits(keys, limits, now_s=now_s).decisions if v.reason}


def test_the_least_recently_used_keys_are_deleted_over_the_size_limit() -> None:
    keys = [_key("a", 10, 40), _key("b", 30, 40), _key("c", 20, 40)]

    assert _delete(keys, CacheLimits(max_bytes=80)) == {"a": "over the size limit"}
    assert _delete(keys, CacheLimits(max_bytes=79)) == {"a": "over the size limit", "c": "over the size limit"}
    assert _delete(keys, CacheLimits(max_bytes=0)).keys() == {"a", "b", "c"}
    assert _delete(keys, CacheLimits(max_bytes=120)) == {}


def test_a_key_that_fits_is_kept_after_a_larger_one_is_deleted() -> None:
    keys = [_key("a", 10, 5), _key("b", 30, 40), _key("c", 20, 1000)]

    assert _delete(keys, CacheLimits(max_bytes=50)) == {"c": "over the size limit"}


def test_keys_over_the_age_limit_are_deleted() -> None:
    keys = [_key("a", 10, 1), _key("b", 90, 1)]

    assert _delete(keys, CacheLimits(max_age_s=50)) == {"a": "not used within the age limit"}


def test_keys_for_another_system_are_deleted() -> None:
    keys = [_key("a", 10, 1, system="other"), _key("b", 10, 1)]

    assert _delete(keys, CacheLimits(systems=frozenset({"mine"}))) == {"a": "compiled for another system"}


def test_keys_deleted_for_another_reason_do_not_count_for_the_size() -> None:
    keys = [_key("a", 90, 100, system="other"), _key("b", 10, 100)]

    assert _delete(keys, CacheLimits(max_bytes=100, systems=frozenset({"mine"}))) == {
        "a": "compiled for another system"
    }


@pytest.mark.parametrize("rules", [{}, {"max_bytes": -1}, {"max_age_s": -1.0}, {"max_age_s": float("nan")}])
def test_missing_and_negative_limits_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"give at least one limit|cannot be negative"):
        CacheLimits(**rules)  # type: ignore[arg-type]  # that is the point


def test_keys_are_sorted_by_last_use_or_else_by_when_they_were_saved(repo: Repository, clock: VirtualClock) -> None:
    for seed in "abc":
        store_artifact(repo, make_artifact(seed))
        clock.advance(1 * DAY_S)
    clock.advance(10 * DAY_S)
    record_use(repo, [find_variant(repo, "a")])

    keys = read_stored(repo.store)

    assert [key.digest for key in keys] == [make_key(seed).digest for seed in "acb"]
    assert [key.used_s for key in keys] == [START_S + 13 * DAY_S, START_S + 2 * DAY_S, START_S + DAY_S]


def test_limits_delete_keys_and_the_records_of_their_use(repo: Repository, clock: VirtualClock) -> None:
    for guards in ("x", "y"):
        store_artifact(repo, make_artifact("a", guards=guards))
    store_artifact(repo, make_artifact("b"))
    clock.advance(5 * DAY_S)
    record_use(repo, [find_variant(repo, "a")])
    clock.advance(30 * DAY_S)
    record_use(repo, [find_variant(repo, "b")])
    clock.advance(2 * DAY_S)

    plan = plan_limits(read_stored(repo.store), CacheLimits(max_age_s=20 * DAY_S), now_s=clock.now())
    deleted = apply_limits(repo.store, plan)

    assert [found.name for found in deleted] == [artifact_name(make_key("a").digest, number) for number in (1, 0)]
    assert [key.digest for key in read_stored(repo.store)] == [make_key("b").digest]
    assert list(read_uses(repo.store)) == [make_key("b").digest]
    assert store_artifact(repo, make_artifact("a")).number == 0


def test_a_key_saved_again_after_the_plan_was_made_is_kept(repo: Repository) -> None:
    found = store_artifact(repo)
    plan = plan_clear(read_stored(repo.store))
    delete_snapshot(repo.store, found.name)
    again = store_artifact(repo)

    assert apply_limits(repo.store, plan) == []
    assert [each.name for each in iter_variants(repo.store, again.key_digest)] == [again.name]


def test_damaged_keys_are_deleted_if_their_records_can_be_read(tmp_path: Path) -> None:
    repo = new_repo(LocalStore(tmp_path))
    for seed in "ab":
        store_artifact(repo, make_artifact(seed))
    strange = forge(repo, "@compiled/strange", {}, {})
    record = tmp_path / record_key(artifact_name(make_key("a").digest, 0))
    record.write_bytes(record.read_bytes()[:-1] + b"?")

    plan = plan_limits(read_stored(repo.store), CacheLimits(max_bytes=1 << 30), now_s=repo.store.clock())

    assert [(v.key.digest, v.reason) for v in plan.decisions if v.reason] == [
        ("@compiled/strange", "damaged"),
        (make_key("a").digest, "damaged"),
    ]
    assert [found.name for found in apply_limits(repo.store, plan)] == [strange.name]
    assert read_name(repo.store, strange.name).snapshot is None


def test_variants_of_a_key_are_in_order_and_last_used_together() -> None:
    found = [StoredVariant(artifact_name(make_key().digest, number), make_key().digest, None) for number in (10, 2, 0)]

    (key,) = group_keys(found, {make_key().digest: KeyUses(7.0, 3)})

    assert [each.number for each in key.variants] == [0, 2, 10]
    assert (key.used_s, key.used_days) == (7.0, 3)
