"""Modules, optimizers and schedulers get their exact state through their own methods."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.store import Store
from tests.kit.capabilities import needs_torch
from tests.kit.loading import bytes_of, noise, problems_of

Optimizer = torch.optim.Optimizer


def new_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(dtype)


def step(model: torch.nn.Module, optimizer: Optimizer, *, seed: int = 0) -> None:
    data = noise(5, 3, seed=seed, dtype=next(model.parameters()).dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(data).square().mean()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]  # torch asks for a float and takes a tensor


def iter_optimizers() -> Iterator[type[Optimizer]]:
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        # Adam for sparse gradients needs those; Muon takes matrices only.
        is_one = inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
        if is_one and name not in ("SparseAdam", "Muon"):
            yield kind


OPTIMIZERS = list(iter_optimizers())


# Optimizers


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_every_optimizer_goes_on_exactly_where_it_was(store: Store, kind: Any, is_used: bool) -> None:
    model = new_model()
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    store.save("x", {"model": model, "optim": optimizer})
    other = new_model(seed=1)
    loaded = kind(other.parameters(), lr=0.5)
    if is_used:
        step(other, loaded, seed=3)

    store.load_into("x", {"model": other, "optim": loaded})

    assert str(bytes_of(loaded)) == str(bytes_of(optimizer))
    step(model, optimizer, seed=7)
    step(other, loaded, seed=7)
    assert bytes_of(other) == bytes_of(model)


def test_there_are_optimizers_to_try() -> None:
    assert {"AdamW", "SGD", "LBFGS", "Adafactor"} <= {kind.__name__ for kind in OPTIMIZERS}


def test_sparse_adam_is_restored(store: Store) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    sparse: Any = torch.optim.SparseAdam(list(table.parameters()))
    torch.autograd.backward(table(torch.tensor([1, 3])).sum())
    sparse.step()
    store.save("x", sparse)
    fresh = torch.optim.SparseAdam(list(table.parameters()))

    store.load_into("x", fresh)

    assert str(bytes_of(fresh)) == str(bytes_of(sparse))


@needs_torch("optim.Muon")
def test_muon_is_restored(store: Store) -> None:
    matrix = torch.nn.Parameter(noise(4, 4))
    muon: Any = torch.optim.Muon([matrix])
    matrix.grad = noise(4, 4, seed=1)
    muon.step()
    store.save("x", muon)
    fresh = torch.optim.Muon([matrix])

    store.load_into("x", fresh)

    assert str(bytes_of(fresh)) == str(bytes_of(muon))


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_state_of_more_precision_than_the_parameters_keeps_it(store: Store, is_used: bool) -> None:
    model = new_model(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = noise(*state["exp_avg"].shape)
        state["list"] = [state["exp_avg"] * 2]
    store.save("x", optimizer)
    loaded = torch.optim.AdamW(model.parameters())
    if is_used:
        step(model, loaded)

    store.load_into("x", loaded)

    assert str(bytes_of(loaded)) == str(bytes_of(optimizer))
    dtypes = {key: value.dtype for key, value in loaded.state[next(model.parameters())].items() if key != "list"}
    assert dtypes == {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
    assert loaded.state[next(model.parameters())]["list"][0].dtype == torch.float32


def test_state_that_is_there_is_filled_in_place(store: Store) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    store.save("x", optimizer)
    kept = bytes_of(optimizer)
    step(model, optimizer, seed=2)
    places = {key: value.data_ptr() for key, value in optimizer.state[next(model.parameters())].items()}

    store.load_into("x", optimizer)

    assert bytes_of(optimizer) == kept
    assert {key: value.data_ptr() for key, value in optimizer.state[next(model.parameters())].items()} == places


def test_assign_gives_an_optimizer_new_tensors(store: Store) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    store.save("x", optimizer)
    place = optimizer.state[next(model.parameters())]["exp_avg"]

    store.load_into("x", optimizer, assign=True)

    assert optimizer.state[next(model.parameters())]["exp_avg"] is not place


def test_other_groups_or_shapes_of_an_optimizer_are_refused_before_anything_is_changed(store: Store) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    wider = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    other = torch.optim.AdamW(wider.parameters())
    step(wider, other)
    split = torch.optim.AdamW([{"params": [each]} for each in model.parameters()])

    assert problems_of(store, optimizer, split) == [
        "param_groups: parameter groups of 1, 1, 1, 1 in the target, of 4 in the snapshot"
    ]
    assert problems_of(store, {"a": noise(2), "o": optimizer}, {"a": torch.zeros(2), "o": other})[0] == (
        "o.state.0.exp_avg: shape (5, 3) in the target, (4, 3) in the snapshot"
    )
    assert problems_of(store, {"o": 5}, {"o": other}) == ["o: the target has a AdamW here, the snapshot an int"]


def test_hooks_of_an_optimizer_are_called_and_may_change_the_groups(store: Store) -> None:
    model = new_model()
    store.save("x", torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.5))
    target = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def merge(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("before")
        group = state["param_groups"][0]
        return {**state, "param_groups": [{**group, "params": [0, 1, 2, 3]}]}

    target.register_load_state_dict_pre_hook(merge)
    target.register_load_state_dict_post_hook(lambda optimizer: calls.append("after"))

    store.load_into("x", target)

    assert calls == ["before", "after"]
    assert target.param_groups[0]["lr"] == 0.5


# Schedulers and scalers


def _make_schedulers(optimizer: Optimizer) -> dict[str, Any]:
    schedulers = torch.optim.lr_scheduler
    return {
        "StepLR": schedulers.StepLR(optimizer, 2),
        "MultiStepLR": schedulers.MultiStepLR(optimizer, [1, 3]),
        "ConstantLR": schedulers.ConstantLR(optimizer),
        "LinearLR": schedulers.LinearLR(optimizer),
        "ExponentialLR": schedulers.ExponentialLR(optimizer, 0.9),
        "PolynomialLR": schedulers.PolynomialLR(optimizer),
        "CosineAnnealingLR": schedulers.CosineAnnealingLR(optimizer, 4),
        "CosineAnnealingWarmRestarts": schedulers.CosineAnnealingWarmRestarts(optimizer, 4),
        "OneCycleLR": schedulers.OneCycleLR(optimizer, 0.1, 10),
        "CyclicLR": schedulers.CyclicLR(optimizer, 0.1, 0.2),
        "LambdaLR": schedulers.LambdaLR(optimizer, lambda count: 0.9**count),
        "MultiplicativeLR": schedulers.MultiplicativeLR(optimizer, lambda count: 0.9),
        "ReduceLROnPlateau": schedulers.ReduceLROnPlateau(optimizer),
    }


@pytest.mark.parametrize("name", _make_schedulers(torch.optim.SGD([torch.zeros(1)], momentum=0.9)))
def test_every_scheduler_goes_on_where_it_was(store: Store, name: str) -> None:
    with warnings.catch_warnings():
        # That it steps before its optimizer is not what is tried here.
        warnings.simplefilter("ignore")
        optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9) for _ in range(2)]
        scheduler, loaded = (_make_schedulers(optimizer)[name] for optimizer in optimizers)
        arguments = [1.0] if name == "ReduceLROnPlateau" else []
        for _ in range(3):
            scheduler.step(*arguments)
        store.save("x", {"o": optimizers[0], "s": scheduler})

        store.load_into("x", {"o": optimizers[1], "s": loaded})

        rates = []
        for each, optimizer in zip((scheduler, loaded), optimizers, strict=True):
            each.step(*arguments)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert loaded.last_epoch == scheduler.last_epoch == 4


def test_a_gradient_scaler_is_restored(store: Store) -> None:
    store.save("x", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5))
    target = torch.amp.GradScaler("cpu")

    store.load_into("x", target)

    assert target.state_dict()["scale"] == 8.0
    assert target.get_growth_interval() == 5


# Objects that refuse


class Stubborn:
    def __init__(self) -> None:
        self.memory = torch.zeros(2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"memory": self.memory}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise ValueError("not today")


def test_an_object_that_refuses_its_state_is_named(store: Store) -> None:
    store.save("x", {"a": {"s": Stubborn()}})

    with pytest.raises(Mismatch, match=r"^a.s: Stubborn refused its state: not today. Before this error,"):
        store.load_into("x", {"a": {"s": Stubborn()}})


def test_memory_that_two_objects_share_is_filled_for_neither_in_place(store: Store) -> None:
    class Keeper(Stubborn):
        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.memory = state["memory"]

    saved = Keeper(), Keeper()
    saved[0].memory, saved[1].memory = noise(2), noise(2, seed=1)
    store.save("x", {"a": saved[0], "b": saved[1]})
    target = {"a": Keeper(), "b": Keeper()}
    target["b"].memory = target["a"].memory

    store.load_into("x", target)

    assert torch.equal(target["a"].memory, noise(2))
    assert torch.equal(target["b"].memory, noise(2, seed=1))
