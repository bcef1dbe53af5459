"""Whatever is wrong: one line on standard error, exit code 2, nothing changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.repo.format.record import encode_record
from tests.cli.runs import Cli, digest_tree
from tests.kit.thinning import thin

Damage = Callable[[Cli], None]


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with one snapshot."""
    cli.ok("put", "snap", "data/")
    return cli


def _verify_refusal(cli: Cli, words: list[str], reason: str) -> None:
    before = digest_tree(cli.folder)

    ran = cli.bare(*words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("holdfast: ")
    assert ran.err.count("\n") == 1
    assert ran.err.endswith("\n")
    assert reason in ran.err
    assert digest_tree(cli.folder) == before


EVERY_VERB = [
    ["ls"],
    ["show", "snap"],
    ["put", "new", "data"],
    ["get", "snap", "out"],
    ["cat", "snap", "config.json"],
    ["tag"],
    ["tag", "best", "snap"],
    ["rm", "snap", "--yes"],
]


@pytest.mark.parametrize("verb", thin(EVERY_VERB, 4), ids=" ".join)
@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("nowhere", "nowhere is not a store; create one with `holdfast -s"),
        ("data/config.json", "data/config.json is a file, not a store; a store is a directory"),
        ("data", "data is not empty and has no config, so it is no store: 'config.json' is there"),
        ("s3://b/x", "names no bucket that can exist"),
        ("ftp://x", "the scheme 'ftp' is not supported"),
        ("s3:/bucket/x", "a URL begins with a scheme and two slashes; a directory of that name is ./s3:/bucket/x"),
        ("simplecache::s3://bucket/x", "a URL begins with a scheme and two slashes"),
        ("memory://", "exists only in the process that opened it; the command line needs a path"),
        ("", "is not a path of a store"),
    ],
)
def test_a_place_without_a_store(empty: Cli, store: str, verb: list[str], reason: str) -> None:
    _verify_refusal(empty, ["-s", store, *verb], reason)


@pytest.mark.parametrize("place", ["s3://bucket/out", "s3:/bucket/out", "file:///out"])
def test_a_url_is_no_directory_to_write_to(saved: Cli, place: str) -> None:
    _verify_refusal(saved, ["-s", "ckpts", "get", "snap", place], f"{place} is a URL and not a local path")


@pytest.mark.parametrize("verb", EVERY_VERB, ids=" ".join)
def test_a_newer_format(saved: Cli, verb: list[str]) -> None:
    config = {"kind": "config", "generation": 1, "store_id": "x", "format": {"major": 9, "minor": 1}, "features": {}}
    saved.find("config").write_bytes(encode_record(config))

    _verify_refusal(saved, ["-s", "ckpts", *verb], "has format 9.1, this Holdfast reads up to 1: upgrade")


@pytest.mark.parametrize(
    "verb", [["put", "new", "data"], ["tag", "best", "snap"], ["rm", "snap", "--yes"]], ids=" ".join
)
def test_a_feature_that_writers_must_know(saved: Cli, verb: list[str]) -> None:
    features = {"read": [], "write": ["tides"], "collect": []}
    config = {
        "kind": "config",
        "generation": 1,
        "store_id": "x",
        "format": {"major": 1, "minor": 1},
        "features": features,
    }
    saved.find("config").write_bytes(encode_record(config))

    assert saved("ls").code == 0
    _verify_refusal(saved, ["-s", "ckpts", *verb], "needs the feature 'tides' to write")


def _flip(prefix: str, position: int) -> Damage:
    def damage(cli: Cli) -> None:
        data = bytearray(cli.find(prefix).read_bytes())
        data[position] ^= 1
        cli.find(prefix).write_bytes(data)

    return damage


def _truncate(prefix: str, size: int) -> Damage:
    return lambda cli: os.truncate(cli.find(prefix), size)


