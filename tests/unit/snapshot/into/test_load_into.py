"""Loading into an existing tree: mismatches, replaced values, and damage."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.cli.main import main
from holdfast.errors import Corrupt, Mismatch, Unsupported
from holdfast.repo.format.layout import PACKS
from holdfast.snapshot.into.plan import IntoOptions
from holdfast.store import Store
from holdfast.store import open as open_store
from tests.kit.loading import bytes_of, noise, problems_of
from tests.kit.saving import pack_of, rot
from tests.tensor_zoo import Scaled

# What does not fit


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(store: Store) -> None:
    saved = {"fits": noise(4), "shape": noise(2, 3), "dtype": noise(2), "only saved": 1, "kind": [1], "tensor": 5}
    target = {
        "fits": torch.zeros(4),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.float64),
        "only target": torch.zeros(1),
        "kind": {"a": 1},
        "tensor": torch.zeros(1),
    }

    assert problems_of(store, saved, target) == [
        "shape: shape (3, 2) in the target, (2, 3) in the snapshot",
        "dtype: torch.float64 in the target, torch.float32 in the snapshot; cast=True converts",
        "only target: the target has it, the snapshot does not",
        "kind: the target has a dict here, the snapshot a list",
        "tensor: the target has a tensor here, the snapshot an int",
        "only saved: the snapshot has it, the target does not",
    ]


def test_problems_of_modules_and_of_optimizers_come_together_with_all_others(store: Store) -> None:
    model = torch.nn.Linear(3, 2)
    saved = {"model": model, "optim": torch.optim.SGD(model.parameters()), "step": 7, "x": noise(2)}
    other = torch.nn.Linear(4, 2, bias=False)
    target = {"x": torch.zeros(2), "model": other, "optim": torch.optim.SGD(other.parameters()), "step": 0, "y": 0}

    assert problems_of(store, saved, target) == [
        "model.weight: shape (2, 4) in the target, (2, 3) in the snapshot",
        "model.bias: the snapshot has it, the target does not",
        "optim.param_groups: parameter groups of 1 in the target, of 2 in the snapshot",
        "y: the target has it, the snapshot does not",
    ]


def test_every_part_of_a_tensor_that_wants_another_value_is_reported(store: Store) -> None:
    memory = torch.zeros(100)
    saved = {"left": noise(10), "right": noise(9), "whole": noise(100)}
    target = {"left": memory[10:20], "right": memory[60:69], "whole": memory}

    problems = problems_of(store, saved, target)

    assert [problem.partition(": ")[0] for problem in problems] == ["whole", "whole"]
    assert "shares memory with left" in problems[0]
    assert "shares memory with right" in problems[1]


def test_many_problems_are_counted_and_kept_as_attributes(store: Store) -> None:
    store.save("x", {f"a{number}": number for number in range(60)})

    with pytest.raises(Mismatch, match="and 10 more") as caught:
        store.load_into("x", {})

    assert len(caught.value.problems) == 60


class Rounding(Scaled):
    """Rounds what is copied into it, as a quantised weight does."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks a parameter that torch passes
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            args[0].payload.copy_(args[1].round())
            return args[0]
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize(
    ("saved", "target", "problem"),
    [
        ([1, 2], [0], "the tree: the target has a list of 1 here, the snapshot one of 2"),
        ((1,), [0], "the tree: the target has a list of 1 here, the snapshot a tuple"),
        ({"a": (1, 2)}, {"a": (1,)}, "a: the target has a tuple of 1 here, the snapshot a tuple of 2"),
        ({"a": [1]}, {"a": 0}, "a: the target has a int here, the snapshot a list"),
        ({"a": {}}, {"a": 0}, "a: the target has a int here, the snapshot a dict"),
        ({"a": noise(1)}, {"a": 0}, "a: the target has a int here, the snapshot a tensor"),
        ({"a": np.zeros(2)}, {"a": 0}, "a: the target has a int here, the snapshot an array"),
        ({"a": 0}, {"a": np.zeros(2)}, "a: the target has a ndarray here, the snapshot an int"),
        ({"a": None}, {"a": torch.zeros(1)}, "a: the target has a tensor here, the snapshot None"),
        ({"a": OrderedDict(b=1)}, {"a": [0]}, "a: the target has a list of 1 here, the snapshot an OrderedDict"),
        (
            {"a": noise(2).to_sparse()},
            {"a": torch.zeros(2)},
            "a: the target has an ordinary tensor here, the snapshot a sparse_coo tensor; assign=True puts that in"
            " place",
        ),
        (
            {"a": noise(2)},
            {"a": torch.zeros(2).to_sparse()},
            "a: the target has a sparse_coo tensor here, the snapshot an ordinary one; assign=True puts that in place",
        ),
        (
            {"a": noise(4)},
            {"a": Scaled(torch.zeros(4), torch.ones(()), {})},
            "a: the target has a Scaled tensor here, the snapshot an ordinary one; assign=True puts that in place",
        ),
        (
            {"a": noise(4)},
            {"a": Rounding(torch.zeros(4), torch.ones(()), {})},
            "a: the target has a Rounding tensor here, the snapshot an ordinary one; assign=True puts that in place",
        ),
        (
            {"a": noise(2, 3)},
            {"a": torch.zeros(3).expand(2, 3)},
            "a: the target is expanded, its items are one and the same memory; clone() it first",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused(store: Store, saved: object, target: object, problem: str) -> None:
    assert problems_of(store, saved, target) == [problem]


def test_a_sparse_tensor_of_another_shape_is_refused_before_anything_is_changed(store: Store) -> None:
    saved = {"a": noise(3), "s": noise(4).to_sparse()}
    target = {"a": torch.zeros(3), "s": torch.zeros(5).to_sparse()}

    assert problems_of(store, saved, target) == ["s: shape (5,) in the target, (4,) in the snapshot"]


def test_without_strict_what_only_one_side_has_is_left_alone(store: Store) -> None:
    store.save("x", {"both": 1, "saved": 2, "model": {"weight": noise(2)}})
    target = {"both": 0, "target": 3, "model": torch.nn.Linear(2, 2)}
    with pytest.raises(Mismatch, match=r"model.weight: shape \(2, 2\) in the target, \(2,\)"):
        store.load_into("x", target, strict=False)

    found = store.load_into("x", {"both": 0, "target": 3, "model": {"bias": 5}}, strict=False)

    assert found == {"both": 1, "target": 3, "model": {"bias": 5}}


def test_a_pickled_value_is_refused_before_anything_is_changed(store: Store) -> None:
    store.save("x", {"a": noise(3), "b": {1: complex}}, allow_pickle=True)
    target: Any = {"a": torch.zeros(3), "b": {1: 0}}

    with pytest.raises(Unsupported, match=r"b.1 was pickled: .*allow_pickle=True.* Nothing was changed"):
        store.load_into("x", target)

    assert target["a"].tolist() == [0, 0, 0]
    assert store.load_into("x", target, allow_pickle=True)["b"] == {1: complex}


# Names, assignment, other faces


def test_prefixes_are_renamed(store: Store) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(2, 2))
    store.save("x", {"model": {f"module.{key}": value for key, value in saved.state_dict().items()}})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))

    store.load_into("x", {"model": model}, rename={"module.": ""})

    assert bytes_of(model) == bytes_of(saved)


