"""Writers and collectors, the real ones, in every order of their operations that few switches can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.interleaving.scenes import CROWDS, SCENES, Scene
from tests.interleaving.schedule import Bounds
from tests.interleaving.theatre import explore
from tests.kit.thinning import thin

Note = Callable[[str, object], None]

# A third of the schedules with one switch or one death, and some of those with two, of each second scene; the slow
# tests run all.
PAIR_BOUNDS: Final = Bounds((1, 3, 90))
CROWD_BOUNDS: Final = Bounds((1, 5, 600))
DEEP_PAIR_BOUNDS: Final = Bounds((1, 1, 1))
DEEP_CROWD_BOUNDS: Final = Bounds((1, 1, 7, 3_000))


@pytest.mark.parametrize("scene", thin(SCENES, 2), ids=str)
def test_two_that_interrupt_each_other_anywhere_keep_every_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    report = explore(scene, PAIR_BOUNDS, monkeypatch)
    record_property("schedules", report.runs)
    assert not report.broken, "\n".join(report.broken)
    assert report.runs > 20


@pytest.mark.parametrize("scene", thin(CROWDS, 2), ids=str)
def test_three_that_interrupt_each_other_anywhere_keep_every_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    report = explore(scene, CROWD_BOUNDS, monkeypatch)
    record_property("schedules", report.runs)
    assert not report.broken, "\n".join(report.broken)
    assert report.runs > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_two_that_interrupt_each_other_twice_keep_every_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    report = explore(scene, DEEP_PAIR_BOUNDS, monkeypatch)
    record_property("schedules", report.runs)
    assert not report.broken, "\n".join(report.broken)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_three_that_interrupt_each_other_often_keep_every_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    report = explore(scene, DEEP_CROWD_BOUNDS, monkeypatch)
    record_property("schedules", report.runs)
    assert not report.broken, "\n".join(report.broken)
