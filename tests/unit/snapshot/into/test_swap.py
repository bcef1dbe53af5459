"""An exchange of memory that fails anywhere can be undone: the target then has its old values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.snapshot.into import in_place as swapping
from holdfast.snapshot.into.in_place import Swap
from tests.kit.hooking import hooked

REAL_COPY = swapping._copy


def make_swap(target: torch.Tensor, new: torch.Tensor) -> Swap:
    return Swap([(target, new)], [target])


@contextmanager
def failing_at(number: int, *, is_late: bool) -> Iterator[list[int]]:
    """Let one copy fail, when it is done or before it; yields how many there were."""
    calls = [0]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] != number or is_late:
            REAL_COPY(target, source)
        if calls[0] == number:
            raise MemoryError

    with hooked(swapping, "_copy", copy):
        yield calls


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("shape", [(40,), (8, 5)], ids=["in blocks", "at once"])
def test_whichever_copy_fails_the_target_gets_its_old_values_back(
    shape: tuple[int, ...], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "_BLOCK_BYTES", 48)
    failures = 0
    for number in range(1, 100):
        old, new = torch.arange(40.0).reshape(shape), -torch.arange(40.0).reshape(shape)
        # No view of one dimension for the second shape.
        target = old.clone() if len(shape) == 1 else torch.empty(5, 8).t().copy_(old)
        swap = make_swap(target, new.clone())
        with failing_at(number, is_late=is_late) as calls:
            try:
                swap.exchange()
            except MemoryError:
                failures += 1
                swap.exchange_back()
        if calls[0] < number:
            assert torch.equal(target, new)
            break
        assert torch.equal(target, old)
    assert failures == number - 1 >= 3


def test_a_finished_exchange_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "_BLOCK_BYTES", 48)
    old, new = torch.arange(40.0), -torch.arange(40.0)
    target = old.clone()
    swap = make_swap(target, new.clone())

    swap.exchange()
    assert torch.equal(target, new)
    swap.exchange_back()

    assert torch.equal(target, old)
