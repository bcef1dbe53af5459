"""The fields of a snapshot: its own, its metrics, its metadata, and steps that only its name tells."""

from __future__ import annotations

import math

import pytest

from holdfast.digest import Digest
from holdfast.json_text import Json
from holdfast.query.expression import parse_field
from holdfast.query.facts import MISSING, make_facts
from holdfast.repo.names.snapshots import Tag
from tests.kit.committed import make_committed, make_one_fact


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "run/step-100"),
        ("created", 1_700_000_000.0),
        ("age", 86400.0),
        ("size", 1000),
        ("entries", 3),
        ("generation", 0),
        ("ranks", 8),
        ("host", "gpu-3"),
        ("env.torch", "2.10.1"),
        ("tag", ["best"]),
        ("loss", 0.5),
        ("metrics.loss", 0.5),
        ("lr", 0.1),
        ("meta.lr", 0.1),
        ("meta.size", "large"),
        ("optimizer.name", "adam"),
        ("optimizer.beta.one", 0.9),
        ("a.b", 1),
        ("gone", MISSING),
        ("meta.gone", MISSING),
        ("env.gone", MISSING),
        ("lr.gone", MISSING),
        ("optimizer.gone", MISSING),
        ("both", "metric"),
        ("meta.both", "metadata"),
    ],
)
def test_a_field_has_this_value(field: str, value: Json) -> None:
    metadata = {
        "metrics": {"loss": 0.5, "both": "metric"},
        "lr": 0.1,
        "size": "large",
        "optimizer": {"name": "adam", "beta.one": 0.9},
        "a.b": 1,
        "both": "metadata",
    }

    found = make_one_fact(metadata, tags=("best",)).find(parse_field(field))

    assert found is value if value is MISSING else found == value


@pytest.mark.parametrize(
    ("name", "metadata", "step"),
    [
        ("run/step-100", {}, 100),
        ("run/step_100", {}, 100),
        ("run/step100", {}, 100),
        ("run/epoch=7", {}, 7),
        ("step-5", {}, 5),
        ("run/step-100", {"step": 3}, 3),
        ("run/step-100", {"metrics": {"step": 4}}, 4),
        ("run/missteps-9", {}, MISSING),
        ("run/100", {}, MISSING),
        ("run/step-1/model", {}, MISSING),
        ("footstep-3", {}, MISSING),
    ],
)
def test_the_step_is_in_the_metadata_or_in_the_name(name: str, metadata: dict[str, Json], step: Json) -> None:
    assert make_one_fact(metadata, name=name).find_step() == step


def test_metrics_that_are_not_finite_are_numbers_again() -> None:
    facts = make_one_fact({"metrics": {"a": "nan", "b": "-inf", "c": 1}, "d": "nan"})

    assert math.isnan(facts.find(parse_field("a")))
    assert facts.find(parse_field("b")) == -math.inf
    assert facts.find(parse_field("d")) == "nan"
    assert [facts.find_number(parse_field(name)) for name in "abcd"] == [None, None, 1, None]
    assert [name for name, _ in facts.iter_metrics()] == ["a", "b", "c"]
    assert make_one_fact({"huge": 10**400}).find_number(parse_field("huge")) == 10**400


def test_metadata_of_any_form_is_no_error() -> None:
    facts = make_one_fact({"metrics": [1, 2], "a": None, "b": {"": 1}})

    assert facts.find(parse_field("metrics")) == [1, 2]
    assert facts.find(parse_field("metrics.loss")) is MISSING
    assert facts.find(parse_field("a")) is None
    assert list(facts.iter_metrics()) == []


def test_each_snapshot_has_its_own_tags() -> None:
    tags = [Tag(name, snapshot, Digest(bytes(32)), 0.0) for name, snapshot in [("x", "a"), ("y", "b"), ("z", "a")]]

    found = make_facts([make_committed("a"), make_committed("b"), make_committed("c")], tags, now_s=0.0)

    assert [each.tags for each in found] == [("x", "z"), ("y",), ()]
