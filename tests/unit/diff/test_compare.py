"""What `compare` finds, and what it reads to find it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.diff.changes import Diff
from holdfast.diff.compare import compare
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request, save
from holdfast.store import Store
from tests.kit.saving import Watched, snapshot_of
from tests.kit.tensors import TENSORS


@pytest.fixture
def watched() -> Watched:
    return Watched(MemoryStore())


@pytest.fixture
def store(watched: Watched) -> Store:
    return Store(watched)


def diff_trees(store: Store, a: object, b: object, **options: Any) -> Diff:
    store.save("a", a, overwrite=True, **options)
    store.save("b", b, overwrite=True, **options)
    diff = store.diff("a", "b")
    # A tree in memory differs from a snapshot as its own snapshot does.
    assert replace(store.diff("a", b), b=diff.b) == diff
    return diff


def summarise(diff: Diff) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(change.kind, change.name, change.what) for change in diff.changes]


def packs_read(watched: Watched) -> int:
    return sum(key.startswith("packs/") for key, _, _ in watched.reads)


def test_equal_digests_are_one_comparison(store: Store, watched: Watched) -> None:
    tree = {"w": torch.arange(1000.0), "lr": 0.1}
    store.save("a", tree)
    store.save("b", tree)
    a, b = (snapshot_of(store.repository, name) for name in "ab")
    watched.reads.clear()

    diff = compare(store.repository, a, b)

    assert watched.reads == []
    assert (diff.is_equal, diff.equal, diff.shared_bytes) == (True, 1, 4000)


def test_otherwise_the_two_manifests_are_read_and_nothing_else(store: Store, watched: Watched) -> None:
    store.save("a", {"w": torch.zeros(1 << 20), "v": torch.ones(1000)})
    store.save("b", {"w": torch.ones(1 << 20), "v": torch.ones(1000)})
    a, b = (snapshot_of(store.repository, name) for name in "ab")
    watched.reads.clear()

    diff = compare(store.repository, a, b)

    assert [key.split("/")[0] for key, _, _ in watched.reads] == ["manifests", "manifests"]
    assert summarise(diff) == [("changed", "w", ("values",))]
    assert (diff.equal, diff.equal_bytes, diff.shared_bytes) == (1, 4000, 4000)


def test_changes_come_in_the_order_of_the_tree(store: Store) -> None:
    a = {"gone first": 0, "a": 1, "gone": 2, "b": {"x": 3, "y": 4}, "c": 5}
    b = {"a": 10, "b": {"x": 3, "y": 40, "new": 6}, "c": 50, "last": 7}

    diff = diff_trees(store, a, b)

    assert summarise(diff) == [
        ("removed", "gone first", ()),
        ("changed", "a", ("value",)),
        ("removed", "gone", ()),
        ("changed", "b.y", ("value",)),
        ("added", "b.new", ()),
        ("changed", "c", ("value",)),
        ("added", "last", ()),
    ]
    assert str(diff) == "2 added, 2 removed, 3 changed, 1 equal"
    assert ([c.name for c in diff.added], [c.name for c in diff.removed]) == (["b.new", "last"], ["gone first", "gone"])


W = torch.arange(6.0).reshape(2, 3)
Z = torch.tensor([1 + 2j, 3 - 4j])
S = torch.eye(3).to_sparse()


def _uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(S._indices(), S._values(), (3, 3), is_coalesced=False, check_invariants=False)


@pytest.mark.parametrize(
    ("before", "after", "aspects"),
    [
        (W, W + 1, [("values", "", "")]),
        (W, W.bfloat16(), [("dtype", "float32", "bfloat16")]),
        (W, W.reshape(3, 2), [("shape", "(2, 3)", "(3, 2)")]),
        (W, W.t().contiguous().t(), [("strides", "(3, 1)", "(1, 2)")]),
        (W, W.t().contiguous().t() + 1, [("strides", "(3, 1)", "(1, 2)"), ("values", "", "")]),
        (W, W.clone().requires_grad_(), [("requires_grad", "false", "true")]),
        (W, torch.nn.Buffer(W.clone()), [("role", "tensor", "buffer")]),
        (Z, torch.conj(Z), [("conj", "false", "true"), ("values", "", "")]),
        (torch.conj(Z), torch.conj(Z).resolve_conj(), [("conj", "true", "false")]),
        (torch._neg_view(W), -W, [("neg", "true", "false")]),
        (torch._neg_view(W), W, [("neg", "true", "false"), ("values", "", "")]),
        (W, W.to("meta"), [("meta", "false", "true")]),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), []),
        (torch.tensor(0.0), torch.tensor(-0.0), [("values", "", "")]),
        (W[:1].expand(4, 3), W[:1].expand(4, 3).clone(), [("strides", "(0, 1)", "(3, 1)")]),
        (torch.zeros(0, 3), torch.zeros(0, 4), [("shape", "(0, 3)", "(0, 4)")]),
        (W, 3, [("kind", "tensor", "int"), ("value", "float32 (2, 3)", "3")]),
        (3, 3.0, [("kind", "int", "float"), ("value", "3", "3.0")]),
        (True, 1, [("kind", "bool", "int"), ("value", "True", "1")]),
        ("x", "y", [("value", "'x'", "'y'")]),
        ({1, 2}, {1, 3}, [("value", "{1, 2}", "{1, 3}")]),
        ("x" * 5000, "x" * 5000 + "y", [("values", "5000 bytes", "5001 bytes")]),
        ("x" * 5000, "y" * 5000, [("values", "", "")]),
        (b"x" * 5000, "x" * 5000, [("kind", "bytes", "str")]),
        (np.arange(6), np.arange(6) + 1, [("values", "", "")]),
        (np.arange(6), np.arange(6.0), [("dtype", "<i8", "<f8")]),
        (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3))), [("order", "C", "F")]),
        (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), [("order", "C", "F")]),
        (np.array(["a", "b"]), np.array(["a", "c"]), [("values", "", "")]),
        (W, np.asarray(W), [("kind", "tensor", "array")]),
        (S, 2 * S, [("values", "", "")]),
        (S, torch.eye(3).to_sparse_csr(), [("kind", "sparse_coo", "sparse_csr")]),
        (S, W, [("kind", "sparse_coo", "tensor")]),
        (S, _uncoalesced(), [("coalesced", "true", "false")]),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_change_says_in_what(store: Store, before: object, after: object, aspects: list[tuple[str, ...]]) -> None:
    diff = diff_trees(store, {"x": before, "y": 0}, {"x": after, "y": 1})

    changes = {change.name: change for change in diff.changes}
    found = [(aspect.what, aspect.before, aspect.after) for aspect in changes["x"].aspects] if "x" in changes else []
    assert found == aspects
    assert diff.equal == (not aspects)


def test_a_part_of_a_tensor_is_named(store: Store) -> None:
    diff = diff_trees(store, {"x": S}, {"x": 2 * S})

    assert [(aspect.what, aspect.part) for aspect in diff.changes[0].aspects] == [("values", "values")]
    assert str(diff.changes[0].after) == "sparse_coo float32 (3, 3)"


@pytest.mark.parametrize(
    ("before", "after", "aspect"),
    [
        ({"a": 1}, OrderedDict(a=1), ("kind", "dict", "OrderedDict")),
        ([1], (1,), ("kind", "list", "tuple")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ("order", "", "")),
        (defaultdict(int, a=1), defaultdict[str, Any](float, a=1), ("attributes", "int", "float")),
        (deque([1], 5), deque([1], 6), ("attributes", "5", "6")),
        (Counter(a=1), {"a": 1}, ("kind", "Counter", "dict")),
    ],
)
def test_a_container_that_differs_is_a_change(
    store: Store, before: object, after: object, aspect: tuple[str, str, str]
) -> None:
    diff = diff_trees(store, {"first": 0, "x": before}, {"first": 0, "x": after})

    (change,) = diff.changes
    assert change.name == "x"
    assert [(found.what, found.before, found.after) for found in change.aspects] == [aspect]
    assert not diff.is_equal


def test_what_is_added_or_removed_does_not_change_the_order(store: Store) -> None:
    diff = diff_trees(store, {"a": 1, "b": 2, "c": 3}, {"a": 1, "new": 0, "c": 3})

    assert summarise(diff) == [("removed", "b", ()), ("added", "new", ())]


def test_paths_are_typed(store: Store) -> None:
    diff = diff_trees(store, {1: "a", "1": "b"}, {1: "a", "1": "c", 1.5: "d"})

    assert [(change.path, change.kind) for change in diff.changes] == [(("1",), "changed"), ((1.5,), "added")]


def test_a_value_that_became_a_container_is_removed_and_added(store: Store) -> None:
    diff = diff_trees(store, {"x": 1}, {"x": {"y": 1}})

    assert sorted((change.kind, change.name) for change in diff.changes) == [("added", "x.y"), ("removed", "x")]


# --- memory


def test_tensors_that_no_longer_share_memory_are_distinguished_from_those_with_other_values(store: Store) -> None:
    tied = torch.arange(4.0)

    diff = diff_trees(store, {"a": tied, "b": tied[:]}, {"a": tied, "b": tied.clone()})

    assert summarise(diff) == [("changed", "b", ("memory",))]
    assert [(aspect.before, aspect.after) for aspect in diff.changes[0].aspects] == [("shared with a", "its own")]


def test_one_object_is_distinguished_from_two_over_the_same_memory(store: Store) -> None:
    tied = torch.arange(4.0)

    diff = diff_trees(store, {"a": tied, "b": tied}, {"a": tied, "b": tied[:]})

    assert summarise(diff) == [("changed", "b", ("object",))]


def test_other_numbers_for_the_same_sharing_are_no_change(store: Store) -> None:
    tied, other = torch.arange(4.0), torch.ones(3)

    diff = diff_trees(store, {"a": tied, "b": tied[1:]}, {"0": other, "1": other[1:], "a": tied, "b": tied[1:]})

    assert {change.kind for change in diff.changes} == {"added"}
    assert diff.equal == 2


def test_views_that_overlap_otherwise_are_a_change(store: Store) -> None:
    base = torch.zeros(10)

    diff = diff_trees(store, {"a": base, "b": base[2:6]}, {"a": base, "b": base[3:7]})

    assert [(aspect.before, aspect.after) for aspect in diff.changes[0].aspects] == [
        ("8 bytes after a", "12 bytes after a")
    ]


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_is_cut_elsewhere_is_compared_by_its_bytes(store: Store, watched: Watched, is_changed: bool) -> None:
    big = torch.arange(1_000_000, dtype=torch.int32)
    other = big.clone()
    other[700_000] += is_changed
    store.save("a", {"w": big})
    store.save("b", {"w": other, "view": other[100_000:800_000]})
    watched.reads.clear()

    diff = store.diff("a", "b")

    assert ("changed", "w", ("values",)) in summarise(diff) or not is_changed
    assert diff.equal == (not is_changed)
    assert packs_read(watched) > 0


def test_of_what_is_cut_elsewhere_only_the_part_between_is_read(store: Store, watched: Watched) -> None:
    big = torch.arange(8 << 20, dtype=torch.uint8)
    store.save("a", {"w": big})
    store.save("b", {"w": big, "view": big[(7 << 20) + 100 :]})
    watched.reads.clear()

    diff = store.diff("a", "b")

    assert diff.equal == 1
    assert sum(size for key, _, size in watched.reads if key.startswith("packs/")) == (2 << 20) - 100


def test_bytes_between_the_items_of_a_view_are_not_compared(store: Store) -> None:
    base = torch.arange(12.0).reshape(4, 3)
    changed = base.clone()
    changed[2, 1] = -1

    diff = diff_trees(store, {"base": base, "column": base[:, 0]}, {"base": changed, "column": changed[:, 0]})

    assert summarise(diff) == [("changed", "base", ("values",))]


def test_a_view_alone_is_the_same_as_with_its_base(store: Store) -> None:
    base = torch.arange(12.0).reshape(4, 3)

    diff = diff_trees(store, {"column": base[:, 0]}, {"column": base[:, 0], "base": base})

    assert summarise(diff) == [("added", "base", ())]
    assert diff.equal == 1


# --- everything


Makers = list[Callable[[], torch.Tensor]]
ALL: Makers = [make for name, make in TENSORS.items() if "subclass" not in name]


@pytest.mark.parametrize("makers", [ALL[::40], pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_tensor_differs_from_itself(store: Store, makers: Makers) -> None:
    tree = {f"{number}": make() for number, make in enumerate(makers)}

    diff = diff_trees(store, {**tree, "z": 1}, {**tree, "z": 2})

    assert summarise(diff) == [("changed", "z", ("value",))]
    assert diff.equal == len(tree)


@pytest.mark.parametrize("makers", [ALL[::40], pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_tensor_is_another_and_all_can_be_measured(store: Store, makers: Makers) -> None:
    tensors = [make() for make in makers]
    store.save("a", dict(enumerate(tensors)))
    store.save("b", dict(enumerate([*tensors[1:], tensors[0]])))

    diff = store.diff("a", "b", values=True)

    assert len(diff.changes) + diff.equal == len(tensors)
    assert len(diff.changes) > len(tensors) * 3 // 4


# --- files, and a part of it all


def _save_files(store: Store, name: str, files: dict[str, tuple[bytes, dict[str, Json]]]) -> None:
    sources = [BytesSource(path, data, {"type": "file", **spec}) for path, (data, spec) in files.items()]
    save(store.repository, Request(name, sources))


def test_files_are_compared_by_name(store: Store) -> None:
    _save_files(store, "a", {"x.py": (b"1", {}), "run": (b"2", {}), "same": (b"3", {}), "old": (b"4", {})})
    _save_files(store, "b", {"x.py": (b"10", {}), "run": (b"2", {"executable": True}), "same": (b"3", {})})

    diff = store.diff("a", "b")

    assert summarise(diff) == [
        ("changed", "x.py", ("values",)),
        ("changed", "run", ("executable",)),
        ("removed", "old", ()),
    ]
    assert str(diff.changes[0].after) == "file"


def test_only_some_leaves_are_compared(store: Store) -> None:
    store.save("a", {"model": {"w": 1, "b": 2}, "step": 1})
    store.save("b", {"model": {"w": 10, "b": 2}, "step": 2})
    records = [snapshot_of(store.repository, name) for name in "ab"]

    diff = compare(store.repository, records[0], records[1], only=["model"])

    assert summarise(diff) == [("changed", "model.w", ("value",))]
    assert diff.equal == 1
    with pytest.raises(NotFound, match=r"no leaf of 'a' or 'b' matches 'modle\.\*'"):
        compare(store.repository, records[0], records[1], only=["modle.*"])


def test_gradients_are_parts(store: Store) -> None:
    def make(scale: float) -> dict[str, torch.Tensor]:
        weight = torch.ones(3, requires_grad=True)
        weight.grad = torch.full((3,), scale)
        return {"w": weight}

    with_grads = diff_trees(store, make(1.0), make(2.0), grads=True)
    store.save("c", make(1.0), grads=False)

    assert [(aspect.what, aspect.part) for aspect in with_grads.changes[0].aspects] == [("values", "grad")]
    assert [(aspect.part, aspect.after) for aspect in store.diff("a", "c").changes[0].aspects] == [("grad", "absent")]
