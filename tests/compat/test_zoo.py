"""Stores damaged in known ways, checked in: check says what it said, and whatever is not hit still loads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import NewerFormat, NotAStore
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import plan_collect, verify_may_collect
from tests.compat.archive import unpack
from tests.compat.make_zoo import CASES, CONTENT, SOUND, ZOO, make_case
from tests.kit.saving import load_bytes

FINDINGS: Final[dict[str, list[str]]] = {
    "sound": [],
    "missing-pack": ["error chunk-lost"],
    "truncated-pack": ["error chunk-lost", "error pack-damaged"],
    "flipped-chunk": ["error chunk-lost", "warning chunk-damaged"],
    "flipped-footer": ["error pack-damaged"],
    "flipped-header": ["error pack-damaged"],
    "missing-manifest": ["error manifest-damaged", "note pack-unused"],
    "flipped-manifest": ["error manifest-damaged", "note pack-unused"],
    "torn-record": ["note manifest-unused", "note pack-unused", "warning record-torn"],
    "flipped-record": ["error record-damaged", "note manifest-unused", "note pack-unused"],
    "misplaced-record": ["error record-damaged", "note manifest-unused", "note pack-unused"],
    "missing-config": ["error config-missing"],
    "swapped-packs": ["error chunk-lost", "error pack-damaged"],
    "index-garbage": ["warning index-damaged"],
    "abandoned-lease": ["note lease-abandoned"],
    "pending-mark": [],
    "superseded": ["note manifest-unused", "note pack-unused"],
    "tombstone": ["note manifest-unused", "note pack-unused"],
    "unknown-prefix": ["warning unknown-object"],
    "newer-minor": [],
    "newer-major": ["error newer-format"],
}
CLOSED: Final = {"missing-config": NotAStore, "newer-major": NewerFormat}
"""Stores that are not opened at all."""
READABLE: Final = {
    "sound", "flipped-footer", "flipped-header", "index-garbage", "abandoned-lease", "pending-mark", "unknown-prefix",
    "newer-minor",
}  # fmt: skip
"""Stores in which `hit` can be read in spite of all."""


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    return LocalStore(str(unpack(ZOO / f"{request.param}.tar.gz", tmp_path)), read_only=True)


@pytest.mark.parametrize(("store", "wanted"), FINDINGS.items(), indirect=["store"], ids=list(FINDINGS))
def test_check_judges_it_as_ever(store: LocalStore, wanted: list[str]) -> None:
    found = {f"{finding.severity} {finding.code}" for finding in Checker(store, read=True).iter_findings()}
    assert sorted(found) == wanted


@pytest.mark.parametrize("store", sorted(FINDINGS.keys() - CLOSED.keys() - {"swapped-packs"}), indirect=True)
def test_what_is_not_hit_still_loads(store: LocalStore) -> None:
    assert load_bytes(open_repository(store), "sound") == SOUND


@pytest.mark.parametrize("store", sorted(READABLE), indirect=True)
def test_what_is_hit_where_it_does_not_matter_still_loads(store: LocalStore) -> None:
    assert load_bytes(open_repository(store), "hit") == CONTENT


@pytest.mark.parametrize(("store", "kind"), CLOSED.items(), indirect=["store"], ids=list(CLOSED))
def test_what_cannot_be_understood_is_refused(store: LocalStore, kind: type[NotAStore]) -> None:
    with pytest.raises(kind):
        open_repository(store)


@pytest.mark.parametrize("store", ["superseded", "tombstone"], indirect=True)
def test_what_was_replaced_or_deleted_can_be_collected(store: LocalStore) -> None:
    assert len(plan_collect(store, min_age_s=0.0).dead) == 2


@pytest.mark.parametrize("store", ["unknown-prefix"], indirect=True)
def test_something_unknown_forbids_collection(store: LocalStore) -> None:
    with pytest.raises(NewerFormat):
        verify_may_collect(store)


def test_the_zoo_is_what_its_maker_lists_and_stays_small() -> None:
    animals = {path.name.removesuffix(".tar.gz"): path.stat().st_size for path in ZOO.iterdir()}
    assert animals.keys() == CASES.keys() == FINDINGS.keys()
    assert sum(animals.values()) < 200_000


def test_making_a_case_twice_gives_the_same_bytes() -> None:
    assert make_case("flipped-chunk") == make_case("flipped-chunk")
