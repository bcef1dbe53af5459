"""Variants of a key are found by exact names; damaged ones and gaps between their numbers do not hide others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.catalog import artifact_name, iter_artifacts, iter_variants
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import Corrupt, NewerFormat
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.names.snapshots import delete_snapshot
from tests.kit.compile_artifacts import (
    forge,
    make_artifact,
    make_key,
    store_artifact,
)
from tests.kit.saving import load_bytes, new_repo, record_key

MINE = Trust()
ALL = Trust(everything=True)


def test_searching_for_a_key_lists_no_other_names() -> None:
    listed: list[str] = []

    class Spy(MemoryStore):
        def list(self, prefix: str, *, after: str = "", limit: int = 1000):  # type: ignore[no-untyped-def]  # a spy
            listed.append(prefix)
            return super().list(prefix, after=after, limit=limit)

    repo = new_repo(Spy())
    store_artifact(repo)
    listed.clear()

    next(iter_variants(repo.store, make_key().digest))

    assert len(listed) == 1
    assert listed[0].endswith("%2f0@")


def test_a_variant_after_deleted_ones_is_found_and_their_names_are_used_again() -> None:
    repo = new_repo()
    for guards in ("a", "b", "c"):
        store_artifact(repo, make_artifact(guards=guards))
    for number in (0, 1):
        delete_snapshot(repo.store, artifact_name(make_key().digest, number))

    assert [found.guards for found in iter_variants(repo.store, make_key().digest)] == ["c"]
    assert store_artifact(repo, make_artifact(guards="d")).number == 0
    assert [found.guards for found in iter_variants(repo.store, make_key().digest)] == ["d", "c"]


def test_a_gap_between_numbers_hides_no_variant() -> None:
    repo = new_repo()
    other = new_repo()
    found = store_artifact(other, make_artifact(guards="c"))
    assert found.snapshot is not None
    forge(repo, artifact_name(make_key().digest, 2), load_bytes(other, found.name), found.snapshot.metadata)

    assert [found.number for found in iter_variants(repo.store, make_key().digest)] == [2]
    assert write_artifact(repo, make_artifact(guards="c"), secret=None).existed


def test_a_variant_with_a_damaged_record_is_reported_and_skipped(tmp_path: Path) -> None:
    repo = new_repo(LocalStore(tmp_path))
    for guards in ("a", "b"):
        store_artifact(repo, make_artifact(guards=guards))
    record = tmp_path / record_key(artifact_name(make_key().digest, 0))
    record.write_bytes(record.read_bytes().replace(b"live", b"LIVE"))

    damaged, well = iter_variants(repo.store, make_key().digest)

    assert well.guards == "b"
    with pytest.raises(Corrupt, match="is damaged: its bytes do not have the digest that it states"):
        read_artifact(repo, damaged, trust=MINE)
    assert store_artifact(repo, make_artifact(guards="a")).number == 2
    assert {found.number for found in iter_artifacts(repo.store)} == {0, 1, 2}


def test_a_record_that_describes_no_artifact_is_reported_and_replaced() -> None:
    repo = new_repo()
    name = artifact_name(make_key().digest, 0)
    found = forge(repo, name, {"graph": b"x"}, {"artifact": 1, "guards": 7})

    with pytest.raises(Corrupt, match=re.escape(f"record {name}: field 'guards' is missing or of the wrong type")):
        read_artifact(repo, found, trust=ALL)
    assert write_artifact(repo, make_artifact(), secret=None).name == name


def test_a_later_format_is_left_to_later_versions() -> None:
    repo = new_repo()
    name = artifact_name(make_key().digest, 0)
    found = forge(repo, name, {"graph": b"x"}, {"artifact": 2})

    with pytest.raises(NewerFormat, match=re.escape(f"'{name}' is an artifact of version 2, this Holdfast reads up")):
        read_artifact(repo, found, trust=ALL)
    assert write_artifact(repo, make_artifact(), secret=None).name == artifact_name(make_key().digest, 1)


def test_a_malformed_name_is_reported() -> None:
    repo = new_repo()
    found = forge(repo, "@compiled/strange", {"graph": b"x"}, {})

    with pytest.raises(Corrupt, match="'@compiled/strange' is not the name of an artifact; delete it"):
        read_artifact(repo, found, trust=ALL)
    assert [each.name for each in iter_artifacts(repo.store)] == ["@compiled/strange"]
