"""Entries that all ranks load are read by one rank and sent to the others; each rank reads the rest itself."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast.distributed.checkpoint import exchange
from holdfast.distributed.checkpoint.exchange import ReplicaExchange
from holdfast.distributed.checkpoint.training import training_state
from holdfast.errors import RankError
from tests.distributed.conftest import World
from tests.distributed.runs import new_model, train, wrap
from tests.kit.hooking import forbidden
from tests.kit.thinning import keep

ROWS = 600
"""Of a thousand floats each, so that there are several chunks to a tensor."""
MIB = 1 << 20


def make(number: int) -> torch.Tensor:
    return torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(number))


def read_bytes(store: holdfast.Store) -> int:
    stage = store.statistics().stages.get("read")
    return 0 if stage is None else stage.size_bytes


def save(path: Path) -> int:
    """Save in one process; return how many bytes there are."""
    tree = {f"t{number}": make(number) for number in range(5)}
    tree |= {"turned": make(7).t(), "tied": make(8)}
    tree["knot"] = tree["tied"]
    holdfast.open(path).save("x", {**tree, "step": 3})
    return 7 * ROWS * 1000 * 4


def load(rank: int, path: Path, how: Any, store: holdfast.Store | None = None) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blank = torch.zeros(ROWS, 1000)
    target: dict[str, Any] = {f"t{number}": torch.zeros(ROWS, 1000) for number in range(4)}
    target |= {"t4": distribute_tensor(blank, mesh, [Replicate()]), "turned": torch.zeros(ROWS, 1000).t(), "step": 0}
    target["tied"] = target["knot"] = torch.zeros(ROWS, 1000)
    versions = target["t0"]._version
    store = store or holdfast.open(path)
    store.load_into("x", target, **({"replicas": how} if how else {}))
    wanted = {f"t{number}": make(number) for number in range(5)} | {"turned": make(7).t()}
    wanted |= {"tied": make(8), "knot": make(8)}
    held = {name: target[name].full_tensor() if name == "t4" else target[name] for name in wanted}
    is_right = all(torch.equal(held[name], wanted[name]) for name in wanted) and target["step"] == 3
    return read_bytes(store), is_right and target["t0"]._version > versions


@pytest.mark.parametrize("size", keep([1, 2, 3], 2))
def test_every_byte_is_read_once_over_all_ranks(world: World, tmp_path: Path, size: int) -> None:
    total = save(tmp_path)

    found = world(size)(load, tmp_path, "broadcast")

    assert all(is_right for _, is_right in found)
    # What lies between chunks in a pack is read along with them.
    assert total <= sum(read for read, _ in found) < total + (1 << 16)
    # As equal as whole tensors allow.
    assert max(read for read, _ in found) <= total // size + ROWS * 1000 * 4


def test_each_rank_reads_all_of_it_unless_told(world: World, tmp_path: Path) -> None:
    total = save(tmp_path)

    found = world(2)(load, tmp_path, "each")

    assert all(is_right and read >= total for read, is_right in found)


def load_by_measure(rank: int, path: Path, slow: str) -> tuple[int, bool]:
    """Load as it is done unless somebody says how, where reading or sending is slow."""
    patches = {"MIN_BYTES": MIB, "SAMPLE_BYTES": MIB, "MIN_READ_S": 0.0}
    kept = exchange._time
    # Reading is measured first, then sending; an hour more makes one of them the slow one on any machine.
    more_s = iter([3600.0, 0.0] if slow == "store" else [0.0, 3600.0])

    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(exchange, name, value))
        stack.enter_context(mock.patch.object(exchange, "_time", lambda act: kept(act) + next(more_s)))
        return load(rank, path, None, stack.enter_context(holdfast.open(path)))


@pytest.mark.parametrize(("slow", "reads"), [("store", 1), ("group", 3)])
def test_if_nobody_says_how_what_is_faster_is_done(world: World, tmp_path: Path, slow: str, reads: int) -> None:
    total = save(tmp_path)

    found = world(3)(load_by_measure, tmp_path, slow)

    assert all(is_right for _, is_right in found)
    # What is read to find out is read by all of them, and what is needed of it again.
    assert sum(read for read, _ in found) == pytest.approx(reads * total + 3 * MIB, abs=1 << 19)


def load_little(rank: int, path: Path) -> tuple[int, bool]:
    with forbidden(ReplicaExchange, "_connect"):
        return load(rank, path, None)


def test_a_little_is_read_by_each_and_nobody_connects(world: World, tmp_path: Path) -> None:
    total = save(tmp_path)

    found = world(2)(load_little, tmp_path)

    assert all(is_right and total <= read < total + MIB for read, is_right in found)


def load_apart(rank: int, path: Path) -> tuple[bool, int]:
    """Load into trees that are not the same: cut, of another dtype, of another order, or not there at all."""
    mesh = init_device_mesh("cpu", (2,))
    target: dict[str, Any] = {"t0": torch.zeros(ROWS, 1000), "t4": torch.zeros(ROWS, 1000), "step": 0}
    target["t1"] = distribute_tensor(torch.zeros(ROWS, 1000), mesh, [Shard(0)])
    target["t2"] = torch.zeros(ROWS, 1000, dtype=torch.float64 if rank else torch.float32)
    if rank:
        target["t3"] = torch.zeros(ROWS, 1000)
    else:
        target["turned"] = torch.zeros(ROWS, 1000).t()
    store = holdfast.open(path)
    store.load_into("x", target, replicas="broadcast", strict=False, cast=True)
    mine = {"t3": make(3)} if rank else {"turned": make(7).t()}
    wanted = {"t0": make(0), "t4": make(4), "t1": make(1), "t2": make(2).to(target["t2"].dtype), **mine}
    held = {name: target[name].full_tensor() if name == "t1" else target[name] for name in wanted}
    return all(torch.equal(held[name], wanted[name]) for name in wanted), read_bytes(store)


def test_what_the_ranks_do_not_have_alike_each_reads_for_itself(world: World, tmp_path: Path) -> None:
    save(tmp_path)
    size = ROWS * 1000 * 4

    found = world(2)(load_apart, tmp_path)

    assert all(is_right for is_right, _ in found)
    # One of t0 and t4, half of t1, all of t2, and one more.
    assert [pytest.approx(3.5 * size, rel=0.1)] * 2 == [read for _, read in found]


def load_training(rank: int, path: Path) -> tuple[int, str]:
    model = wrap(new_model(seed=rank), "ddp")
    optimizer = torch.optim.AdamW(model.parameters())
    store = holdfast.open(path)
    store.load_into("x", training_state(model, optimizer, rng=False), replicas="broadcast")
    return read_bytes(store), str([each.tolist() for each in model.parameters()]) + str(optimizer.state_dict())


def test_a_fresh_optimizer_gets_its_state_from_whoever_read_it(world: World, tmp_path: Path) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2), "plain")
    store = holdfast.open(tmp_path)
    store.save("x", training_state(model, optimizer, rng=False))

    found = world(2)(load_training, tmp_path)

    wanted = str([each.tolist() for each in model.parameters()]) + str(optimizer.state_dict())
    assert [state for _, state in found] == [wanted, wanted]


def load_damaged(rank: int, path: Path) -> str:
    target = {name: torch.zeros(ROWS, 1000) for name in ("t0", "t1", "t2", "t3")}
    try:
        holdfast.open(path).load_into("x", target, replicas="broadcast", strict=False)
    except RankError as error:
        return error.step
    return ""


def test_what_one_rank_cannot_read_fails_on_all_before_anything_is_sent(world: World, tmp_path: Path) -> None:
    save(tmp_path)
    pack = max((tmp_path / "packs").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    data = bytearray(pack.read_bytes())
    data[len(data) // 7] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)

    assert world(2)(load_damaged, tmp_path) == ["read", "read"]


def test_another_word_is_refused(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path)
    with pytest.raises(ValueError, match="replicas must be 'auto', 'each' or 'broadcast', not 'once'"):
        store.load_into("x", {}, replicas="once")  # type: ignore[arg-type]
