"""A resumed run has the same random numbers, batches, losses and parameters as one that was not stopped."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import Mismatch
from holdfast.snapshot import resume
from holdfast.snapshot.resume import ResumableSampler, RngState
from holdfast.store import Store
from holdfast.store import open as open_store

ROOT: Final = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


def draw() -> tuple[list[float], list[float], list[float]]:
    """Take some numbers from every generator, an odd number of normal ones: half of a pair stays behind."""
    python = [random.random(), random.gauss(0, 1)]
    numpy = [float(np.random.random()), float(np.random.standard_normal())]
    return python, numpy, [*torch.rand(3).tolist(), *torch.randn(1).tolist()]


# Random generators


def test_a_restored_state_gives_the_same_numbers_again() -> None:
    draw()
    state = RngState().state_dict()
    expected = [draw() for _ in range(3)]

    RngState().load_state_dict(state)

    assert [draw() for _ in range(3)] == expected


def test_taking_the_state_draws_nothing() -> None:
    state = RngState().state_dict()
    expected = draw()
    RngState().load_state_dict(state)

    RngState().state_dict()

    assert draw() == expected


def test_a_state_goes_through_a_store_unchanged() -> None:
    rng = RngState()
    with open_store("memory://") as store:
        store.save("rng", {"rng": rng})
        expected = draw()

        store.load_into("rng", {"rng": rng})

    assert draw() == expected


def test_a_state_is_saved_in_the_background_as_it_was() -> None:
    rng = RngState()
    with open_store("memory://") as store:
        # Bytes cannot be written to; torch warns of those when they are not copied with care.
        handle = store.save_async("rng", {"rng": rng})
        expected = draw()
        handle.wait()

        store.load_into("rng", {"rng": rng})

    assert draw() == expected


def _iter_values(tree: Any) -> Iterator[object]:
    if isinstance(tree, dict):
        for item in tree.values():
            yield from _iter_values(item)
    else:
        yield tree


def test_a_state_holds_nothing_that_a_load_could_move() -> None:
    kinds = {type(value) for value in _iter_values(RngState().state_dict())}

    assert kinds <= {int, float, str, bytes, type(None)}


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        state = RngState().state_dict()
        RngState().load_state_dict(state)

    assert RngState().state_dict() == state


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_whatever_numpy_draws_from_is_restored(kind: type[np.random.BitGenerator]) -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs do not list it
    np.random.set_bit_generator(kind(1))  # type: ignore[attr-defined]  # numpy's stubs do not list it
    try:
        state = RngState().state_dict()
        expected = draw()
        RngState().load_state_dict(state)
        found = draw()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]  # numpy's stubs do not list it

    assert found == expected


def _drop(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(key)


def _put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.update({key: value})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_drop("numpy"), "'numpy'"),
        (_put("torch", b"too short"), "RNG state"),
        (_put("python", {"version": 9, "words": bytes(2500), "gauss": None}), "version 9"),
        (_put("numpy", {"bit_generator": "PCG64", "state": {}}), "MT19937|PCG64"),
    ],
    ids=["missing", "torch", "python", "numpy"],
)
def test_a_state_that_one_generator_refuses_moves_none(spoil: Callable[[dict[str, Any]], object], reason: str) -> None:
    state = RngState().state_dict()
    draw()
    before = RngState().state_dict()
    spoil(state)

    with pytest.raises(Mismatch, match=reason) as caught:
        RngState().load_state_dict(state)

    assert "load the rest without it, and set new seeds" in str(caught.value)
    assert RngState().state_dict() == before


class Accelerator:
    """Stands for torch.cuda: a generator for each device, reached by its index."""

    def __init__(self, count: int) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]

    def get_rng_state(self, index: int = 0) -> torch.Tensor:
        return self.generators[index].get_state()

    def set_rng_state(self, state: torch.Tensor, index: int = 0) -> None:
        self.generators[index].set_state(state)

    def draw(self) -> list[list[float]]:
        return [torch.rand(2, generator=generator).tolist() for generator in self.generators]


def _install(monkeypatch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> Accelerator:
    module = Accelerator(count)
    monkeypatch.setattr(resume, "_find_accelerator", lambda: (kind, count, module))
    return module


@pytest.mark.parametrize(("count", "kind"), [(2, "cuda"), (1, "mps")])
def test_every_accelerator_is_restored(monkeypatch: pytest.MonkeyPatch, count: int, kind: str) -> None:
    devices = _install(monkeypatch, count, kind)
    state = RngState().state_dict()
    expected = devices.draw()

    RngState().load_state_dict(state)

    assert devices.draw() == expected


def test_accelerators_are_left_alone_if_told(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = _install(monkeypatch, 1)
    state = RngState().state_dict()
    devices.draw()
    before = devices.get_rng_state()

    RngState(cuda=False).load_state_dict(state)

    assert torch.equal(devices.get_rng_state(), before)
    assert RngState(cuda=False).state_dict()["accelerator"] is None


@pytest.mark.parametrize(
    ("count", "kind", "here"), [(1, "cuda", "1 cuda"), (2, "xpu", "2 xpu"), (0, "", "0 accelerators")]
)
def test_a_state_of_other_devices_is_refused(monkeypatch: pytest.MonkeyPatch, count: int, kind: str, here: str) -> None:
    _install(monkeypatch, 2)
    state = RngState().state_dict()
    _install(monkeypatch, count, kind)

    with pytest.raises(Mismatch, match=rf"2 cuda device\(s\), and here are {here}; RngState\(cuda=False\) leaves"):
        RngState().load_state_dict(state)


def test_a_device_state_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = _install(monkeypatch, 2)
    state = RngState().state_dict()
    state["accelerator"]["states"][1] = b"short"
    expected = devices.get_rng_state()

    with pytest.raises(Mismatch, match="cuda has another form in this torch"):
        RngState().load_state_dict(state)

    assert torch.equal(devices.get_rng_state(), expected)


# A whole run


class Training:
    """A small training job with everything that makes resuming hard: dropout, shuffling, AdamW, a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(20, 8), torch.randn(20, 1))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=5)
        self.sampler = ResumableSampler(20, batch_size=6, seed=3)
        self.loader = DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.sampler,
            "rng": RngState(),
        }

    def run(self, num_steps: int) -> list[str]:
        """Train for some steps, across the ends of epochs, and return the losses, exactly."""
        losses: list[str] = []
        while len(losses) < num_steps:
            for x, y in self.loader:
                noise = random.random() + float(np.random.random())
                loss = nn.functional.mse_loss(self.model(x * noise), y)
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self.optimizer.step()
                self.schedule.step()
                self.sampler.advance()
                losses.append(float(loss.item()).hex())
                if len(losses) == num_steps:
                    break
        return losses


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        _start(store)
        random.seed()
        np.random.seed()
        torch.seed()

        resumed = Training()
        store.load_into("step-6", resumed.state)
        losses = resumed.run(9)

        assert losses == _read_losses(store)
        assert store.save("resumed", resumed.state).digest == store.snapshot("step-15").digest


@pytest.mark.slow
def test_a_run_resumed_in_a_fresh_process_is_the_same_run(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        _start(store)

    code = f"from tests.unit.snapshot.test_resume import go_on; go_on({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    with open_store(tmp_path) as store:
        assert run.stdout.split() == _read_losses(store)
        assert store.snapshot("resumed").digest == store.snapshot("step-15").digest


def _start(store: Store) -> None:
    """Train for 15 steps, saving at the sixth and the last."""
    training = Training()
    training.run(6)
    store.save("step-6", training.state)
    losses = training.run(9)
    store.save("step-15", training.state)
    store.save("losses", losses)


def _read_losses(store: Store) -> list[str]:
    losses: list[str] = store.load("losses")
    return losses


def go_on(place: str) -> None:
    """Resume at the sixth step in a process that knows nothing but the store, and print the losses."""
    training = Training()
    with open_store(place) as store:
        store.load_into("step-6", training.state)
        sys.stdout.write("\n".join(training.run(9)))
        store.save("resumed", training.state)
