"""Model checks: the protocol holds in every interleaving of each scene, and each broken rule is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.kit.thinning import thin
from tests.model.explore import Report, Scene, explore
from tests.model.mutants import MUTANTS, Mutant
from tests.model.scenes import SCENES, SLOW_SCENES
from tests.model.world import Rules

MIN_STATES: Final = 100_000
LARGE: Final = ("overwrite at once, save at once, collector", "overwrite, two collectors", "two overwrites, collector")
"""Half of all states; the slow tests explore them, and those of broken rules until they find what is wrong."""
# Dying costs two collections and a save each time; a prime, so that it does not fall in step with the search.
CRASH_EVERY: Final = 53


def show(report: Report) -> str:
    steps = "\n".join(report.trace)
    return f"{report.broken}, after {len(report.trace)} steps:\n{steps}"


def by_title(item: Scene | Mutant) -> str:
    return item.title


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Return what exploring each scene that is not large found."""
    scenes = {title: scene for title, scene in SCENES.items() if title not in LARGE}
    return {title: explore(scene, Rules(), crash_every=CRASH_EVERY) for title, scene in scenes.items()}


@pytest.mark.parametrize("title", [title for title in SCENES if title not in LARGE])
def test_every_interleaving_keeps_every_invariant(reports: dict[str, Report], title: str) -> None:
    report = reports[title]
    assert not report.broken, show(report)
    assert report.ends > 0


def test_the_scenes_together_are_large(reports: dict[str, Report]) -> None:
    assert sum(report.states for report in reports.values()) >= MIN_STATES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("scene", "crash_every"),
    [(SCENES[title], CRASH_EVERY) for title in LARGE] + [(scene, 997) for scene in SLOW_SCENES.values()],
    ids=[*LARGE, *SLOW_SCENES],
)
def test_every_interleaving_of_a_large_scene_keeps_every_invariant(scene: Scene, crash_every: int) -> None:
    report = explore(scene, Rules(), crash_every=crash_every)
    assert not report.broken, show(report)


@pytest.mark.parametrize("mutant", thin(MUTANTS, 2), ids=by_title)
def test_a_broken_rule_is_found_out(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    report = explore((SCENES | SLOW_SCENES)[mutant.scene], mutant.rules, ends=mutant.ends)
    record_property("broken", report.broken)
    record_property("steps", len(report.trace))
    assert report.broken.startswith(mutant.breaks + ":"), show(report)
    assert len(report.trace) > 0


@pytest.mark.parametrize("scene", [SCENES["first save, collector"], SCENES["two first saves, collector"]], ids=by_title)
def test_the_live_set_may_be_read_again_for_each_file(scene: Scene) -> None:
    """It is as good as once: what matters is that it is not older than the wait."""
    report = explore(scene, Rules(live_set="per key"))
    assert not report.broken, show(report)


def test_looking_at_a_fence_again_is_what_protects_leases_that_lose_files_during_life() -> None:
    report = explore(SCENES["save of many renewals, collector"], Rules(trims_lease=True))
    assert not report.broken, show(report)


@pytest.mark.parametrize(
    "title",
    [
        "first save, collector",
        "delete, first save, collector",
        "overwrite, collector",
        pytest.param("overwrite, two collectors", marks=pytest.mark.slow),
    ],
)
def test_files_may_be_deleted_in_any_order_and_the_records_of_several_names_in_turn(title: str) -> None:
    """An object store is asked for many deletes at once."""
    report = explore(SCENES[title], Rules(purges="names in turn", deletes_in_any_order=True))
    assert not report.broken, show(report)
