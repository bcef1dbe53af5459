"""Every saved value is loaded the same, bit for bit, with every property that torch knows of it."""

from __future__ import annotations

import datetime
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from holdfast.objects.memory import MemoryStore
from holdfast.store import OpenOptions, Store
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor, find_facts

KINDS = {kind: list(names) for kind, names in groupby(sorted(TENSORS), key=lambda name: name.partition("/")[0])}
BATCHES = {
    f"{kind} {start}": names[start : start + 40] for kind, names in KINDS.items() for start in range(0, len(names), 40)
}
OPTIMIZERS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
)
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


class Colour(Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Unlike(AssertionError):
    """Two trees differ."""


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    """Fail unless two trees are the same in types, order and bits; 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if type(found) is not type(wanted):
        raise Unlike(f"{path}: {type(found)} is not {type(wanted)}")
    if isinstance(wanted, torch.Tensor):
        assert_same_tensor(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), path
    elif isinstance(wanted, dict):
        assert_same(list(found), list(wanted), f"{path}, keys")
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}.{key}")
        assert_same(getattr(found, "__dict__", {}) or 0, getattr(wanted, "__dict__", {}) or 0, f"{path}, attributes")
        assert getattr(found, "default_factory", None) is getattr(wanted, "default_factory", None), path
    elif isinstance(wanted, list | tuple | deque):
        assert len(found) == len(wanted), path
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}.{number}")
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None), path
    elif isinstance(wanted, float):
        assert struct.pack("d", found) == struct.pack("d", wanted), path
    elif isinstance(wanted, np.generic):
        assert found.tobytes() == wanted.tobytes(), path
    else:
        assert found == wanted or wanted != wanted, path  # what is no number equals nothing
        # Sets that are equal may be told in another order.
        assert type(found) is type(wanted), path
        assert isinstance(wanted, set | frozenset) or repr(found) == repr(wanted), path


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore(), OpenOptions(types=[*SUBCLASSES, Colour, Point]))


@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_tensor_comes_back_the_same(store: Store, batch: str) -> None:
    tree = {name: TENSORS[name]() for name in BATCHES[batch]}
    store.save("x", tree, grads=True)
    found = store.load("x")
    assert list(found) == list(tree)
    wrong = [name for name in tree if find_facts(found[name]) != find_facts(tree[name])]
    assert wrong == []


@pytest.mark.slow
def test_all_tensors_come_back_the_same_from_one_tree(store: Store) -> None:
    tree = {name: make() for name, make in TENSORS.items()}
    store.save("x", tree, grads=True)
    found = store.load("x")
    for name, tensor in tree.items():
        assert_same_tensor(found[name], tensor)


@pytest.mark.parametrize("name", ["float32/whole", "int8/0-d", "sparse_csr/whole", "jagged/whole", "subclass/whole"])
def test_a_tensor_may_be_the_whole_tree(store: Store, name: str) -> None:
    tensor = TENSORS[name]()
    store.save("x", tensor)
    assert_same_tensor(store.load("x"), tensor)


def test_a_tensor_of_many_chunks_comes_back_the_same(store: Store) -> None:
    tensor = torch.randn(7, 150_001, generator=torch.Generator().manual_seed(0))
    store.save("x", [tensor, tensor.t().contiguous(), tensor[:, ::2]])
    for found, wanted in zip(store.load("x"), [tensor, tensor.t().contiguous(), tensor[:, ::2]], strict=True):
        assert_same_tensor(found, wanted)


def iter_plain() -> Iterator[object]:
    yield from (None, True, False, 0, 1, -1, 1 << 62, 1 << 63, -(1 << 200), "", "text", "\u00e9\U0001f600", "\ud800")
    yield from (0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, struct.unpack("d", b"\x01\0\0\0\0\0\xf0\x7f")[0], 5e-324)
    yield from (1 + 2j, complex(-0.0, math.nan), b"", b"\x00\xff", bytearray(b"ab"), b"x" * 5000, "y" * 5000)
    yield from ([], (), {}, [[]], ((),), {"a": {}}, set(), frozenset(), {1, "a", (2, None)}, frozenset({b"x"}))
    yield from (OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], 3), deque(), defaultdict(list, a=[1]))
    yield from (range(3, 9, 2), slice(1, None, -1), pathlib.Path("/a/b"), pathlib.PurePosixPath("c"))
    yield from (datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.date(2020, 1, 2), datetime.timedelta(1, 2, 3))
    yield datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)
    yield from (Fraction(1, 3), Decimal("1.50"), Decimal("NaN12"))
    yield from (torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda", 1), torch.sparse_coo, torch.channels_last)
    yield from (
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.datetime64("2001-01-01"),
        np.str_("s"),
        np.bytes_(b"b"),
    )
    yield from (np.arange(6.0).reshape(2, 3), np.array("x"), Colour.RED, Point(1, torch.ones(2)))


def test_every_plain_value_comes_back_the_same_from_one_tree(store: Store) -> None:
    tree = {
        "list": list(iter_plain()),
        "tuple": tuple(iter_plain()),
        (1, "k"): {str(n): v for n, v in enumerate(iter_plain())},
    }
    store.save("x", tree)
    assert_same(store.load("x"), tree)


def test_the_comparison_notices_small_differences() -> None:
    pairs: list[tuple[object, object]] = [
        (1, True), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (deque([1], 2), deque([1])),
        (defaultdict(int), defaultdict(list)), (torch.ones(1), torch.ones(1, dtype=torch.float64)),
    ]  # fmt: skip
    for one, other in pairs:
        with pytest.raises(AssertionError):
            assert_same(one, other)


def make_net() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return net


def make_optimizer(name: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    # Muon knows matrices only, SparseAdam needs sparse gradients.
    parameters = [each for each in net.parameters() if each.dim() == 2] if name == "Muon" else list(net.parameters())
    more: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"max_iter": 3} if name == "LBFGS" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **more)
    return optimizer


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sparse: bool = False) -> None:
    def step() -> Any:
        optimizer.zero_grad()
        loss = net(torch.linspace(-1, 1, 20).view(5, 4)).square().sum()
        loss.backward()
        for parameter in net.parameters() if sparse else ():
            parameter.grad = parameter.grad.to_sparse() if parameter.grad is not None else None
        return loss

    for _ in range(2):
        optimizer.step(step)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_comes_back_the_same(store: Store, name: str) -> None:
    net = make_net()
    optimizer = make_optimizer(name, net)
    train(net, optimizer, sparse=name == "SparseAdam")
    state = optimizer.state_dict()
    store.save("x", {"net": net, "optimizer": optimizer})
    found = store.load("x")
    assert state["state"]
    assert_same(found["optimizer"], state)
    assert_same(found["net"], net.state_dict())


# Some versions of torch warn of what one of their own schedules does.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_every_scheduler_comes_back_the_same(store: Store, name: str) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    train(net, optimizer)
    scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    store.save("x", scheduler)
    assert_same(store.load("x"), scheduler.state_dict())


def test_no_scheduler_is_left_out() -> None:
    found = {
        name
        for name in lr_scheduler.__all__
        if name not in ("LRScheduler", "EPOCH_DEPRECATION_WARNING") and isinstance(getattr(lr_scheduler, name), type)
    }
    assert found == SCHEDULERS.keys()


def test_the_state_of_a_module_keeps_its_versions_and_its_order(store: Store) -> None:
    state = make_net().state_dict()
    store.save("x", state)
    found = store.load("x")
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata  # type: ignore[attr-defined]  # torch puts it there
    assert_same(found, state)


def test_parameters_themselves_keep_their_role(store: Store) -> None:
    net = make_net()
    store.save("x", dict(net.named_parameters()))
    assert all(type(each) is torch.nn.Parameter and each.requires_grad for each in store.load("x").values())


def test_channels_last_weights_stay_so(store: Store) -> None:
    weight = torch.nn.Conv2d(3, 4, 3).weight.data.to(memory_format=torch.channels_last)
    store.save("x", weight)
    found = store.load("x")
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found.stride() == weight.stride()