def test_names_with_dots_and_names_that_two_leaves_share_are_told_apart(store: Store) -> None:
    saved = {"a": {"b.c": noise(1), "b": {"c": noise(1, seed=1)}}, "a.b": {"c": noise(1, seed=2)}, 1: 2, "1": 3}
    store.save("x", saved)
    target: Any = {"a": {"b.c": torch.zeros(1), "b": {"c": torch.zeros(1)}}, "a.b": {"c": torch.zeros(1)}, 1: 0, "1": 0}

    store.load_into("x", target)

    assert bytes_of(target) == bytes_of(saved)


def test_meta_targets_are_refused_unless_assigned(store: Store) -> None:
    saved = torch.nn.Linear(2, 3)
    store.save("x", {"model": saved, "t": noise(2)})
    with torch.device("meta"):
        target: Any = {"model": torch.nn.Linear(2, 3), "t": torch.zeros(2)}
    with pytest.raises(Mismatch, match=r"model.weight: the tensor in the target is on the meta device; assign=True"):
        store.load_into("x", target)

    store.load_into("x", target, assign=True)

    assert bytes_of(target) == bytes_of({"model": saved, "t": noise(2)})
    assert isinstance(target["model"].weight, torch.nn.Parameter)
    assert target["model"].weight.requires_grad


def test_a_meta_target_in_a_tuple_cannot_be_assigned(store: Store) -> None:
    target = (torch.zeros(2, device="meta"),)

    assert problems_of(store, (noise(2),), target, assign=True) == [
        "0: the saved tensor must replace the target, which is in a tuple or frozen dataclass"
    ]


def test_a_tree_that_is_a_meta_tensor_is_returned_anew(store: Store) -> None:
    store.save("x", noise(2))

    found = store.load_into("x", torch.zeros(2, device="meta"), assign=True)

    assert torch.equal(found, noise(2))


