"""Saved calls are made again with the same arguments, on another device or in another precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.snapshot.call import Call
from holdfast.store import Store


def collect(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def save_and_load(store: Store, call: Call) -> Call:
    store.save("call", {"call": call})
    loaded = Call()
    store.load_into("call", {"call": loaded})
    return loaded


def test_a_call_comes_back_with_what_was_given_by_position_and_by_keyword(store: Store) -> None:
    call = Call(torch.arange(3), [1, (torch.ones(2),)], mask=None, scale=0.5)

    args, kwargs = save_and_load(store, call).run(collect)

    assert args[0].tolist() == [0, 1, 2]
    assert args[1][0] == 1
    assert args[1][1][0].tolist() == [1, 1]
    assert kwargs == {"mask": None, "scale": 0.5}


def test_arguments_that_shared_memory_still_do(store: Store) -> None:
    base = torch.zeros(4)

    args, _ = save_and_load(store, Call(base, base[1:3])).run(collect)

    args[1].fill_(1)
    assert args[0].tolist() == [0, 1, 1, 0]


def test_a_call_runs_in_another_precision(store: Store) -> None:
    model = torch.nn.Linear(4, 2)
    call = save_and_load(store, Call(torch.randn(3, 4)))

    single = call.run(model)
    double = call.run(model.double(), dtype=torch.float64)

    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, atol=1e-5)


def test_only_floating_arguments_are_cast() -> None:
    args, kwargs = Call(torch.tensor(1), x=torch.ones(1)).run(collect, dtype=torch.float64)

    assert args[0].dtype == torch.int64
    assert kwargs["x"].dtype == torch.float64


def test_a_call_runs_on_another_device() -> None:
    args, kwargs = Call(torch.ones(2), y={"z": torch.ones(3)}).run(collect, device="meta")

    assert args[0].is_meta
    assert kwargs["y"]["z"].is_meta


def test_a_call_without_arguments_is_one_too(store: Store) -> None:
    assert save_and_load(store, Call()).run(collect, device="cpu") == ((), {})


@pytest.mark.parametrize("state", [{}, {"values": []}, {"values": [1], "keys": ["a", "b"]}, None])
def test_what_is_no_call_is_refused(state: Any) -> None:
    call = Call(1)

    with pytest.raises(Mismatch):
        call.load_state_dict(state)

    assert call.args == (1,)


def test_a_call_shows_how_much_it_holds_and_no_tensors() -> None:
    assert repr(Call(torch.zeros(1000), 1, x=2)) == "<Call of 2 by position, 1 by keyword>"


def test_a_call_without_arguments_runs_on_any_device() -> None:
    assert Call().run(lambda *args, **kwargs: (args, kwargs), device="cpu", dtype=torch.float64) == ((), {})
