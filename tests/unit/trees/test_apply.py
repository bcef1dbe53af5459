"""A function is applied to every tensor of a tree, and the containers keep their types."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from holdfast.errors import Unsupported
from holdfast.trees.apply import MAX_DEPTH, apply_to_tensors, iter_tensors


class Pair(NamedTuple):
    left: object
    right: object


class Labelled(tuple[object, ...]):
    label = "none"


class History(list[object]):
    label = "none"


class Registry(OrderedDict[str, object]):
    label = "none"


@dataclass
class Plain:
    x: object
    y: object = None


@dataclass(frozen=True)
class Frozen:
    x: object
    y: object = None

    @cached_property
    def total(self) -> float:
        assert isinstance(self.x, torch.Tensor)
        return float(self.x.sum())


@dataclass(frozen=True, slots=True)
class Slotted:
    x: object
    y: object = None


@dataclass(frozen=True)
class HandSlotted:
    __slots__ = ("x", "y")
    x: object
    y: object


@dataclass
class Derived:
    x: torch.Tensor
    doubled: torch.Tensor = field(init=False)
    never_set: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.x


def one() -> torch.Tensor:
    return torch.ones(2)


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def values_of(tree: object) -> list[float]:
    return [float(tensor.flatten()[0]) for _, tensor in iter_tensors(tree)]


@pytest.mark.parametrize(
    "tree",
    [
        one(),
        {"a": one(), 3: 4},
        OrderedDict(b=one(), a=0),
        [one(), "text"],
        (one(), None),
        Pair(one(), 1),
        {one()},
        frozenset({one(), "x"}),
        deque([one(), 5], maxlen=2),
        Plain(one(), "kept"),
        Frozen(one(), "kept"),
        Slotted(one(), "kept"),
        HandSlotted(one(), "kept"),
        torch.max(torch.ones(1, 2), dim=0),
        Labelled([one()]),
        History([one()]),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_every_container_comes_back_as_its_type_with_its_tensors_converted(tree: object) -> None:
    before = values_of(tree)

    result = apply_to_tensors(add_one, tree)

    assert type(result) is type(tree)
    assert values_of(result) == [value + 1 for value in before]
    assert values_of(tree) == before


def test_what_is_no_tensor_stays_the_same_object() -> None:
    marker, module = object(), torch.nn.Linear(1, 1)

    result = apply_to_tensors(add_one, {"t": one(), "o": marker, "m": module, "type": Plain, "size": torch.Size([1])})

    assert result["o"] is marker
    assert result["m"] is module
    assert result["type"] is Plain
    assert type(result["size"]) is torch.Size


def test_a_module_that_is_a_dataclass_is_left_alone() -> None:
    @dataclass(eq=False)
    class Scale(torch.nn.Module):
        weight: torch.Tensor

        def __new__(cls, weight: torch.Tensor) -> Scale:
            module = super().__new__(cls)
            torch.nn.Module.__init__(module)
            return module

    module = Scale(torch.nn.Parameter(one()))

    assert apply_to_tensors(add_one, [module])[0] is module


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    assert list(apply_to_tensors(add_one, {"z": one(), "a": 1, "m": one()})) == ["z", "a", "m"]


def test_a_defaultdict_keeps_its_factory() -> None:
    tree: defaultdict[str, Any] = defaultdict(list, a=one())

    result = apply_to_tensors(add_one, tree)

    assert result.default_factory is list


def test_a_counter_stays_a_counter() -> None:
    counter: Counter[str] = Counter({"a": 2})
    counter["t"] = one()  # type: ignore[assignment]  # what people do with counters

    result = apply_to_tensors(add_one, counter)

    assert type(result) is Counter
    assert result["a"] == 2


def test_a_deque_keeps_its_length() -> None:
    result = apply_to_tensors(add_one, deque([one(), one()], maxlen=2))

    assert result.maxlen == 2


@pytest.mark.parametrize("tree", [Labelled([one()]), History([one()]), Registry(a=one())], ids=repr)
def test_attributes_of_a_container_are_kept(tree: Any) -> None:
    tree.label = "mine"

    result = apply_to_tensors(add_one, tree)

    assert type(result) is type(tree)
    assert result.label == "mine"


def test_the_metadata_of_a_state_dict_is_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()

    result = apply_to_tensors(add_one, state)

    assert result._metadata == state._metadata  # type: ignore[attr-defined]  # set by nn.Module


def test_fields_that_init_does_not_take_are_converted_and_unset_ones_stay_unset() -> None:
    result = apply_to_tensors(add_one, Derived(one()))

    assert values_of(result) == [2.0, 3.0]
    with pytest.raises(AttributeError):
        _ = result.never_set


def test_what_a_dataclass_computed_from_its_tensors_is_computed_again() -> None:
    tree = Frozen(one())
    assert tree.total == 2.0

    assert apply_to_tensors(add_one, tree).total == 4.0


def test_a_tree_in_which_nothing_changed_is_returned_itself() -> None:
    tree = {"a": [one(), (one(), {one()})], "b": Frozen(one()), "c": pack_sequence([one()])}

    assert apply_to_tensors(lambda tensor: tensor, tree) is tree


def test_only_the_containers_above_a_change_are_new() -> None:
    changed, kept = one(), one()
    tree = {"changed": [changed], "kept": [kept]}

    result = apply_to_tensors(lambda tensor: tensor + 1 if tensor is changed else tensor, tree)

    assert result["kept"] is tree["kept"]
    assert result["changed"] is not tree["changed"]


def test_what_is_shared_stays_shared_and_is_converted_once() -> None:
    tensor = one()
    inner = [tensor]
    calls: list[torch.Tensor] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor + 1

    tree: dict[str, Any] = {"a": inner, "b": inner, "tied": tensor}

    result = apply_to_tensors(count, tree)

    assert result["a"] is result["b"]
    assert result["tied"] is result["a"][0]
    assert len(calls) == 1


def test_tensors_made_on_the_fly_are_not_taken_for_one_another() -> None:
    class Lazy(dict[str, float]):
        def values(self) -> Any:
            return [torch.full((1,), value) for value in super().values()]

    tree = [Lazy(a=float(value)) for value in range(20)]

    # Nothing that is made on the way takes up the addresses that become free.
    result = apply_to_tensors(float, tree)

    assert result == [{"a": float(value)} for value in range(20)]


def test_tensors_may_become_something_else() -> None:
    assert apply_to_tensors(lambda tensor: tensor.shape, {"a": (one(),)}) == {"a": (torch.Size([2]),)}


def test_an_error_in_the_function_tells_where_it_happened() -> None:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        apply_to_tensors(fail, {"model": [1, one()]})
    assert vars(caught.value)["__notes__"] == ["at tree['model'][1]"]


def nest(depth: int) -> object:
    tree: object = one()
    for _ in range(depth):
        tree = [tree]
    return tree


def walk_all(tree: object) -> object:
    return list(iter_tensors(tree))


def apply_all(tree: object) -> object:
    return apply_to_tensors(add_one, tree)


@pytest.mark.parametrize("walk", [apply_all, walk_all])
class TestLimits:
    def test_the_deepest_tree_allowed_is_walked(self, walk: Any) -> None:
        assert walk(nest(MAX_DEPTH))

    @pytest.mark.parametrize("depth", [MAX_DEPTH, 10_000])
    def test_a_deeper_one_is_refused_and_located(self, walk: Any, depth: int) -> None:
        with pytest.raises(
            Unsupported, match=r"^tree\['model'\]\[0\]\[0\]\[0\]\.\.\. is nested deeper than 200 levels"
        ):
            walk({"model": nest(depth)})

    def test_a_tree_that_contains_itself_is_refused_and_located(self, walk: Any) -> None:
        cyclic: dict[str, object] = {"t": one()}
        cyclic["me"] = (cyclic,)
        with pytest.raises(
            Unsupported, match=r"^tree\[0\]\['me'\]\[0\] is a dict that contains itself; break the cycle$"
        ):
            walk([cyclic])


def test_a_tree_that_shares_parts_on_every_level_is_converted_quickly() -> None:
    tree: object = one()
    for _ in range(MAX_DEPTH):
        tree = [tree, tree]

    assert apply_to_tensors(add_one, tree) is not tree


class Sealed(dict[str, object]):
    def __copy__(self) -> Sealed:
        return self


class Strict(defaultdict[str, object]):
    def __init__(self) -> None:
        super().__init__(list)


@dataclass
class Failure(Exception):
    cause: torch.Tensor


def make_strict() -> Strict:
    strict = Strict()
    strict["a"] = one()
    return strict


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (Sealed(a=one()), r"^tree\[0\]: copying a Sealed gives no new one; unpack it first$"),
        (make_strict(), r"^tree\[0\]: a Strict cannot be rebuilt: .*; unpack it first$"),
        (Failure(one()), r"^tree\[0\]: a Failure cannot be rebuilt: .*; unpack it first$"),
    ],
    ids=["copies are itself", "has its own constructor", "is no plain object"],
)
def test_a_container_that_cannot_be_rebuilt_is_named(tree: object, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        apply_to_tensors(add_one, [tree])
    assert values_of(tree) == [1.0]


def test_a_container_that_cannot_be_rebuilt_is_fine_if_nothing_changes() -> None:
    tree = [Sealed(a=one()), make_strict(), Failure(one())]

    assert apply_to_tensors(lambda tensor: tensor, tree) is tree


def test_paths_are_keys_indices_and_names_of_fields() -> None:
    tree = {"a": [0, one()], 7: Pair(one(), Slotted(1, (one(),))), "s": frozenset({one()})}

    paths = [path for path, _ in iter_tensors(tree)]

    assert paths == [("a", 1), (7, "left"), (7, "right", "y", 0), ("s", 0)]


def test_a_bare_tensor_has_the_empty_path() -> None:
    tensor = one()

    assert list(iter_tensors(tensor)) == [((), tensor)]


def test_a_shared_tensor_is_met_in_every_place() -> None:
    tensor = one()

    assert [path for path, _ in iter_tensors({"a": tensor, "b": [tensor]})] == [("a",), ("b", 0)]
