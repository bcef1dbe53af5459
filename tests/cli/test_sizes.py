"""Sizes that verbs print: never negative, and the same in every verb, whoever made the snapshot and however small."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import holdfast
from holdfast.cli.output import format_bytes
from holdfast.dcp import StorageWriter
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.write.writer import SaveResult, save
from tests.cli.runs import Cli
from tests.kit.saving import noise
from tests.kit.thread_ranks import run_threads
from tests.property.test_sizes import make_share


def save_tensors(path: Path) -> SaveResult:
    """Save tensors of one process: large, inlined, equal ones, and some that share memory."""
    large = torch.arange(5000)
    tree = {"large": large, "view": large[:10], "equal": large.clone(), "tiny": torch.ones(3), "lr": 0.1}
    return holdfast.open(path).save("run/1", tree)


def save_again(path: Path) -> SaveResult:
    """Save what is mostly in the store."""
    save_tensors(path)
    return holdfast.open(path).save("run/2", {"large": torch.arange(5000), "tiny": torch.ones(3)})


def save_with_dcp(path: Path) -> None:
    """Save through torch.distributed.checkpoint, which commits under one lease and writes under another."""
    state = {"large": torch.arange(5000), "tiny": torch.ones(3), "step": 7}
    save_checkpoint(state, storage_writer=StorageWriter(holdfast.open(path), "run/1"))


def save_together(path: Path) -> SaveResult:
    """Save three ranks with values of their own, of which a snapshot's logical bytes count one."""
    content = {"own": (3000, 1), "small": (100, 1)}
    repo = holdfast.open(path).repository
    results = run_threads(3, lambda ranks: save(repo, make_share(ranks.rank, 3, content, noise(4000, 9)), ranks=ranks))
    assert isinstance(results[0], SaveResult), results[0]
    return results[0]


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WAYS: dict[str, Callable[[Path], SaveResult | None]] = {
    "one process": save_tensors,
    "again": save_again,
    "torch.distributed.checkpoint": save_with_dcp,
    "three ranks": save_together,
}


def find_sizes(found: Any) -> list[int]:
    """Return every number in JSON that is a size."""
    if isinstance(found, list):
        return [size for each in found for size in find_sizes(each)]
    if not isinstance(found, dict):
        return []
    sizes = [value for key, value in found.items() if key.endswith("bytes") and isinstance(value, int)]
    return sizes + [size for value in found.values() for size in find_sizes(value)]


def look_at(cli: Cli, name: str) -> None:
    """Run every verb that prints sizes, as text and as JSON, and refuse any that is negative."""
    verbs = [["ls"], ["show", name], ["du"], ["check", "--read"], ["diff", name, name], ["gc"], ["doctor"], ["repair"]]
    for verb in [
        *verbs,
        ["rm", name],
        ["copy", name, "--to", "text"],
        ["gc", "--repack"],
        ["prune", "--keep-last", "1"],
    ]:
        assert not re.search(r"-\d[\d.]* ?([KMGT]i)?B", cli(*verb).out), verb
        if verb[0] not in ("rm", "copy"):
            assert min(find_sizes(cli(*verb, "--json").json), default=0) >= 0, verb


@pytest.mark.parametrize("how", WAYS)
def test_no_verb_prints_a_negative_size_and_all_agree(empty: Cli, how: str) -> None:
    result = WAYS[how](empty.store)
    (*_, listed) = empty("ls", "--json").json["snapshots"]
    name = listed["name"]

    shown = empty("show", name, "--json").json
    used = {each["name"]: each for each in empty("du", "--json").json["snapshots"]}[name]
    look_at(empty, name)

    assert listed["logical_bytes"] == shown["logical_bytes"] == used["logical_bytes"]
    assert used["stored_bytes"] == used["shared_bytes"] + used["own_bytes"]
    assert used["stored_bytes"] == shown["stored_bytes"] == shown["packed_bytes"] + shown["manifest_bytes"]
    assert shown["inline_bytes"] == sum(entry["inline_bytes"] for entry in shown["content"]) or how == "three ranks"
    if how != "three ranks":  # of values that each rank has for itself, `show` lists one
        assert shown["new_bytes"] == sum(entry["new_bytes"] for entry in shown["content"])
        assert shown["new_bytes"] + shown["reused_bytes"] == shown["logical_bytes"]
    if result is not None:
        assert (result.new_bytes, result.reused_bytes) == (shown["new_bytes"], shown["reused_bytes"])
        assert result.logical_bytes == shown["logical_bytes"]


def count_copied(path: Path, name: str) -> tuple[int, int]:
    """Return how many bytes of a snapshot a copy to an empty store writes: each chunk once, and inlined ones."""
    store = holdfast.open(path).repository.store
    entries = read_manifests(store, read_snapshot(store, name).manifest).iter_entries()
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    packed = {chunk.digest: chunk.size_bytes for chunk in chunks if chunk.location}
    return sum(packed.values()), sum(chunk.size_bytes for chunk in chunks if chunk.location is None)


@pytest.mark.parametrize("how", WAYS)
def test_a_copy_moves_each_chunk_once_and_then_only_what_lies_in_manifests(empty: Cli, how: str) -> None:
    WAYS[how](empty.store)
    name = empty("ls", "--json").json["snapshots"][-1]["name"]
    shown = empty("show", name, "--json").json
    total = shown["new_bytes"] + shown["reused_bytes"]
    packed, inline = count_copied(empty.store, name)

    first = empty.ok("copy", name, "--to", "other")
    there = empty.bare("-s", "other", "show", name, "--json").json
    empty.bare("-s", "other", "rm", name, "--yes")
    again = empty.ok("copy", name, "--to", "other")

    assert (there["new_bytes"], there["reused_bytes"]) == (packed + inline, total - packed - inline)
    for printed, moved in ((first, packed + inline), (again, inline)):
        assert f"({format_bytes(moved)} copied, {format_bytes(total - moved)} already present)" in printed


@pytest.mark.parametrize("how", WAYS)
def test_show_du_and_check_print_the_same_sizes(empty: Cli, how: str) -> None:
    WAYS[how](empty.store)
    name = empty("ls", "--json").json["snapshots"][-1]["name"]
    files = [path for kind in ("packs", "manifests") for path in (empty.store / kind).rglob("*") if path.is_file()]

    shown, used, checked = empty.ok("show", name), empty.ok("du"), empty.ok("check", "--read")

    (line,) = [line for line in used.splitlines() if line.startswith(f"{name} ")]
    _, logical, stored, *_ = re.split(r"  +", line)
    total = format_bytes(sum(path.stat().st_size for path in files))
    assert re.search(rf"^size +{logical} \(", shown, re.MULTILINE)
    assert re.search(rf"^stored +{stored}: ", shown, re.MULTILINE)
    assert f"stored in {total};" in used
    assert f"({total} of {total} read)" in checked
    assert f"(structure of {total};" in empty.ok("check")


def test_the_sizes_of_leaves_add_up_to_the_size_of_the_snapshot(empty: Cli) -> None:
    save_tensors(empty.store)
    shown = empty("show", "run/1", "--json").json

    listed = {entry["name"]: entry["bytes"] for entry in shown["content"]}
    of_leaves = {name: listed[name] for leaf in shown["leaves"] for name in leaf["entries"]}

    assert sum(of_leaves.values()) == shown["logical_bytes"]
    assert shown["inline_bytes"] > 0
    assert shown["manifest_bytes"] > 0
