"""A name that is not in the store is answered with names that are."""

from __future__ import annotations

import pytest

from holdfast.cli.lookup import open_for_plan, suggest
from holdfast.cli.output import Output
from holdfast.errors import ReadOnlyStore
from holdfast.repo.names.snapshots import delete_snapshot
from tests.cli.runs import Cli


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """One snapshot with metadata, and one that reuses its bytes."""
    cli.ok("put", "first", "data", "--meta", "epoch=3")
    cli.ok("put", "second", "data/")
    return cli


@pytest.mark.parametrize("verb", [["show", "frist"], ["get", "frist", "out"], ["cat", "frist", "x"]])
def test_a_missing_name_suggests_close_ones(saved: Cli, verb: list[str]) -> None:
    ran = saved(*verb)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"holdfast: no snapshot or tag 'frist' in {saved.store}; did you mean 'first'?\n"


def test_a_name_like_no_other_points_to_ls(saved: Cli) -> None:
    assert "`holdfast ls` lists the snapshots" in saved("show", "qqqqqq").err


def test_a_suggestion_names_at_most_three_that_are_alike() -> None:
    assert suggest("step-1", ["step-2", "other"]) == "did you mean 'step-2'?"
    assert suggest("step-1", [f"step-{number}" for number in range(2, 9)]).count("'step-") == 3
    assert suggest("step-1", ["zzz"]) == ""


def test_a_plan_opens_the_store_for_writing_only_if_it_is_carried_out(saved: Cli) -> None:
    planned = open_for_plan(str(saved.store), Output(), is_applied=False)
    applied = open_for_plan(str(saved.store), Output(), is_applied=True)

    with pytest.raises(ReadOnlyStore):
        delete_snapshot(planned.store, "first")
    delete_snapshot(applied.store, "first")
