"""Compressed chunks in a bucket: the first declares the codec, and nothing else takes more rounds than raw ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.repo.handle.compression import Compression
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.read.reader import open_snapshot
from tests.kit.encoded import CONFIGS, codecs, halves, save_encoded
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import keys, load_bytes, snapshot_of
from tests.unit.objects.cloud.servers import open_cloud

STATE = {"weights": halves(300_000), "more": halves(20_000, 1)}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


def open_bucket(server: S3Server) -> Repository:
    return open_repository(open_cloud(server), create=True)


def count_save(repo: Repository, name: str, seed: int, compression: Compression) -> int:
    with count_rounds(CloudStore, "_ask") as rounds:
        save_encoded(repo, name, {"weights": halves(300_000, seed)}, compression)
    return rounds.greatest


def test_only_the_first_compressed_save_of_a_store_takes_more_rounds(server: S3Server) -> None:
    repo = open_bucket(server)
    save_encoded(repo, "first", {"x": b"1" * 600}, None)
    raw = count_save(repo, "raw", 1, None)

    declaring = count_save(repo, "fast/1", 2, "fast")
    # List the configs, read the newest, create the next, list again; and the next read of the config finds another.
    assert declaring <= raw + 5
    count_save(repo, "fast/2", 3, "fast")
    assert count_save(repo, "fast/3", 4, "small") <= raw
    assert keys(repo.store, "config/") == CONFIGS


def test_another_handle_declares_nothing_again(server: S3Server) -> None:
    save_encoded(open_bucket(server), "a", STATE)
    server.requests.clear()
    save_encoded(open_bucket(server), "b", {"weights": halves(9000, 9)})
    assert server.count("PUT", "config/") == 0
    assert keys(open_cloud(server), "config/") == CONFIGS


def test_opening_takes_one_round_and_loading_no_more_than_raw_bytes(server: S3Server) -> None:
    repo = open_bucket(server)
    save_encoded(repo, "raw", STATE, None)
    save_encoded(repo, "fast", {name: data[::-1] for name, data in STATE.items()})
    assert {1} == set(codecs(repo, "fast", "more"))
    with count_rounds(CloudStore, "_ask") as opening:
        fresh = open_repository(open_cloud(server))
    assert opening.greatest == 1
    found = []
    for name in ("raw", "fast"):
        snapshot = snapshot_of(fresh, name)
        with count_rounds(CloudStore, "_ask") as loading, open_snapshot(fresh, snapshot) as reader:
            for entry in STATE:
                reader.read_entry(entry)
        found.append(loading.greatest)
    assert found[1] <= found[0]
    assert load_bytes(fresh, "fast") == {name: data[::-1] for name, data in STATE.items()}


def test_small_saves_to_a_bucket_are_raw_by_default(server: S3Server) -> None:
    repo = open_bucket(server)
    assert repo.compression == "auto"
    for number in range(3):
        save_encoded(repo, str(number), {"weights": halves(300_000, number)}, "default")
    assert keys(repo.store, "config/") == CONFIGS[:2]
