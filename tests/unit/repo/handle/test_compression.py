"""What "auto" chooses follows from measured numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.codec import CodecLevel
from holdfast.repo.handle.compression import (
    LEAST_PACK_BYTES,
    PRIORS,
    Speed,
    Speeds,
    choose_compression,
    plan_level,
    verify_compression,
)
from tests.kit.waiting_store import WaitingStore

GB = 1e9
MIB = 1 << 20


@pytest.mark.parametrize(
    ("store", "cores", "expected"),
    [
        (0.05 * GB, 2, "small"),
        (0.3 * GB, 2, "small"),
        (0.7 * GB, 2, "fast"),
        (1.2 * GB, 2, "fast"),
        (3.0 * GB, 2, None),
        (3.0 * GB, 16, "small"),
        (8.0 * GB, 16, "fast"),
        (40.0 * GB, 16, None),
    ],
)
def test_slow_stores_get_small_chunks_and_fast_ones_raw_bytes(
    store: float, cores: int, expected: CodecLevel | None
) -> None:
    assert plan_level(store, 2 * GB, cores, PRIORS) == expected


def test_what_does_not_shrink_is_stored_raw_however_slow_the_store_is() -> None:
    speeds: dict[CodecLevel, Speed] = {"fast": Speed(2 * GB, 1.0), "small": Speed(0.4 * GB, 0.95)}
    assert plan_level(0.01 * GB, 2 * GB, 2, speeds) is None


def test_of_two_levels_that_gain_the_same_the_faster_is_chosen() -> None:
    speeds: dict[CodecLevel, Speed] = {"fast": Speed(2 * GB, 0.5), "small": Speed(0.4 * GB, 0.5)}
    assert plan_level(0.01 * GB, 2 * GB, 2, speeds) == "fast"


def test_nothing_is_encoded_before_the_store_was_measured() -> None:
    speeds = Speeds()
    assert speeds.find_level(2, 2 * GB, 2) is None
    speeds.note_stored(LEAST_PACK_BYTES - 1, 1.0)
    assert speeds.find_level(2, 2 * GB, 2) is None
    speeds.note_stored(LEAST_PACK_BYTES, 1.0)
    assert speeds.find_level(2, 2 * GB, 2) == "small"


def test_a_store_that_becomes_faster_is_noticed() -> None:
    speeds = Speeds()
    speeds.note_stored(8 * MIB, 1.0)
    assert speeds.find_level(2, 2 * GB, 2) is not None
    for _ in range(20):
        speeds.note_stored(5000 * MIB, 1.0)
    assert speeds.find_level(2, 2 * GB, 2) is None


def test_bytes_that_a_buffer_took_at_once_do_not_hide_a_slow_store() -> None:
    speeds = Speeds()
    speeds.note_stored(32 * MIB, 1e-6)
    assert speeds.find_level(2, 2 * GB, 2) is None
    speeds.note_stored(32 * MIB, 0.1)
    assert speeds.find_level(2, 2 * GB, 2) is not None


def test_items_that_do_not_shrink_are_tried_again_at_times_and_others_are_not_affected() -> None:
    speeds = Speeds()
    speeds.note_stored(8 * MIB, 1.0)
    for _ in range(30):
        speeds.note_encoded("fast", 1, (MIB, MIB), MIB / (2 * GB))
        speeds.note_encoded("small", 1, (MIB, MIB), MIB / (0.4 * GB))
    found = [speeds.find_level(1, 2 * GB, 2) for _ in range(64)]
    assert [level for level in found if level] == ["fast", "fast"]
    assert speeds.find_level(2, 2 * GB, 2) == "small"


def test_a_fast_store_is_not_probed() -> None:
    speeds = Speeds()
    speeds.note_stored(20_000 * MIB, 1.0)
    assert {speeds.find_level(2, 2 * GB, 2) for _ in range(100)} == {None}


def test_a_measurement_without_time_is_none() -> None:
    speeds = Speeds()
    speeds.note_stored(8 * MIB, 0.0)
    speeds.note_encoded("fast", 2, (MIB, MIB), 0.0)
    assert speeds.find_level(2, 2 * GB, 2) is None


def test_the_default_is_auto_where_requests_are_waited_for() -> None:
    assert choose_compression(MemoryStore(), "default") is None
    assert choose_compression(WaitingStore(), "default") == "auto"
    assert choose_compression(WaitingStore(), None) is None
    assert choose_compression(MemoryStore(), "small") == "small"


@pytest.mark.parametrize("wrong", ["zstd", "", "none", 1, True])
def test_other_choices_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="compression must be None, 'auto', 'fast', 'small' or 'default'"):
        verify_compression(wrong)
