"""A snapshot that is read through a cache: small tensors are cached, and `verify` reads the store itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.errors import Corrupt
from holdfast.objects.disk_cache import DiskCache
from holdfast.store import Store
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import only_pack, rot
from tests.unit.objects.cloud.servers import open_cloud

SAVED = torch.arange(5000)


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with one small tensor."""
    with serve_s3() as running:
        Store(open_cloud(running)).save("a", {"w": SAVED})
        yield running


def open_cached(server: S3Server, tmp_path: Path) -> Store:
    return Store(open_cloud(server, cache=DiskCache(str(tmp_path / "cache"))))


def test_one_small_tensor_is_downloaded_once(server: S3Server, tmp_path: Path) -> None:
    assert torch.equal(open_cached(server, tmp_path)["a"]["w"][...], SAVED)
    server.requests.clear()

    assert torch.equal(open_cached(server, tmp_path)["a"]["w"][...], SAVED)
    assert server.count("GET", "packs/") == 0


def test_verify_reads_the_store_and_not_the_cache(server: S3Server, tmp_path: Path) -> None:
    store = open_cached(server, tmp_path)
    store.load("a")
    store["a"].verify()
    objects = store.repository.store
    rot(objects, only_pack(objects), 4096 + 100)

    assert torch.equal(store.load("a")["w"], SAVED)
    with pytest.raises(Corrupt, match="damaged in pack"):
        store["a"].verify()
