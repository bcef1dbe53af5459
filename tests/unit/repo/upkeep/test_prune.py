"""Retention: every rule by itself and together, decided without touching a store."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from holdfast.digest import Digest
from holdfast.errors import Corrupt
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import ManifestRef
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, delete_snapshot, set_tag
from holdfast.repo.upkeep.prune import (
    Best,
    Keep,
    Mode,
    apply_prune,
    make_keep,
    parse_best,
    plan_prune,
    read_prune_plan,
)
from tests.kit.saving import PACK_ID, keys, load_bytes, record_key, rot, save_bytes, snapshot_of

NO_DIGEST = Digest(bytes(32))


def at(name: str, time_s: float = 0.0) -> CommittedSnapshot:
    return CommittedSnapshot(name, ManifestRef(PACK_ID, NO_DIGEST, 1), NO_DIGEST, time_s, 0, 0, {}, "")


def tag(name: str, snapshot_name: str) -> Tag:
    return Tag(name, snapshot_name, NO_DIGEST, 0.0)


def names(snapshots: tuple[CommittedSnapshot, ...]) -> list[str]:
    return [snapshot.name for snapshot in snapshots]


STEPS = [at(f"run/step-{step}", 100.0 * position) for position, step in enumerate([90, 100, 110, 200])]


def test_the_newest_by_commit_time_stay() -> None:
    plan = plan_prune([at("b", 1.0), at("a", 3.0), at("c", 2.0)], [], Keep(last=2), now_s=10.0)
    assert names(plan.keep) == ["a", "c"]
    assert names(plan.delete) == ["b"]


def test_of_equal_times_the_later_in_natural_order_is_newer() -> None:
    plan = plan_prune([at("step-100"), at("step-99"), at("step-9")], [], Keep(last=1), now_s=10.0)
    assert names(plan.keep) == ["step-100"]


def test_more_to_keep_than_there_are_keeps_all() -> None:
    assert plan_prune(STEPS, [], Keep(last=99), now_s=0.0).delete == ()


def test_steps_that_are_multiples_stay() -> None:
    plan = plan_prune(STEPS, [], Keep(every=100), now_s=1000.0)
    assert names(plan.keep) == ["run/step-100", "run/step-200"]


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [("step-0", True), ("100-final", True), ("run100/step-7", False), ("final", False), ("step-1e3", False)],
)
def test_a_step_is_the_last_number_in_the_name(name: str, is_kept: bool) -> None:
    assert bool(plan_prune([at(name)], [], Keep(every=100), now_s=0.0).keep) == is_kept


def test_digits_of_other_scripts_are_no_steps() -> None:
    assert plan_prune([at("step-\u0661\u0660\u0660"), at("step-\u00b2")], [], Keep(every=1), now_s=0.0).keep == ()


def test_recent_ones_stay_and_those_from_a_clock_ahead_of_ours() -> None:
    plan = plan_prune([at("old", 0.0), at("edge", 50.0), at("future", 200.0)], [], Keep(within_s=50.0), now_s=100.0)
    assert names(plan.keep) == ["edge", "future"]


def test_what_a_tag_points_to_stays() -> None:
    plan = plan_prune(STEPS, [tag("good", "run/step-90"), tag("best", "run/step-90")], Keep(last=1), now_s=1000.0)
    assert [verdict.reasons for verdict in plan.verdicts] == [("tagged best, good",), (), (), ("among the last 1",)]


def test_tags_can_be_ignored() -> None:
    plan = plan_prune(STEPS, [tag("best", "run/step-90")], Keep(last=1, tagged=False), now_s=1000.0)
    assert names(plan.keep) == ["run/step-200"]


def test_any_rule_is_enough_and_all_reasons_are_given() -> None:
    plan = plan_prune(STEPS, [], Keep(last=1, every=100, within_s=150.0), now_s=400.0)
    assert [verdict.reasons for verdict in plan.verdicts] == [
        (),
        ("step is a multiple of 100",),
        (),
        ("among the last 1", "step is a multiple of 100", "recent"),
    ]


def scored(name: str, time_s: float = 0.0, **metadata: object) -> CommittedSnapshot:
    return replace(at(name, time_s), metadata=dict(metadata))


SCORED = [
    scored("step-1", 1.0, metrics={"loss": 3.0, "accuracy": 0.1}),
    scored("step-2", 2.0, metrics={"loss": 1.0, "accuracy": 0.4}),
    scored("step-3", 3.0, metrics={"loss": "nan", "accuracy": 0.2}),
    scored("step-4", 4.0, loss=2),
    scored("step-5", 5.0, metrics={"loss": True}, note="no number"),
]


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        (Best("loss", 1), ["step-2"]),
        (Best("loss", 2), ["step-2", "step-4"]),
        (Best("loss", 9), ["step-1", "step-2", "step-4"]),
        (Best("loss", 1, "max"), ["step-1"]),
        (Best("accuracy", 2, "max"), ["step-2", "step-3"]),
    ],
    ids=str,
)
def test_the_best_by_a_metric_stay(best: Best, kept: list[str]) -> None:
    plan = plan_prune(SCORED, [], Keep(best=best), now_s=10.0)

    assert names(plan.keep) == kept
    assert {verdict.reasons for verdict in plan.verdicts if verdict.reasons} == {(str(best),)}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_two_that_are_equally_good_the_newer_stays(mode: Mode) -> None:
    equal = [scored(f"step-{step}", step, loss=1.0) for step in (1, 3, 2)]

    assert names(plan_prune(equal, [], Keep(best=Best("loss", 1, mode)), now_s=10.0).keep) == ["step-3"]


def test_an_integer_that_no_float_can_hold_is_no_metric() -> None:
    huge = [scored("step-1", 1.0, metrics={"loss": 1}), scored("step-2", 2.0, metrics={"loss": 10**400})]

    assert names(plan_prune(huge, [], Keep(best=Best("loss", 1, "max")), now_s=10.0).keep) == ["step-1"]


def test_a_metric_that_no_snapshot_has_deletes_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"no snapshot here has the metric 'lose'; metrics that exist: accuracy, loss$"
    ):
        plan_prune(SCORED, [], Keep(last=1, best=Best("lose", 1)), now_s=10.0)
    assert plan_prune([], [], Keep(best=Best("lose", 1)), now_s=10.0).verdicts == ()


@pytest.mark.parametrize(
    ("rule", "text"), [(("", 1), "name"), (("a", 0), "at least one"), (("a", 1, "low"), "'min' or 'max'")]
)
def test_a_rule_about_the_best_that_cannot_be_meant_is_refused(rule: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_keep(keep_best=rule)


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss:2", Best("loss", 2)),
        ("loss:1:min", Best("loss", 1)),
        ("val/acc:3:max", Best("val/acc", 3, "max")),
    ],
)
def test_a_rule_about_the_best_is_parsed(text: str, best: Best) -> None:
    assert parse_best(text) == best


@pytest.mark.parametrize(
    "text", ["", "loss", "loss:", "loss:x", "loss:1:low", ":1", "loss:0", "loss:\u0663", "loss:-1"]
)
def test_a_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"METRIC:N|metric|at least one"):
        parse_best(text)


def test_verdicts_are_in_natural_order() -> None:
    plan = plan_prune(list(reversed(STEPS)), [], Keep(last=1), now_s=0.0)
    assert [verdict.snapshot for verdict in plan.verdicts] == STEPS


@pytest.mark.parametrize("rules", [{"last": -1}, {"last": 1, "every": -2}, {"within_s": -0.5}])
def test_negative_rules_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Keep(**rules)  # type: ignore[arg-type]  # the values are what is tried


@pytest.mark.parametrize("rules", [{}, {"tagged": True}, {"last": 0, "every": 0}])
def test_no_rule_at_all_is_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least one rule: --keep-last, --keep-every, --keep-within or"):
        Keep(**rules)  # type: ignore[arg-type]  # the values are what is tried


def test_a_time_that_is_no_number_does_not_delete_everything() -> None:
    with pytest.raises(ValueError, match="within"):
        Keep(within_s=math.nan)


@pytest.fixture
def three(repo: Repository, clock: VirtualClock) -> Repository:
    """A repository with `run/1` to `run/3` and `other`."""
    for name in ("run/1", "run/2", "run/3", "other"):
        save_bytes(repo, name, {"x": name.encode() * 200})
        clock.advance(10)
    return repo


def test_only_names_under_the_prefix_are_looked_at(three: Repository) -> None:
    assert names(read_prune_plan(three.store, "run/", Keep(last=1)).delete) == ["run/1", "run/2"]


def test_names_that_a_pattern_does_not_match_are_neither_counted_nor_deleted(three: Repository) -> None:
    save_bytes(three, "run/2-final", {"x": b"new"})
    plan = read_prune_plan(three.store, "run/", Keep(last=1), only=re.compile("run/[0-9]+"))
    assert names(plan.delete) == ["run/1", "run/2"]
    assert names(plan.keep) == ["run/3"]


def test_planning_changes_nothing(three: Repository, store: MemoryStore) -> None:
    before = store.contents()
    read_prune_plan(store, "", Keep(last=1))
    assert store.contents() == before


def test_pruning_deletes_and_says_what(three: Repository) -> None:
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    assert names(apply_prune(three.store, plan).deleted) == ["run/1", "run/2"]
    assert load_bytes(three, "run/3") == {"x": b"run/3" * 200}
    assert read_prune_plan(three.store, "", Keep(last=1)).delete == (snapshot_of(three, "run/3"),)


def test_a_tagged_one_is_not_pruned(three: Repository) -> None:
    set_tag(three.store, "best", snapshot_of(three, "run/1"))
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    assert names(apply_prune(three.store, plan).deleted) == ["run/2"]


def test_a_name_that_changed_since_the_plan_is_passed_over(three: Repository) -> None:
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    save_bytes(three, "run/1", {"x": b"new"}, overwrite=True)
    delete_snapshot(three.store, "run/2")
    done = apply_prune(three.store, plan)
    assert done.deleted == ()
    assert [(verdict.snapshot, verdict.reasons) for verdict in done.kept] == [
        (snapshot_of(three, "run/1"), ("overwritten since the plan was made",))
    ]
    assert load_bytes(three, "run/1") == {"x": b"new"}


def test_what_was_tagged_since_the_plan_is_kept_and_reported(three: Repository) -> None:
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    set_tag(three.store, "best", snapshot_of(three, "run/1"))
    done = apply_prune(three.store, plan)
    assert names(done.deleted) == ["run/2"]
    assert [(verdict.snapshot.name, verdict.reasons) for verdict in done.kept] == [("run/1", ("tagged best",))]
    assert load_bytes(three, "run/1") == {"x": b"run/1" * 200}


def test_a_tag_moved_away_since_the_plan_does_not_make_more_go(three: Repository) -> None:
    set_tag(three.store, "best", snapshot_of(three, "run/1"))
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    set_tag(three.store, "best", snapshot_of(three, "run/3"), move=True)
    assert names(apply_prune(three.store, plan).deleted) == ["run/2"]


def test_where_tags_do_not_count_one_set_since_the_plan_does_not_either(three: Repository) -> None:
    plan = read_prune_plan(three.store, "run/", Keep(last=1, tagged=False))
    set_tag(three.store, "best", snapshot_of(three, "run/1"))
    assert names(apply_prune(three.store, plan).deleted) == ["run/1", "run/2"]


def test_a_tag_damaged_since_the_plan_forbids_it(three: Repository) -> None:
    set_tag(three.store, "best", snapshot_of(three, "run/3"))
    plan = read_prune_plan(three.store, "run/", Keep(last=1))
    rot(three.store, keys(three.store, "tags/")[0], 130)
    with pytest.raises(Corrupt, match="it might protect a snapshot, so nothing is pruned"):
        apply_prune(three.store, plan)
    assert [load_bytes(three, name) for name in ("run/1", "run/2")] == [{"x": b"run/1" * 200}, {"x": b"run/2" * 200}]


def test_a_tag_that_cannot_be_read_might_protect_anything(three: Repository) -> None:
    set_tag(three.store, "best", snapshot_of(three, "run/1"))
    rot(three.store, keys(three.store, "tags/")[0], 130)
    with pytest.raises(Corrupt, match="it might protect a snapshot, so nothing is pruned"):
        read_prune_plan(three.store, "run/", Keep(last=1))


def test_a_damaged_snapshot_is_kept(three: Repository) -> None:
    rot(three.store, record_key("run/1"), 130)
    assert names(read_prune_plan(three.store, "run/", Keep(last=1)).delete) == ["run/2"]
