"""History: which snapshots are parents, which are lost, ancestors, and the graph as text."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.json_text import Json
from holdfast.query.lineage import LINEAGE, find_ancestors, iter_graph, make_history
from holdfast.repo.names.snapshots import CommittedSnapshot
from tests.kit.committed import make_committed


def make(
    name: str, time_s: float, *, loaded: Sequence[str] = (), previous: str = "", began: Sequence[str] = ()
) -> CommittedSnapshot:
    lineage: dict[str, Json] = {"previous": previous} if previous else {}
    for field, names in (("loaded", loaded), ("began", began)):
        lineage[field] = [{"name": each, "digest": make_committed(each).digest.hex()} for each in names]
    return make_committed(name, environment={LINEAGE: lineage}, time_s=time_s)


def draw(*snapshots: CommittedSnapshot) -> list[str]:
    rows = iter_graph(make_history(snapshots))
    return [f"{row.lanes} {row.entry.snapshot.name if row.entry else ''}".rstrip() for row in rows]


def test_the_newest_comes_first_with_its_parents() -> None:
    found = make_history([make("a", 1), make("b", 2, previous="a"), make("c", 3, loaded=["a"], previous="b")])

    assert [(entry.snapshot.name, entry.parents, entry.lost) for entry in found] == [
        ("c", ("a",), ()),
        ("b", ("a",), ()),
        ("a", (), ()),
    ]


def test_a_parent_that_is_gone_or_has_other_content_is_lost() -> None:
    overwritten = make_committed("base", content="other", time_s=1)
    later = make("run/1", 9)
    found = make_history(
        [
            overwritten,
            later,
            make("x", 3, loaded=["base", "gone"]),
            make("y", 4, previous="run/1"),
            make("z", 5, loaded=["z"]),
        ]
    )

    assert {entry.snapshot.name: (entry.parents, entry.lost) for entry in found} == {
        "base": ((), ()),
        "run/1": ((), ()),
        "x": ((), ("base", "gone")),
        "y": ((), ("run/1",)),
        "z": ((), ("z",)),
    }


def test_a_run_whose_first_snapshots_are_gone_continues_what_it_began_from() -> None:
    base = make("base", 1)
    left, next_one = (
        make("run/2", 3, previous="run/1", began=["base"]),
        make("run/3", 4, previous="run/2", began=["base"]),
    )

    found = make_history([base, left, next_one])

    assert [(entry.snapshot.name, entry.parents, entry.lost) for entry in found] == [
        ("run/3", ("run/2",), ()),
        ("run/2", ("base",), ("run/1",)),
        ("base", (), ()),
    ]


def test_ancestors_are_followed_to_the_end_even_in_a_circle() -> None:
    history = make_history(
        [
            make("a", 1, loaded=["c"]),
            make("b", 2, previous="a"),
            make("c", 3, previous="b"),
            make("d", 4, loaded=["c"]),
            make("e", 5, previous="b"),
        ]
    )

    assert [entry.snapshot.name for entry in find_ancestors(history, "d")] == ["d", "c", "b", "a"]
    assert find_ancestors(history, "none") == []


def test_a_line_is_one_lane() -> None:
    assert draw(make("a", 1), make("b", 2, previous="a"), make("c", 3, previous="b")) == ["* c", "* b", "* a"]


def test_unrelated_snapshots_have_no_lanes() -> None:
    assert draw(make("a", 1), make("b", 2), make("c", 3)) == ["* c", "* b", "* a"]


def test_a_fork_joins_where_it_began() -> None:
    assert draw(
        make("a", 1), make("b", 2, previous="a"), make("fork", 3, loaded=["a"]), make("c", 4, previous="b")
    ) == ["* c", "| * fork", "* | b", "|/", "* a"]


def test_lanes_between_are_crossed() -> None:
    assert draw(
        make("x", 1),
        make("a", 2),
        make("c", 3, loaded=["a"]),
        make("y", 4, previous="x"),
        make("b", 5, previous="a"),
    ) == ["* b", "| * y", "| | * c", "|_|/", "* | a", "* x"]


def test_several_lanes_join_at_once() -> None:
    assert draw(make("a", 1), make("b", 2, loaded=["a"]), make("c", 3, loaded=["a"]), make("d", 4, loaded=["a"])) == [
        "* d",
        "| * c",
        "| | * b",
        "|/_/",
        "* a",
    ]


def test_a_snapshot_of_several_parents_opens_lanes() -> None:
    assert draw(make("a", 1), make("b", 2), make("soup", 3, loaded=["a", "b"])) == ["* soup", "|\\", "| * b", "* a"]


def test_a_parent_that_is_listed_first_gets_no_lane() -> None:
    # Two hosts with different clocks: the digest proves the parent, though it seems younger.
    assert draw(make("a", 9), make("b", 2, loaded=["a"])) == ["* a", "* b"]
