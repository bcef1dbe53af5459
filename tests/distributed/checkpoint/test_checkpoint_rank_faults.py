"""One rank fails at any step of a save or load: all others raise, and the name has its old or its new content."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any, Final, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import holdfast
from holdfast.distributed.talk.collectives import Collectives
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.names.snapshots import commit_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.write import transaction
from holdfast.testing.faults import Fault, FaultyStore
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.distributed.placing import place
from tests.kit.hooking import hooked
from tests.kit.patience import PATIENCE_S, PROMPT_S
from tests.kit.thinning import keep, pair_up

TIMEOUT_S: Final = 8.0
STEPS: Final = [
    "save 'run'",
    "describe",
    "alike",
    "cover",
    "prepare",
    "name",
    "room",
    "open",
    "begin",
    "share",
    "write",
    "marks",
    "stale",
    "commit",
    "done",
]
"""Every step of a save that overwrites, in order."""


class Odd(Exception):
    """Can be neither pickled nor shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ValueError("it does not say")

    def __reduce__(self) -> NoReturn:
        raise TypeError("it does not travel")


KINDS: Final[dict[str, Callable[[], BaseException]]] = {
    "plain": lambda: ValueError("on cue"),
    "odd": Odd,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
}


def begin_with(step: str, act: Callable[[], Any], block: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Collectives that does the same as `block`, after `act` if it is for that step."""

    @contextmanager
    def meet(self: Collectives, found: str) -> Iterator[Any]:
        with block(self, found) as given:
            if found == step:
                act()
            yield given

    return meet


def strike(step: str, act: Callable[[], Any]) -> Callable[[], None]:
    """Have `act` happen when this rank is about to do its part of a step; return what takes that back."""
    kept = {name: getattr(Collectives, name) for name in ("all_to_all", "broadcast")}
    blocks: dict[str, Callable[..., Any]] = {name: getattr(Collectives, name) for name in ("gathering", "step")}

    def make(name: str) -> Callable[..., Any]:
        def meet(self: Collectives, found: str, map: Callable[[], Any]) -> Any:
            if found != step:
                return kept[name](self, found, map)
            if name == "broadcast" and not self.is_coordinator:
                act()  # it has no part in that step but to wait for the answer
            return kept[name](self, found, lambda: (act(), map())[1])

        return meet

    for name in kept:
        setattr(Collectives, name, make(name))
    for name, block in blocks.items():
        setattr(Collectives, name, begin_with(step, act, block))

    def restore() -> None:
        for name, method in (kept | blocks).items():
            setattr(Collectives, name, method)

    return restore


def make_tree(value: float) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"w": place(torch.full((6, 200), value), mesh, [Shard(0)]), "plain": torch.full((300,), value)}


def read_value(path: Path) -> float:
    """Return the value that all of the tree has; fail if it is a mix."""
    with holdfast.open(path, read_only=True) as store:
        tree = store.load("run")
    (value,) = set(tree["w"].flatten().tolist()) | set(tree["plain"].tolist())
    return float(value)


def raise_at(
    rank: int, path: Path, victim: int, cases: list[tuple[str, str]]
) -> list[tuple[ActOutcome, float, ActOutcome]]:
    """For each case, save with an error on one rank, look what is there, and save again with the same group."""
    trees = {value: make_tree(value) for value in (1.0, 2.0)}
    found = []
    with holdfast.open(path) as store:
        for step, kind in cases:
            store.save("run", trees[1.0], overwrite=True, timeout_s=PATIENCE_S)

            def fail(kind: str = kind) -> NoReturn:
                raise KINDS[kind]()

            restore = strike(step, fail) if rank == victim else lambda: None
            outcome = report_outcome(
                lambda: store.save("run", trees[2.0], overwrite=True, timeout_s=PATIENCE_S).generation
            )
            restore()
            dist.barrier()
            value = read_value(path)
            dist.barrier()
            found.append(
                (outcome, value, report_outcome(lambda: store.save("next", trees[2.0], overwrite=True).generation))
            )
    return found


@pytest.mark.slow  # every step
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kinds", [("plain", "odd"), ("exit", "interrupt")])
def test_what_one_rank_raises_in_any_step_ends_the_save_of_all(
    world: World, tmp_path: Path, victim: int, kinds: tuple[str, str]
) -> None:
    # The kinds take turns, so that each meets every second step on each of the victims.
    cases = [(step, kinds[(number + victim) % 2]) for number, step in enumerate(STEPS)]

    results = world(2)(raise_at, tmp_path, victim, cases)

    for (step, kind), *told_by_rank in zip(cases, *results, strict=True):
        for rank, (outcome, value, after) in enumerate(told_by_rank):
            what = f"{kind} at {step!r}, seen by rank {rank}: {outcome}"
            is_new = step == "done" or (step == "commit" and victim != 0)
            assert value == (2.0 if is_new else 1.0), what
            assert after.kind == "", after
            if kind in ("exit", "interrupt") and rank == victim:
                assert outcome.kind == {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[kind], what
            elif step == "done":
                assert outcome.kind == "", what
            elif rank == victim:
                # Outside of its part of a step it is raised as it is.
                assert outcome.kind in ("RankError", "ValueError", "Odd"), what
            elif step == "commit":
                assert outcome.kind == "CommitUnknown", what
            else:
                assert outcome.kind == "RankError", what
                assert list(outcome.failures) == [victim], what
            assert outcome.seconds < PROMPT_S, what
    with holdfast.open(tmp_path) as store:
        assert [finding for finding in store.check(read=True) if finding.severity != "note"] == []


# Ranks that die or stop


def lose_at(rank: int, path: Path, victim: int, step: str, signal: Signals) -> ActOutcome:
    tree = make_tree(2.0)

    def commit_and_die(*args: Any) -> None:
        commit_snapshot(*args)
        os.kill(os.getpid(), signal)

    is_in_commit = rank == victim and step == "after the commit"
    if rank == victim and not is_in_commit:
        strike(step, lambda: os.kill(os.getpid(), signal))
    with (
        hooked(transaction, "commit_snapshot", commit_and_die) if is_in_commit else nullcontext(),
        holdfast.open(path) as store,
    ):
        return report_outcome(lambda: store.save("run", tree, overwrite=True, timeout_s=TIMEOUT_S).generation)


def save_both(rank: int, path: Path, name: str, value: float) -> ActOutcome:
    tree = make_tree(value)
    with holdfast.open(path) as store:
        return report_outcome(lambda: store.save(name, tree, overwrite=True, timeout_s=PATIENCE_S).generation)


@pytest.mark.slow  # the timeout has to pass
@pytest.mark.parametrize(
    ("victim", "step", "signal"),
    [
        (0, "describe", SIGKILL),
        (0, "write", SIGKILL),
        (0, "write", SIGSTOP),
        (0, "commit", SIGKILL),
        (0, "after the commit", SIGKILL),
        (0, "after the commit", SIGSTOP),
        (2, "save 'run'", SIGSTOP),
        (2, "describe", SIGKILL),
        (2, "write", SIGKILL),
        (2, "stale", SIGSTOP),
        (2, "commit", SIGKILL),
        (2, "done", SIGKILL),
    ],
)
def test_a_rank_that_is_lost_in_any_step_is_named_and_nothing_is_mixed(
    world: World, tmp_path: Path, victim: int, step: str, signal: Signals
) -> None:
    assert [outcome.kind for outcome in world(3)(save_both, tmp_path, "run", 1.0)] == [""] * 3

    results = world(3)(lose_at, tmp_path, victim, step, signal, lost=[victim], hosted_apart=True)

    value = read_value(tmp_path)
    for rank, outcome in enumerate(results):
        if rank == victim:
            continue
        if value == 2.0 and outcome.kind == "":
            continue  # it knew that it was done before the other was lost
        assert value == 1.0 or outcome.kind == "CommitUnknown", outcome
        assert outcome.kind in ("RankError", "CommitUnknown"), outcome
        assert f"rank {victim}: RankGone" in outcome.text, outcome
    assert (step in ("after the commit", "done") or (step, victim) == ("commit", 2)) == (value == 2.0)
    again = world(2)(save_both, tmp_path, "run", 3.0)
    assert [outcome.kind for outcome in again] == ["", ""]
    assert read_value(tmp_path) == 3.0
    with holdfast.open(tmp_path) as store:
        assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []


# Loads


def raise_in_load(rank: int, path: Path, victim: int, steps: list[str]) -> list[tuple[ActOutcome, bool]]:
    """For each step, load with an error on one rank; then without, with the same group."""
    found = []
    with holdfast.open(path) as store:
        for step in [*steps, ""]:

            def fail() -> NoReturn:
                raise ValueError("on cue")

            tree = make_tree(0.0)
            restore = strike(step, fail) if rank == victim else lambda: None
            outcome = report_outcome(lambda tree=tree: store.load_into("run", tree, timeout_s=PATIENCE_S) and None)  # type: ignore[misc]
            restore()
            found.append((outcome, bool(tree["plain"].any())))
    return found


@pytest.mark.parametrize("victim", keep([0, 1], 1))
def test_what_one_rank_raises_in_any_step_ends_the_load_of_all(world: World, tmp_path: Path, victim: int) -> None:
    steps = ["load", "root", "parts", "variants", "fit", "rows", "places", "read"]
    world(2)(save_both, tmp_path, "run", 1.0)

    results = world(3)(raise_in_load, tmp_path, victim, steps)

    for rank, told_by_step in enumerate(results):
        for step, (outcome, is_changed) in zip(steps, told_by_step, strict=False):
            if rank == victim:
                assert outcome.kind in ("RankError", "ValueError"), (step, outcome)
            else:
                assert (outcome.kind, outcome.failures) == ("RankError", {victim: "ValueError"}), (step, outcome)
            assert not is_changed or step == "read", step
        outcome, is_changed = told_by_step[-1]
        assert (outcome.kind, is_changed) == ("", True), outcome


# Collectors


def save_beside_a_collector(rank: int, path: Path) -> tuple[ActOutcome, bool]:
    """Save what the store holds but nobody needs any more, while a collector marks just that."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    weight = torch.rand(900, 1024, generator=torch.Generator().manual_seed(0))
    tree = {"w": place(weight, mesh, [Shard(0)]), "plain": weight + 1}
    with holdfast.open(path) as store:
        store.save("old", tree)
        dist.barrier()
        if rank == 0:
            store.delete("old")
            strike("marks", lambda: collect(LocalStore(path), Rules(min_age_s=0.0)).pending_marks)
        outcome = report_outcome(lambda: store.save("new", tree, timeout_s=PATIENCE_S).new_bytes)
        dist.barrier()
        if rank == 0:
            store.gc(Rules(min_age_s=0.0))
        dist.barrier()
        loaded = store.load("new")
    return outcome, torch.equal(loaded["w"], weight) and torch.equal(loaded["plain"], weight + 1)


def test_what_a_collector_marks_meanwhile_is_written_anew_by_the_rank_that_uses_it(
    world: World, tmp_path: Path
) -> None:
    results = world(2)(save_beside_a_collector, tmp_path)

    for outcome, is_right in results:
        assert outcome.value == 2 * 900 * 1024 * 4, outcome
        assert is_right


# Disks of one rank


def save_on_bad_disk(rank: int, path: Path, victim: int, how: str) -> tuple[ActOutcome, ActOutcome]:
    """Save with a disk that is full, read-only or failing for one rank; then again, when all is well."""
    tree = make_tree(2.0)
    inner: Any = LocalStore(path, read_only=how == "read-only" and rank == victim)
    if rank == victim and how != "read-only":
        fault, at = {"full": (Fault.NO_SPACE, 1), "failing": (Fault.FOR_GOOD, 12)}[how]
        inner = FaultyStore(inner, fault=fault, at=at)
    with holdfast.Store(inner) as store:
        bad = report_outcome(lambda: store.save("run", tree, overwrite=True, timeout_s=PATIENCE_S).generation)
    with holdfast.open(path) as store:
        return bad, report_outcome(lambda: store.save("after", tree, timeout_s=PATIENCE_S).generation)


@pytest.mark.parametrize(("how", "victim"), pair_up(["full", "read-only", "failing"], [0, 2]))
def test_a_disk_that_is_bad_for_one_rank_fails_the_save_of_all(
    world: World, tmp_path: Path, victim: int, how: str
) -> None:
    world(3)(save_both, tmp_path, "run", 1.0)

    results = world(3)(save_on_bad_disk, tmp_path, victim, how)

    kinds = {"full": "StoreFull", "read-only": "ReadOnlyStore", "failing": "StoreError"}
    for bad, after in results:
        assert (bad.kind, bad.failures) == ("RankError", {victim: kinds[how]}), bad
        assert after.kind == "", after
    assert read_value(tmp_path) == 1.0
    with holdfast.open(tmp_path) as store:
        assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []
