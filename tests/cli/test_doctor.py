"""The verb `doctor`: a verdict on the store and on its filesystem."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from holdfast.cli.verbs import doctor
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.probe import DirectoryFacts, probe_directory
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.choice import BackendChoice
from tests.cli.runs import Cli, digest_tree, flip
from tests.kit.on_disk import tmp_path  # noqa: F401 - a fixture
from tests.kit.standing import put_mark


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with one snapshot."""
    cli.ok("put", "snap", "data/")
    return cli


def test_doctor_says_how_the_place_is(saved: Cli) -> None:
    before = digest_tree(saved.store)

    ran = saved("doctor")

    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"store {saved.store}"
    assert re.fullmatch(r"ok       format 1\.0, store id [0-9a-f]{32}; this Holdfast reads and writes it", lines[1])
    assert "ok       1 snapshot, 0 tags, 1 pack of 2.4 MiB together, 1 manifest" in lines
    assert {line.split()[0] for line in lines[1:]} <= {"ok", "note"}
    assert digest_tree(saved.store) == before


def test_doctor_says_what_it_has_not_tried_and_how_to(saved: Cli) -> None:
    untried = "note     not tested, because that needs a write: whether two writers can overwrite each other"
    tried = "ok       hard links work: two writers cannot overwrite each other"
    before = digest_tree(saved.store)

    looked, wrote = saved.ok("doctor"), saved.ok("doctor", "--write")

    assert untried in looked
    assert "`holdfast doctor --write` tests them" in looked
    assert tried not in looked
    assert tried in wrote
    assert untried not in wrote
    assert digest_tree(saved.store) == before


def test_doctor_as_json(saved: Cli) -> None:
    found, tried = saved("doctor", "--json").json, saved("doctor", "--write", "--json").json

    assert found["place"]["path"] == str(saved.store)
    assert (found["place"]["tried"], found["place"]["hard_links"], found["place"]["sync_ms"]) == (False, None, None)
    assert (tried["place"]["tried"], tried["place"]["hard_links"]) == (True, True)
    assert found["counts"]["snapshots"] == 1
    topics = {"format", "filesystem", "room"}
    assert {verdict["topic"] for verdict in found["verdicts"]} >= topics | {"untried"}
    assert {verdict["topic"] for verdict in tried["verdicts"]} >= topics | {"exclusive", "sync"}


@pytest.mark.parametrize("words", [[], ["--write"]], ids=["look", "--write"])
def test_doctor_looks_at_a_place_before_there_is_a_store(empty: Cli, words: list[str]) -> None:
    (empty.folder / "void").mkdir()
    before = digest_tree(empty.folder)

    for place, seen in (("void", "void"), ("data/far/away", "data")):
        ran = empty.bare("-s", place, "doctor", *words)
        path = empty.folder / place
        assert (ran.code, ran.err) == (1, "")
        assert ran.out.splitlines()[0] == f"store {path}"
        assert f"warning  there is no store here yet; `holdfast -s {path} init` or the first save creates it" in ran.out
        assert (f"the following is about {empty.folder / seen}, the nearest existing directory" in ran.out) is (
            place != seen
        )
        assert "are free" in ran.out
        assert ("hard links work" in ran.out) is bool(words)
        assert empty.bare("-s", place, "doctor", "--json", *words).json["place"]["path"] == str(empty.folder / seen)
    assert digest_tree(empty.folder) == before


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"network": True, "filesystem": "nfs4"}, "note     the filesystem is nfs4, which other hosts may share"),
        ({"durable": False, "filesystem": "tmpfs"}, "warning  tmpfs is lost on reboot"),
        ({"free_bytes": 999}, "warning  only 999 B are free"),
        (
            {"writable": False, "refusal": "Read-only file system"},
            "note     the directory is not writable (Read-only",
        ),
        ({"hard_links": False}, "ok       there are no hard links, but rename without replacement works"),
        (
            {"hard_links": False, "rename_noreplace": False},
            "warning  neither hard links nor rename without replacement",
        ),
        ({"sync_ms": 80.0}, "note     making a small write durable takes 80.0 ms"),
        ({"direct_io": False}, "note     direct I/O does not work here"),
        ({"case_sensitive": False}, "ok       names are not case-sensitive"),
    ],
)
def test_doctor_judges(saved: Cli, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], verdict: str) -> None:
    def probe(path: str, *, write: bool) -> DirectoryFacts:
        return replace(probe_directory(path, write=write), **change)  # type: ignore[arg-type]  # the table above names real fields

    monkeypatch.setattr(doctor, "probe_directory", probe)

    ran = saved("doctor", "--write")

    assert verdict in ran.out
    assert ran.code == (1 if verdict.startswith("warning") else 0)


