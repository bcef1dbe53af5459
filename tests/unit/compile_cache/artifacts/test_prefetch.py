"""Artifacts are read into memory in the background, within the memory budget, and each is taken once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.compile_cache.artifacts.prefetch import PrefetchedArtifacts
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.repo.handle.repository import Repository
from tests.kit.compile_artifacts import make_artifact, make_key, store_artifact
from tests.kit.patience import PATIENCE_S
from tests.kit.saving import new_repo

A, B = make_key("a").digest, make_key("b").digest


@pytest.fixture
def repo(monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return a repository with two artifacts for the torch of this process."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    repo = new_repo()
    for seed in "ab":
        store_artifact(repo, make_artifact(seed))
    return repo


def _fetch(repo: Repository, *keys: str) -> tuple[PrefetchedArtifacts, int]:
    prefetched = PrefetchedArtifacts(repo, Trust())
    progress = prefetched.fetch(keys)
    assert progress.wait(PATIENCE_S)
    return prefetched, progress.num_artifacts


@pytest.mark.parametrize(("keys", "expected"), [((), {A, B}), ((A,), {A}), ((B[:8],), {B}), (("f" * 64,), set())])
def test_the_artifacts_of_keys_or_prefixes_are_read(
    repo: Repository, keys: tuple[str, ...], expected: set[str]
) -> None:
    prefetched, count = _fetch(repo, *keys)

    assert {digest for digest in (A, B) if prefetched.find(digest)} == expected
    assert count == len(expected)


def test_an_artifact_is_taken_once(repo: Repository) -> None:
    prefetched, _ = _fetch(repo, A)
    (variant,) = prefetched.find(A)

    assert prefetched.take(variant) == make_artifact("a")
    assert prefetched.take(variant) is None
    assert prefetched.find(A) == []


def test_an_artifact_that_was_replaced_is_not_taken(repo: Repository) -> None:
    prefetched, _ = _fetch(repo, A)
    (variant,) = prefetched.find(A)

    assert prefetched.take(replace(variant, guards="s0 > 8")) is None


def test_artifacts_for_another_torch_are_not_read(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")

    assert _fetch(repo)[1] == 0


def test_reading_stops_at_the_memory_budget() -> None:
    repo = new_repo()
    for seed in "ab":
        store_artifact(repo, make_artifact(seed, key=make_key(seed, system={"torch": torch.__version__})))
    assert _fetch(repo)[1] == 2

    object.__setattr__(repo, "budget_bytes", 1)

    assert _fetch(repo)[1] == 0