def test_assign_converts_only_with_cast(store: Store) -> None:
    store.save("x", {"t": noise(2), "model": torch.nn.Linear(2, 2)})
    with torch.device("meta"):
        target: Any = {"t": torch.zeros(2, dtype=torch.float64), "model": torch.nn.Linear(2, 2).double()}
    with pytest.raises(Mismatch, match="cast=True converts"):
        store.load_into("x", target, assign=True)

    store.load_into("x", target, assign=True, cast=True)

    assert target["t"].dtype == target["model"].weight.dtype == torch.float64


def test_assign_puts_a_new_tensor_where_the_old_one_was(store: Store) -> None:
    store.save("x", {"p": noise(2)})
    old = torch.nn.Parameter(torch.zeros(2))
    target = {"p": old}

    store.load_into("x", target, assign=True)

    assert target["p"] is not old
    assert isinstance(target["p"], torch.nn.Parameter)
    assert old.tolist() == [0, 0]


def test_files_that_were_put_are_a_dict_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"hello")
    assert main(["-s", str(tmp_path / "s"), "init"]) == 0
    assert main(["-s", str(tmp_path / "s"), "put", "files", str(tmp_path / "a.bin")]) == 0

    assert open_store(tmp_path / "s").load_into("files", {"a.bin": b""}) == {"a.bin": b"hello"}


@pytest.mark.parametrize("verify", ["full", "fast"])
def test_after_damage_the_error_lists_what_was_overwritten(store: Store, verify: Any) -> None:
    store.save("x", {"b": noise(5000), "a": noise(5000, seed=1), "strided": noise(80, 60)})
    location = pack_of(store.repository, "x", "a")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset + 7)
    target = {"b": torch.zeros(5000), "a": torch.zeros(5000), "strided": torch.zeros(60, 80).t()}

    with pytest.raises(Corrupt, match=r"entry 'a'.*the load had written to the target. New values: b. Every") as caught:
        store.load_into("x", target, verify=verify)

    assert caught.value.overwritten == ("b",)
    assert caught.value.partly_written == ()
    assert torch.equal(target["b"], noise(5000))
    assert target["a"].count_nonzero() == target["strided"].count_nonzero() == 0


def test_damage_in_what_is_read_straight_into_the_target_is_told_as_a_mixture(store: Store) -> None:
    store.save("x", {"a": noise(600_000), "b": noise(600_000, seed=1)})
    location = pack_of(store.repository, "x", "a")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset + 7)
    target = {"a": torch.zeros(600_000), "b": torch.zeros(600_000)}

    with pytest.raises(Corrupt, match="Perhaps a mixture of old and new: a") as caught:
        store.load_into("x", target)

    assert "a" in caught.value.overwritten
    assert "a" in caught.value.partly_written


def test_planning_for_an_optimizer_leaves_its_state_alone(store: Store) -> None:
    """Memory for a state that ranks read together is made while the load is planned, which may still be refused."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((4,), 7.0, dtype=torch.float64)
    saved = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], momentum=0.9)
    saved.state[saved.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(4)
    store.save("x", {"optimizer": saved, "more": 1})

    with pytest.raises(Mismatch):
        store.snapshot("x").load_into({"optimizer": optimizer}, IntoOptions(replicas="broadcast"))

    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [7.0] * 4


def test_damage_of_what_is_read_to_new_memory_changes_nothing(store: Store) -> None:
    store.save("x", {"a": noise(5000), "strided": noise(80, 60)})
    location = pack_of(store.repository, "x", "strided")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset + 7)
    target = {"a": torch.zeros(5000), "strided": torch.zeros(60, 80).t()}

    with pytest.raises(Corrupt, match="entry 'strided'") as caught:
        store.load_into("x", target)

    assert "Overwritten" not in str(caught.value)
    assert target["a"].count_nonzero() == 0


def test_what_does_not_fit_is_reported_before_anything_is_read(store: Store) -> None:
    store.save("x", {"strided": noise(80, 60), "shape": noise(2)})
    location = pack_of(store.repository, "x", "strided")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset + 7)

    with pytest.raises(Mismatch, match=r"shape: shape \(3,\) in the target"):
        store.load_into("x", {"strided": torch.zeros(60, 80).t(), "shape": torch.zeros(3)})


def test_without_verification_damage_is_loaded(store: Store) -> None:
    store.save("x", {"a": noise(5000)})
    location = pack_of(store.repository, "x", "a")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset + 7)
    target = {"a": torch.zeros(5000)}

    store.load_into("x", target, verify=False)

    assert (target["a"] != noise(5000)).sum() == 1
