"""Movement over a series: which snapshots are compared, which tensors count, and the lines of the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch

import holdfast
from holdfast.diff.facts import LeafFacts
from holdfast.errors import BadName
from holdfast.serving.answer import parse_request
from holdfast.serving.answers.movement import choose_series, find_layer, make_grouping
from holdfast.serving.remembered import WatchedListing
from holdfast.serving.routes import API, StoreApi


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    """Six snapshots of a run, two of another one, and one without a series."""
    opened = holdfast.open(tmp_path / "store")
    for step in (100, 200, 300, 500, 600, 700):
        layers = {str(at): {"w": torch.full((200,), 1.0 + at * step / 1000)} for at in range(3)}
        state = {
            "model": {"layers": layers, "embed": {"weight": torch.ones(300)}},
            "optimizer": {"m": torch.ones(9) * step},
        }
        opened.save(f"run/step-{step}", state)
    for step in (1, 2):
        opened.save(f"other/{step}", {"w": torch.ones(500) * step})
    opened.save("alone", {"w": torch.ones(5)})
    return opened


def ask(store: holdfast.Store, **parameters: str) -> list[Any]:
    query = urlencode(parameters)
    answer = StoreApi(store.repository).answer(parse_request(f"{API}movement" + (f"?{query}" if query else "")))
    return [json.loads(line) for line in answer.body if not isinstance(line, int)]


def test_parameters_of_the_longest_series_are_measured_by_step(store: holdfast.Store) -> None:
    head, *pairs = ask(store)

    assert (head["chosen"], head["total"], head["per"]) == ("run/", 6, "step")
    assert head["series"] == [
        {"name": "run/", "snapshots": 6},
        {"name": "other/", "snapshots": 2},
        {"name": "", "snapshots": 1},
    ]
    assert head["steps"] == [100, 200, 300, 500, 600, 700]
    assert [pair["pair"] for pair in pairs] == [0, 1, 2, 3, 4]
    assert set(pairs[0]["layers"]) == {"model.embed", "model.layers.0", "model.layers.1", "model.layers.2"}
    assert pairs[0]["layers"]["model.embed"] == pairs[0]["layers"]["model.layers.0"] == 0.0
    assert pairs[0]["layers"]["model.layers.2"] == pytest.approx(0.2 / 1.2 / 100)
    assert pairs[2]["layers"]["model.layers.1"] == pytest.approx(0.2 / 1.3 / 200)


def test_a_series_a_filter_and_tensors_are_chosen(store: holdfast.Store) -> None:
    assert ask(store, series="other/")[0]["names"] == ["other/1", "other/2"]
    assert ask(store, filter="step > 300 and step < 650")[0]["steps"] == [500, 600]
    assert set(ask(store, leaves="optimizer.*")[1]["layers"]) == {"optimizer"}
    assert set(ask(store, leaves="layers.2", by="leaf")[1]["layers"]) == {"model.layers.2.w"}


def test_of_a_long_series_some_at_equal_distances_are_compared(store: holdfast.Store) -> None:
    head, *pairs = ask(store, limit="3")

    assert (head["total"], head["steps"]) == (6, [100, 300, 700])
    assert [pair["steps"] for pair in pairs] == [200, 400]


def test_without_steps_the_order_is_that_of_times(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for name in ("b", "a"):
            store.save(f"run/{name}", {"w": torch.ones(500) * len(name)})
        chosen = choose_series(WatchedListing(store.repository).read().facts, "", 9)

    assert not chosen.has_steps
    assert [each.snapshot.name for each in chosen.facts] == ["run/b", "run/a"]


def test_steps_that_no_float_can_hold_do_not_divide(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for at, step in enumerate((1, 10**400)):
            store.save(f"run/{at}", {"w": torch.ones(500) + at}, metadata={"step": step})
        head, pair = ask(store)

    assert head["per"] == "snapshot"
    assert pair["layers"] == {"w": 1.0}


def test_a_limit_that_is_too_small_is_named(store: holdfast.Store) -> None:
    with pytest.raises(BadName, match="limit=1 is too small"):
        ask(store, limit="1")


@pytest.mark.parametrize(
    "parameters", [{"filter": "alone"}, {"filter": "nobody"}, {"limit": "1"}, {"limit": "999"}, {"by": "color"}]
)
def test_what_cannot_be_compared_is_refused(store: holdfast.Store, parameters: dict[str, str]) -> None:
    with pytest.raises(BadName):
        ask(store, **parameters)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.attn.weight", "model.layers.3"),
        ("model.embed.weight", "model.embed"),
        ("weight", "weight"),
        ("h.0.1.w", "h.0"),
    ],
)
def test_a_layer_is_the_name_up_to_its_number(name: str, layer: str) -> None:
    assert find_layer(name) == layer


@pytest.mark.parametrize(
    "name", ["optimizer.state.0.exp_avg", "lr_scheduler.x", "Optim.w", "rng.torch", "model.w.grad"]
)
def test_state_of_the_training_is_no_parameter(name: str) -> None:
    facts = LeafFacts("tensor", 40, "float32", (10,))

    assert make_grouping("", by_leaf=True)(name, facts) is None
    assert make_grouping(name, by_leaf=True)(name, facts) == name
    assert make_grouping(name, by_leaf=True)(name, LeafFacts("tensor", 40, "int64", (5,))) is None
