"""Modules and optimizers under other names: the state that is saved, and which states are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.snapshot.into.match import NamedModule, NamedOptimizer


def make_optimizer() -> NamedOptimizer:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups)
    first.grad, second.grad = torch.ones(2), torch.ones(3)
    optimizer.step()
    return NamedOptimizer(optimizer, ["a", "b"])


def test_the_state_of_an_optimizer_is_keyed_by_names_and_loaded_by_them() -> None:
    saved, target = make_optimizer().state_dict(), make_optimizer()
    saved["state"]["b"]["exp_avg"].fill_(7)
    target.load_state_dict(saved)

    assert list(saved["state"]) == ["a", "b"]
    assert [group["params"] for group in saved["param_groups"]] == [["a"], ["b"]]
    assert target.state_dict()["state"]["b"]["exp_avg"].tolist() == [7, 7, 7]
    assert target.state_dict()["param_groups"][1]["lr"] == 0.5


@pytest.mark.parametrize(
    ("groups", "problems"),
    [
        ([["a"], ["b"]], []),
        ([["a", "b"]], ["2 parameter groups in the target, 1 in the snapshot"]),
        ([["a"], ["c"]], ["b is in group 1 of the target only", "c is in group 1 of the snapshot only"]),
    ],
)
def test_groups_that_differ_are_named(groups: list[list[str]], problems: list[str]) -> None:
    target = make_optimizer()
    state = target.state_dict()
    state["param_groups"] = [{"params": names} for names in groups]

    assert target.find_problems(groups) == problems
    if problems:
        with pytest.raises(Mismatch) as caught:
            target.load_state_dict(state)
        assert caught.value.problems == tuple(problems)


def test_a_module_is_read_and_written_by_the_functions_that_were_passed() -> None:
    written: list[tuple[dict[str, int], bool]] = []
    named = NamedModule(torch.nn.Identity(), lambda: {"x": 1}, lambda state, strict: written.append((state, strict)))
    named.load_state_dict(named.state_dict())

    assert written == [({"x": 1}, True)]
