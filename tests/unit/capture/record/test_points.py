"""What of a model can be recorded: modules, parameters and buffers, by names without wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.capture.record.points import find_points


class Tied(nn.Module):
    """Two layers that share a weight, in a container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.layers[0].weight  # type: ignore[assignment]  # a parameter, as torch knows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_containers_that_are_never_called_are_no_points() -> None:
    points = find_points(Tied(), compiled="boundary")

    assert [point.fqn for point in points.modules] == ["", "layers.0", "layers.1", "head"]
    assert [point.class_name for point in points.modules] == ["Tied", "Linear", "BatchNorm1d", "Linear"]


def test_a_tied_parameter_has_the_first_of_its_names() -> None:
    points = find_points(Tied(), compiled="boundary")

    assert list(points.parameters) == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "head.bias",
    ]


def test_a_buffer_that_a_module_replaced_is_the_new_one() -> None:
    model = Tied()
    points = find_points(model, compiled="boundary")
    norm = model.layers[1]
    norm.running_mean = torch.ones(2)

    assert torch.equal(dict(points.iter_buffers())["layers.1.running_mean"], torch.ones(2))


def test_names_leave_out_a_wrapper() -> None:
    points = find_points(nn.DataParallel(Tied()), compiled="boundary")

    assert [point.fqn for point in points.modules] == ["", "layers.0", "layers.1", "head"]


def test_nothing_is_recorded_inside_a_compiled_module_unless_it_is_tapped() -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    model = nn.Sequential(compiled)

    boundary, tapped = find_points(model, compiled="boundary"), find_points(model, compiled="tap")

    assert boundary.boundaries == ("0",)
    assert [point.fqn for point in boundary.modules] == ["", "0"]
    assert tapped.boundaries == ()
    assert [(point.fqn, point.is_outside) for point in tapped.modules] == [
        ("", False),
        ("0", True),
        ("0", False),
        ("0.0", False),
    ]
