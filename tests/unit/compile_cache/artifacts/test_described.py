"""Keys of a compile cache as JSON, and how one differs from others."""

from __future__ import annotations

from holdfast.compile_cache.artifacts.limits import read_stored
from holdfast.compile_cache.artifacts.why import describe_key, explain_key
from holdfast.objects.memory import MemoryStore
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.saving import new_repo


def test_a_key_is_described_and_compared_with_the_most_similar_one() -> None:
    repo = new_repo(MemoryStore())
    for seed in "ab":
        store_artifact(repo, make_artifact(seed))
    first, second = read_stored(repo.store)

    described = describe_key(first)

    assert (described["key"], described["bytes"]) == (first.digest, first.size_bytes)
    assert len(described["variants"]) == 1
    assert explain_key(repo, first, [second]).startswith("missed: ")
