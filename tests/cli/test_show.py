"""The verb `show`, of snapshots of files: record, entries, packs and chunks."""

from __future__ import annotations

import re

import pytest

from tests.cli.runs import Cli


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """One snapshot with metadata, and one that reuses its bytes."""
    cli.ok("put", "first", "data", "--meta", "epoch=3")
    cli.ok("put", "second", "data/")
    return cli


def test_show_prints_record_entries_and_packs(saved: Cli) -> None:
    text = re.sub(r"[0-9a-f]{24}-[0-9a-f]{16}", "<id>".ljust(41), saved.ok("show", "first"))

    record, entries, packs = text.split("\n\n")
    assert [line.split()[0] for line in record.splitlines()] == [
        "name", "tags", "saved", "digest", "size", "new", "stored", "entries", "manifest", "generation", "meta",
    ]  # fmt: skip
    assert "size        2.4 MiB (2500020 bytes)" in record
    assert "new         2.4 MiB; 0 B reused" in record
    assert "entries     3 in 5 chunks" in record
    assert "meta epoch  3" in record
    assert entries == (
        "ENTRY             KIND     SIZE  CHUNKS      NEW  INLINE\n"
        "data/config.json  file     10 B       1     10 B    10 B\n"
        "data/model.bin    file  2.4 MiB       3  2.4 MiB     0 B\n"
        "data/sub/run.sh   file     10 B       1     10 B    10 B"
    )
    assert packs.splitlines()[1] == "<id>".ljust(41) + "       3  2.4 MiB  2.4 MiB"


def test_show_tells_reused_from_new(saved: Cli) -> None:
    found = saved("show", "second", "--json").json
    entries = found["content"]

    assert (found["new_bytes"], found["reused_bytes"]) == (20, 2_500_000)
    assert [(entry["name"], entry["bytes"], entry["new_bytes"], entry["inline_bytes"]) for entry in entries] == [
        ("config.json", 10, 10, 10),
        ("model.bin", 2_500_000, 0, 0),
        ("sub/run.sh", 10, 10, 10),
    ]


def test_show_as_json_is_complete(saved: Cli) -> None:
    found = saved("show", "first", "--json").json

    assert found["metadata"] == {"epoch": "3"}
    assert found["manifest"]["id"] == saved("show", "first", "--json").json["manifest"]["id"]
    script = found["content"][2]
    assert (script["kind"], script["spec"]) == ("file", {"type": "file", "executable": True})
    assert list(script["note"]) == ["mtime_ns"]
    (pack,) = found["packs"]
    assert (pack["chunks"], pack["used_bytes"]) == (3, 2_500_000)
    assert pack["file_bytes"] == saved.find("packs").stat().st_size
    assert [chunk["pack"] for chunk in found["content"][1]["chunks"]] == [pack["id"]] * 3


def test_show_lists_chunks(saved: Cli) -> None:
    chunks = saved.ok("show", "first", "--chunks").split("\n\n")[2].splitlines()

    assert chunks[0].split() == ["ENTRY", "START", "BYTES", "DIGEST", "PACK", "OFFSET"]
    assert [line.split()[:3] for line in chunks[2:5]] == [
        ["data/model.bin", "0", "1048576"],
        ["data/model.bin", "1048576", "1048576"],
        ["data/model.bin", "2097152", "402848"],
    ]
    assert chunks[1].split()[4:] == ["inline", "-"]


def test_show_notices_a_missing_pack(saved: Cli) -> None:
    pack = saved.find("packs")
    pack.unlink()

    ran = saved("show", "first")

    assert ran.code == 1
    assert ran.out.endswith("missing\n")
    assert ran.err == f"holdfast: pack {pack.name} is missing; run `holdfast check` to see what is lost\n"
