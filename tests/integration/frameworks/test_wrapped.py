"""Everything that frameworks and torch put around models and optimizers is saved, loaded, named and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.errors import Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.kit.loading import bytes_of

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'holdfast[lightning]'")

from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer

Pair = tuple[Any, Any]
"""A model and its optimizer."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """DDP and FSDP2 need a process group; a rank alone has one, too."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


@cache
def make_fabric() -> Any:
    return Fabric(accelerator="cpu", devices=1)


def make_plain(seed: int) -> Pair:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def make_ddp(seed: int) -> Pair:
    model, optimizer = make_plain(seed)
    return torch.nn.parallel.DistributedDataParallel(model), optimizer


def make_fsdp(seed: int) -> Pair:
    model, _ = make_plain(seed)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def make_compiled(seed: int) -> Pair:
    model, optimizer = make_plain(seed)
    return torch.compile(model, backend="eager"), optimizer


def make_lightning(seed: int) -> Pair:
    model, optimizer = make_plain(seed)
    return model, LightningOptimizer(optimizer)


def make_fabric_pair(seed: int) -> Pair:
    model, optimizer = make_plain(seed)
    pair: Pair = make_fabric().setup(model, optimizer)
    return pair


def make_fabric_compiled(seed: int) -> Pair:
    model, optimizer = make_compiled(seed)
    pair: Pair = make_fabric().setup(model, optimizer)
    return pair


WRAPPERS: dict[str, Callable[[int], Pair]] = {
    "plain": make_plain,
    "DDP": make_ddp,
    "FSDP2": make_fsdp,
    "compiled": make_compiled,
    "Lightning": make_lightning,
    "Fabric": make_fabric_pair,
    "Fabric, compiled": make_fabric_compiled,
}
each_wrapper = pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())


def train(pair: Pair, steps: range = range(2)) -> Pair:
    """Train for some steps. LightningOptimizer steps through a Trainer, so its inner optimizer steps here."""
    model, optimizer = pair
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    for step in steps:
        inner.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + step)).square().sum()
        loss.backward()
        inner.step()
    return pair


def make_tree(pair: Pair) -> dict[str, Any]:
    return {"model": pair[0], "optimizer": pair[1]}


def make_named(pair: Pair) -> Any:
    return holdfast.training_state(*pair, rng=False)


each_form = pytest.mark.parametrize("form", [make_tree, make_named], ids=["tree", "training_state"])


def read_bytes(pair: Pair) -> Any:
    """Return the bytes of all values, under the names of the plain model."""
    state: Any = holdfast.training_state(*pair, rng=False).state_dict()
    return bytes_of({name: _gather(state[name]) for name in ("model", "optimizer")})


def _gather(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _gather(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@each_wrapper
@each_form
def test_a_saved_run_is_loaded_into_a_fresh_one(store: Store, make: Any, form: Any) -> None:
    run = train(make(1))
    store.save("x", form(run))
    fresh = make(2)

    store.load_into("x", form(fresh))

    assert read_bytes(train(fresh, range(2, 4))) == read_bytes(train(run, range(2, 4)))


@each_wrapper
@each_form
def test_a_wrapped_run_is_loaded_into_a_plain_one(store: Store, make: Any, form: Any) -> None:
    run = train(make(1))
    store.save("x", form(run))
    plain = make_plain(2)

    store.load_into("x", form(plain))

    assert read_bytes(plain) == read_bytes(run)


@each_wrapper
@each_form
def test_a_plain_run_is_loaded_into_a_wrapped_one(store: Store, make: Any, form: Any) -> None:
    plain = train(make_plain(1))
    store.save("x", form(plain))
    wrapped = make(2)

    store.load_into("x", form(wrapped))

    assert read_bytes(wrapped) == read_bytes(plain)


@each_wrapper
def test_a_run_is_recorded_as_often_as_it_steps(store: Store, make: Any) -> None:
    pair = make(1)
    with store.record("run", *pair, compiled="eager"):
        train(pair)

    assert len(store.run("run").steps) == 2


@each_wrapper
def test_a_wrapped_run_and_a_plain_one_are_recorded_alike(store: Store, make: Any) -> None:
    for name, pair in (("plain", make_plain(1)), ("wrapped", make(1))):
        with store.record(name, *pair, compiled="eager"):
            train(pair)

    assert store.diff_runs("plain", "wrapped").is_equal


class PlainEma:
    """An average of the weights in a class of the user's own."""

    def __init__(self, seed: int) -> None:
        self._shadow = dict(make_plain(seed)[0].named_parameters())
        self._decay = 0.9

    def state_dict(self) -> Any:
        return {"shadow": self._shadow, "decay": self._decay}

    def load_state_dict(self, state_dict: Any) -> None:
        self._shadow = dict(state_dict["shadow"])
        self._decay = state_dict["decay"]


def make_average(seed: int) -> Any:
    model, optimizer = make_plain(seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # torch's
    train((model, optimizer))
    average.update_parameters(model)
    return average


def make_scaler(seed: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    scaler.scale(torch.ones(1, requires_grad=True))
    return scaler


def make_schedule(seed: int) -> Any:
    schedule = torch.optim.lr_scheduler.OneCycleLR(make_plain(seed)[1], max_lr=0.1 * seed, total_steps=9)
    schedule.optimizer.step()
    schedule.step()
    return schedule


OTHERS = {"EMA of one's own": PlainEma, "AveragedModel": make_average, "GradScaler": make_scaler, "LR": make_schedule}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("named", [False, True], ids=["tree", "training_state"])
def test_an_object_beside_the_model_is_loaded_into_a_fresh_one(store: Store, make: Any, named: bool) -> None:
    def form(value: Any) -> Any:
        return holdfast.training_state(make_plain(0)[0], part=value) if named else {"part": value}

    saved, fresh = make(1), make(2)
    assert bytes_of(fresh.state_dict()) != bytes_of(saved.state_dict())
    store.save("x", form(saved))

    store.load_into("x", form(fresh))

    assert bytes_of(fresh.state_dict()) == bytes_of(saved.state_dict())


def make_loader(*, resumable: bool) -> Any:
    data: Any = list(torch.zeros(8, 3))
    sampler: Any = holdfast.ResumableSampler(8, batch_size=2)
    loader = torch.utils.data.DataLoader(data, **({"batch_sampler": sampler} if resumable else {"batch_size": 2}))
    return make_fabric().setup_dataloaders(loader)


def test_a_training_state_finds_the_sampler_in_a_loader_of_fabric(store: Store) -> None:
    model = make_plain(0)[0]
    loader, other = make_loader(resumable=True), make_loader(resumable=True)
    loader.batch_sampler.advance()
    store.save("x", holdfast.training_state(model, dataloader=loader))

    store.load_into("x", holdfast.training_state(model, dataloader=other))

    assert other.batch_sampler.position == 1


def test_a_loader_of_fabric_without_a_position_is_refused_at_once(store: Store) -> None:
    loader = make_loader(resumable=False)

    with pytest.raises(Unsupported, match="does not save its position"):
        holdfast.training_state(make_plain(0)[0], dataloader=loader)
    with pytest.raises(Unsupported, match=r"^loader: an object of class .*FabricDataLoader cannot be saved"):
        store.save("x", {"loader": loader}, collective=False)
