"""Ranks and pieces: who stored which box of a tensor, and what of it was new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadName, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.serving.answers.pieces import (
    RankedSnapshot,
    describe_cuts,
    describe_pieces,
    describe_ranks,
    read_ranked,
)
from tests.kit.saving import new_repo, save_bytes
from tests.kit.thread_ranks import save_on_threads

ROWS = torch.arange(1600.0).reshape(40, 40)
LARGE = torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))


def make_trees(shift: float = 0.0) -> list[object]:
    """Return the trees of four ranks: rows, a 2 x 2 grid, columns, irregular boxes, a replica, and own values."""
    return [
        {
            "rows": cut(ROWS + shift, (slice(10 * rank, 10 * rank + 10), slice(0, 40))),
            "grid": cut(
                ROWS, (slice(20 * (rank // 2), 20 * (rank // 2) + 20), slice(20 * (rank % 2), 20 * (rank % 2) + 20))
            ),
            "columns": cut(ROWS, (slice(0, 40), slice(10 * rank, 10 * rank + 10))),
            "odd": cut(
                ROWS,
                (
                    (slice(0, 39), slice(0, 40))
                    if rank == 0
                    else (slice(39, 40), slice(13 * rank - 13, 13 * rank + (rank == 3)))
                ),
            ),
            "vector": cut(ROWS.flatten(), (slice(400 * rank, 400 * rank + 400),)),
            "same": LARGE,
            "own": holdfast.per_rank(torch.full((200,), float(rank))),
            "lr": 0.1,
        }
        for rank in range(4)
    ]


def cut(tensor: torch.Tensor, index: tuple[slice, ...]) -> object:
    starts = [part.start for part in index]
    return holdfast.shard(tensor[index].clone(), global_shape=tensor.shape, offsets=starts)


@pytest.fixture(scope="module")
def repo() -> Repository:
    made = new_repo(MemoryStore())
    save_on_threads(made, "first", make_trees())
    save_on_threads(made, "second", make_trees(shift=1.0))
    return made


@pytest.fixture
def ranked(repo: Repository) -> RankedSnapshot:
    return read_ranked(repo, read_snapshot(repo.store, "second"))


def ask(ranked: RankedSnapshot, leaf: str) -> dict[str, Any]:
    return describe_pieces(ranked, leaf, 0, 100)


@pytest.mark.parametrize(
    ("leaf", "kind", "grid"),
    [
        ("rows", "grid", [4, 1]),
        ("columns", "grid", [1, 4]),
        ("grid", "grid", [2, 2]),
        ("vector", "grid", [4]),
        ("odd", "boxes", []),
        ("own", "per rank", []),
        ("same", "shares", []),
    ],
)
def test_the_cut_of_a_tensor_is_found_from_its_pieces(
    ranked: RankedSnapshot, leaf: str, kind: str, grid: list[int]
) -> None:
    found = ask(ranked, leaf)

    assert (found["kind"], found["grid"], found["world"]) == (kind, grid, 4)
    assert describe_cuts(ranked, [leaf, "lr", "nobody"]) == {leaf: {"kind": kind, "grid": grid}}


def test_the_pieces_have_offsets_shapes_and_bytes(ranked: RankedSnapshot) -> None:
    pieces = ask(ranked, "grid")["pieces"]

    assert [(each["rank"], each["offsets"], each["shape"], each["bytes"]) for each in pieces] == [
        (rank, [20 * (rank // 2), 20 * (rank % 2)], [20, 20], 1600) for rank in range(4)
    ]
    assert [each["shape"] for each in ask(ranked, "own")["pieces"]] == [[200]] * 4
    shares = ask(ranked, "same")["pieces"]
    assert sum(each["bytes"] for each in shares) == LARGE.nbytes
    spans = [
        each["span"] or [300 * each["offsets"][0], 300 * (each["offsets"][0] + each["shape"][0])] for each in shares
    ]
    assert sorted(start for start, _ in spans) == [0, *sorted(stop for _, stop in spans)[:-1]]


def test_what_was_in_the_store_before_is_reused(ranked: RankedSnapshot) -> None:
    assert {each["reused_bytes"] for each in ask(ranked, "rows")["pieces"]} == {0}
    assert {each["new_bytes"] for each in ask(ranked, "same")["pieces"]} == {0}


def test_ranks_are_measured_and_sorted(ranked: RankedSnapshot, repo: Repository) -> None:
    found = describe_ranks(ranked, "-size_bytes", 0, 2)

    sizes = [row.size_bytes for row in ranked.ranks]
    assert found["total"] == 4
    assert [row["size_bytes"] for row in found["ranks"]] == sorted(sizes, reverse=True)[:2]
    assert sum(sizes) == ranked.manifests.content_bytes
    inline_bytes = 40 * 4  # small values in a manifest are always written
    assert sum(row.new_bytes for row in ranked.ranks) == ROWS.nbytes + inline_bytes
    with pytest.raises(BadName, match="cannot be sorted by 'color'"):
        describe_ranks(ranked, "color", 0, 1)


def test_a_leaf_without_bytes_has_no_pieces(ranked: RankedSnapshot) -> None:
    for leaf in ("lr", "nobody"):
        with pytest.raises(NotFound, match=leaf):
            ask(ranked, leaf)


def test_a_tensor_that_one_rank_stored_is_whole(tmp_path: Path) -> None:
    repo = new_repo(MemoryStore())
    save_on_threads(repo, "a", [{"x": torch.arange(9.0)}, {"y": torch.arange(9.0)}])

    assert ask(read_ranked(repo, read_snapshot(repo.store, "a")), "y")["kind"] == "whole"


def test_a_snapshot_of_one_process_has_no_ranks() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "files", {"model.bin": bytes(5000)})
    ranked = read_ranked(repo, read_snapshot(repo.store, "files"))

    assert describe_ranks(ranked, "", 0, 10)["ranks"] == []
    assert ask(ranked, "model.bin")["pieces"] == []
