"""Leaves of a snapshot: folded lines, order, parts, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.diff.facts import iter_described
from holdfast.errors import BadName
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.serving.answers.outline import (
    LeafChoice,
    SnapshotOutline,
    choose_lines,
    describe_leaves,
    describe_parts,
    list_members,
    read_outline,
)
from holdfast.trees.folding import FoldableLeaf, fold_leaves
from tests.kit.saving import new_repo, save_bytes


@pytest.fixture
def outline(tmp_path: Path) -> SnapshotOutline:
    with holdfast.open(tmp_path / "store") as store:
        layers = {str(at): {"w": torch.zeros(2, 3), "b": torch.zeros(at + 1)} for at in range(12)}
        store.save("a", {"model": {"layers": layers}, "lr": 0.5, "note": "x" * 2000})
        return read_outline(store.repository, store.snapshot("a").record)


def test_repeated_layers_are_one_line(outline: SnapshotOutline) -> None:
    found = describe_leaves(outline, choose_lines(outline, LeafChoice(is_folded=True)), 0, 2)

    assert found["leaves"] == 26
    first = found["lines"][0]
    assert (first["name"], first["count"], first["items"], first["first"], first["last"]) == (
        *("model.layers.#.w", 12, 72, "model.layers.0.w"),
        "model.layers.11.w",
    )
    assert list_members(outline, "model.layers.#.w").rows[10].name == "model.layers.10.w"
    with pytest.raises(BadName, match="no line"):
        list_members(outline, "nobody")


@pytest.mark.parametrize(
    ("sort", "first"), [("", "model.layers.0.w"), ("-items", "model.layers.11.b"), ("name", "lr"), ("dtype", "note")]
)
def test_lines_are_sorted(outline: SnapshotOutline, sort: str, first: str) -> None:
    lines = choose_lines(outline, LeafChoice(sort=sort))

    assert lines.list(outline, 0, 1)[0].name == first


def test_lines_are_filtered_by_a_part_of_the_name_or_a_glob(outline: SnapshotOutline) -> None:
    assert len(choose_lines(outline, LeafChoice("layers.1")).order) == 6
    assert len(choose_lines(outline, LeafChoice("*.b")).order) == 12
    with pytest.raises(BadName, match="cannot be sorted by 'color'"):
        choose_lines(outline, LeafChoice(sort="-color"))


def test_parts_add_up_and_long_values_are_cut(outline: SnapshotOutline) -> None:
    assert describe_parts(outline)[0] == {"name": "model", "leaves": 24, "items": 72 + 78, "bytes": 600}
    labels = [
        line["label"] for line in describe_leaves(outline, choose_lines(outline, LeafChoice("note")), 0, 1)["lines"]
    ]
    assert len(labels[0]) <= 400


def test_a_snapshot_of_files_lists_them() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "files", {"config.json": b"{}", "model.bin": bytes(5000)})

    found = read_outline(repo, read_snapshot(repo.store, "files"))

    assert [(row.name, row.kind, row.size_bytes) for row in found.rows] == [
        ("config.json", "file", 2),
        ("model.bin", "file", 5000),
    ]


def test_rows_are_those_of_leaves_that_are_described_one_by_one(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    tree = {
        "same": [shared, shared],
        "view": shared.t(),
        "many": {str(at): torch.zeros(at % 3, 2, dtype=torch.float16 if at % 2 else torch.int8) for at in range(40)},
        "sparse": torch.eye(4).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "values": [1, 0.5, "text", None, True, {"empty": {}}],
        "bytes": bytes(3000),
        "long": "x" * 5000,
    }
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", tree)
        record = store.snapshot("a").record
        manifests = read_manifests(store.repository.store, record.manifest)
        found = read_outline(store.repository, record)
    view = manifests.view()
    expected = [
        (each.leaf.name, each.facts.dtype, each.facts.shape, each.facts.size_bytes, str(each.facts)[:400])
        for each in iter_described(view, view.spec["tree"])
    ]

    assert [(row.name, row.dtype, row.shape, row.size_bytes, row.label) for row in found.rows] == expected
    assert fold_leaves([FoldableLeaf(row.name, row.label, row.is_plain) for row in found.rows]) == list(found.folds)
