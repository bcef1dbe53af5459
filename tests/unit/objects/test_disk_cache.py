"""The cache: what was written is found, holes are not, it stays small, and nothing that is wrong with it raises."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.memory import MemoryStore
from tests.kit.hooking import Hook
from tests.kit.patience import PATIENCE_S
from tests.kit.scripted_files import open_descriptors

KIB = 1 << 10
MIB = 1 << 20


def read(cache: DiskCache, key: str, start: int, size_bytes: int) -> bytes | None:
    with cache.open(key) as cached:
        data = None if cached is None else cached.read(start, size_bytes)
        return None if data is None else bytes(data)


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(str(tmp_path / "cache"), limit_bytes=64 * MIB)


def files_of(cache: DiskCache) -> Path:
    return Path(cache.directory) / "holdfast-cache-1"


def test_bytes_that_were_written_are_found_at_their_offset(cache: DiskCache) -> None:
    cache.write("packs/one", 5 * MIB, b"x" * MIB)

    assert read(cache, "packs/one", 5 * MIB + 3, 10) == b"x" * 10
    assert read(DiskCache(cache.directory), "packs/one", 5 * MIB, MIB) == b"x" * MIB


@pytest.mark.parametrize(("start", "size_bytes"), [(0, 10), (4 * MIB, 2 * MIB), (5 * MIB, MIB + 1), (9 * MIB, 1)])
def test_bytes_that_were_never_written_are_missing(cache: DiskCache, start: int, size_bytes: int) -> None:
    cache.write("packs/one", 5 * MIB, b"x" * MIB)

    assert read(cache, "packs/one", start, size_bytes) is None


def test_an_object_that_was_never_written_is_missing(cache: DiskCache) -> None:
    assert read(cache, "packs/one", 0, 1) is None
    assert not os.path.exists(cache.directory)  # reading creates nothing


def test_no_file_stays_open(cache: DiskCache) -> None:
    before = open_descriptors()

    cache.write("packs/one", 0, b"x" * KIB)
    assert read(cache, "packs/one", 0, KIB) == b"x" * KIB
    os.link(files_of(cache) / "packs/one", files_of(cache) / "packs/two")
    assert read(cache, "packs/two", 0, KIB) is None  # it may be somebody else's file
    cache.write("packs/two", 0, b"y")

    assert open_descriptors() == before


def test_only_the_user_can_read_the_files(cache: DiskCache) -> None:
    cache.write("packs/one", 0, b"secret")

    paths = [files_of(cache), files_of(cache) / "packs", files_of(cache) / "packs" / "one"]
    assert [oct(path.stat().st_mode & 0o777) for path in [Path(cache.directory), *paths]] == [
        "0o700", "0o700", "0o700", "0o600",
    ]  # fmt: skip


def test_what_was_not_used_for_longest_is_deleted_first(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), limit_bytes=MIB)
    for number, age_s in enumerate((300, 100, 500, 400)):
        cache.write(f"packs/{number}", 0, os.urandom(200 * KIB))
        path = files_of(cache) / "packs" / str(number)
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    assert read(cache, "packs/3", 0, 1)  # now it is the newest

    DiskCache(str(tmp_path), limit_bytes=MIB).write("packs/new", 0, os.urandom(300 * KIB))

    assert sorted(os.listdir(files_of(cache) / "packs")) == ["1", "3", "new"]


def test_it_stays_near_its_limit_however_much_is_written(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), limit_bytes=MIB)
    for number in range(100):
        cache.write(f"packs/{number}", 0, os.urandom(64 * KIB))
        assert cache.read_usage().size_bytes <= MIB + MIB // 8


def test_many_threads_write_and_read_the_same_objects(cache: DiskCache) -> None:
    content = os.urandom(MIB)

    def use(number: int) -> None:
        for at in range(0, MIB, 64 * KIB):
            cache.write(f"packs/{number % 2}", at, content[at : at + 64 * KIB])
            read(cache, f"packs/{(number + 1) % 2}", at, 64 * KIB)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [read(cache, f"packs/{number}", 0, MIB) for number in range(2)] == [content, content]


def test_its_size_is_shown_and_it_can_be_cleared(cache: DiskCache) -> None:
    cache.write("packs/one", 10 * MIB, os.urandom(MIB))
    cache.write("manifests/one", 0, os.urandom(4 * KIB))
    usage = cache.read_usage()
    assert usage.files == 2
    assert MIB < usage.size_bytes < 2 * MIB  # the hole takes no space

    cache.clear()

    assert cache.read_usage().files == 0
    assert read(cache, "packs/one", 10 * MIB, 1) is None


def test_a_removed_directory_is_created_again(cache: DiskCache) -> None:
    cache.write("packs/one", 0, b"x")
    os.unlink(files_of(cache) / "packs" / "one")
    os.rmdir(files_of(cache) / "packs")
    os.rmdir(files_of(cache))

    cache.write("packs/two", 0, b"y")

    assert read(cache, "packs/two", 0, 1) == b"y"


def test_a_limit_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        DiskCache(str(tmp_path), limit_bytes=0)


def test_it_is_pickled_as_its_directory_and_limit(cache: DiskCache) -> None:
    again = pickle.loads(pickle.dumps(cache))
    assert (again.directory, again.limit_bytes) == (cache.directory, cache.limit_bytes)


def test_a_store_that_needs_no_cache_gets_none(cache: DiskCache) -> None:
    store = MemoryStore()
    store.use_cache(cache)
    assert store.cache is None


class TestTrouble:
    """What is wrong with the directory: one warning, and everything comes from the store."""

    def warnings_of(self, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> list[str]:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                cache.write("packs/one", 0, b"new")
                assert read(cache, "packs/one", 0, 3) in (None, b"new")
        return [record.getMessage() for record in caplog.records]

    def test_a_link_in_place_of_a_file_is_not_followed(
        self, cache: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache.write("packs/two", 0, b"x")
        victim = tmp_path / "victim"
        victim.write_bytes(b"old")
        os.symlink(victim, files_of(cache) / "packs" / "one")

        (text,) = self.warnings_of(cache, caplog)

        assert victim.read_bytes() == b"old"
        assert "nothing more is cached" in text

    def test_a_second_name_of_a_file_is_neither_read_nor_written(
        self, cache: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache.write("packs/two", 0, b"x")
        victim = tmp_path / "victim"
        victim.write_bytes(b"old")
        os.link(victim, files_of(cache) / "packs" / "one")

        (text,) = self.warnings_of(cache, caplog)

        assert victim.read_bytes() == b"old"
        assert read(cache, "packs/one", 0, 3) is None
        assert "not a plain file" in text

    @pytest.mark.parametrize("part", [".", "packs"])
    def test_a_link_in_place_of_a_folder_is_not_followed(
        self, cache: DiskCache, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        path = files_of(cache) / part if part != "." else files_of(cache)
        path.parent.mkdir(parents=True, mode=0o700)
        os.symlink(elsewhere, path)

        assert len(self.warnings_of(cache, caplog)) == 1
        assert os.listdir(elsewhere) == []

    def test_a_folder_that_others_can_use_is_refused(self, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
        files_of(cache).mkdir(parents=True)
        os.chmod(files_of(cache), 0o755)

        (text,) = self.warnings_of(cache, caplog)

        assert "can be used by others" in text
        assert os.listdir(files_of(cache)) == []

    def test_a_pipe_in_place_of_a_file_does_not_hang(self, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
        cache.write("packs/two", 0, b"x")
        os.mkfifo(files_of(cache) / "packs" / "one", 0o600)

        assert len(self.warnings_of(cache, caplog)) == 1

    def test_a_file_in_place_of_the_directory(self, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
        Path(cache.directory).write_bytes(b"")
        assert len(self.warnings_of(cache, caplog)) == 1

    def test_a_full_disk(self, cache: DiskCache, caplog: pytest.LogCaptureFixture, hook: Hook) -> None:
        cache.write("packs/two", 0, b"x")

        def refuse(handle: int, data: memoryview, start: int) -> int:
            raise OSError(28, "No space left on device")

        hook(os, "pwrite", refuse)
        (text,) = self.warnings_of(cache, caplog)

        assert "No space left on device; bytes come from the store instead" in text
        assert read(cache, "packs/two", 0, 1) == b"x"  # what is there is still used


USE = """
import sys
from holdfast.objects.disk_cache import DiskCache

cache = DiskCache(sys.argv[1], limit_bytes=512 << 10)
hits = 0
for round in range(40):
    for number in range(16):
        content = bytes([number]) * 65536
        with cache.open(f"packs/{number}") as cached:
            data = None if cached is None else cached.read(0, 65536)
        assert data is None or data == content, (number, bytes(data[:3]))
        hits += data is not None
        cache.write(f"packs/{number}", 0, content)
print(hits)
"""


def test_processes_that_write_and_evict_the_same_objects_see_right_bytes_or_none(tmp_path: Path) -> None:
    words = [sys.executable, "-c", USE, str(tmp_path)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]

    ended = [(*each.communicate(timeout=PATIENCE_S), each.returncode) for each in running]

    assert [code for _, _, code in ended] == [0, 0, 0], ended
    assert [error for _, error, _ in ended] == ["", "", ""]
    assert sum(int(hits) for hits, _, _ in ended) > 0
    assert DiskCache(str(tmp_path)).read_usage().size_bytes <= (512 + 3 * 64) << 10
