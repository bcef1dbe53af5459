"""Settings of a step: decoded as they were encoded, and refused if they are not settings."""

from __future__ import annotations

import pytest

from holdfast.capture.stored.events import (
    Event,
    EventKind,
    OptimizerSettings,
    ParameterSettings,
    Phase,
    Site,
    StepSettings,
    encode_model,
    encode_optimizer,
    keep_shared,
    read_settings,
)
from holdfast.errors import Corrupt


def make_event(kind: EventKind, phase: Phase, path: str = "", form: str = "") -> Event:
    return Event(0, Site(0, phase, kind, "", 0, path), 0, "uint8", (1,), b"", form=form)


def test_settings_are_decoded_as_they_were_encoded() -> None:
    modules = {"": {"class": "Linear", "training": True}}
    parameters = {"weight": ParameterSettings(requires_grad=True, group="0")}
    optimizer = OptimizerSettings("SGD", ({"lr": 0.1, "betas": [0.9, 0.99]},))

    found = read_settings(
        [
            make_event("setting", "forward", form=encode_model(modules, parameters, {"other": "weight"})),
            make_event("output", "forward"),
            make_event("setting", "optimizer", "1", encode_optimizer(optimizer)),
        ]
    )

    assert found == StepSettings(modules, parameters, {"other": "weight"}, {"1": optimizer})


def test_a_step_without_settings_has_empty_ones() -> None:
    assert read_settings([make_event("output", "forward")]) == StepSettings()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"modules": 1, "parameters": {}, "tied": {}}', "null"])
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_a_text_that_is_not_settings_is_corrupt(text: str, phase: Phase) -> None:
    with pytest.raises(Corrupt, match="the settings of step 0 are invalid"):
        read_settings([make_event("setting", phase, form=text)])


def test_gradients_during_the_backward_pass_are_left_out_if_one_run_has_none() -> None:
    final, summed = make_event("param_grad", "backward"), make_event("param_grad", "backward", "#1")

    assert keep_shared([summed, final], [final]) == ([final], [final])
    assert keep_shared([summed, final], [summed, final]) == ([summed, final], [summed, final])
