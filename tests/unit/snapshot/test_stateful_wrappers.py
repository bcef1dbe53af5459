"""Wrapped, compiled and data-parallel modules are saved under the names of the module, and loaded into each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from holdfast.snapshot.stateful import find_wrapping
from holdfast.store import Store

Wrap = Callable[[torch.nn.Module], Any]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def bare(module: torch.nn.Module) -> Any:
    return module


parallel: Wrap = torch.nn.parallel.DistributedDataParallel
WRAPS: list[Wrap] = [bare, compiled, parallel, torch.nn.DataParallel, lambda module: parallel(compiled(module))]


@pytest.mark.parametrize("load_wrap", WRAPS)
@pytest.mark.parametrize("save_wrap", WRAPS)
def test_a_state_fits_every_wrapper(store: Store, save_wrap: Wrap, load_wrap: Wrap) -> None:
    saved, target = make(), make()
    store.save("x", {"model": save_wrap(saved)})

    store.load_into("x", {"model": load_wrap(target)})

    assert torch.equal(saved.get_parameter("0.weight"), target.get_parameter("0.weight"))


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_those_of_the_module(store: Store, wrap: Wrap) -> None:
    store.save("x", {"model": wrap(make())})

    assert store.snapshot("x").keys()[:2] == ["model.0.weight", "model.0.bias"]


@pytest.mark.parametrize("wrap", [bare, compiled, torch.nn.DataParallel])
def test_meta_modules_take_over_what_was_saved(store: Store, wrap: Wrap) -> None:
    saved = make()
    store.save("x", {"model": saved})
    with torch.device("meta"):
        target = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    store.load_into("x", {"model": wrap(target)}, assign=True)

    assert torch.equal(saved.get_parameter("0.weight"), target.get_parameter("0.weight"))


def test_a_wrapper_that_changes_states_itself_is_left_to_do_so(store: Store) -> None:
    module = compiled(make())
    module.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)

    store.save("x", {"model": module})

    assert find_wrapping(module) == ""
    assert store.snapshot("x").keys()[0] == "model._orig_mod.0.weight"


def test_hooks_of_the_wrapped_module_see_its_own_names(store: Store) -> None:
    saved, target = make(), make()
    seen: list[str] = []

    def note(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        seen.extend(key.removeprefix(prefix) for key in state)

    hooked: Any = target
    hooked.register_load_state_dict_pre_hook(note)
    store.save("x", {"model": saved})

    store.load_into("x", {"model": compiled(target)})

    assert "0.weight" in seen
    assert torch.equal(saved.get_parameter("0.weight"), target.get_parameter("0.weight"))


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_versions_of_modules_are_kept_under_the_names_of_the_module(store: Store, wrap: Wrap) -> None:
    store.save("x", wrap(make()))

    loaded: Any = store.load("x")

    assert list(loaded._metadata) == ["", "0", "1"]
    assert loaded._metadata["1"] == {"version": 2}


def test_wrapped_or_not_a_module_has_one_digest(store: Store) -> None:
    module = make()

    digests = {store.save(str(number), wrap(module)).digest for number, wrap in enumerate(WRAPS)}

    assert len(digests) == 1
