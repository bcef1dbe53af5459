"""The memory of a save is divided so that hashing and uploads together stay within the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, MIN_BUDGET_BYTES
from holdfast.repo.write.packing import Shares, plan_shares

MIB: Final = 1 << 20
BUCKET: Final = replace(MemoryStore().traits, upload_bytes=64 * MIB, requests_at_once=64)
BUDGETS: Final = (MIN_BUDGET_BYTES, 100 * MIB, DEFAULT_BUDGET_BYTES, 1 << 30, 1 << 36)


def count_most_bytes(shares: Shares) -> int:
    """Return the most bytes in memory: a pack is complete once it has `pack_bytes`, and a batch may make it larger."""
    assert shares.pack_bytes is not None
    return shares.hash_bytes + (shares.packs_in_flight + 1) * (shares.pack_bytes + shares.batch_bytes)


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_hashing_and_uploads_fit_into_the_budget(budget_bytes: int) -> None:
    assert count_most_bytes(plan_shares(BUCKET, budget_bytes)) <= budget_bytes


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_at_least_two_packs_are_sent_while_the_next_is_filled(budget_bytes: int) -> None:
    assert plan_shares(BUCKET, budget_bytes).packs_in_flight >= 2


def test_a_larger_budget_has_more_packs_in_flight_not_larger_ones() -> None:
    small, large = plan_shares(BUCKET, DEFAULT_BUDGET_BYTES), plan_shares(BUCKET, 1 << 30)
    assert small.pack_bytes == large.pack_bytes == 60 * MIB
    assert (small.packs_in_flight, large.packs_in_flight) == (2, 11)
    assert plan_shares(BUCKET, 1 << 40).packs_in_flight == BUCKET.requests_at_once


def test_a_store_that_writes_while_it_is_appended_to_needs_no_room_for_packs() -> None:
    shares = plan_shares(MemoryStore().traits, DEFAULT_BUDGET_BYTES)
    assert shares == Shares(DEFAULT_BUDGET_BYTES // 2, batch_bytes=8 * MIB, staged_bytes=4 * MIB)
