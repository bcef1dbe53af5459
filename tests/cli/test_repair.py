"""repair and copy: what they print, what they change, and how they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.runs import Cli, digest_tree


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with one snapshot."""
    cli.ok("put", "snap", "data/", "--meta", "k=v")
    return cli


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- repair


def test_a_loss_is_restored_from_a_copy(saved: Cli) -> None:
    saved.ok("copy", "snap", "--to", "copy")
    flip(saved.find("packs"), 1_500_000)
    ran = saved("repair", "--from", "copy")
    assert ran.code == 0
    assert "restore: snap\n" in ran.out
    assert "lost" not in ran.out
    ran = saved("repair", "--from", "copy", "--yes")
    assert (ran.code, ran.err) == (0, "holdfast: carried out 2 actions of 2\n")
    saved.ok("get", "snap", "out")
    assert (saved.folder / "out/model.bin").read_bytes() == (saved.folder / "data/model.bin").read_bytes()


def test_what_the_other_store_lacks_stays_lost(saved: Cli) -> None:
    saved.ok("put", "other", "data/config.json")
    saved.ok("copy", "other", "--to", "copy")
    flip(saved.find("packs"), 1_500_000)
    ran = saved("repair", "--from", "copy", "--yes")
    assert ran.code == 1
    assert "lost: snapshot 'snap'" in ran.out


def test_a_sound_store_has_nothing_to_repair(saved: Cli) -> None:
    assert saved.ok("repair") == "nothing to repair\n"
    assert saved("repair", "--json").json == {"actions": [], "losses": []}
    ran = saved("repair", "--yes")
    assert (ran.code, ran.out, ran.err) == (0, "nothing to repair\n", "holdfast: carried out 0 actions of 0\n")


def test_a_lost_index_is_planned_then_rebuilt(saved: Cli) -> None:
    saved.find("index").unlink()
    before = digest_tree(saved.store)
    ran = saved("repair")
    assert ran.code == 0
    assert ran.out == "reindex: index/\n    some chunks are missing in the index\n"
    assert ran.err == "holdfast: nothing was changed; repeat with --yes for 1 action\n"
    assert digest_tree(saved.store) == before
    ran = saved("repair", "--yes")
    assert (ran.code, ran.err) == (0, "holdfast: carried out 1 action of 1\n")
    assert saved.ok("repair") == "nothing to repair\n"


def test_a_loss_is_named_and_ends_with_1(saved: Cli) -> None:
    flip(saved.find("packs"), 1_500_000)
    ran = saved("repair")
    assert ran.code == 1
    assert "lost: snapshot 'snap', entry 'model.bin'\n" in ran.out
    assert "no other copy is in the store" in ran.out
    found = saved("repair", "--json")
    assert found.code == 1
    assert [(loss["snapshot"], loss["entry"]) for loss in found.json["losses"]] == [("snap", "model.bin")]
    assert [action["kind"] for action in found.json["actions"]] == ["quarantine"]


def test_a_damaged_tag_is_called_a_tag(saved: Cli) -> None:
    saved.ok("tag", "best", "snap")
    flip(saved.find("tags"), -5)
    ran = saved("repair")
    assert ran.code == 1
    assert ran.out.startswith("lost: tag 'best'\n    record tags/best@00000000 is damaged")
    assert "snapshot" not in ran.out
    assert [(loss["tag"], loss["snapshot"]) for loss in saved("repair", "--json").json["losses"]] == [("best", "")]


def test_a_loss_stays_named_after_the_repair_and_the_rest_stays_readable(saved: Cli) -> None:
    flip(saved.find("packs"), 1_500_000)
    assert saved("repair", "--yes").code == 1
    assert saved("repair").code == 1
    assert saved.ok("cat", "snap", "config.json") == '{"lr": 1}\n'


def test_repair_wants_a_store(empty: Cli) -> None:
    ran = empty("repair")
    assert (ran.code, ran.out) == (2, "")
    assert not empty.store.exists()


# --- copy


def test_a_copy_that_must_not_create_makes_no_store(saved: Cli) -> None:
    ran = saved("copy", "snap", "--to", "other", "--no-create")
    assert (ran.code, ran.out) == (2, "")
    assert "other is not a store" in ran.err
    saved.ok("copy", "snap", "--to", "other")
    assert saved("copy", "snap", "--to", "other", "--no-create").code == 0


def test_a_copy_is_made_and_a_second_one_moves_nothing(saved: Cli) -> None:
    out = saved.ok("copy", "snap", "--to", "other")
    assert out.startswith("copied snap: 3 entries, 2.4 MiB (2.4 MiB copied, ")
    again = saved.ok("copy", "snap", "--to", "other")
    assert re.fullmatch(r"snap: already present in .*, nothing was copied\n", again)
    one, other = (saved.bare("-s", where, "show", "snap", "--json").json for where in ("ckpts", "other"))
    for field in ("name", "digest", "time", "metadata"):
        assert one.get(field) == other.get(field)
    assert saved.bare("-s", "other", "check", "--read").code == 0


def test_copies_by_tag_have_the_snapshots_name(saved: Cli) -> None:
    saved.ok("tag", "best", "snap")
    saved.ok("copy", "best", "--to", "other")
    assert [each["name"] for each in saved.bare("-s", "other", "ls", "--json").json["snapshots"]] == ["snap"]


def test_a_name_in_use_there_is_kept_unless_told(saved: Cli) -> None:
    saved.ok("copy", "snap", "--to", "other")
    saved.ok("put", "snap", "data/sub", "--overwrite")
    ran = saved("copy", "snap", "--to", "other")
    assert (ran.code, ran.out) == (2, "")
    assert "holds other content; nothing was copied" in ran.err
    assert saved("copy", "snap", "--to", "other", "--overwrite").code == 0


def test_a_rotten_source_commits_nothing_there(saved: Cli) -> None:
    flip(saved.find("packs"), 1_500_000)
    ran = saved("copy", "snap", "--to", "other")
    assert ran.code == 2
    assert "entry 'model.bin'" in ran.err
    assert saved.bare("-s", "other", "ls").out == ""


def test_copy_wants_a_target(saved: Cli) -> None:
    with pytest.raises(SystemExit) as end:
        saved("copy", "snap")
    assert end.value.code == 2


def test_a_name_that_is_not_there_makes_no_store(saved: Cli) -> None:
    ran = saved("copy", "snup", "--to", "other")
    assert ran.code == 2
    assert "did you mean 'snap'?" in ran.err
    assert not (saved.folder / "other").exists()


def test_a_target_that_holds_other_files_is_refused(saved: Cli) -> None:
    ran = saved("copy", "snap", "--to", "data")
    assert ran.code == 2
    assert "is not empty and has no config" in ran.err
    assert not (saved.folder / "data/config").exists()


def test_a_copy_into_memory_is_refused_for_it_would_be_lost(saved: Cli) -> None:
    ran = saved("copy", "snap", "--to", "memory://x")
    assert ran.code == 2
    assert "exists only in the process that opened it" in ran.err


def test_a_home_directory_in_the_target_is_understood(saved: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.folder / "home"))
    saved.ok("copy", "snap", "--to", "~/other")
    assert (saved.folder / "home/other/config").exists()