def _remove(prefix: str) -> Damage:
    def damage(cli: Cli) -> None:
        for path in (cli.store / prefix).iterdir():
            path.unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "verb", "reason"),
    [
        (_flip("packs", 1_500_000), ["cat", "snap", "model.bin"], "damaged in pack"),
        (_flip("packs", 1_500_000), ["get", "snap", "out", "--only", "model.bin"], "entry 'model.bin', chunk"),
        (_flip("manifests", 100), ["show", "snap"], "its digest is not the one that its snapshot states"),
        (_flip("snapshots", -10), ["show", "snap"], "is damaged: its bytes do not have the digest that it states"),
        (_flip("snapshots", -10), ["rm", "snap", "--yes"], "is damaged"),
        (_flip("config", -10), ["ls"], "record config/00000001 is damaged"),
        (_truncate("packs", 1_000_000), ["cat", "snap", "model.bin"], "no other intact copy is in the store"),
        (_truncate("manifests", 50), ["cat", "snap", "model.bin"], "is damaged"),
        (_truncate("snapshots", 50), ["show", "snap"], "no snapshot or tag 'snap'"),
        (_remove("packs"), ["cat", "snap", "model.bin"], "is gone, and no other intact copy is in the store"),
        (_remove("manifests"), ["get", "snap", "out"], "'snap' is gone: its manifest was collected or lost"),
        (_remove("manifests"), ["show", "snap"], "no object manifests/"),
        (_remove("config"), ["ls"], "its config/ was lost: restore it from a copy"),
    ],
)
def test_damage(saved: Cli, damage: Damage, verb: list[str], reason: str) -> None:
    damage(saved)
    # A restore makes its directory before the first byte; that is no change worth reporting.
    (saved.folder / "out").mkdir()

    _verify_refusal(saved, ["-s", "ckpts", *verb], reason)


def test_a_name_in_use(saved: Cli) -> None:
    _verify_refusal(saved, ["-s", "ckpts", "put", "snap", "data/sub"], "'snap' is in use and holds other content")


def test_no_store_anywhere(empty: Cli) -> None:
    _verify_refusal(
        empty,
        ["ls"],
        f"no store was given, and there is none at or above {empty.folder}; use -s STORE, set HOLDFAST_STORE, or",
    )


@contextmanager
def _mount(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small(empty: Cli) -> Iterator[Cli]:
    """A store on a filesystem of 4 MiB."""
    with _mount(empty.store, "4m"):
        empty.ok("init")
        empty.ok("put", "snap", "data/config.json")
        yield empty


@pytest.mark.parametrize(
    "verb", [["put", "new", "data/sub"], ["tag", "best", "snap"], ["rm", "snap", "--yes"]], ids=" ".join
)
def test_a_read_only_filesystem(small: Cli, verb: list[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small.store)], check=True)

    _verify_refusal(small, ["-s", "ckpts", *verb], "Read-only file system; let this user write there")
    assert small.ok("cat", "snap", "config.json") == '{"lr": 1}\n'
    assert "note     the directory is not writable (Read-only file system)" in small("doctor").out


def test_a_full_disk_is_noticed_before_anything_is_written(small: Cli) -> None:
    (small.folder / "big").write_bytes(os.urandom(8 << 20))

    _verify_refusal(small, ["-s", "ckpts", "put", "big", "big"], "saving 'big' needs 8388608 bytes, ")


def test_a_disk_that_has_no_room_at_all(small: Cli) -> None:
    with (small.store / ".filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))

    _verify_refusal(small, ["-s", "ckpts", "put", "new", "data/config.json"], "needs 10 bytes")
    _verify_refusal(small, ["-s", "ckpts", "tag", "best", "snap"], "No space left on device")


def test_get_to_a_full_disk_names_the_file(saved: Cli) -> None:
    words = ["-s", "ckpts", "get", "snap", "full", "--only", "model.bin"]
    with _mount(saved.folder / "full", "1m"):
        _verify_refusal(saved, words, "full/model.bin: No space left on device")
