"""Every rule of collective saves and loads has code that keeps it: without that code, a test sees it broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.distributed.checkpoint import checkpoint, plan
from holdfast.distributed.checkpoint.exchange import ChunkExchange
from holdfast.distributed.talk.call_ids import Pulse
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.store_rounds import StoreRounds
from holdfast.errors import RankError
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.write.transaction import Transaction
from holdfast.snapshot.into import in_place as places
from holdfast.tensors.sharding import shard
from tests.distributed.checkpoint.test_checkpoint_rank_faults import strike
from tests.distributed.conftest import World
from tests.distributed.outcomes import counting, report_outcome
from tests.distributed.placing import place
from tests.kit.patience import PATIENCE_S

MIB = 1 << 20

pytestmark = pytest.mark.slow  # each rule twice, and each time with several processes


def make_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


def save(path: Path, tree: Any, **options: Any) -> str:
    """Save as one of all ranks; return what that raises."""
    with holdfast.open(path) as store:
        return report_outcome(lambda: store.save("run", tree, timeout_s=PATIENCE_S, **options)).kind


def load(path: Path, name: str, tree: Any) -> tuple[str, int]:
    """Load as one of all ranks; return what that raises, and how many warnings there are."""
    with holdfast.open(path) as store:
        # With anything to be sent, the ranks would meet once more before they read.
        outcome = report_outcome(lambda: store.load_into(name, tree, timeout_s=PATIENCE_S, replicas="each"))
    return outcome.kind, len(outcome.warned)


def load_alone(path: Path) -> str:
    with holdfast.open(path) as store:
        return report_outcome(lambda: store.load("run")).kind


# Acts: what ranks do, and what they then find. They run with the rule and without it.


def save_at_each_node(rank: int, path: Path) -> Any:
    saved = save(path / f"node {rank}", {"w": place(torch.rand(900, 900), make_mesh(), [Shard(0)])})
    dist.barrier()
    return saved, load_alone(path / "node 0")


def save_gap(rank: int, path: Path) -> Any:
    saved = save(path, {"w": shard(torch.ones(2, 300), global_shape=(6, 300), offsets=(2 * rank, 0))})
    dist.barrier()
    return saved, load_alone(path)


def save_unlike_replicas(rank: int, path: Path) -> Any:
    weight = DTensor.from_local(torch.full((300,), float(rank)), make_mesh(), [Replicate()], run_check=False)
    with holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.save("run", {"w": weight}, timeout_s=PATIENCE_S))
    return outcome.kind, "differs between rank 0, and rank 1" in outcome.text


def save_replicas(rank: int, path: Path) -> Any:
    save(path, {"w": torch.arange(3 * MIB // 8)})
    with holdfast.open(path) as store:
        manifests = read_manifests(store.repository.store, store.snapshot("run").record.manifest)
    written = [
        sum(chunk.size_bytes for entry in part.iter_entries() for chunk in entry.chunks) for part in manifests.parts
    ]
    return max(written) <= 2 * MIB, sum(written) // (3 * MIB)


def save_and_load_own(rank: int, path: Path) -> Any:
    weight = torch.full((300,), float(rank))
    save(path, {"w": weight})
    weight.fill_(-1)
    load(path, "run", {"w": weight})
    return set(weight.tolist()) == {float(rank)}


def load_others_own(rank: int, path: Path) -> Any:
    save(path, {"w": torch.full((300,), float(rank))})
    pair = dist.new_group([0])
    if rank:
        return 0
    with holdfast.open(path) as store:
        return len(report_outcome(lambda: store.load_into("run", {"w": torch.zeros(300)}, process_group=pair)).warned)


def load_different(rank: int, path: Path) -> Any:
    with holdfast.open(path) as store:
        store.save(f"run {rank}", {"w": torch.full((3,), float(rank))}, collective=False)
    weight = torch.zeros(3)
    return load(path, f"run {rank}", {"w": weight})[0], weight.tolist()


def load_misfit(rank: int, path: Path) -> Any:
    save(path, {"w": torch.ones(3)})
    weight = torch.zeros(3 + rank)
    return load(path, "run", {"w": weight})[0], weight.tolist()


def load_part(rank: int, path: Path) -> Any:
    save(path, {"w": torch.arange(6 * MIB // 4, dtype=torch.int32).view(-1, 1024)})
    target = place(torch.zeros(6 * MIB // 4, dtype=torch.int32).view(-1, 1024), make_mesh(), [Shard(0)])
    with counting(path) as (store, inner):
        store.load_into("run", {"w": target})
    return inner.read_bytes["packs"] <= target._local_tensor.nbytes + 2 * MIB


def read_parts(rank: int, path: Path) -> Any:
    save(path, {"w": place(torch.rand(900, 900), make_mesh(), [Shard(0)])})
    with counting(path) as (store, inner):
        store.load_into("run", {"w": place(torch.zeros(900, 900), make_mesh(), [Shard(0)])})
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(count for key, count in inner.reads.items() if key.startswith("manifests/")))
    return sum(counts)


def raise_in_commit(rank: int, path: Path) -> Any:
    save(path, {"w": torch.zeros(300)})

    def interrupt() -> None:
        raise KeyboardInterrupt

    restore = strike("commit", interrupt) if rank == 1 else lambda: None
    kind = save(path, {"w": torch.ones(300)}, overwrite=True)
    restore()
    dist.barrier()
    with holdfast.open(path) as store:
        return kind, bool(store.load("run")["w"].any())


def raise_in_write(rank: int, path: Path) -> Any:
    def fail() -> None:
        raise ValueError("on cue")

    restore = strike("write", fail) if rank == 1 else lambda: None
    with holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.save("run", {"w": torch.ones(300)}, timeout_s=PATIENCE_S))
    restore()
    return outcome.failures


def work_long(rank: int, path: Path) -> Any:
    timeout_s = 4.0
    with Collectives(timeout_s=timeout_s) as ranks:

        def work() -> None:
            end = time.monotonic() + (2.5 * timeout_s if rank else 0.0)
            while time.monotonic() < end:
                ranks.beat()
                time.sleep(0.06)

        return report_outcome(lambda: ranks.all_gather("write", work)).kind


@dataclass(frozen=True)
class Rule:
    """What is promised, whose code keeps it, and what is found with that code and without."""

    act: Callable[[int, Path], Any]
    size: int
    kept: Any
    broken: Any
    owner: Any
    name: str
    instead: Any


def _write_all(self: Any, holders: Any) -> dict[int, list[int]]:
    return {number: list(range(len(chunks))) for number, chunks in enumerate(self._leaves.chunks)}


def _compute_no_fingerprints(self: Any, seed: bytes) -> None:
    self._leaves.fingerprints = dict.fromkeys(range(len(self._leaves.sources)), b"")


def _forget_rank(self: Any, ranks: Any, root: Any, parts: Any) -> None:
    self._ranks, self._root, self._parts, self._rank = ranks, root, parts, None
    self.heads = self._make_heads()


def _read_all_parts(store: Any, ref: Any, ranks: Any, *, name: str) -> Any:
    manifests = read_manifests(store, ref)
    return ChunkExchange(ranks, manifests.root, dict(enumerate(manifests.parts)))


RULES = {
    "a path that is local to each node is refused": Rule(
        save_at_each_node, 2, {("RankError", "NotFound")}, {("", "SnapshotGone")},
        Transaction, "_verify_shared", lambda self, locks: None,
    ),
    "every tensor is stored exactly once": Rule(
        save_gap, 2, {("Mismatch", "NotFound")}, {("", "Corrupt")},
        plan._Planner, "_verify_coverage", lambda self, own_chunks, seed: None,
    ),
    "declared replicas that differ are refused": Rule(
        save_unlike_replicas, 2, {("RankError", True)}, {("Mismatch", False)},
        plan, "_verify_replicas", lambda texts: None,
    ),
    "one copy of replicas is stored": Rule(
        save_replicas, 3, {(True, 1)}, {(False, 3)}, plan._Planner, "_choose_chunks", _write_all,
    ),
    "what differs undeclared is kept for each": Rule(
        save_and_load_own, 2, {True}, {True, False}, plan._Planner, "_compute_fingerprints", _compute_no_fingerprints,
    ),
    "as many ranks get each its own back": Rule(
        save_and_load_own, 2, {True}, {True, False}, ChunkExchange, "__init__", _forget_rank,
    ),
    "another number of ranks is warned": Rule(
        load_others_own, 2, {1, 0}, {0}, ChunkExchange, "list_variants", lambda self: [],
    ),
    "ranks that open different snapshots are told so": Rule(
        load_different, 2,
        {("Mismatch", (0.0,) * 3)}, {("", (0.0,) * 3)},
        checkpoint, "_verify_alike", lambda given: None,
    ),
    "nothing changes unless it fits on all ranks": Rule(
        load_misfit, 2,
        {("Mismatch", (0.0,) * 3), ("Mismatch", (0.0,) * 4)}, {("RankError", (1.0,) * 3), ("RankError", (0.0,) * 4)},
        checkpoint, "_agree_on_problems", lambda plan, ranks: None,
    ),
    "ranks read no more than they need": Rule(
        load_part, 3, {True}, {False}, places, "find_shard_target", lambda *args: None,
    ),
    "each manifest is read once": Rule(
        read_parts, 3, {4}, {12}, checkpoint, "open_together", _read_all_parts,
    ),
    "a commit that not all have heard of is unknown": Rule(
        raise_in_commit, 2,
        {("CommitUnknown", True), ("KeyboardInterrupt", True)}, {("RankError", True), ("KeyboardInterrupt", True)},
        Transaction, "_make_unknown", lambda self, error: RankError(str(error), step=error.step),
    ),
    "what a rank raises is told to all": Rule(
        raise_in_write, 2, {((1, "ValueError"),)}, {((1, "ValueError"),), ((1, "RankLeft"),)},
        StoreRounds, "fail", lambda self, failure: [failure],
    ),
    "a rank that shows that it is alive is waited for": Rule(
        work_long, 2, {""}, {"RankError"}, Pulse, "find_due", lambda self, step: None,
    ),
}  # fmt: skip


def run_act(rank: int, path: Path, rule: str, is_kept: bool) -> Any:
    found = RULES[rule]
    if is_kept:
        return found.act(rank, path)
    with mock.patch.object(found.owner, found.name, found.instead):
        return found.act(rank, path)


def freeze(value: Any) -> Any:
    """Return lists, sets and dicts as tuples, which can be members of a set."""
    if isinstance(value, dict):
        value = sorted(value.items())
    return tuple(map(freeze, value)) if isinstance(value, list | set | tuple) else value


@pytest.mark.parametrize("is_kept", [True, False], ids=["with its code", "without"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_by_its_code_alone(world: World, tmp_path: Path, rule: str, is_kept: bool) -> None:
    results = world(RULES[rule].size)(run_act, tmp_path, rule, is_kept)

    assert {freeze(result) for result in results} == (RULES[rule].kept if is_kept else RULES[rule].broken)


def test_the_rules_name_code_that_is_there() -> None:
    for rule in RULES.values():
        assert hasattr(rule.owner, rule.name)
