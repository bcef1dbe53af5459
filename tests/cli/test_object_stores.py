"""Every verb on a store in a bucket; address and credentials come from the environment."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.every_verb import IMPORTING, READING, WITH_TORCH, WRITING, make_files, make_store
from tests.cli.runs import Cli
from tests.kit.s3_server import Fault, Request, S3Server, Stored, serve_s3

PLACES = ("init fresh", "--to other", "--from other")
"""Places of other stores; these are in the bucket, too."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of a store that every command finds something in."""
    root = tmp_path_factory.mktemp("made") / "ckpts"
    make_store(root)
    files = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def server(made: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A bucket with that store."""
    with serve_s3() as running:
        for key, data in made.items():
            running.objects[f"ckpts/{key}"] = Stored(data, time.time() - 7200.0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("HOLDFAST_STORE", "s3://bucket/ckpts")
        yield running


@pytest.fixture
def bucket(empty: Cli, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line on it."""
    make_files(empty.folder)
    monkeypatch.setenv("HOLDFAST_STORE", "s3://bucket/ckpts")
    return empty


def move_to_bucket(command: str) -> str:
    for place in PLACES:
        verb, _, name = place.partition(" ")
        command = command.replace(place, f"{verb} s3://bucket/{name}")
    return command


@pytest.mark.slow
def test_every_command_works_on_a_bucket_and_reading_ones_write_nothing(bucket: Cli, server: S3Server) -> None:
    for group in (READING, [*WITH_TORCH, *IMPORTING, *WRITING]):
        for command in map(move_to_bucket, group):
            ran = bucket.bare(*shlex.split(command))

            assert ran.code in (0, 1), (command, ran)
            assert "Traceback" not in ran.err
        if group is READING:
            assert {request.kind for request in server.requests} <= {"GET", "HEAD", "LIST"}


def test_nothing_secret_is_printed_or_stored(bucket: Cli, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    printed = [bucket.bare(*shlex.split(words)) for words in ("put new data/", "show new --all", "doctor --json")]
    server.fault_of = lambda request: "bad signature"
    printed += [bucket.bare(*shlex.split(words)) for words in ("ls", "--debug ls", "put more data/")]

    assert not any("hidden" in ran.out + ran.err for ran in printed)
    assert not any(b"hidden" in stored.data for stored in server.objects.values())


def test_an_error_of_a_bucket_is_one_line(bucket: Cli) -> None:
    ran = bucket.bare("-s", "s3://elsewhere/ckpts", "ls")

    assert ran.code == 2
    assert ran.err.startswith("holdfast: cannot list s3://elsewhere/ckpts/config: the bucket does not exist")
    assert ran.err.count("\n") == 1


def test_doctor_tells_what_the_server_can_do(bucket: Cli, server: S3Server) -> None:
    before = dict(server.objects)
    ran = bucket.bare("doctor", "s3://bucket/ckpts", "--write")

    assert (ran.code, ran.err) == (0, "")
    assert "ok       the server refuses to create what exists: two writers cannot overwrite each other" in ran.out
    assert "ok       parts of objects can be read" in ran.out
    assert "ok       the server refuses bytes that do not fit their checksum" in ran.out
    assert "ok       an object is listed as soon as it was created" in ran.out
    assert "ok       objects can be deleted" in ran.out
    assert "ok       the clocks of the server and of this host agree" in ran.out
    assert server.objects == before


def test_doctor_finds_what_a_server_cannot_do(bucket: Cli, server: S3Server) -> None:
    server.ignores_conditions = server.ignores_checksums = True
    server.skew_s = 500.0

    ran = bucket.bare("doctor", "s3://bucket/ckpts", "--write")

    assert ran.code == 1
    assert "warning  the server ignores the condition that an object must not exist yet" in ran.out
    assert "note     the server does not verify checksums" in ran.out
    assert "s ahead of this host's" in ran.out


def test_doctor_as_json_has_the_facts(bucket: Cli) -> None:
    looked, tried = (bucket.bare("doctor", "--json", *words).json["place"] for words in ([], ["--write"]))

    assert (looked["tried"], looked["conditional_create"]) == (False, None)
    assert (tried["tried"], tried["conditional_create"], tried["ranges"], tried["skew_s"]) == (True, True, True, 0.0)
    assert looked["request_ms"] > 0


def test_doctor_says_that_a_bucket_cannot_be_written_to(bucket: Cli, server: S3Server) -> None:
    server.fault_of = lambda request: "403" if request.kind == "PUT" else None

    ran = bucket.bare("doctor", "--write")

    assert "note     objects cannot be created, so only reading works: cannot create s3://bucket/ckpts/" in ran.out


def test_doctor_takes_one_place_only(bucket: Cli, tmp_path: Path) -> None:
    ran = bucket.bare("-s", str(tmp_path), "doctor", "s3://bucket/ckpts")

    assert ran.code == 2
    assert "give only one" in ran.err


def test_doctor_says_what_a_failed_test_leaves_open(bucket: Cli, server: S3Server) -> None:
    def refuse_checksum(request: Request) -> Fault | None:
        return "403" if request.key.endswith("-checksum") else None

    server.fault_of = refuse_checksum

    ran = bucket.bare("doctor", "--write", "--json")

    assert ran.json["place"]["checksums"] is None
    texts = [verdict["text"] for verdict in ran.json["verdicts"] if verdict["topic"] == "checksum"]
    assert texts == [
        "the test failed, so it is not known whether the server refuses bytes that do not fit their checksum"
    ]


def test_a_cache_directory_keeps_what_commands_read_and_doctor_shows_it(
    bucket: Cli, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", str(tmp_path / "cache"))
    bucket.bare("put", "kept", "data/")
    first = bucket.bare("get", "kept", "one")
    server.requests.clear()
    again = bucket.bare("get", "kept", "two")
    downloads = server.count("GET", "packs/") + server.count("GET", "manifests/")
    shown = bucket.bare("doctor")

    assert (first.code, again.code, downloads) == (0, 0, 0)
    assert f"the cache in {tmp_path / 'cache'} has " in shown.out


def test_a_cache_directory_that_is_a_url_is_refused(bucket: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", "s3://bucket/cache")

    ran = bucket.bare("ls")

    assert (ran.code, "s3://bucket/cache is a URL and not a local path" in ran.err) == (2, True)
