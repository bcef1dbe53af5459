"""What a recording reads of modules, parameters and optimizers that no tensor shows."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from holdfast.capture.record.observer import SettingsReader
from holdfast.capture.record.points import find_points


class Tied(nn.Module):
    """Two layers that share a weight, and attributes of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.25)
        self.order = [0, 1]
        self.limit = float("inf")
        self.table = {"a": 1}
        self._private = 1


def new_reader(model: nn.Module, *optimizers: torch.optim.Optimizer) -> SettingsReader:
    return SettingsReader(find_points(model, compiled="boundary"), optimizers)


def read(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(new_reader(model, *optimizers).read_model())
    return found


def test_plain_attributes_and_classes_of_modules_are_read() -> None:
    found = read(Tied())["modules"]

    assert found["drop"] == {"class": "Dropout", "training": True, "p": 0.25, "inplace": False}
    assert found[""] == {"class": "Tied", "training": True, "order": [0, 1], "limit": "inf"}


def test_parameters_are_read_with_their_group_and_their_other_names() -> None:
    model = Tied()
    model.second.bias.requires_grad_(False)
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (model.second.bias, model.first.weight)]

    found = read(model, *optimizers)

    assert found["parameters"] == {"first.weight": [True, "1.0"], "second.bias": [False, "0.0"]}
    assert found["tied"] == {"second.weight": "first.weight"}
    assert read(model)["parameters"]["first.weight"] == [True, ""]


def test_a_setting_that_changes_is_read_again() -> None:
    model = Tied()
    reader = new_reader(model)
    before = reader.read_model()

    model.order.append(2)
    changed = reader.read_model()
    model.drop.__class__ = nn.AlphaDropout  # type: ignore[assignment]  # its attributes are the same

    assert json.loads(changed)["modules"][""]["order"] == [0, 1, 2]
    assert json.loads(reader.read_model())["modules"]["drop"]["class"] == "AlphaDropout"
    assert len({before, changed, reader.read_model()}) == 3


def test_an_attribute_that_changes_in_every_step_is_no_setting() -> None:
    model = Tied()
    reader = new_reader(model)
    texts = []

    for number in range(20):
        model.order.append(number)
        model.train(number % 2 == 0)
        texts.append(reader.read_model())

    assert "order" in json.loads(texts[0])["modules"][""]
    assert "order" not in json.loads(texts[-1])["modules"][""]
    assert len(set(texts[-4:])) == 2


def test_settings_of_an_optimizer_are_read_but_not_how_it_computes() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.5, nesterov=True, foreach=True)

    found = json.loads(new_reader(model, optimizer).read_optimizer(optimizer))

    assert found["class"] == "SGD"
    (group,) = found["groups"]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.5, True)
    assert not {"params", "foreach", "fused"} & group.keys()
