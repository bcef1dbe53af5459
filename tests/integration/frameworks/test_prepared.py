"""What `accelerator.prepare` returns is saved, loaded, named and recorded as the objects inside it are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.kit.loading import bytes_of

accelerate = pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")


@pytest.fixture(autouse=True)
def forget_the_accelerator() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A model, an optimizer, a schedule and a loader, prepared by Accelerate, after some steps."""

    def __init__(self, *, steps: int, prepare: bool = True) -> None:
        torch.manual_seed(steps)
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        data: Any = list(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
        self.sampler: Any = holdfast.ResumableSampler(20, batch_size=2)
        loader: Any = torch.utils.data.DataLoader(data, batch_sampler=self.sampler)
        parts = (model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = (
            accelerate.Accelerator(cpu=True).prepare(*parts) if prepare else parts
        )
        self.step(steps)

    def step(self, count: int) -> None:
        for batch in self.loader if count else ():
            self.optimizer.zero_grad()
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()
            self.sampler.advance()
            count -= 1
            if not count:
                return

    def tree(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "sampler": self.sampler}
        return {**parts, "rng": holdfast.RngState()}

    def named(self) -> Any:
        return holdfast.training_state(self.model, self.optimizer, self.schedule, self.loader)

    def bytes(self) -> Any:
        return [bytes_of(each.state_dict()) for each in (self.model, self.optimizer, self.schedule, self.sampler)]


@pytest.mark.parametrize("form", ["tree", "named"])
@pytest.mark.parametrize("atomic", [False, True])
def test_prepared_objects_resume_to_the_last_bit(form: str, atomic: bool) -> None:
    store = Store(MemoryStore())
    run = Run(steps=3)
    store.save("x", getattr(run, form)())
    run.step(4)
    resumed = Run(steps=1)

    store.load_into("x", getattr(resumed, form)(), atomic=atomic)

    resumed.step(4)
    assert resumed.bytes() == run.bytes()


def test_a_prepared_run_and_a_plain_one_have_one_digest() -> None:
    store = Store(MemoryStore())

    digests = {store.save(str(prepare), Run(steps=2, prepare=prepare).named()).digest for prepare in (False, True)}

    assert len(digests) == 1


def test_a_prepared_optimizer_is_recorded() -> None:
    store = Store(MemoryStore())
    for prepare in (False, True):
        run = Run(steps=0, prepare=prepare)
        with store.record(str(prepare), run.model, run.optimizer):
            run.step(2)

    assert store.diff_runs("False", "True").is_equal


def test_a_prepared_loader_without_a_position_is_refused_when_it_is_saved() -> None:
    store = Store(MemoryStore())
    loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(list(range(4))))  # type: ignore[arg-type]  # a list is a dataset

    with pytest.raises(Unsupported, match=r"^loader: a DataLoader does not save its position; .*use_stateful"):
        store.save("x", {"loader": loader})
    with pytest.raises(Unsupported, match="does not save its position"):
        holdfast.training_state(torch.nn.Linear(1, 1), dataloader=loader)
