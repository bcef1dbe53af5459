"""An error that one rank raises in a collective is raised on all ranks, by name, and the next collective works."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIGINT, default_int_handler, signal
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.distributed.talk import store_rounds
from holdfast.distributed.talk.collectives import Collectives
from holdfast.errors import RankError
from tests.distributed.conftest import World
from tests.distributed.watching import looking_often
from tests.kit.patience import PATIENCE_S, PROMPT_S
from tests.kit.thinning import keep


class Unpicklable(Exception):
    """Cannot be sent anywhere by pickle."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Stubborn(Exception):
    """Pickles, and cannot be made again from that."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Speechless(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError


class OwnBaseException(BaseException):
    """Is caught by no `except Exception`, like torch's CheckpointException."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("it is wrong"),
    "Unpicklable": lambda: Unpicklable("it is wrong"),
    "Stubborn": lambda: Stubborn("it is", "wrong"),
    "Speechless": Speechless,
    "SystemExit": lambda: SystemExit("it is wrong"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("it is wrong"),
    "OwnBaseException": lambda: OwnBaseException("it is wrong"),
    "CheckpointException": lambda: CheckpointException("it is wrong", {}),
    "GeneratorExit": lambda: GeneratorExit("it is wrong"),
}
STOPS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "OwnBaseException", "CheckpointException")
"""Errors that are no Exception: their own rank raises them as they are."""
KINDS = ["reduce_scatter", "all_reduce", "all_gather", "broadcast"]


def report(act: Callable[[], object]) -> dict[str, Any]:
    """Say what `act` raised, in words that can be sent."""
    began = time.monotonic()
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is to be told
        found: dict[str, Any] = {
            "type": type(error).__name__,
            "text": "" if isinstance(error, Speechless) else str(error),
            "cause": type(error.__cause__).__name__,
            "notes": list(getattr(error, "__notes__", [])),
            "seconds": time.monotonic() - began,
        }
        if isinstance(error, RankError):
            found |= {"step": error.step, "failures": dict(error.failures)}
            pickle.dumps(error)
        return found
    return {"type": None}


def call(ranks: Collectives, kind: str, map: Callable[[], Any], reduce: Callable[[list[Any]], Any]) -> Any:
    method = getattr(ranks, kind)
    return method(kind, map, reduce) if "reduce" in kind else method(kind, map)


def raise_in_turn(rank: int, culprit: int, cases: list[tuple[str, str, str]]) -> list[Any]:
    """Go through the cases with one group: which collective, what is raised, in `map` or `reduce`."""
    found = []
    with Collectives() as ranks:
        for kind, name, where in cases:
            act = {
                place: partial(fail_at, place == where and rank == culprit, name, rank) for place in ("map", "reduce")
            }
            outcome = report(partial(call, ranks, kind, act["map"], act["reduce"]))
            found.append((outcome, ranks.all_gather_object(rank, step="after")))
    return found


def fail_at(is_here: bool, name: str, rank: int, got: Sequence[Any] = (1, 2, 3)) -> Any:
    if is_here:
        raise ERRORS[name]()
    return [rank] * len(got)


@pytest.mark.parametrize(("size", "culprit"), keep([(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)], (1, 0), (3, 1)))
def test_an_error_of_any_kind_anywhere_reaches_every_rank_and_the_group_stays_usable(
    world: World, size: int, culprit: int
) -> None:
    # Only the coordinator reduces, and maps for a broadcast.
    kinds = [kind for kind in KINDS if culprit == 0 or kind != "broadcast"]
    cases = [(kind, "ValueError", "map") for kind in kinds]
    cases += [(kind, name, "map") for kind in kinds for name in STOPS]
    cases += [("all_reduce", name, "map") for name in ERRORS]
    cases += [("reduce_scatter", name, "reduce") for name in ERRORS if culprit == 0]

    results = world(size)(raise_in_turn, culprit, cases)

    for rank, found in enumerate(results):
        for (kind, name, _), (outcome, after) in zip(cases, found, strict=True):
            assert after == list(range(size))
            assert outcome["seconds"] < PROMPT_S
            if rank == culprit and name in STOPS:
                assert outcome["type"] == name
                told = [f"step {kind!r}: the other ranks were told, and raise RankError"]
                assert outcome["notes"] == (told if size > 1 else [])
                continue
            assert outcome["type"] == "RankError"
            assert outcome["step"] == kind
            assert outcome["cause"] == (name if rank == culprit else "NoneType")
            (failure,) = outcome["failures"].values()
            assert list(outcome["failures"]) == [failure.rank] == [culprit]
            assert failure.type_name.endswith(name)
            if name != "CheckpointException":  # its text is longer
                assert failure.message == ("<exception str() failed>" if name == "Speechless" else "it is wrong")
            assert "raise ERRORS[name]()" in failure.traceback_text
            assert f"rank {culprit}: {failure.type_name}: {failure.message.rstrip()}" in outcome["text"]


