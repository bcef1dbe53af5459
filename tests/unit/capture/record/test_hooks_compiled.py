"""Recording compiled modules: from outside, through taps, or uncompiled; a note says where hooks cannot fire."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.stored.runs import Run
from tests.kit.recorded_training import Training, new_repo, new_training, pick, record_steps

# Torch hides this one from users, but not from filters that make errors of warnings.
_OF_TORCH = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# Torch's tracing takes seconds before it begins.
pytestmark = [_OF_TORCH, pytest.mark.slow]

# Tracing without a compiler behind it: quick, and the same for hooks.
BACKEND = "aot_eager"
INSIDE = ["layers.0.up", "layers.0.activation", "layers.0.down", "layers.0", "norm", "dropout", ""]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_outside(training: Training) -> None:
    training.model = torch.compile(training.model, backend=BACKEND, fullgraph=True)  # type: ignore[assignment]  # it is one


def compile_in_place(training: Training) -> None:
    training.model.compile(backend=BACKEND, fullgraph=True)


def call(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch)
    return result


def list_outputs(run: Run, step: int = 0) -> list[str]:
    return [event.site.fqn for event in pick(run.events(step), "output")]


both_ways = pytest.mark.parametrize("compile_it", [compile_outside, compile_in_place])


@both_ways
def test_a_compiled_model_is_recorded_from_outside_and_that_is_said(compile_it: Callable[[Training], None]) -> None:
    training = new_training()
    compile_it(training)
    plain = record_steps(new_repo(), count=1)
    torch.manual_seed(0)
    training.batch = new_training().batch

    with pytest.warns(RecordingWarning, match="the model is compiled, .* only its inputs and outputs are recorded"):
        run = record_steps(new_repo(), training=training, count=1)

    assert list_outputs(run) == [""]
    assert [event.site.fqn for event in pick(run.events(0), "grad")] == [""]
    assert [event.site for event in pick(run.events(0), "parameter")] == [
        event.site for event in pick(plain.events(0), "parameter")
    ]
    assert "hooks do not fire inside compiled code" in run.facts.notes[0]


def test_a_model_that_was_compiled_in_place_gets_its_own_call_back() -> None:
    training = new_training()
    compile_in_place(training)
    before = training.model._compiled_call_impl

    with pytest.warns(RecordingWarning):
        record_steps(new_repo(), training=training, count=1)

    assert training.model._compiled_call_impl is before


@both_ways
def test_a_compiled_model_that_is_run_uncompiled_shows_all(compile_it: Callable[[Training], None]) -> None:
    training = new_training()
    compile_it(training)

    run = record_steps(new_repo(), training=training, compiled="eager", count=1)

    assert run.facts.notes == ()
    assert list_outputs(run) == list_outputs(record_steps(new_repo(), count=1))


@both_ways
def test_taps_show_results_and_gradients_inside(compile_it: Callable[[Training], None]) -> None:
    training = new_training()
    compile_it(training)

    run = record_steps(new_repo(), training=training, compiled="tap", level="full")

    for step in (0, 1):
        assert set(INSIDE) <= set(list_outputs(run, step))
        assert {event.site.fqn for event in pick(run.events(step), "grad")} == set(list_outputs(run, step))
        assert [event.site.fqn for event in pick(run.events(step), "input")] == [""]


def test_taps_that_come_too_late_are_missed_and_that_is_said() -> None:
    training = new_training()
    compile_outside(training)
    training.step()

    with pytest.warns(RecordingWarning, match="no tap was called: code that was compiled before the recording"):
        run = record_steps(new_repo(), training=training, compiled="tap", count=1)

    # The model itself is called by torch, outside of what is compiled.
    assert list_outputs(run) == [""]


def test_a_compiled_function_around_the_model_is_noted() -> None:
    training = new_training()
    function = torch.compile(partial(call, training.model), backend=BACKEND, fullgraph=True)

    def train() -> None:
        with training.record(new_repo()):
            loss = function(training.batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            training.optimizer.step()

    with pytest.warns(RecordingWarning, match="no module was called: .* inside compiled code"):
        train()


def test_one_compiled_layer_among_others_is_a_boundary() -> None:
    training = new_training()
    training.model.get_submodule("layers.0").compile(backend=BACKEND)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = record_steps(new_repo(), training=training, count=1)

    assert [str(each.message)[:29] for each in caught if each.category is RecordingWarning] == [
        "holdfast: layers.0 is compile"
    ]
    assert list_outputs(run)[0] == "layers.0"
    assert "layers.1.up" in list_outputs(run)
