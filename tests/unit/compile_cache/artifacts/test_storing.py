"""Artifacts are written as variants of their key, one for each set of guards; a damaged or unsigned one is replaced."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.catalog import iter_artifacts, iter_variants
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import Corrupt
from holdfast.repo.format.layout import PACKS
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from tests.kit.compile_artifacts import (
    OTHER_SECRET,
    SECRET,
    find_variant,
    make_artifact,
    make_key,
    store_artifact,
)
from tests.kit.saving import keys, new_repo, noise

MINE = Trust()
ALL = Trust(everything=True)
BIG = {"k1": noise(300_000, 1), "k2": noise(1_500_000, 2)}


def test_other_guards_are_another_variant() -> None:
    repo = new_repo()
    for guards in ("s0 > 8", "s0 <= 8", ""):
        write_artifact(repo, make_artifact(guards=guards), secret=None)

    found = list(iter_variants(repo.store, make_key().digest))

    assert [(each.number, each.guards) for each in found] == [(0, "s0 > 8"), (1, "s0 <= 8"), (2, "")]


def test_the_same_guards_are_stored_once_though_bytes_differ() -> None:
    repo = new_repo()
    first = write_artifact(repo, make_artifact(graph=b"one"), secret=None)

    again = write_artifact(repo, make_artifact(graph=b"two"), secret=None)

    assert (again.existed, again.name, again.digest) == (True, first.name, first.digest)
    assert read_artifact(repo, find_variant(repo), trust=MINE).graph == b"one"


def test_another_key_has_its_own_variants() -> None:
    repo = new_repo()
    for seed in "ab":
        store_artifact(repo, make_artifact(seed, graph=seed.encode()))

    assert [
        read_artifact(repo, found, trust=MINE).graph for found in iter_variants(repo.store, make_key("b").digest)
    ] == [b"b"]
    assert {found.key_digest for found in iter_artifacts(repo.store)} == {make_key(seed).digest for seed in "ab"}


def test_a_variant_whose_bytes_are_lost_is_replaced_by_the_next_save() -> None:
    repo = new_repo()
    artifact = make_artifact(kernels=BIG)
    found = store_artifact(repo, artifact)
    for key in keys(repo.store, PACKS):
        repo.store.delete(key)
    with pytest.raises(Corrupt, match="is gone, and no other intact copy is in the store"):
        read_artifact(repo, found, trust=MINE)

    result = write_artifact(new_repo(repo.store), artifact, secret=None)

    assert (result.existed, result.name, result.generation) == (False, found.name, 1)
    assert read_artifact(repo, find_variant(repo), trust=MINE) == artifact


def test_an_unsigned_variant_is_replaced_by_a_signed_one() -> None:
    repo = new_repo()
    first = store_artifact(repo)

    signed = store_artifact(repo, secret=SECRET)

    assert (first.mac, signed.name) == ("", first.name)
    assert write_artifact(repo, make_artifact(), secret=SECRET).existed
    assert write_artifact(repo, make_artifact(), secret=None).existed


def test_a_variant_signed_with_another_key_is_not_replaced() -> None:
    repo = new_repo()
    first = store_artifact(repo, secret=OTHER_SECRET)

    second = store_artifact(repo, secret=SECRET)

    assert (first.number, second.number) == (0, 1)
    assert [found.mac for found in iter_variants(repo.store, make_key().digest)] == [first.mac, second.mac]


def test_artifacts_that_are_deleted_are_collected() -> None:
    repo = new_repo()
    found = store_artifact(repo, make_artifact(kernels=BIG))
    delete_snapshot(repo.store, found.name)

    collect(repo.store, Rules(min_age_s=0.0))

    assert keys(repo.store, PACKS) == []
