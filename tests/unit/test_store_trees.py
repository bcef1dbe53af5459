"""Saving and loading trees: what a save tells and records, which options are refused, and what is left untouched."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import NameInUse, NotFound, Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.query.lineage import LineageLog
from holdfast.repo.format.layout import PACKS
from holdfast.repo.upkeep.collect import Rules
from holdfast.store import Store
from holdfast.store import open as open_store
from tests.kit.hooking import Hook
from tests.kit.saving import keys


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_save_tells_what_it_did(store: Store) -> None:
    result = store.save("run/1", {"a": noise(5000), "b": noise(5000), "c": noise(100)})

    assert (result.name, result.generation, result.existed) == ("run/1", 0, False)
    assert result.logical_bytes == 40_400
    assert (result.new_bytes, result.reused_bytes) == (20_400, 20_000)
    assert result.digest == store.snapshot("run/1").digest
    assert result.seconds > 0


def test_what_the_store_holds_already_is_not_written_again(store: Store) -> None:
    tree = {"a": noise(5000), "b": noise(300, 40).t()}
    store.save("run/1", tree)
    packs = keys(store.repository.store, PACKS)

    result = store.save(
        "run/2", {"other": {"place": tree["a"]}, "b": tree["b"].clone(memory_format=torch.preserve_format)}
    )

    assert (result.new_bytes, result.reused_bytes) == (0, result.logical_bytes)
    assert keys(store.repository.store, PACKS) == packs


def test_only_what_changed_is_written(store: Store) -> None:
    tree = {str(number): noise(5000, seed=number) for number in range(10)}
    store.save("run/1", tree)
    tree["3"][7] += 1

    assert store.save("run/2", tree).new_bytes == 20_000


def test_a_name_in_use_is_refused_unless_it_holds_the_same_or_is_overwritten(store: Store) -> None:
    first = store.save("x", {"a": noise(10)}, metadata={"n": 1})

    again = store.save("x", {"a": noise(10)}, metadata={"n": 1})
    with pytest.raises(NameInUse, match="'x' is in use and holds other content; nothing was written") as caught:
        store.save("x", {"a": noise(11)}, metadata={"n": 1})
    with pytest.raises(NameInUse, match="overwrite=True"):
        store.save("x", {"a": noise(10)}, metadata={"n": 2})
    over = store.save("x", {"a": noise(11)}, overwrite=True)

    assert caught.value.name == "x"
    assert (again.existed, again.digest, again.new_bytes) == (True, first.digest, 0)
    assert (over.existed, over.generation) == (False, 1)
    assert store.load("x")["a"].shape == (11,)


def test_a_base_is_what_a_save_builds_upon(store: Store) -> None:
    store.save("other/1", {"a": noise(5000)})

    assert store.save("run/1", {"a": noise(5000)}, base="other/1").new_bytes == 0
    with pytest.raises(NotFound, match="no snapshot 'missing'"):
        store.save("run/2", {"a": noise(6000)}, base="missing")


def test_metadata_and_the_environment_are_recorded(store: Store) -> None:
    store.save("x", {"a": 1}, metadata={"loss": 0.5, "tags": ["a", None]})

    snap = store.snapshot("x")

    assert snap.metadata == {"loss": 0.5, "tags": ["a", None]}
    assert set(snap.environment) == {"host", "python", "torch", "platform", "world_size"}
    assert snap.environment["torch"] == str(torch.__version__)


def test_the_environment_is_not_recorded_if_it_must_not_be(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", environment=False)
    store.save("x", {"a": 1})

    assert store.snapshot("x").environment == {}
    assert pickle.loads(pickle.dumps(store)).save("y", 1).name == "y"
    assert store.snapshot("y").environment == {}


def test_the_environment_is_not_part_of_the_content(tmp_path: Path) -> None:
    first = open_store(tmp_path / "s", environment=False).save("x", {"a": 1})

    again = open_store(tmp_path / "s").save("x", {"a": 1})

    assert again.existed
    assert again.digest == first.digest


def test_what_has_no_form_names_its_place_and_writes_nothing(store: Store) -> None:
    with pytest.raises(
        Unsupported, match=r"a\.1\.b: a function cannot be saved; convert it, or pass allow_pickle=True"
    ):
        store.save("x", {"a": [1, {"b": lambda: None}]})

    assert keys(store.repository.store, "") == []


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda store: store.load("x", verify="slow"), "verify must be 'full', 'fast', 'device' or False, not 'slow'"),
        (
            lambda store: store.load_into("x", {"a": 0}, verify=True),
            "verify must be 'full', 'fast', 'device' or False, not True",
        ),
        (lambda store: store.load("x", aliases="none"), "aliases must be 'preserve' or 'fresh', not 'none'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(store: Store, act: Callable[[Any], object], text: str) -> None:
    store.save("x", {"a": 1})

    with pytest.raises(ValueError, match=text):
        act(store)


def test_names_tags_and_snapshots_are_all_accepted(store: Store) -> None:
    store.save("run/1", {"a": 5})
    store.tag("best", "run/1")
    snap = store.latest()
    assert snap is not None

    assert store.load("run/1") == store.load("best") == store.load(snap) == snap.load() == {"a": 5}
    assert store.load_into(snap, {"a": 0}) == snap.load_into({"a": 1}) == {"a": 5}
    with pytest.raises(NotFound, match="no snapshot 'worst'"):
        store.load("worst")


def _random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


def test_random_generators_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Dropout())
    tree = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "array": np.arange(5)}
    before = _random_states()

    store.save("a", tree)
    store.save_async("b", tree).wait()
    store.save_async("c", tree, staging="budget").wait()
    store.load("a")
    store.load_into("b", tree)
    store.load("c", mmap=True)
    store.snapshot("a")["model.0.weight"][3:5]
    store.delete("c")
    store.gc(Rules(min_age_s=0))
    store.check(read=True)

    assert _random_states() == before


def test_saving_changes_no_tensor_and_no_graph(store: Store) -> None:
    parameter = torch.nn.Parameter(noise(5))
    view = parameter * 2
    version, before = parameter._version, parameter.tolist()

    store.save("x", {"p": parameter, "v": view})
    store.save_async("y", {"p": parameter, "v": view}).wait()

    assert (parameter._version, parameter.tolist(), parameter.grad) == (version, before, None)
    torch.autograd.backward(view.sum())
    assert parameter.grad is not None


def test_saving_and_loading_leave_no_files_open(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.save_async("x", {"a": noise(5000)}).wait()
    store.load("x")
    before = len(os.listdir("/proc/self/fd"))

    for step in range(5):
        store.save(f"s{step}", {"a": noise(5000, seed=step)})
        store.load(f"s{step}", mmap=True)

    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_an_error_after_everything_was_loaded_lists_it_as_overwritten(store: Store, hook: Hook) -> None:
    store.save("x", {"w": noise(4)})
    target = {"w": torch.zeros(4)}

    def fail(self: LineageLog, snapshot: object) -> None:
        raise MemoryError

    hook(LineageLog, "note_loaded", fail)

    with pytest.raises(MemoryError) as caught:
        store.load_into("x", target)

    assert torch.equal(target["w"], noise(4))
    assert vars(caught.value)["overwritten"] == ("w",)
