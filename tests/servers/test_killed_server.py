"""SeaweedFS is killed in the middle of a save and started again: nothing that was committed is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast.errors import CommitUnknown, StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.repo.upkeep.collect import Rules, collect
from tests.faults.hooked_store import HookedStore, once
from tests.faults.scenario import FIRST, SECOND, THIRD, check_store, holds, read_state, save_content
from tests.kit.patience import PATIENCE_S
from tests.servers.places import ServerPlace, make_prefix, serve_seaweedfs

pytestmark = pytest.mark.slow

PATIENT = {"max_retries": 100, "retry_timeout": timedelta(seconds=PATIENCE_S)}
MOMENTS = {
    "before the lease": ("before", "create", "leases/"),
    "before the pack": ("before", "commit", "packs/"),
    "after the pack": ("after", "commit", "packs/"),
    "before the manifest": ("before", "create", "manifests/"),
    "before the record": ("before", "create", "snapshots/"),
    "after the record": ("after", "create", "snapshots/"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPlace]:
    """A server of these tests alone, because they kill it."""
    with serve_seaweedfs(tmp_path_factory.mktemp("server")) as running:
        yield running


def kill(place: ServerPlace) -> None:
    assert place.process is not None
    place.process.kill()


def restart(place: ServerPlace) -> None:
    assert place.process is not None
    place.process.start(place.options["endpoint"])


def open_patient(place: ServerPlace, tmp_path: Path) -> CloudStore:
    """Open a store that repeats requests for as long as a server takes to start."""
    return place.open(make_prefix(tmp_path), retry_config=PATIENT)


@contextmanager
def striking(store: CloudStore, moment: str, act: Callable[[], None]) -> Iterator[HookedStore]:
    """Yield a store that acts at a moment of a save, which must come."""
    side, name, prefix = MOMENTS[moment]
    hook = once(name, prefix, act)
    yield HookedStore(store, **{side: hook})
    assert hook.has_acted, f"the save has no moment {moment!r}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_dies_in_a_save_loses_nothing(place: ServerPlace, tmp_path: Path, moment: str) -> None:
    save_content(open_patient(place, tmp_path), "run/1", FIRST)
    save_content(open_patient(place, tmp_path), "run/2", SECOND)

    with (
        striking(place.open(make_prefix(tmp_path)), moment, lambda: kill(place)) as dying,
        pytest.raises((StoreError, CommitUnknown), match="did not answer"),
    ):
        save_content(dying, "run/2", THIRD, overwrite=True)

    restart(place)
    store = open_patient(place, tmp_path)
    state = read_state(store)
    assert holds(state, "run/1", FIRST)
    assert holds(state, "run/2", SECOND) or (moment == "after the record" and holds(state, "run/2", THIRD))
    assert [str(finding) for finding in check_store(store) if finding.severity == "error"] == []
    save_content(store, "run/2", THIRD, overwrite=True)
    collect(store, Rules(min_age_s=0.0))
    state = read_state(open_patient(place, tmp_path))
    assert holds(state, "run/1", FIRST)
    assert holds(state, "run/2", THIRD)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_outlasts_a_server_that_is_started_again(place: ServerPlace, tmp_path: Path, moment: str) -> None:
    def replace_server() -> None:
        kill(place)
        restart(place)

    save_content(open_patient(place, tmp_path), "run/1", FIRST)

    with striking(open_patient(place, tmp_path), moment, replace_server) as store:
        save_content(store, "run/2", THIRD)

    state = read_state(open_patient(place, tmp_path))
    assert holds(state, "run/1", FIRST)
    assert holds(state, "run/2", THIRD)
    assert [str(finding) for finding in check_store(open_patient(place, tmp_path)) if finding.severity != "note"] == []