def raise_on_all(rank: int) -> dict[str, Any]:
    def fail() -> None:
        raise OSError(f"disk of rank {rank} is full")

    # As long as it takes: all of them fail, so that nobody waits for one more.
    kept = time.sleep
    long = mock.patch.multiple(store_rounds, _SETTLE_S=PATIENCE_S, _MAX_SETTLE_S=PATIENCE_S)
    with long, mock.patch("time.sleep", lambda seconds: kept(min(seconds, 0.01))):
        with Collectives() as ranks:
            return report(lambda: ranks.all_gather("write", fail))


def test_all_ranks_that_fail_in_one_step_are_named(world: World) -> None:
    results = world(3)(raise_on_all)

    for result in results:
        assert {rank: one.message for rank, one in result["failures"].items()} == {
            rank: f"disk of rank {rank} is full" for rank in range(3)
        }


def send_what_cannot_be_sent(rank: int) -> list[dict[str, Any]]:
    with Collectives() as ranks:
        odd = torch.ones(2) if rank == 1 else 1
        return [
            report(lambda: ranks.all_gather_object({"a": [odd]}, step="odd value")),
            report(lambda: ranks.scatter_object([1], step="too few")),
            report(lambda: ranks.all_to_all_object([1] * (2 + rank), step="too many")),
            report(lambda: ranks.all_gather_keys(["a", rank] if rank else ["a"], step="odd key")),  # type: ignore[list-item]
        ]


def test_a_value_that_cannot_be_sent_is_a_failure_of_its_rank(world: World) -> None:
    results = world(2)(send_what_cannot_be_sent)

    for odd, few, many, key in results:
        assert "value['a'][0] is a torch.Tensor, which cannot be sent" in odd["failures"][1].message
        assert "there are 2 ranks and 1 values" in few["failures"][0].message
        assert "there are 2 ranks and 3 values" in many["failures"][1].message
        assert list(key["failures"]) == [1]


def test_a_world_of_one_fails_in_the_same_way() -> None:
    def fail() -> None:
        raise ValueError("it is wrong")

    with Collectives() as ranks:
        with pytest.raises(RankError, match=r"step 'plan' failed on rank 0 of 1, because of this rank: .*it is wrong"):
            ranks.all_gather("plan", fail)
        with pytest.raises(KeyboardInterrupt):
            ranks.all_gather("plan", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        assert ranks.all_gather_object(1, step="after") == [1]


def tell_between(rank: int) -> list[Any]:
    ranks = Collectives()
    found: list[Any] = []
    if rank == 1:
        ranks.fail(ValueError("between"), step="prepare")
        found.append({"failures": {1: None}})
    else:
        found.append(report(lambda: ranks.all_gather_object(rank, step="plan")))
    found.append(ranks.all_gather_object(rank, step="after"))
    ranks.close()
    return found


def test_a_rank_that_fails_between_two_collectives_can_tell_those_who_wait(world: World) -> None:
    results = world(3)(tell_between)

    assert [list(found[0]["failures"]) for found in results] == [[1]] * 3
    assert results[0][0]["failures"][1].message == "between"
    assert [found[1] for found in results] == [[0, 1, 2]] * 3


def leave_by_an_error(rank: int) -> dict[str, Any]:
    def act() -> None:
        with Collectives() as ranks:
            if rank == 1:
                raise ValueError("no state")
            ranks.all_gather_object(rank, step="plan")

    return report(act)


def test_an_error_that_leaves_the_with_block_is_told_to_all(world: World) -> None:
    results = world(2)(leave_by_an_error)

    assert results[0]["failures"][1].message == "no state"
    assert results[0]["seconds"] < PROMPT_S
    assert results[1]["type"] == "ValueError"


def leave_early(rank: int) -> list[dict[str, Any]]:
    found = []
    for absent in range(3):
        with looking_often(), Collectives() as ranks:
            ranks.all_gather_object(rank, step="plan")
            if rank != absent:
                found.append(report(partial(ranks.all_gather_object, rank, step="write")))
    return found


def test_whoever_waits_for_a_rank_that_has_left_is_told(world: World) -> None:
    results = world(3)(leave_early)

    for rank, found in enumerate(results):
        for absent, outcome in zip([one for one in range(3) if one != rank], found, strict=True):
            assert {one: failure.type_name for one, failure in outcome["failures"].items()} == {absent: "RankLeft"}


def watch_while_working(rank: int) -> list[Any]:
    """Rank 0 fails; the others notice while they work: 1 inside a collective, 2 before it."""
    ranks = Collectives()
    ranks.all_gather_object(None, step="begin")

    def work() -> None:
        while True:
            ranks.check_failures()
            time.sleep(0.01)

    def fail() -> None:
        raise OSError("disk full")

    found: list[Any] = [
        report([lambda: ranks.all_gather("write", fail), lambda: ranks.all_gather("write", work), work][rank])
    ]
    found.append(ranks.all_gather_object(rank, step="after"))
    ranks.close()
    return found


def test_a_rank_that_works_long_can_look_whether_others_have_failed(world: World) -> None:
    results = world(3)(watch_while_working)

    for found in results:
        assert found[0]["failures"][0].message == "disk full"
        assert found[0]["seconds"] < PROMPT_S
        assert found[1] == [0, 1, 2]


def interrupt_a_wait(rank: int) -> list[Any]:
    signal(SIGINT, default_int_handler)  # whoever runs the tests in the background has it ignored
    ranks = Collectives()
    ranks.all_gather_object(None, step="begin")

    def work() -> None:
        if rank == 1:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), SIGINT)).start()
            return
        while True:
            ranks.check_failures()
            time.sleep(0.01)

    found: list[Any] = [report(lambda: ranks.all_gather("write", work))]
    found.append(ranks.all_gather_object(rank, step="after"))
    ranks.close()
    return found


