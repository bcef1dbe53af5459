"""Atomic loads: an error in any object's own code, or too little memory, leaves the target bit for bit as it was."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

import holdfast.snapshot.into.load_into
from holdfast.errors import Mismatch, OutOfMemory, Unsupported
from holdfast.snapshot.into.load_into import delaying_signals
from holdfast.store import Store
from tests.kit.hooking import Hook
from tests.kit.loading import bytes_of, noise


class Faulty:
    """Fails, once or always, in the middle of taking its state over."""

    def __init__(self, value: int, *, times: int = 0) -> None:
        self.held = [value]
        self.value = value
        self.times = times

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held[:] = state["held"]
        if self.times > 0:
            self.times -= 1
            raise ValueError("not today")
        self.value = state["value"]


def make_hooked() -> torch.nn.Module:
    model = torch.nn.BatchNorm1d(3)
    register: Any = model.register_load_state_dict_post_hook
    register(lambda module, keys: setattr(module, "loaded", True))
    return model


def make_target(times: int) -> dict[str, Any]:
    torch.manual_seed(1)
    hooked, model = make_hooked(), torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    large = noise(3_000_000, seed=1)
    target: dict[str, Any] = {
        "hooked": hooked,
        "model": model,
        "optimizer": optimizer,
        "large": large,
        "tied": large,
        "view": large[10:20],
        "strided": noise(6, seed=1).reshape(2, 3).t(),
        "half": noise(4, seed=1).half(),
        "grad": torch.nn.Parameter(noise(4, seed=1)),
        "value": 1,
        "faulty": Faulty(1, times=times),
    }
    target["grad"].grad = noise(4, seed=5)
    return target


def save(store: Store) -> None:
    target = make_target(0)
    with torch.no_grad():
        for tensor in (
            target["large"],
            target["strided"],
            target["half"],
            target["grad"],
            *target["model"].parameters(),
        ):
            tensor.add_(1)
        target["hooked"].weight.fill_(5)
        target["optimizer"].state[target["model"].weight]["exp_avg"].fill_(3)
    target["optimizer"].param_groups[0]["lr"] = 7.0
    target["value"] = 2
    target["faulty"] = Faulty(2)
    store.save("x", target | {"strided": target["strided"].contiguous(), "half": target["half"].float()}, grads=True)


def facts_of(target: dict[str, Any]) -> Any:
    attributes = {key: value for key, value in vars(target["hooked"]).items() if key in ("loaded", "training")}
    faulty = target["faulty"]
    grads = [bytes_of(each.grad) for each in (target["grad"], *target["model"].parameters())]
    return repr((bytes_of({**target, "faulty": None}), attributes, faulty.value, faulty.held, grads))


def test_an_object_that_fails_leaves_everything_as_it_was(store: Store) -> None:
    save(store)
    target = make_target(1)
    before, identities = facts_of(target), [id(target["optimizer"].state), id(target["faulty"].held)]

    with pytest.raises(
        Mismatch, match=r"refused its state: not today. The target was restored: it is as it was"
    ) as caught:
        store.load_into("x", target, atomic=True, cast=True)

    assert facts_of(target) == before
    assert [id(target["optimizer"].state), id(target["faulty"].held)] == identities
    assert caught.value.overwritten == ()


def test_an_atomic_load_gives_what_a_direct_one_does(store: Store) -> None:
    save(store)
    direct, atomic = make_target(0), make_target(0)

    store.load_into("x", direct, cast=True)
    store.load_into("x", atomic, cast=True, atomic=True)

    assert facts_of(atomic) == facts_of(direct)
    assert facts_of(atomic) != facts_of(make_target(0))
    assert atomic["large"][10:20].data_ptr() == atomic["view"].data_ptr()


def test_an_object_that_refuses_its_old_state_as_well_is_named(store: Store) -> None:
    save(store)
    target = make_target(2)

    with pytest.raises(Mismatch, match=r"faulty refused its old state: not today. Before this error") as caught:
        store.load_into("x", target, atomic=True, cast=True)

    assert caught.value.overwritten == caught.value.partly_written == ("faulty",)
    assert bytes_of({**target, "faulty": None}) == bytes_of({**make_target(0), "faulty": None})


def test_a_state_that_cannot_be_copied_is_refused_before_anything_changes(store: Store) -> None:
    class Locked(Faulty):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "generator": (number for number in range(3))}

    store.save("x", {"a": noise(9), "faulty": Faulty(2)})
    target: dict[str, Any] = {"a": torch.zeros(9), "faulty": Locked(1)}

    with pytest.raises(
        Unsupported, match=r"needs a copy of the state of a Locked, which cannot be copied: cannot pickle"
    ):
        store.load_into("x", target, atomic=True)

    assert target["a"].count_nonzero() == 0


def test_a_lazy_module_is_refused_before_anything_changes(store: Store) -> None:
    store.save("x", torch.nn.Linear(2, 3))

    with pytest.raises(Mismatch, match=r"not initialised yet; run it once, or load without atomic=True"):
        store.load_into("x", torch.nn.LazyLinear(3), atomic=True)


def test_too_little_memory_is_refused_before_anything_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save("x", {"a": noise(1000)})
    target = {"a": torch.zeros(1000)}
    monkeypatch.setattr(
        holdfast.snapshot.into.in_place, "read_memory_facts", lambda path: {"MemAvailable": 3000, "SwapFree": 500}
    )

    with pytest.raises(OutOfMemory, match=r"needs 4000 bytes of new memory .*: 3000 bytes are available") as caught:
        store.load_into("x", target, atomic=True)

    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed_bytes == 4000
    assert target["a"].count_nonzero() == 0
    store.load_into("x", target)


def test_memory_that_torch_refuses_is_told_as_such(store: Store, hook: Hook) -> None:
    def refuse(size_bytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")

    store.save("x", {"a": noise(1000)})
    hook(holdfast.snapshot.into.in_place, "new_memory", refuse)

    with pytest.raises(
        OutOfMemory, match=r"a second copy of the target: DefaultCPUAllocator: can't allocate memory. No"
    ):
        store.load_into("x", {"a": torch.zeros(1000)}, atomic=True)


def test_signals_wait_for_the_end_and_are_handled_then() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = []

    def fail_when_interrupted() -> None:
        with delaying_signals():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            raise ValueError("kept as the context")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail_when_interrupted()

    assert reached == [1]
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is before
