"""What an export selects, how tensors are called, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import NotFound, Unsupported
from holdfast.formats.writing.plan import TensorPlan, leave_out_others, plan_tensors, select_tree

Plan = Callable[..., TensorPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return what saves a tree, and plans its export."""
    store = holdfast.open(tmp_path / "store")

    def run(tree: Any, prefix: str = "", exclude: tuple[str, ...] = (), **options: Any) -> TensorPlan:
        store.save("a", tree, **options)
        opened = store.snapshot("a").open()
        return plan_tensors(opened, select_tree(opened, prefix, exclude))

    return run


def test_names_are_joined_with_dots(plan: Plan) -> None:
    found = plan({"a": {"b.c": torch.ones(1)}, "d": [torch.ones(2), 3]})

    assert {name: each.tensor.name for name, each in found.tensors.items()} == {"a.b.c": "a.b.c", "d.0": "d.0"}
    assert found.size_bytes == 12


@pytest.mark.parametrize(
    ("prefix", "names"),
    [("model", ["enc.w", "enc.b", "dec"]), ("model.enc", ["w", "b"]), ("model.dec", ["dec"]), ("list.1", ["x"])],
)
def test_a_prefix_selects_and_is_removed(plan: Plan, prefix: str, names: list[str]) -> None:
    one = torch.ones(1)
    tree = {
        "model": {"enc.w": one, "enc.b": one.clone(), "dec": one.clone()},
        "list": [0, {"x": one.clone()}],
        "o": one,
    }

    found = plan(tree, prefix)

    assert list(found.tensors) == names
    assert all(each.tensor.name.startswith(prefix) for each in found.tensors.values())


def test_excluded_leaves_are_left_out(plan: Plan) -> None:
    found = plan({"a": {"x": torch.ones(1), "y": torch.ones(1)}, "b": torch.ones(1)}, exclude=("a.x", "b*"))

    assert list(found.tensors) == ["a.y"]


def test_a_prefix_that_matches_nothing_is_refused(plan: Plan) -> None:
    with pytest.raises(NotFound, match=r"no leaf 'modle' in 'a'; did you mean 'model'"):
        plan({"model": torch.ones(1)}, "modle")


def test_excluding_everything_is_refused(plan: Plan) -> None:
    with pytest.raises(NotFound, match="nothing of 'a' is left to export"):
        plan({"model": torch.ones(1)}, exclude=("*",))


def test_two_tensors_of_one_name_are_refused(plan: Plan) -> None:
    with pytest.raises(Unsupported, match=r"would both be called 'a\.b' in the files"):
        plan({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def test_every_tensor_that_no_format_has_is_named(plan: Plan) -> None:
    tree = {"s": torch.eye(3).to_sparse(), "m": torch.empty(2, device="meta"), "ok": torch.ones(1)}

    with pytest.raises(Unsupported, match=r"s \(a sparse_coo tensor\), m \(on the meta device, without values\)"):
        plan(tree)


def test_quantised_tensors_are_refused(plan: Plan) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

    with pytest.raises(Unsupported, match=r"q \(quantised\)"):
        plan({"q": tensor})


def test_gradients_are_reported(plan: Plan) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)

    found = plan({"w": weight}, grads=True)

    assert list(found.tensors) == ["w"]
    assert [each.name for each in found.left_out] == ["w.grad"]


def test_ties_are_exact(plan: Plan) -> None:
    base = torch.arange(6.0)
    found = plan({"a": base, "b": base, "c": base[:3], "d": base.view(2, 3), "e": base.clone()}).tensors

    ties = {name: each.tie for name, each in found.items()}
    assert ties["a"] == ties["b"]
    assert len(set(ties.values())) == 4


def test_a_tensor_that_is_the_whole_tree_has_a_name(plan: Plan) -> None:
    assert list(plan(torch.ones(1)).tensors) == ["value"]


def test_everything_else_is_listed_by_its_name_in_the_snapshot(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "store")
    store.save("a", {"m": {"w": torch.ones(1), "n": 1}})
    opened = store.snapshot("a").open()
    tree = select_tree(opened, "m", ())

    found = leave_out_others(plan_tensors(opened, tree), tree, "a file")

    assert [(each.name, each.reason) for each in found] == [("m.n", "an int: a file contains tensors only")]
