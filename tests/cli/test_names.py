"""The verbs `init`, `ls` and `tag`."""

from __future__ import annotations

import re

import pytest

from holdfast.objects.url import open_store
from holdfast.repo.format.layout import snapshot_stem
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from tests.cli.runs import Cli, digest_tree, flip, mask
from tests.kit.saving import record_key

# --- init


def test_init_makes_a_store_that_other_verbs_open(empty: Cli) -> None:
    ran = empty.bare("init", "new/place")

    assert ran.code == 0
    assert re.fullmatch(rf"created an empty store in {empty.folder}/new/place \(id [0-9a-f]{{32}}\)\n", ran.out)
    assert empty.bare("-s", "new/place", "ls").code == 0


def test_init_without_a_path_takes_the_environment_then_the_current_directory(
    empty: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", "named")
    assert f"{empty.folder}/named " in empty.bare("init").out

    monkeypatch.delenv("HOLDFAST_STORE")
    (empty.folder / "here").mkdir()
    monkeypatch.chdir("here")
    assert f"{empty.folder}/here " in empty.bare("init").out


def test_init_does_not_look_above(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = cli.store / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)

    assert f"{inner} " in cli.bare("init").out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["init", "ckpts"], "is a store already; nothing was changed"),
        (["init", "data"], "data is not empty and has no config, so it is no store: 'config.json' is there."),
        (["-s", "a", "init", "b"], "both 'a' (-s) and 'b' are given"),
        (["init", "s3://b"], "names no bucket that can exist"),
        (["init", "memory://"], "exists only in the process that opened it"),
    ],
)
def test_init_refuses(cli: Cli, words: list[str], reason: str) -> None:
    before = digest_tree(cli.folder)

    ran = cli.bare(*words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err
    assert digest_tree(cli.folder) == before


# --- ls


def test_ls_lists_in_natural_order(filled: Cli) -> None:
    assert mask(filled.ok("ls")) == (
        "NAME          WHEN                 ENTRIES     SIZE  DIGEST        TAGS\n"
        "other         2026-01-02 03:04:05        1     10 B  0123456789ab\n"
        "run/step-99   2026-01-02 03:04:05        3  2.4 MiB  0123456789ab  best\n"
        "run/step-100  2026-01-02 03:04:05        1     10 B  0123456789ab\n"
    )


def test_ls_takes_a_prefix(filled: Cli) -> None:
    lines = filled.ok("ls", "run/").splitlines()[1:]

    assert [line.split()[0] for line in lines] == ["run/step-99", "run/step-100"]


def test_ls_long_adds_whole_digests_generations_and_metadata(filled: Cli) -> None:
    header, line = filled.ok("ls", "-l", "run/step-9").splitlines()

    assert header.split() == ["NAME", "WHEN", "ENTRIES", "SIZE", "DIGEST", "TAGS", "GENERATION", "METADATA"]
    assert re.search(r" [0-9a-f]{64}  best +0  \{\"epoch\":\"3\",\"why\":\"a test\"\}$", line)


def test_ls_as_json(filled: Cli) -> None:
    found = filled("ls", "--json").json

    assert found["store"] == str(filled.store)
    assert found["damaged"] == []
    assert [snapshot["name"] for snapshot in found["snapshots"]] == ["other", "run/step-99", "run/step-100"]
    middle = found["snapshots"][1]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", middle.pop("time"))
    assert middle.pop("time_s") > 1_600_000_000
    assert len(middle.pop("digest")) == 64
    assert middle == {
        "name": "run/step-99",
        "entries": 3,
        "logical_bytes": 2_500_020,
        "generation": 0,
        "tags": ["best"],
        "metadata": {"epoch": "3", "why": "a test"},
        "environment": {},
    }


def test_ls_of_an_empty_store_prints_nothing_but_a_word(cli: Cli) -> None:
    ran = cli("ls")

    assert (ran.code, ran.out) == (0, "")
    assert ran.err == f"holdfast: no snapshot was saved yet in {cli.store}\n"
    assert cli("ls", "x").err == f"holdfast: no snapshot starts with 'x' in {cli.store}\n"
    assert cli("ls", "--json").json["snapshots"] == []


def test_ls_lists_damaged_names_and_exits_with_1(filled: Cli) -> None:
    flip(filled.store / record_key("run/step-100"), -10)
    flip(filled.find("tags"), -10)

    ran = filled("ls")

    assert ran.code == 1
    assert re.search(r"^run%2fstep-100 +damaged +- +- +-$", ran.out, re.MULTILINE)
    assert "run/step-99" in ran.out
    assert f"holdfast: {snapshot_stem('run/step-100')} is damaged: record" in ran.err
    assert "holdfast: tags/best is damaged" in ran.err
    assert "run `holdfast check`" in ran.err
    found = filled("ls", "--json")
    assert found.code == 1
    assert [damage["key"] for damage in found.json["damaged"]] == [snapshot_stem("run/step-100"), "tags/best"]


def test_a_name_cannot_command_the_terminal(cli: Cli) -> None:
    cli.ok("put", "snap", "data/config.json", "--meta", "title=\x1b[31mred\nline")

    assert "\x1b" not in cli.ok("show", "snap")
    assert r"meta title  \x1b[31mred\nline" in cli.ok("show", "snap").splitlines()


# --- tag


def test_tags_are_set_listed_printed_moved_and_deleted(filled: Cli) -> None:
    assert mask(filled.ok("tag")) == (
        "TAG   SNAPSHOT     SET                  STATE\nbest  run/step-99  2026-01-02 03:04:05  ok\n"
    )
    assert filled.ok("tag", "best") == "run/step-99\n"
    refused = filled("tag", "best", "other")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "holdfast: tag 'best' points to 'run/step-99'; move it with --move (move=True)\n"
    assert mask(filled.ok("tag", "best", "other", "--move")) == "tag best points to other (0123456789ab)\n"
    assert filled.ok("tag", "--delete", "best") == "deleted tag best, which pointed to other\n"
    ran = filled("tag")
    assert (ran.code, ran.out) == (0, "")
    assert "no tags" in ran.err


def test_tags_as_json(filled: Cli) -> None:
    (tag,) = filled("tag", "--json").json["tags"]

    assert (tag["tag"], tag["snapshot"], tag["state"]) == ("best", "run/step-99", "ok")
    assert filled("tag", "best", "--json").json == tag


def test_a_tag_of_a_tag_points_to_the_snapshot(filled: Cli) -> None:
    filled.ok("tag", "again", "best")

    assert filled.ok("tag", "again") == "run/step-99\n"


def test_a_tag_whose_snapshot_was_overwritten_shows_it(filled: Cli) -> None:
    filled.ok("put", "run/step-99", "data/sub", "--overwrite")

    assert filled.ok("tag").splitlines()[1].endswith("  changed since")
    assert "best (changed since)" in filled.ok("ls")
    ran = filled("cat", "best", "sub/run.sh")
    assert (ran.code, ran.out) == (0, "#!/bin/sh\n")
    assert ran.err == (
        "holdfast: 'run/step-99' was overwritten after the tag 'best' was set; this is the newer content\n"
    )


def test_a_tag_whose_snapshot_is_gone_shows_it(filled: Cli) -> None:
    delete_snapshot(open_repository(open_store(str(filled.store))).store, "run/step-99")

    ran = filled("tag")
    assert (ran.code, ran.out.split()[-1]) == (1, "missing")
    shown = filled("show", "best")
    assert shown.code == 2
    assert "tag 'best' points to 'run/step-99', which no longer exists; move it" in shown.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["tag", "x", "nothing"], "no snapshot or tag 'nothing'"),
        (["tag", "x", "run/step-9"], "did you mean 'run/step-99' or 'run/step-100'?"),
        (["tag", "other", "run/step-99"], "'other' is the name of a snapshot, which would hide a tag of that name"),
        (["tag", "nothing"], "no tag 'nothing'"),
        (["tag", "--delete", "nothing"], "no tag 'nothing'"),
        (["tag", "best", "--delete", "best"], "--delete takes one tag and nothing else"),
        (["tag", "a//b", "other"], "name 'a//b' is refused"),
        (["put", "best", "data/sub"], "'best' is a tag for 'run/step-99', which a snapshot of that name would hide"),
    ],
)
def test_tag_refuses(filled: Cli, words: list[str], reason: str) -> None:
    before = digest_tree(filled.folder)

    ran = filled(*words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err
    assert ran.err.count("\n") == 1
    assert digest_tree(filled.folder) == before
