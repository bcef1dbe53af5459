"""The verb `check`: findings, the sum, JSON and exit codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest

from holdfast.repo.format.record import encode_record
from tests.cli.runs import Cli, digest_tree, flip


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with one snapshot."""
    cli.ok("put", "snap", "data/")
    return cli


def test_a_sound_store_has_nothing_to_report(saved: Cli) -> None:
    looked = "checked 1 snapshot, 1 manifest, 1 pack, 3 chunks"
    assert saved.ok("check") == f"{looked} (structure of 2.4 MiB; --read reads every byte): nothing to report\n"
    assert re.fullmatch(
        rf"{looked} \(2\.4 MiB of 2\.4 MiB read\): nothing to report\n",
        saved.ok("check", "--read"),
    )


def test_notes_alone_are_fine(saved: Cli) -> None:
    saved.ok("rm", "snap", "--yes")

    out = saved.ok("check")

    note = r"^note: no snapshot that can be read uses manifests/\S+ \(\d+ bytes\) \[manifest-unused\]$"
    assert re.search(note, out, re.MULTILINE)
    assert "    `holdfast gc --yes` removes it\n" in out
    assert out.endswith(": 2 notes\n")


def test_a_flipped_bit_is_found_by_reading(saved: Cli) -> None:
    flip(saved.find("packs"), 1_500_000)
    before = digest_tree(saved.store)

    assert saved("check").code == 0
    ran = saved("check", "--read")

    assert (ran.code, ran.err) == (1, "")
    assert "error: snapshot 'snap', entry 'model.bin': chunk" in ran.out
    assert "[chunk-lost]" in ran.out
    assert re.search(r"1 error, 1 warning\n$", ran.out)
    assert digest_tree(saved.store) == before


def test_check_as_json(saved: Cli) -> None:
    saved.find("packs").unlink()

    ran = saved("check", "--json")

    assert ran.code == 1
    assert {finding["code"] for finding in ran.json["findings"]} == {"chunk-lost"}
    assert {finding["entry"] for finding in ran.json["findings"]} == {"model.bin"}
    assert ran.json["checked"]["snapshots"] == 1


@pytest.mark.parametrize("damage", [lambda path: flip(path, -5), lambda path: rmtree(path.parent)])
def test_check_works_without_a_config(saved: Cli, damage: Callable[[Path], None]) -> None:
    damage(saved.find("config"))

    ran = saved("check", "--read")

    assert ran.code == 1
    assert "error: " in ran.out
    assert "config" in ran.out


def test_check_of_a_newer_format_asks_for_an_upgrade_and_tells_of_no_damage(saved: Cli) -> None:
    config = {"kind": "config", "generation": 1, "store_id": "x", "format": {"major": 9, "minor": 1}, "features": {}}
    saved.find("config").write_bytes(encode_record(config))
    saved.find("packs").write_bytes(b"a pack of another kind")

    ran = saved("check", "--read")

    assert (ran.code, ran.err) == (1, "")
    assert "has format 9.1, this Holdfast reads up to 1: upgrade [newer-format]\n" in ran.out
    assert "    upgrade Holdfast; nothing else was checked" in ran.out
    assert "damaged" not in ran.out
    assert ran.out.endswith(": 1 error\n")


def test_an_empty_place_is_no_store(empty: Cli) -> None:
    (empty.folder / "void").mkdir()

    for place in ("void", "nowhere"):
        ran = empty.bare("-s", place, "check")
        path = empty.folder / place
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == f"holdfast: {path} is not a store; create one with `holdfast -s {path} init`\n"
    assert not (empty.folder / "nowhere").exists()
