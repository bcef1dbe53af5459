"""The garbage collector is paused while many objects are built, and enabled again afterwards."""

from __future__ import annotations

import gc

import pytest

from holdfast.snapshot.gc_pause import pause_gc, pause_gc_if_small


def test_the_collector_is_paused_and_enabled_again_even_after_an_error() -> None:
    with pause_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), pause_gc():
        _ = 1 // 0
    assert gc.isenabled()


def test_a_collector_that_was_disabled_before_stays_disabled() -> None:
    with pause_gc():
        with pause_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(("size_bytes", "is_enabled"), [(1000, False), (1 << 30, True)])
def test_the_collector_is_paused_only_for_many_small_entries(size_bytes: int, is_enabled: bool) -> None:
    with pause_gc_if_small(size_bytes, 10):
        assert gc.isenabled() == is_enabled