def test_doctor_looks_at_a_store_whose_config_is_damaged(saved: Cli) -> None:
    flip(saved.find("config"), -5)

    ran = saved("doctor")

    assert ran.code == 1
    assert "error    the config cannot be read: record config/00000001 is damaged" in ran.out
    assert "the filesystem is " in ran.out


def put_old_mark(cli: Cli, key: str) -> None:
    """Leave a mark on `key` that was made a day ago."""
    path = cli.store / put_mark(LocalStore(str(cli.store)), [key])
    path = path.with_name(path.name + "@00000000")
    os.utime(path, (path.stat().st_mtime - 86400,) * 2)


def test_doctor_calls_a_collection_that_left_something_to_delete_given_up(saved: Cli) -> None:
    dead = saved.store / "packs" / f"{'0' * 24}-{'0' * 16}"
    dead.write_bytes(b"dead")
    put_old_mark(saved, f"packs/{dead.name}")

    ran = saved("doctor")

    assert ran.code == 1
    assert f"warning  a garbage collection did not finish (marks/{'f' * 24}@00000000): saves do not reuse" in ran.out


def test_doctor_calls_a_mark_on_files_in_use_harmless_and_gc_removes_it(saved: Cli) -> None:
    put_old_mark(saved, f"packs/{saved.find('packs').name}")

    ran = saved("doctor")

    assert ran.code == 0
    assert (
        f"note     the mark marks/{'f' * 24} names only files that are in use: this is harmless, but saves do not reuse"
        " them until `holdfast gc --yes` runs while no other process uses the store\n"
    ) in ran.out
    assert saved("gc", "--yes").code == 0
    assert "the mark" not in saved.ok("doctor")


def test_doctor_calls_a_mark_given_up_where_nobody_can_tell_what_is_in_use(saved: Cli) -> None:
    put_old_mark(saved, f"packs/{saved.find('packs').name}")
    saved.find("manifests").unlink()

    assert "warning  a garbage collection did not finish" in saved("doctor").out


def test_doctor_points_out_foreign_objects_and_damage(saved: Cli) -> None:
    (saved.store / "zebra").mkdir()
    (saved.store / "zebra/stripe").touch()
    flip(saved.find("snapshots"), -5)

    ran = saved("doctor")

    assert ran.code == 1
    assert "warning  zebra/stripe is not part of the format" in ran.out
    assert "error    1 damaged name: run `holdfast check`" in ran.out


def test_doctor_says_where_digests_are_computed_if_it_is_asked(saved: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "ok       torch has no accelerator here: digests are computed by the CPU"
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)

    assert line in saved.ok("doctor", "--devices").splitlines()
    assert line not in saved.ok("doctor").splitlines()


def test_doctor_warns_of_a_device_that_gave_wrong_digests(saved: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = BackendChoice("cpu", "triton: it returned wrong digests", has_wrong=True)
    monkeypatch.setattr(choice, "list_accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(choice, "choose_backend", lambda device: found)

    ran = saved("doctor", "--devices")

    assert ran.code == 1
    assert "warning  digests of bytes on cuda:0 are computed by the backend 'cpu': triton: it returned wrong" in ran.out
