"""Loaders in wrappers: what has a position is saved by it, what has none is refused at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.distributed.checkpoint.training import training_state
from holdfast.errors import Unsupported
from holdfast.snapshot.resume import ResumableSampler
from holdfast.snapshot.stateful import is_stateful
from holdfast.store import Store
from tests.kit.wrappers import ForwardingOptimizer, WrappedLoader


def test_a_wrapper_around_a_loader_without_a_state_is_refused_when_it_is_saved(store: Store) -> None:
    data: Any = torch.arange(10)
    tree = {"weights": torch.ones(2), "loader": WrappedLoader(torch.utils.data.DataLoader(data))}

    with pytest.raises(Unsupported, match=r"^loader: a DataLoader does not save its position; .*ResumableSampler"):
        store.save("x", tree)

    assert store.latest("") is None


def test_a_training_state_finds_the_sampler_in_a_wrapped_loader(store: Store) -> None:
    def make() -> WrappedLoader:
        data: Any = torch.arange(10)
        sampler: Any = ResumableSampler(10, batch_size=2)
        return WrappedLoader(torch.utils.data.DataLoader(data, batch_sampler=sampler))

    loader, other = make(), make()
    sampler: Any = loader.batch_sampler
    sampler.advance()
    model = torch.nn.Linear(1, 1)
    store.save("x", training_state(model, dataloader=loader, rng=False))

    store.load_into("x", training_state(model, dataloader=other, rng=False))

    restored: Any = other.batch_sampler
    assert next(iter(restored)) == next(iter(sampler))
    assert restored.state_dict() == sampler.state_dict()


def test_a_wrapped_loader_with_a_state_is_saved_by_it(store: Store) -> None:
    class WithState(WrappedLoader):
        def state_dict(self) -> Any:
            return {"position": 3}

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict

    data: Any = torch.arange(10)
    loader, other = (WithState(torch.utils.data.DataLoader(data)) for _ in range(2))
    model = torch.nn.Linear(1, 1)
    store.save("x", training_state(model, dataloader=loader, rng=False))

    store.load_into("x", training_state(model, dataloader=other, rng=False))

    assert other.loaded == {"position": 3}


def test_methods_that_a_wrapper_forwards_count() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert is_stateful(ForwardingOptimizer(plain))
    assert not is_stateful(ForwardingOptimizer(object()))
    assert not is_stateful(type(plain))