def test_a_rank_that_is_interrupted_while_it_waits_tells_the_others(world: World) -> None:
    results = world(2)(interrupt_a_wait)

    assert results[0][0]["failures"][1].type_name == "KeyboardInterrupt"
    assert results[1][0]["type"] == "KeyboardInterrupt"
    assert [found[1] for found in results] == [[0, 1]] * 2


def call_different_steps(rank: int) -> list[Any]:
    with Collectives() as ranks:
        found: list[Any] = [
            report(lambda: ranks.all_gather_object(1, step="plan" if rank == 0 else "load")),
            report(lambda: ranks.all_gather_object(1, step="x") if rank else ranks.broadcast_object(1, step="x")),
        ]
        found.append(ranks.all_gather_object(rank, step="after"))
        return found


@pytest.mark.parametrize("size", keep([2, 3], 3))
def test_ranks_that_call_different_steps_are_told_so(world: World, size: int) -> None:
    results = world(size)(call_different_steps)

    for other_step, other_kind, after in results:
        assert set(other_step["failures"]) == set(range(1, size))
        assert "called all_gather 'load' where rank 0 called all_gather 'plan'" in other_step["text"]
        assert "called all_gather 'x' where rank 0 called broadcast 'x'" in other_kind["text"]
        assert after == list(range(size))


def call_in_the_wrong_way(rank: int) -> list[dict[str, Any]]:
    ranks = Collectives()
    nested = report(lambda: ranks.all_gather("outer", lambda: ranks.all_gather_object(1, step="inner")))
    ranks.close()
    ranks.close()
    return [nested, report(lambda: ranks.all_gather_object(1, step="late"))]


def test_a_collective_inside_another_or_after_the_end_is_refused(world: World) -> None:
    for nested, late in world(2)(call_in_the_wrong_way):
        assert "'outer' is still running" in nested["text"]
        assert late["type"] == "ValueError"
        assert "'late'" in late["text"]


def name_itself(rank: int) -> list[dict[str, Any]]:
    def talk() -> None:
        with looking_often(), Collectives(coordinator=1 - rank) as ranks:
            ranks.all_gather_object(1, step="plan")

    return [report(talk), report(lambda: Collectives().close())]


def test_ranks_that_disagree_on_the_coordinator_are_told(world: World) -> None:
    results = world(2)(name_itself)

    (told,) = [found for found, _ in results if found["type"] == "ValueError"]
    (left,) = [found for found, _ in results if found["type"] == "RankError"]
    assert "pass the same coordinator" in told["text"]
    assert [failure.type_name for failure in left["failures"].values()] == ["RankLeft"]
    assert [after["type"] for _, after in results] == [None, None]


def test_a_coordinator_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="coordinator=1: must be a rank of the group"):
        Collectives(coordinator=1)
