"""Reading through a cache: nothing is downloaded twice, no cached byte is believed, and names are never cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, DigestMismatch, NotFound
from holdfast.objects.disk_cache import DiskCache, ReadCacheStatistics
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.read.reader import Verify, is_readable, open_snapshot
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import MIB, new_repo, noise, only_pack, pack_of, rot, save_bytes
from tests.kit.thinning import keep
from tests.unit.objects.cloud.servers import open_cloud

CONTENT = {"x": noise(5 * MIB + 99, seed=1), "small": noise(3000, seed=2), "tiny": noise(2000, seed=3)}


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with the snapshot "a"."""
    with serve_s3() as running:
        save_bytes(new_repo(open_cloud(running)), "a", CONTENT)
        running.requests.clear()
        yield running


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def open_cached(server: S3Server, directory: str) -> Repository:
    """Open a new handle, as another process would."""
    return new_repo(open_cloud(server, cache=DiskCache(directory)))


def load(repo: Repository, name: str = "a", verify: Verify = "full") -> dict[str, bytes]:
    with open_snapshot(repo, read_snapshot(repo.store, name), verify=verify) as reader:
        found = {entry.name: bytearray(entry.size_bytes) for entry in reader.manifest.iter_entries()}
        reader.read_all([(reader.find_entry(each), memoryview(data)) for each, data in found.items()])
    return {name: bytes(data) for name, data in found.items()}


def count_downloads(server: S3Server, act: Callable[[], object]) -> int:
    """Return how many packs and manifests, or parts of them, are requested."""
    server.requests.clear()
    act()
    return server.count("GET", "packs/") + server.count("GET", "manifests/")


def find_file(directory: str, kind: str) -> Path:
    (path,) = (Path(directory) / "holdfast-cache-1" / kind).iterdir()
    return path


def test_what_was_loaded_once_is_not_downloaded_again(server: S3Server, directory: str) -> None:
    assert load(open_cached(server, directory)) == CONTENT
    again = open_cached(server, directory)

    downloads = count_downloads(server, lambda: load(again))

    assert downloads == 0
    assert load(again) == CONTENT


def test_the_statistics_of_a_handle_tell_what_came_from_where(server: S3Server, directory: str) -> None:
    first, second, without = (
        open_cached(server, directory),
        open_cached(server, directory),
        new_repo(open_cloud(server)),
    )
    for repo in (first, second, without):
        load(repo)

    of_first, of_second = first.counters.read().cache, second.counters.read().cache

    size_bytes = sum(map(len, CONTENT.values()))
    assert of_first is not None
    assert of_first.hit_bytes == 0
    assert of_first.missed_bytes > size_bytes
    assert of_second is not None
    assert of_second.hit_bytes > size_bytes
    assert of_second.missed_bytes == 0
    assert without.counters.read().cache is None


def test_after_a_part_was_read_only_the_rest_is_downloaded(server: S3Server, directory: str) -> None:
    repo = open_cached(server, directory)
    with open_snapshot(repo, read_snapshot(repo.store, "a")) as reader:
        reader.read_into(reader.find_entry("x"), 0, memoryview(bytearray(2 * MIB)))
    before = repo.counters.read().cache or ReadCacheStatistics(0, 0)

    assert load(repo) == CONTENT

    after = repo.counters.read().cache or ReadCacheStatistics(0, 0)
    assert after.hit_bytes >= 2 * MIB
    assert after.missed_bytes - before.missed_bytes < 4 * MIB


@pytest.mark.parametrize("verify", keep(["full", "fast", False], "fast"))
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: bytes(len(data)),
        lambda data: data[: MIB + 7] + bytes([data[MIB + 7] ^ 1]) + data[MIB + 8 :],
        lambda data: b"",
        lambda data: data[1:] + b"more than there was",
    ],
    ids=["cut", "zeros", "one bit", "empty", "shifted"],
)
@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_a_damaged_or_hostile_file_never_gives_wrong_bytes_and_is_healed(
    server: S3Server, directory: str, kind: str, damage: Callable[[bytes], bytes], verify: Verify
) -> None:
    load(open_cached(server, directory))
    path = find_file(directory, kind)
    data = path.read_bytes()
    path.write_bytes(damage(data if len(data) > MIB + 8 else data.ljust(MIB + 9)))

    assert load(open_cached(server, directory), verify=verify) == CONTENT
    assert count_downloads(server, lambda: load(open_cached(server, directory), verify=verify)) == 0


def test_what_is_damaged_in_the_store_is_found_although_the_cache_has_it(server: S3Server, directory: str) -> None:
    repo = open_cached(server, directory)
    load(repo)
    rot(repo.store, only_pack(repo.store), pack_of(repo, "a", "x").offset + 9)

    assert load(open_cached(server, directory)) == CONTENT  # the cache has the right bytes
    assert not is_readable(repo, read_snapshot(repo.store, "a"))
    with pytest.raises(DigestMismatch, match="'a', entry 'x'"):
        with open_snapshot(repo, read_snapshot(repo.store, "a"), use_cache=False) as reader:
            reader.read_entry("x")


def test_damage_in_the_store_is_not_believed_when_it_comes_through_the_cache(server: S3Server, directory: str) -> None:
    repo = open_cached(server, directory)
    rot(repo.store, only_pack(repo.store), pack_of(repo, "a", "x").offset + 9)

    for _ in range(2):
        with pytest.raises(Corrupt, match="'a', entry 'x'"):
            load(open_cached(server, directory))


def test_names_are_never_cached(server: S3Server, directory: str) -> None:
    load(open_cached(server, directory))
    writer = new_repo(open_cloud(server))
    save_bytes(writer, "a", {"x": b"new"}, overwrite=True)

    assert load(open_cached(server, directory)) == {"x": b"new"}

    delete_snapshot(writer.store, "a")
    with pytest.raises(NotFound):
        load(open_cached(server, directory))


def test_a_cache_that_is_removed_while_it_is_used_is_filled_again(server: S3Server, directory: str) -> None:
    repo = open_cached(server, directory)
    load(repo)
    for kind in ("packs", "manifests"):
        os.unlink(find_file(directory, kind))
    os.rmdir(Path(directory) / "holdfast-cache-1" / "packs")

    assert load(repo) == CONTENT
    assert count_downloads(server, lambda: load(repo)) == 0
