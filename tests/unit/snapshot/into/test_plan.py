"""The plan of a load: what a branch adds, which entries are needed, and how values are fitted to their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.snapshot.into.plan import IntoOptions, IntoPlan, check_cast, fit_replacement
from holdfast.store import Store
from holdfast.tensors.spec import SpecDecoder
from holdfast.trees.registered import Types


@pytest.fixture
def plan(store: Store, request: pytest.FixtureRequest) -> IntoPlan:
    store.save("run", {"w": torch.ones(2, 3), "n": 5})
    opened = store.snapshot("run").open()
    return IntoPlan(opened, IntoOptions(**getattr(request, "param", {})), Types(), SpecDecoder(opened.name))


@pytest.mark.parametrize("options", [{"replicas": "all"}, {"verify": "perhaps"}])
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        IntoOptions(**options)


def test_a_branch_changes_the_plan_only_when_it_is_absorbed(plan: IntoPlan) -> None:
    branch = plan.branch()
    branch.add_problem(("w", 0), "it is red")
    branch.is_replaced = True
    assert (plan.problems, plan.is_replaced) == ([], False)
    plan.absorb(branch)

    assert (plan.problems, plan.is_replaced) == (["w.0: it is red"], True)


def test_all_stored_leaves_below_a_node_are_needed(plan: IntoPlan) -> None:
    plan.read_below(plan.opened.tree, ("state",))

    assert [name for name, _ in plan.nodes] == ["state.w"]
    assert plan.list_wants() == {0: None}


def test_a_saved_tensor_is_found_by_its_node(plan: IntoPlan) -> None:
    found = plan.find_saved(["@tensor", 0], "w")

    assert (found.ref.name, found.spec.shape) == ("w", (2, 3))


@pytest.mark.parametrize("plan", [{}, {"cast": True}], indirect=True)
def test_another_dtype_is_a_problem_unless_it_may_be_cast(plan: IntoPlan) -> None:
    can_cast = check_cast(plan, torch.ones(2).half(), torch.float32, ("w",))

    assert can_cast == plan.options.cast
    expected = ["w: torch.float16 in the target, torch.float32 in the snapshot; cast=True converts"]
    assert plan.problems == ([] if can_cast else expected)


@pytest.mark.parametrize("plan", [{"cast": True}], indirect=True)
def test_a_replacement_has_the_dtype_and_role_of_its_target_and_stays_one_object(plan: IntoPlan) -> None:
    target, value = torch.nn.Parameter(torch.ones(2).double(), requires_grad=False), torch.tensor([1.0, 2.0])
    first, second = (fit_replacement(plan, torch.ones(2).double(), value, ("w",)) for _ in range(2))
    parameter = fit_replacement(plan, target, value, ("w",))

    assert first is second
    assert first.dtype == parameter.dtype == torch.float64
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad
