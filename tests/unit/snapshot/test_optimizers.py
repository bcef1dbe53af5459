"""Optimizers in wrappers are saved and loaded by the wrapper, and named by the parameters inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.distributed.checkpoint.training import training_state
from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.stateful import has_load_hooks, is_optimizer, is_plain_optimizer, list_optimizers, unwrap
from holdfast.store import Store
from tests.kit.loading import bytes_of
from tests.kit.wrappers import (
    ForwardingOptimizer,
    ImitatingOptimizer,
    InheritingOptimizer,
    OptimizerWithMore,
    WrappedScheduler,
)

Wrap = Callable[[torch.optim.Optimizer], Any]

each_wrapper = pytest.mark.parametrize(
    "wrap",
    [
        InheritingOptimizer,
        ForwardingOptimizer,
        ImitatingOptimizer,
        lambda optimizer: ForwardingOptimizer(InheritingOptimizer(optimizer)),
        lambda optimizer: InheritingOptimizer(ForwardingOptimizer(optimizer)),  # type: ignore[arg-type]
    ],
    ids=["inheriting", "forwarding", "imitating", "forwarding-inheriting", "inheriting-forwarding"],
)


class Run:
    """A model with an optimizer in a wrapper and a schedule in a wrapper, after some steps."""

    def __init__(self, wrap: Wrap, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(steps)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
        self.plain = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = wrap(self.plain)
        schedule = torch.optim.lr_scheduler.StepLR(self.plain, step_size=2)
        self.schedule = WrappedScheduler(schedule, self.optimizer)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 3, dtype=next(self.model.parameters()).dtype)).square().sum().backward()
        self.optimizer.step()
        self.plain.zero_grad()
        self.schedule.scheduler.step()

    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def named(self) -> Any:
        return training_state(self.model, self.optimizer, self.schedule, rng=False)

    def bytes(self) -> Any:
        return bytes_of(self.model), bytes_of(self.plain.state_dict()), self.schedule.state_dict()


@each_wrapper
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_wrapped_optimizer_continues_where_it_was(store: Store, wrap: Wrap, steps_before: int) -> None:
    saved, target = Run(wrap, steps=3), Run(wrap, steps=steps_before)
    store.save("x", saved.tree())

    store.load_into("x", target.tree())

    saved.step()
    target.step()
    assert target.bytes() == saved.bytes()


@each_wrapper
def test_a_training_state_of_wrapped_objects_loads_into_plain_ones_and_back(store: Store, wrap: Wrap) -> None:
    saved, plain, again = Run(wrap, steps=3), Run(lambda optimizer: optimizer, steps=1), Run(wrap, steps=0)

    first = store.save("x", saved.named())
    store.load_into("x", plain.named())
    second = store.save("y", plain.named())
    store.load_into("y", again.named())

    assert first.digest == second.digest
    assert plain.bytes() == again.bytes() == saved.bytes()


@each_wrapper
def test_a_failed_atomic_load_restores_a_wrapped_optimizer(store: Store, wrap: Wrap) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state_dict: Any) -> None:
            raise RuntimeError("no")

    saved, target = Run(wrap, steps=3), Run(wrap, steps=1)
    store.save("x", {**saved.tree(), "z": Refusing()})
    before = target.bytes()

    with pytest.raises(Mismatch, match="no"):
        store.load_into("x", {**target.tree(), "z": Refusing()}, atomic=True)

    assert target.bytes() == before


@each_wrapper
def test_a_wrapped_optimizer_of_other_parameters_is_refused_before_anything_changes(store: Store, wrap: Wrap) -> None:
    saved, target = Run(wrap, steps=2), torch.nn.Linear(3, 4)
    store.save("x", {"optimizer": saved.optimizer})

    with pytest.raises(Mismatch, match="parameter groups of 2 in the target, of 4 in the snapshot"):
        store.load_into("x", {"optimizer": wrap(torch.optim.AdamW(target.parameters()))})


@each_wrapper
def test_the_state_in_a_wrapper_keeps_its_dtype(store: Store, wrap: Wrap) -> None:
    saved, target = (Run(wrap, steps=steps, dtype=torch.bfloat16) for steps in (2, 0))
    for values in saved.plain.state.values():
        values["exp_avg"] = values["exp_avg"].float() + 2**-20
    store.save("x", saved.tree())

    store.load_into("x", target.tree())

    assert target.bytes() == saved.bytes()


def test_a_wrapper_loads_by_its_own_method(store: Store) -> None:
    saved, target = Run(InheritingOptimizer, steps=2), Run(InheritingOptimizer, steps=0)
    store.save("x", saved.tree())

    store.load_into("x", target.tree())

    assert target.optimizer.loads == 1


def test_a_wrapper_with_a_state_of_its_own_form_is_saved_as_it_is(store: Store) -> None:
    saved, target = Run(OptimizerWithMore, steps=2), Run(OptimizerWithMore, steps=0)
    saved.optimizer.skipped = 7
    store.save("x", saved.tree())

    store.load_into("x", target.tree())

    assert target.bytes() == saved.bytes()
    assert target.optimizer.skipped == 7


def test_a_state_of_another_form_is_refused_when_it_is_to_be_saved_by_name(store: Store) -> None:
    run = Run(OptimizerWithMore, steps=2)

    with pytest.raises(Unsupported, match=r"OptimizerWithMore.*training_state\(model, my_optimizer=\.\.\.\)"):
        store.save("x", run.named())

    assert store.latest("") is None
    store.save("x", training_state(run.model, my_optimizer=run.optimizer))


@each_wrapper
def test_a_wrapped_optimizer_is_recorded_as_the_plain_one(store: Store, wrap: Wrap) -> None:
    for name, wrapped in (("plain", lambda optimizer: optimizer), ("wrapped", wrap)):
        run = Run(wrapped, steps=0)
        with store.record(name, run.model, run.optimizer):
            run.step()

    assert store.diff_runs("plain", "wrapped").is_equal


@each_wrapper
def test_several_wrapped_optimizers_are_named(store: Store, wrap: Wrap) -> None:
    def make() -> tuple[torch.nn.Module, list[Any]]:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        return model, [wrap(torch.optim.SGD(part.parameters(), momentum=0.5)) for part in model]

    (model, optimizers), (other, others) = make(), make()
    model(torch.ones(1, 1)).sum().backward()
    for each in optimizers:
        each.step()
    store.save("x", training_state(model, optimizers, rng=False))

    store.load_into("x", training_state(other, others, rng=False))

    assert [bytes_of(each.state_dict()) for each in others] == [bytes_of(each.state_dict()) for each in optimizers]


def test_hooks_of_the_optimizer_inside_are_respected(store: Store) -> None:
    saved, target = Run(InheritingOptimizer, steps=1), Run(InheritingOptimizer, steps=0)
    called = []
    target.plain.register_load_state_dict_pre_hook(lambda *_: called.append(1))
    store.save("x", saved.tree())

    store.load_into("x", target.tree())

    assert called == [1]
    assert has_load_hooks(target.optimizer, before_only=True)
    assert not has_load_hooks(saved.optimizer)


def test_what_an_optimizer_is() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    inner = InheritingOptimizer(plain)
    outer = ForwardingOptimizer(inner)

    assert [is_optimizer(each) for each in (plain, inner, outer)] == [True] * 3
    assert [is_optimizer(each) for each in (schedule, WrappedScheduler(schedule, plain), [plain], None)] == [False] * 4
    assert unwrap(outer) is unwrap(inner) is unwrap(plain) is plain
    assert is_plain_optimizer(plain)
    assert not is_plain_optimizer(inner)
    assert list_optimizers(None) == []
    assert list_optimizers(outer) == [outer]
    assert list_optimizers((plain, outer)) == [plain, outer]


def test_an_optimizer_that_contains_itself_is_its_own_innermost() -> None:
    plain: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    plain.optimizer = plain

    assert unwrap(plain) is plain


def test_the_scaler_and_the_average_of_a_run_are_saved_beside_wrapped_objects(store: Store) -> None:
    def make(steps: int) -> tuple[Run, Any, torch.amp.GradScaler]:
        run = Run(InheritingOptimizer, steps=steps)
        average = torch.optim.swa_utils.AveragedModel(run.model)
        for _ in range(steps):
            average.update_parameters(run.model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**steps)
        scaler.scale(torch.ones(1))
        return run, average, scaler

    (run, average, scaler), (other, other_average, other_scaler) = make(3), make(1)
    store.save("x", training_state(run.model, run.optimizer, average=average, scaler=scaler))

    store.load_into("x", training_state(other.model, other.optimizer, average=other_average, scaler=other_scaler))

    assert bytes_of(other_average) == bytes_of(average)
    assert other_scaler.state_dict() == scaler.state_dict()
    assert other.bytes()[:2] == run.bytes()[:2]


def test_the_average_itself_is_a_model_with_a_training_state(store: Store) -> None:
    average, other = (torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)) for _ in range(2))
    average.update_parameters(torch.nn.Linear(2, 2))
    store.save("x", holdfast.training_state(average, rng=False))

    store.load_into("x", holdfast.training_state(other, rng=False))

    assert bytes_of(other) == bytes_of(average)


class StepsOnly:
    """Keeps an optimizer where nothing can find it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer

    def step(self) -> None:
        self._inner.step()


def test_an_object_that_is_no_optimizer_is_refused_by_its_class(store: Store) -> None:
    model = torch.nn.Linear(1, 1)
    wrapped: Any = StepsOnly(torch.optim.SGD(model.parameters()))

    with pytest.raises(Unsupported, match=r"StepsOnly is not an optimizer.*its \.optimizer"):
        training_state(model, wrapped)
    with pytest.raises(Unsupported, match=r"StepsOnly is not an optimizer"):
        store.record("x", model, wrapped)
    with pytest.raises(Unsupported, match=r"StepsOnly is not an optimizer"):
        training_state(model, [wrapped])
