"""Recording: which events a step has, under which names, and that recording does not change the training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast.capture.record.options import LevelName
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.events import Level, Stats
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import read_run
from holdfast.capture.stored.segments import iter_segments
from holdfast.capture.stored.statistics import measure_bytes
from holdfast.errors import BadName, NameInUse
from tests.kit.recorded_training import (
    Model,
    count_hooks,
    leave_out_settings,
    new_repo,
    new_training,
    pick,
    record_steps,
)


def test_a_step_is_recorded_from_its_parameters_to_the_update_of_the_optimizer() -> None:
    events = record_steps(new_repo()).events(1)

    order = list(dict.fromkeys((event.site.phase, event.site.kind) for event in events))
    assert order == [
        ("forward", "setting"),
        ("forward", "rng"),
        ("forward", "parameter"),
        ("forward", "buffer"),
        ("forward", "input"),
        ("forward", "output"),
        ("backward", "grad"),
        ("backward", "param_grad"),
        ("optimizer", "optimizer"),
        ("optimizer", "setting"),
        ("optimizer", "parameter"),
    ]
    assert [event.seq for event in events] == sorted(event.seq for event in events)


def test_events_say_where_they_were_observed() -> None:
    run = record_steps(new_repo())

    (event,) = pick(run.events(1), "output", "layers.1.down")

    assert event.module == "Linear"
    assert event.source.startswith("recorded_training.py:")
    assert (event.dtype, event.shape) == ("float32", (3, 4))
    assert not event.recompute
    assert event.leaf == ""
    assert event.stats is None


def test_a_recorded_digest_is_that_of_the_bytes() -> None:
    training = new_training()
    before = observe(training.model.get_parameter("layers.0.up.weight")).digest()

    run = record_steps(new_repo(), training=training, count=1)

    first, after = pick(run.events(0), "parameter", "layers.0.up.weight")
    assert first.digest == before
    assert after.digest == observe(training.model.get_parameter("layers.0.up.weight")).digest() != before


def test_training_gives_the_same_with_and_without_recording() -> None:
    bare = new_training()
    expected = [*(bare.step() for _ in range(3)), torch.randn(())]
    watched = new_training()

    with watched.record(new_repo(), level="full", drill="layers.0"):
        found = [watched.step() for _ in range(3)]

    assert torch.equal(torch.stack([*found, torch.randn(())]), torch.stack(expected))
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name


def test_equal_runs_have_equal_roots_and_unequal_ones_do_not() -> None:
    repo = new_repo()

    first, second = record_steps(repo, "first"), record_steps(repo, "second", level="stats")
    other = record_steps(repo, "other", training=new_training(seed=1))

    assert [first.root(step) for step in first.steps] == [second.root(step) for step in second.steps]
    assert first.root(0) != other.root(0)


def test_the_gradient_before_an_operation_in_place_is_that_of_the_model_without() -> None:
    def make_apart() -> nn.Module:
        model = Model()
        for block in model.layers:
            block.activation = nn.ReLU()
        return model

    in_place = record_steps(new_repo(), count=1)
    apart = record_steps(new_repo(), training=new_training(make_apart), count=1)

    for fqn in ("layers.0.up", "layers.1.activation", "layers.0.down"):
        assert [e.digest for e in pick(in_place.events(0), "grad", fqn)] == [
            e.digest for e in pick(apart.events(0), "grad", fqn)
        ]


def test_full_tensors_are_read_as_they_were_when_observed() -> None:
    run = record_steps(new_repo(), level="full", count=1)

    for event in leave_out_settings(run.events(0)):
        tensor = run.read_tensor(event)
        assert tuple(tensor.shape) == event.shape
        assert observe(tensor).digest() == event.digest
        assert event.stats is not None


def test_what_one_module_passes_to_the_next_is_kept_once() -> None:
    events = record_steps(new_repo(), level="full", count=2).events(1)

    (output,), (taken,) = pick(events, "output", "layers.0"), pick(events, "input", "layers.1")

    assert output.leaf == taken.leaf
    assert output.alias == taken.alias


def test_levels_go_by_the_first_pattern_that_fits() -> None:
    level: dict[str, LevelName | Level] = {"layers.0": "full", "layers.*": "stats", "norm*": "off", "*": "digest"}
    events = record_steps(new_repo(), level=level, count=1).events(0)

    assert {bool(event.leaf) for event in events if event.site.fqn.startswith("layers.0")} == {True}
    assert {event.stats is not None for event in events if event.site.fqn.startswith("layers.1")} == {True}
    assert not [event for event in events if event.site.fqn.startswith("norm")]
    assert {event.stats for event in pick(events, "output", "dropout")} == {None}


def test_only_what_is_asked_for_is_recorded() -> None:
    run = record_steps(new_repo(), include="layers.*", exclude=["*.activation"], kinds="input, output", count=4)

    names = {event.site.fqn for step in run.steps for event in run.events(step)}
    assert {event.site.kind for event in run.events(0)} == {"input", "output"}
    assert names == {f"layers.{n}{part}" for n in (0, 1) for part in ("", ".up", ".down")}


def test_steps_that_are_not_asked_for_are_counted_and_not_recorded() -> None:
    training = new_training()
    repo = new_repo()

    with training.record(repo, steps="1-2,4"):
        for _ in range(6):
            training.step()

    assert list(read_run(repo, "run").steps) == [1, 2, 4]


def test_a_resumed_run_counts_its_steps_from_where_it_went_on() -> None:
    run = record_steps(new_repo(), first_step=7)
    assert run.steps[0] == 7


def test_stats_count_nonfinite_values_separately() -> None:
    training = new_training()
    repo = new_repo()
    values = torch.tensor([1.0, -3.0, 0.0, float("nan"), float("inf"), float("-inf")])

    with training.record(repo, level="stats") as rec:
        rec.log("values", values)

    (event,) = pick(read_run(repo, "run").events(0), "log")
    assert event.stats is not None
    stats = event.stats
    assert (stats.minimum, stats.maximum, stats.nan, stats.inf, stats.zero) == (-3.0, 1.0, 1, 2, 1)
    assert stats.mean == pytest.approx(-2 / 3)
    assert stats.norm == pytest.approx(10**0.5)
    assert sum(stats.histogram) == 3


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.uint8]
)
def test_stats_are_those_of_float64_for_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).to(dtype)

    stats = measure_bytes(observe(tensor).data, dtype, 4)

    assert stats is not None
    assert stats.norm == pytest.approx(3**0.5)
    assert replace(stats, norm=0.0) == Stats(0.0, 1.0, 0.6, 0.0, 0, 0, 2, (2, 0, 0, 3))


def test_a_view_is_recorded_as_its_own_items_in_order() -> None:
    base = torch.arange(12.0).reshape(3, 4)

    for view in (
        base.t(),
        base[:, 1:3],
        base[1],
        torch.arange(3.0).expand(2, 3),
        torch.view_as_complex(base.reshape(3, 2, 2)).conj(),
    ):
        assert (
            observe(view).digest() == observe(view.resolve_conj().clone(memory_format=torch.contiguous_format)).digest()
        )


def test_forward_passes_of_one_step_are_numbered() -> None:
    training, repo = new_training(), new_repo()

    with training.record(repo):
        for _ in range(2):
            training.optimizer.zero_grad()
            for _ in range(3):
                training.model(training.batch).square().mean().backward()
            training.optimizer.step()

    run = read_run(repo, "run")
    assert list(run.steps) == [0, 1]
    assert [event.site.call for event in pick(run.events(1), "output", "layers.0")] == [0, 1, 2]
    assert sorted(event.site.call for event in pick(run.events(1), "grad", "layers.0")) == [0, 1, 2]


def test_what_is_logged_after_the_optimizer_belongs_to_the_step_that_ends() -> None:
    training, repo = new_training(), new_repo()

    with training.record(repo) as rec:
        for _ in range(2):
            rec.log("loss", training.step())
            rec.log("loss", 0.5)

    run = read_run(repo, "run")
    assert list(run.steps) == [0, 1]
    assert [(event.site.call, event.dtype) for event in pick(run.events(0), "log")] == [(0, "float32"), (1, "float64")]


def test_an_evaluation_without_gradients_is_recorded_without_them() -> None:
    training, repo = new_training(), new_repo()

    with training.record(repo) as rec:
        training.model.eval()
        with torch.no_grad():
            training.model(training.batch)
        rec.step()
        with torch.inference_mode():
            training.model(training.batch)
        rec.step()

    run = read_run(repo, "run")
    assert list(run.steps) == [0, 1]
    assert pick(run.events(1), "output")
    assert not pick(run.events(0), "grad")


def test_a_step_ends_when_all_optimizers_have_stepped() -> None:
    repo, model = new_repo(), Model()
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers]

    with record(repo, "run", model, parts):
        for _ in range(2):
            for optimizer in parts:
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()

    run = read_run(repo, "run")
    assert list(run.steps) == [0, 1]
    assert len(pick(run.events(0), "output", "layers.0")) == 2
    groups = {event.site.fqn for event in pick(run.events(0), "optimizer")}
    assert groups == {"param_groups.0.0", "param_groups.1.0"}


def test_hooks_are_gone_after_the_recording_also_if_it_ends_by_an_exception() -> None:
    training, repo = new_training(), new_repo()

    def train() -> None:
        with training.record(repo, drill="layers.0"):
            training.step()
            raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError):
        train()

    assert count_hooks(training.model) == 0
    assert "forward" not in vars(training.model.get_submodule("layers.0"))
    assert not training.optimizer._optimizer_step_pre_hooks
    run = read_run(repo, "run")
    assert run.facts.status == "unfinished"
    assert run.facts.notes == ("ended by ZeroDivisionError: by the user",)
    assert list(run.steps) == [0]


def test_operations_inside_of_a_drilled_module_are_recorded() -> None:
    events = record_steps(new_repo(), drill="layers.1", count=1).events(0)

    found = [(event.site.fqn, event.site.call, event.parent) for event in pick(events, "op")]
    assert ("layers.1.up/aten.addmm.default", 0, "layers.1.up") in found
    assert ("layers.1.activation/aten.relu_.default", 0, "layers.1.activation") in found
    assert ("layers.1/aten.add.Tensor", 0, "layers.1") in found
    assert not [fqn for fqn, _, _ in found if fqn.startswith("layers.0")]


def test_a_name_that_is_taken_is_refused_before_anything_is_hooked() -> None:
    repo, training = new_repo(), new_training()
    record_steps(repo, "run")

    with pytest.raises(NameInUse, match="choose another name, or pass overwrite=True"), training.record(repo, "run"):
        pytest.fail("it must not begin")

    assert count_hooks(training.model) == 0
    assert list(record_steps(repo, "run", count=1, overwrite=True).steps) == [0]


def test_a_name_that_could_be_taken_for_a_segment_is_refused() -> None:
    with pytest.raises(BadName):
        new_training().record(new_repo(), "runs/@r0")


def test_wrappers_have_no_part_in_names() -> None:
    training = new_training()
    plain = record_steps(new_repo(), training=new_training(), count=1)
    training.model = nn.DataParallel(training.model)

    wrapped = record_steps(new_repo(), training=training, count=1)

    assert [event.site for event in wrapped.events(0)] == [event.site for event in plain.events(0)]


def test_segments_end_after_so_many_steps() -> None:
    repo, training = new_repo(), new_training()

    with training.record(repo, segment_steps=2):
        for _ in range(5):
            training.step()

    assert sorted(segment.name for segment, _ in iter_segments(repo, "run")) == [
        f"@runs/run/@r0/{number:08d}" for number in range(4)
    ]
    assert list(read_run(repo, "run").steps) == [0, 1, 2, 3, 4]
