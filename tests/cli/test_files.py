"""The verbs `put`, `get` and `cat`, of files."""

from __future__ import annotations

import os
import re

import pytest

from tests.cli.runs import Cli, digest_tree


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """One snapshot with metadata, and one that reuses its bytes."""
    cli.ok("put", "first", "data", "--meta", "epoch=3")
    cli.ok("put", "second", "data/")
    return cli


# --- put


def test_put_says_what_was_stored_and_what_was_there(cli: Cli) -> None:
    first = cli.ok("put", "first", "data")
    again = cli.ok("put", "first", "data")
    second = cli.ok("put", "second", "data")

    assert re.fullmatch(
        r"saved first: 3 files, 2\.4 MiB \(2\.4 MiB new, 0 B reused\) in \d+\.\d\d s; digest [0-9a-f]{12}\n", first
    )
    assert again == "first: 3 files, 2.4 MiB; already present, nothing was written\n"
    assert "(20 B new, 2.4 MiB reused)" in second


def test_put_overwrites_if_told(saved: Cli) -> None:
    saved.ok("put", "first", "data/sub", "--overwrite")

    assert saved("show", "first", "--json").json["generation"] == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["put", "first", "data/sub"],
            "'first' is in use and holds other content; nothing was written. Choose another",
        ),
        (["put", "first", "data"], "'first' is in use"),  # without its metadata it is not the same
        (["put", "x", "data/nothing"], "data/nothing: No such file or directory"),
        (["put", "x", "data/config.json", "data/config.json"], "would both be the entry 'config.json'"),
        (["put", "x", "data", "--meta", "epoch"], "--meta 'epoch' is not of the form KEY=VALUE"),
        (["put", "x", "data", "--meta", "=3"], "is not of the form KEY=VALUE"),
        (["put", "x", "data", "--meta", "a=1", "--meta", "a=2"], "gives the key 'a' twice"),
        (["put", "../x", "data"], "snapshot name '../x' is refused"),
        (["put", "x", "."], ". contains the store"),
        (["put", "x", "ckpts/packs"], "ckpts/packs is inside the store"),
        (["put", "x", "void/"], "there are no files in void/; nothing was saved"),
    ],
)
def test_put_refuses(saved: Cli, words: list[str], reason: str) -> None:
    (saved.folder / "void").mkdir()
    before = digest_tree(saved.folder)

    ran = saved(*words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err
    assert ran.err.startswith("holdfast: ")
    assert ran.err.count("\n") == 1
    assert digest_tree(saved.folder) == before


# --- get


def test_get_restores_files(saved: Cli) -> None:
    out = saved.ok("get", "second", "out")

    assert re.fullmatch(r"wrote 3 files, 2\.4 MiB to out in \d+\.\d\d s\n", out)
    assert digest_tree(saved.folder / "out") == digest_tree(saved.folder / "data")
    assert os.access("out/sub/run.sh", os.X_OK)


def test_get_takes_a_tag_and_a_glob(saved: Cli) -> None:
    saved.ok("tag", "best", "second")

    saved.ok("get", "best", "out", "--only", "*.json")

    assert os.listdir("out") == ["config.json"]


def test_get_names_what_is_in_the_way_unless_it_may_replace_it(saved: Cli) -> None:
    saved.ok("get", "second", "out")
    (saved.folder / "out/config.json").write_text("mine")
    before = digest_tree(saved.folder)

    ran = saved("get", "second", "out", "--only", "*n")

    assert (ran.code, ran.out) == (2, "")
    assert f"2 of 2 files exist already in {saved.folder}/out: config.json, model.bin. Nothing" in ran.err
    assert digest_tree(saved.folder) == before
    saved.ok("get", "second", "out", "--overwrite")
    assert digest_tree(saved.folder / "out") == digest_tree(saved.folder / "data")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["get", "first", "ckpts"], "ckpts is inside the store"),
        (["get", "first", "ckpts/packs/new"], "is inside the store"),
        (["get", "first", "out", "--only", "*.pt"], "no entry of 'first' matches '*.pt'"),
        (["get", "first", "data/config.json"], "data/config.json: Not a directory"),
        (["cat", "first", "config.json"], "no entry 'config.json' in 'first'; `holdfast show first` lists them"),
    ],
)
def test_reading_refuses(saved: Cli, words: list[str], reason: str) -> None:
    before = digest_tree(saved.folder)

    ran = saved(*words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err
    assert digest_tree(saved.folder) == before


# --- cat


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0:3", '{"l'),
        ("-3:", "1}\n"),
        (":-8", '{"'),
        (":", '{"lr": 1}\n'),
        ("5:2", ""),
        ("3:900", 'r": 1}\n'),
        ("900:", ""),
    ],
)
def test_cat_writes_a_range_of_the_bytes(saved: Cli, text: str, wanted: str) -> None:
    assert saved.ok("cat", "first", "data/config.json", f"--range={text}") == wanted


@pytest.mark.parametrize("text", ["3", "a:b", "1:2:3", "", "1.5:"])
def test_cat_refuses_what_is_no_range(saved: Cli, text: str) -> None:
    ran = saved("cat", "first", "data/config.json", f"--range={text}")

    assert (ran.code, ran.out) == (2, "")
    assert "give two positions in bytes" in ran.err


def test_cat_writes_the_bytes(saved: Cli) -> None:
    assert saved.ok("cat", "first", "data/config.json") == '{"lr": 1}\n'


def test_reading_verbs_write_nothing(saved: Cli) -> None:
    before = digest_tree(saved.store)

    for words in (["ls"], ["show", "first"], ["get", "first", "out"], ["cat", "first", "data/config.json"]):
        saved.ok(*words)
    saved("tag")
    saved.ok("check", "--read")

    assert digest_tree(saved.store) == before
