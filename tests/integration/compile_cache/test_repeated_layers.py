"""Layers of one kind that are compiled one by one share one entry, forward and backward included."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from holdfast.compile_cache.artifacts.catalog import iter_artifacts
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository
from tests.integration.compile_cache.cases import Stack
from tests.integration.compile_cache.processes import Trial, try_cases
from tests.kit.graph_keys import record_keys

# Dynamo itself reads the attribute.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

SHARED: Final = ("train_12_layers", "train_6_layers", "train_2_layers", "train_numbered_layers")
"""Cases whose graphs all have one key."""
FROM_DATA: Final = "train_layers_from_data"
REGION: Final = "train_region"
REQUESTS: Final = {"train_numbered_layers": 12, FROM_DATA: 2}
"""Case -> number of graphs that dynamo requests, if it traces more than one of the layers."""


class Layer(nn.Module):
    """A small layer with a number, by which it may multiply."""

    def __init__(self, number: int, *, multiplies: bool = False) -> None:
        super().__init__()
        self.number = number
        self.multiplies = multiplies
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.number < 0:
            raise ValueError("layers are numbered from 0")
        y: Tensor = x + self.linear(x).relu()
        return y * (self.number + 1) if self.multiplies else y


def _record(layers: list[nn.Module], *, has_embedding: bool = True) -> list[Any]:
    """Return the key of each layer in a training step, each compiled as the first of a new process."""
    model = Stack(layers)
    x = model.embedding(torch.zeros(2, 3, dtype=torch.int64)) if has_embedding else torch.ones(2, 3, 32)
    found: list[Any] = []
    for layer in layers:
        found += record_keys(layer, x)
        x = layer(x)
    assert all(isinstance(key, GraphKey) for key in found), found
    return [key.digests for key in found]


@pytest.mark.parametrize("count", [2, 6, 12])
def test_the_names_and_numbers_of_layers_do_not_change_the_key(count: int) -> None:
    keys = _record([Layer(number) for number in range(count)])

    assert len(keys) == count
    assert all(key == keys[0] for key in keys)


def test_a_number_that_the_graph_uses_changes_the_key() -> None:
    keys = _record([Layer(number, multiplies=True) for number in range(3)])

    assert len({key["graph"] for key in keys}) == 3


def test_a_first_layer_whose_input_needs_no_gradient_has_its_own_key() -> None:
    first, *others = _record([Layer(number) for number in range(3)], has_embedding=False)

    assert [part for part in first if first[part] != others[0][part]] == ["inputs"]
    assert others[0] == others[1]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return try_cases(tmp_path_factory.mktemp("layers"), (*SHARED, FROM_DATA, REGION))


def _count_artifacts(store: Path) -> int:
    return sum(1 for _ in iter_artifacts(open_repository(open_store(str(store))).store))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SHARED)
def test_all_layers_use_one_entry(trial: Trial, case: str) -> None:
    first = trial.cold.cases[SHARED[0]]

    assert trial.cold.cases[case]["used"] == trial.warm.cases[case]["used"] == first["used"]
    assert len(first["used"]) == first["saved"] == 1
    assert trial.cold.cases[case]["miss"] == (1 if case == SHARED[0] else 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_first_layer_that_needs_no_gradient_adds_one_entry(trial: Trial) -> None:
    told = trial.cold.cases[FROM_DATA]

    assert (told["hit"], told["miss"], told["saved"]) == (1, 1, 1)
    # One for all layers whose input needs a gradient, one for the first that needs none, one for the nested region.
    assert _count_artifacts(trial.store) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*SHARED, FROM_DATA, REGION])
def test_a_second_process_loads_every_layer_and_has_equal_results(trial: Trial, case: str) -> None:
    plain, cold, warm = (outcome.cases[case] for outcome in (trial.plain, trial.cold, trial.warm))

    assert (warm["hit"], warm["miss"], warm["bypass"]) == (REQUESTS.get(case, 1), 0, {})
    assert cold["digest"] == warm["digest"] == plain["digest"]
    assert trial.warm.compiler_runs == 0
