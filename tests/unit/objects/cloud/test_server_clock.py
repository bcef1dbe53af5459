"""The clock of a server, estimated from objects that were created there."""

from __future__ import annotations

import time

import pytest

from holdfast.objects.cloud.cloud_store import ServerClock
from holdfast.objects.protocol import ObjectInfo


def make_info(key: str, modified_s: float) -> ObjectInfo:
    return ObjectInfo(key, 1, modified_s)


@pytest.mark.parametrize("skew_s", [-86400.0, -900.0, 5.0, 3600.0])
def test_an_object_that_was_just_created_shows_the_difference(skew_s: float) -> None:
    clock = ServerClock()
    clock.note_created("leases/one", began_s=time.time())

    clock.note_seen([make_info("packs/old", 0.0), make_info("leases/one", time.time() + skew_s)])

    assert clock.is_known
    assert abs(clock.now() - time.time() - skew_s) < 1.0


def test_times_in_whole_seconds_are_no_difference() -> None:
    clock = ServerClock()
    clock.note_created("leases/one", began_s=time.time())

    clock.note_seen([make_info("leases/one", time.time() - 0.999)])

    assert clock.skew_s == 0.0


def test_objects_of_others_show_nothing() -> None:
    clock = ServerClock()
    clock.note_created("leases/one", began_s=time.time())

    clock.note_seen([make_info("leases/two", time.time() + 3600.0)])

    assert clock.skew_s == 0.0
    assert not clock.is_known


def test_an_object_that_took_long_to_create_shows_nothing() -> None:
    clock = ServerClock()
    clock.note_created("packs/one", began_s=time.time() - 60.0)

    clock.note_seen([make_info("packs/one", time.time() + 3600.0)])

    assert clock.skew_s == 0.0
