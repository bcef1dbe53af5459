"""The state of a prepared data loader: epoch, order, generator, and a position if it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Mismatch

pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

import accelerate  # after the test for the library
from accelerate.state import AcceleratorState, GradientState  # likewise

from holdfast.integrations.accelerate import LoaderState, make_state  # likewise


@pytest.fixture(autouse=True)
def forget_the_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepare(*, seeded: bool = False, **options: Any) -> Any:
    data: Any = list(range(8))
    configuration = accelerate.DataLoaderConfiguration(use_seedable_sampler=seeded)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    return accelerator.prepare(torch.utils.data.DataLoader(data, **options))


def read(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_the_order_of_the_next_epoch_is_restored_with_its_seed() -> None:
    torch.manual_seed(1)
    loader = prepare(seeded=True, shuffle=True)
    read(loader)
    state = LoaderState(loader).state_dict()
    torch.manual_seed(2)
    resumed = prepare(seeded=True, shuffle=True)

    LoaderState(resumed).load_state_dict(state)

    assert state["epoch"] == 1
    assert read(resumed) == read(loader)


def test_the_order_of_the_next_epoch_is_restored_with_its_generator() -> None:
    loader = prepare(shuffle=True, generator=torch.Generator().manual_seed(1))
    read(loader)
    state = LoaderState(loader).state_dict()
    resumed = prepare(shuffle=True, generator=torch.Generator().manual_seed(2))

    LoaderState(resumed).load_state_dict(state)

    assert read(resumed) == read(loader)


def test_a_sampler_with_a_position_continues_within_the_epoch() -> None:
    def make() -> tuple[Any, holdfast.ResumableSampler]:
        sampler = holdfast.ResumableSampler(8, batch_size=2)
        return prepare(batch_sampler=sampler), sampler

    (loader, sampler), (resumed, _), (whole, _) = make(), make(), make()
    next(iter(loader))
    sampler.advance()

    LoaderState(resumed).load_state_dict(LoaderState(loader).state_dict())

    assert read(resumed) == read(whole)[2:]


class StatefulLoader:
    """A double of a loader of `use_stateful_dataloader=True`, which needs torchdata; not an instance of DataLoader."""

    use_stateful_dataloader = True
    iteration = 0
    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]

    def get_sampler(self) -> None:
        return None


def test_a_loader_with_a_state_of_its_own_restores_it() -> None:
    loader, resumed = StatefulLoader(), StatefulLoader()
    loader.iteration, loader.position = 2, 5

    LoaderState(resumed).load_state_dict(LoaderState(loader).state_dict())

    assert (resumed.iteration, resumed.position) == (2, 5)


def test_a_loader_of_another_kind_is_refused_and_not_changed() -> None:
    seeded, plain = prepare(seeded=True, shuffle=True), prepare()
    read(seeded)

    with pytest.raises(Mismatch, match="only one has: order; create this one as"):
        LoaderState(plain).load_state_dict(LoaderState(seeded).state_dict())

    assert plain.iteration == 0


def test_an_optimizer_of_parameters_that_no_model_has_is_saved_by_number() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    own = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = accelerator.prepare(torch.optim.SGD([own], lr=0.1, momentum=0.9))
    own.grad = torch.ones(2)
    optimizer.step()

    state = make_state(accelerator, [])["optimizer"].state_dict()

    assert list(state["state"]) == [0]
