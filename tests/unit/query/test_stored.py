"""The cache file: it is found again, ignored if anything is wrong with it, and replaced as a whole."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.digest import fingerprint
from holdfast.objects.protocol import ObjectInfo
from holdfast.query.stored import MIN_NEW, CacheFile
from holdfast.repo.names.listed import CachedRecord, RecordCache
from tests.kit.committed import make_committed

STORE_ID = "0123abc"


def make_cache(number: int = MIN_NEW) -> RecordCache:
    cache = RecordCache()
    for each in range(number):
        snapshot = make_committed(
            f"run/{each}", {"step": each, "ö": [None, {"x": 0.1}]}, environment={"host": f"h{each % 2}"}
        )
        info = ObjectInfo(f"snapshots/00/{each}@00000000", 500, 0.0, f"v{each}")
        cache.put(info, None if each == 3 else snapshot)
    return cache


def read(folder: Path, store_id: str = STORE_ID) -> dict[str, CachedRecord]:
    cache = RecordCache()
    CacheFile(str(folder), store_id).read_into(cache)
    return dict(cache.iter_records())


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    cache = make_cache()

    assert CacheFile(str(tmp_path / "new/folder"), STORE_ID).write_from(cache)

    assert read(tmp_path / "new/folder") == dict(cache.iter_records())
    (file,) = (tmp_path / "new/folder").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_few_new_records_are_not_worth_a_file(tmp_path: Path) -> None:
    assert not CacheFile(str(tmp_path), STORE_ID).write_from(make_cache(MIN_NEW - 1))
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_store_is_another_file(tmp_path: Path) -> None:
    CacheFile(str(tmp_path), STORE_ID).write_from(make_cache())

    assert read(tmp_path, "other") == {}


@pytest.mark.parametrize("store_id", ["", "../x", "a/b", ".", "x" * 65])
def test_an_id_that_is_no_file_name_has_no_file(tmp_path: Path, store_id: str) -> None:
    assert not CacheFile(str(tmp_path / "inner"), store_id).write_from(make_cache())
    assert read(tmp_path / "inner", store_id) == {}
    assert list(tmp_path.rglob("*")) == []


def test_without_a_folder_nothing_is_written() -> None:
    assert not CacheFile("", STORE_ID).write_from(make_cache())


def damage(data: bytes) -> list[bytes]:
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 17, 30, 60, len(data) // 2, -2)]
    return [*flipped[:5], b"", data[:10], data[: len(data) // 2], data + b"x", b"\0" * 1000]


def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path) -> None:
    cache = make_cache()
    CacheFile(str(tmp_path), STORE_ID).write_from(cache)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()

    for data in damage(whole):
        file.write_bytes(data)
        assert read(tmp_path) == {}
        assert CacheFile(str(tmp_path), STORE_ID).write_from(cache)
        assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"3", b"[[],[3]]", b"[[],[[1]]]", b'[[],[["k",1,"v","name"]]]', b"[" * 100_000, b"\xff"],
)
def test_a_file_of_another_version_is_ignored(tmp_path: Path, body: bytes) -> None:
    header = b"holdfast-records 1 " + fingerprint(body).hex().encode() + b"\n"
    (tmp_path / f"{STORE_ID}.records").write_bytes(header + body)

    assert read(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert not CacheFile(str(tmp_path / "file"), STORE_ID).write_from(make_cache())
    assert read(tmp_path / "file") == {}


def test_a_file_that_is_a_directory_is_no_error(tmp_path: Path) -> None:
    (tmp_path / f"{STORE_ID}.records").mkdir()

    assert not CacheFile(str(tmp_path), STORE_ID).write_from(make_cache())
    assert read(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == [f"{STORE_ID}.records"]


def test_files_of_stores_that_were_not_used_for_longest_are_deleted(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / f"old{number}.records"
        path.write_text("")
        os.utime(path, (number, number))

    CacheFile(str(tmp_path), STORE_ID).write_from(make_cache())

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{STORE_ID}.records", *(f"old{number}.records" for number in range(9, 40))}


WRITER = """
import sys
from tests.unit.query.test_stored import STORE_ID, make_cache
from holdfast.query.stored import CacheFile
cache = make_cache()
for _ in range(30):
    assert CacheFile(sys.argv[1], STORE_ID).write_from(cache)
"""


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    expected = len(make_cache())
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    seen = set()

    while any(writer.poll() is None for writer in writers):
        seen.add(len(read(tmp_path)))

    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {0, expected}, "a reader sees no file or a whole one"
    assert len(read(tmp_path)) == expected
    assert [path.name for path in tmp_path.iterdir()] == [f"{STORE_ID}.records"]
