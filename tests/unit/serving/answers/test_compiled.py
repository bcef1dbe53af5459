"""The compile cache: its entries are those of the verb, and a miss is explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.compile_cache.artifacts.limits import read_stored
from holdfast.errors import NotFound
from holdfast.serving.answers.compiled import describe_cache, describe_miss
from tests.kit.compile_artifacts import make_artifact, make_key, store_artifact


def test_keys_and_a_miss_are_those_of_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = make_key("a").digest
    with holdfast.open(tmp_path / "store") as store:
        for seed in "ab":
            store_artifact(store.repository, make_artifact(seed))
        found = describe_cache(read_stored(store.repository.store), "-used_s", 0, 10)
        miss = describe_miss(store.repository, key)
    assert main(["-s", str(tmp_path / "store"), "cache", "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main(["-s", str(tmp_path / "store"), "cache", "why", key, "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)

    assert sorted(found["keys"], key=str) == sorted(listed["keys"], key=str)
    assert found["total"] == 2
    assert miss["lines"] == explained["lines"]


def test_an_only_graph_and_a_wrong_key(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store_artifact(store.repository, make_artifact("a"))

        assert describe_miss(store.repository, make_key("a").digest)["lines"] == ["It is the only graph in the cache."]
        with pytest.raises(NotFound):
            describe_miss(store.repository, "0" * 64)
