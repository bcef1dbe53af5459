"""The verb `rm`: what would be deleted, what is deleted, and what is refused."""

from __future__ import annotations

import re

import pytest

from tests.cli.runs import Cli, digest_tree, flip, mask


def test_rm_only_says_what_it_would_do(filled: Cli) -> None:
    before = digest_tree(filled.folder)

    out = filled.ok("rm", "other", "run/step-100", "other")

    assert re.sub(r"[0-9.]+ (B|KiB)$", "SIZE", mask(out), flags=re.MULTILINE) == (
        "would delete other (1 entry, 10 B, saved 2026-01-02 03:04:05)\n"
        "would delete run/step-100 (1 entry, 10 B, saved 2026-01-02 03:04:05)\n"
        "nothing was deleted; repeat with --yes to delete 2 snapshots and free SIZE\n"
    )
    assert digest_tree(filled.folder) == before


def test_rm_deletes_if_it_is_meant(filled: Cli) -> None:
    out = filled.ok("rm", "other", "run/step-100", "--yes")

    assert re.sub(r"[0-9.]+ (B|KiB)$", "SIZE", mask(out), flags=re.MULTILINE) == (
        "deleted other (1 entry, 10 B, saved 2026-01-02 03:04:05)\n"
        "deleted run/step-100 (1 entry, 10 B, saved 2026-01-02 03:04:05)\n"
        "`holdfast gc --yes` can now free SIZE\n"
    )
    assert [snapshot["name"] for snapshot in filled("ls", "--json").json["snapshots"]] == ["run/step-99"]


@pytest.mark.parametrize("yes", [[], ["--yes"]])
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (
            ["other", "run/step-99"],
            "'run/step-99' is kept by the tag 'best'; nothing was deleted. Delete the tag first",
        ),
        (["other", "best"], "'best' is a tag; delete it with `holdfast tag --delete best`"),
        (["other", "othr"], "no snapshot or tag 'othr' in {store}; did you mean 'other'?"),
    ],
)
def test_rm_of_many_is_all_or_nothing(filled: Cli, names: list[str], yes: list[str], reason: str) -> None:
    before = digest_tree(filled.folder)

    ran = filled("rm", *names, *yes)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("holdfast: " + reason.format(store=filled.store))
    assert digest_tree(filled.folder) == before


def test_rm_beside_a_damaged_tag_says_so(filled: Cli) -> None:
    flip(filled.find("tags"), -10)

    ran = filled("rm", "other")

    assert ran.code == 0
    assert "it may point to one of these snapshots. Run `holdfast check`" in ran.err


def test_rm_says_what_it_would_free(steps: Cli) -> None:
    out = steps.ok("rm", "run/step-90", "twin")
    assert re.search(r"nothing was deleted; repeat with --yes to delete 2 snapshots and free [0-9.]+ KiB", out)
    ran = steps("rm", "twin", "--yes")
    assert re.search(r"deleted twin \(1 entry, 2.0 KiB, saved .*\)\n`holdfast gc --yes` can now free \d+ B\n", ran.out)


@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_rm_works_though_the_manifest_is_gone(cli: Cli, damage: str) -> None:
    cli.ok("put", "snap", "data/")
    path = cli.find("manifests")
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    ran = cli("rm", "snap", "--yes")
    assert (ran.code, ran.err) == (0, "")
    assert "an unknown amount: a snapshot cannot be read" in ran.out
    assert cli("gc", "--yes").code == 0
    assert list((cli.store / "packs").iterdir()) == []


def test_rm_of_a_glob_names_everything_that_it_would_delete(steps: Cli) -> None:
    before = digest_tree(steps.folder)

    out = steps.ok("rm", "run/step-1*", "run/step-100", "twin")

    assert re.findall(r"would delete (\S+)", out) == ["run/step-100", "run/step-110", "twin"]
    assert "repeat with --yes to delete 3 snapshots" in out
    assert digest_tree(steps.folder) == before


def test_rm_of_a_glob_deletes_what_matches(steps: Cli) -> None:
    steps.ok("rm", "run/*", "--yes")

    assert [snapshot["name"] for snapshot in steps("ls", "--json").json["snapshots"]] == ["twin"]


def test_rm_takes_a_name_literally_before_it_is_a_glob(cli: Cli) -> None:
    for name in ("a*", "ab", "a[b]"):
        cli.ok("put", name, "data/config.json")

    assert re.findall(r"would delete (\S+)", cli.ok("rm", "a*")) == ["a*"]
    assert re.findall(r"would delete (\S+)", cli.ok("rm", "a[b]")) == ["a[b]"]
    assert re.findall(r"would delete (\S+)", cli.ok("rm", "a?")) == ["a*", "ab"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["other", "x*"], "no snapshot matches 'x*' in {store}; `holdfast ls` lists the snapshots"),
        (["run/*"], "'run/step-99' is kept by the tag 'best'; nothing was deleted."),
    ],
)
def test_rm_of_a_glob_is_all_or_nothing(filled: Cli, names: list[str], reason: str) -> None:
    before = digest_tree(filled.folder)

    ran = filled("rm", *names, "--yes")

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("holdfast: " + reason.format(store=filled.store))
    assert digest_tree(filled.folder) == before


def test_rm_of_a_glob_never_matches_reserved_names(cli: Cli) -> None:
    cli.ok("put", "mine", "data/config.json")

    assert re.findall(r"would delete (\S+)", cli.ok("rm", "**")) == ["mine"]
