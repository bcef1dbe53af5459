"""Artifacts are read as they were written."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact, read_parts
from holdfast.compile_cache.artifacts.catalog import iter_variants
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import Corrupt
from tests.kit.compile_artifacts import (
    forge,
    make_artifact,
    make_key,
    store_artifact,
)
from tests.kit.saving import new_repo, noise

MINE = Trust()
ALL = Trust(everything=True)
BIG = {"k1": noise(300_000, 1), "k2": noise(1_500_000, 2)}


def test_an_artifact_is_read_as_it_was_written() -> None:
    repo = new_repo()
    artifact = make_artifact(guards="s0 > 8", graph=noise(200_000), kernels=BIG)

    result = write_artifact(repo, artifact, secret=None)
    (found,) = iter_variants(repo.store, artifact.key.digest)

    assert result.name == f"@compiled/{artifact.key.digest}/0"
    assert (found.guards, found.seconds, found.digests) == ("s0 > 8", 12.5, artifact.key.digests)
    assert read_artifact(repo, found, trust=MINE) == artifact


def test_an_artifact_without_kernels_can_be_read() -> None:
    repo = new_repo()
    artifact = make_artifact(kernels={})

    assert read_artifact(repo, store_artifact(repo, artifact), trust=MINE) == artifact


def test_the_parts_of_a_key_can_be_read_alone() -> None:
    repo = new_repo()
    found = store_artifact(repo)

    assert read_parts(repo, found) == make_key().parts


@pytest.mark.parametrize("entries", [{"graph": b"x"}, {"key.json": b"{}"}, {"graph": b"", "key.json": b"{}", "x": b""}])
def test_an_artifact_with_missing_or_unknown_entries_is_refused(entries: dict[str, bytes]) -> None:
    repo = new_repo()
    good = store_artifact(repo)
    assert good.snapshot is not None
    found = forge(repo, good.name, entries, good.snapshot.metadata)

    with pytest.raises(Corrupt, match="does not have the entries of an artifact, but"):
        read_artifact(repo, found, trust=ALL)
