"""`ls --tree`: folders with counts and sizes, long folders folded."""

from __future__ import annotations

from holdfast.cli.verbs.ls import describe_tree, list_tree
from tests.cli.runs import Cli, mask
from tests.kit.committed import make_committed


def test_folders_have_counts_and_sizes(filled: Cli) -> None:
    assert mask(filled.ok("ls", "--tree")) == (
        "NAME        SNAPSHOTS     SIZE  NEWEST\n"
        "other                     10 B  2026-01-02 03:04:05\n"
        "run/                2  2.4 MiB  2026-01-02 03:04:05\n"
        "  step-99              2.4 MiB  2026-01-02 03:04:05\n"
        "  step-100                10 B  2026-01-02 03:04:05\n"
    )


def test_a_long_folder_is_folded_unless_all_of_it_is_wanted() -> None:
    snapshots = [make_committed(f"run/a/{number}", size_bytes=10) for number in range(1, 12)]

    folded = [row[0] for row in list_tree(snapshots, is_long=False)]
    whole = [row[0] for row in list_tree(snapshots, is_long=True)]

    assert folded == [
        "run/",
        "  a/",
        *("    1", "    2", "    3"),
        "    ... 5 more; -l shows them",
        *("    9", "    10", "    11"),
    ]
    assert whole == ["run/", "  a/", *(f"    {number}" for number in range(1, 12))]


def test_folders_are_described_with_all_that_is_below_them() -> None:
    snapshots = [make_committed(name, size_bytes=10, time_s=1.7e9) for name in ("x", "a/1", "a/b/1", "a/b/2", "c/1")]

    found = describe_tree(snapshots)

    assert [(each["folder"], each["snapshots"], each["logical_bytes"]) for each in found] == [
        ("a/", 3, 30),
        ("a/b/", 2, 20),
        ("c/", 1, 10),
    ]
    assert found[0]["newest"] == "2023-11-14T22:13:20Z"


def test_a_name_may_be_a_folder_too(cli: Cli) -> None:
    for name in ("run", "run/1"):
        cli.ok("put", name, "data/config.json")

    assert [line.split()[0] for line in cli.ok("ls", "--tree").splitlines()] == ["NAME", "run", "run/", "1"]


def test_names_of_very_many_parts_are_no_problem() -> None:
    deep = [make_committed("/".join("a" * 1500))]

    assert len(list_tree(deep, is_long=False)) == 1500
    assert len(describe_tree(deep)) == 1499


def test_an_empty_store_has_no_tree(cli: Cli) -> None:
    ran = cli("ls", "--tree")

    assert (ran.code, ran.out) == (0, "")
    assert cli("ls", "--tree", "--json").json["tree"] == []
