"""Every request of every verb goes wrong once, in every way: the state is old or new, and check accepts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.cloud.cloud_store import CloudStore
from tests.faults.fault_loop import Run, find_wrong
from tests.faults.scenario import FIRST_SAVE, INIT, OVERWRITE, SAVE_AGAIN, VERBS, State, Verb, read_state
from tests.kit.s3_server import Fault, S3Server, serve_s3
from tests.servers.request_faults import FAULTS, TRANSIENT, copy_objects, failing_at, iter_request_runs
from tests.unit.objects.cloud.servers import open_cloud

_STEP = 9
"""Every ninth request by default; the faults differ in which."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


def find_all_wrong(server: S3Server, verb: Verb, fault: Fault, ats: Iterable[int]) -> tuple[list[str], list[Run]]:
    """Run the loop; return what is wrong, and the runs."""

    def open_clean() -> CloudStore:
        return open_cloud(server)

    old, new = prepare(server, verb)
    runs, wrong = [], []
    for run in iter_request_runs(verb, fault, server, open_clean, ats=ats):
        runs.append(run)
        wrong += [*find_unclear(run, fault), *find_wrong(excuse_init(run), old, new)]
    return wrong, runs


def excuse_init(run: Run) -> Run:
    """Return a run as it is judged: making a place a store takes several objects, and the first makes it one."""
    return replace(run, outcome="unknown") if run.verb is INIT and run.outcome == "failed" else run


def prepare(server: S3Server, verb: Verb) -> tuple[State, State]:
    """Prepare the server for a verb; return the state before and after it."""
    verb.prepare(open_cloud(server))
    base, old = copy_objects(server), read_state(open_cloud(server))
    verb.act(open_cloud(server))
    new = read_state(open_cloud(server))
    server.objects = base
    return old, new


def find_unclear(run: Run, fault: Fault) -> Iterator[str]:
    """Yield a run that failed although its fault does not come back, or whose error does not say what is wrong."""
    # Servers answer with 409 only to a put.
    if fault in TRANSIENT and (fault != "409" or run.met.name == "PUT") and run.outcome != "returned":
        yield f"{run}: a request that can be repeated"
    text = str(run.error)
    if run.error is not None and not (isinstance(run.error, HoldfastError) and "s3://bucket/store" in text):
        yield f"{run}: the error does not name the place"
    if fault == "403" and run.error is not None and "do not allow" not in text:
        yield f"{run}: the error does not name the cause"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_goes_wrong_leaves_the_old_or_the_new_state(server: S3Server, fault: Fault) -> None:
    ats = count(1 + FAULTS.index(fault), _STEP)

    wrong, runs = find_all_wrong(server, FIRST_SAVE, fault, ats)

    assert wrong == []
    assert len(runs) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_each_request_that_goes_wrong_leaves_the_old_or_the_new_state(
    server: S3Server, verb: Verb, fault: Fault
) -> None:
    wrong, runs = find_all_wrong(server, verb, fault, count(1))

    assert wrong == []
    assert [run.at for run in runs] == list(range(1, len(runs) + 1))
    # A repeated save of the same content only reads.
    assert ({"LIST"} if verb is SAVE_AGAIN else {"LIST", "PUT"}) <= {run.met.name for run in runs}


def test_the_loop_reports_a_loss(server: S3Server) -> None:
    old, new = prepare(server, OVERWRITE)

    def act(store: CloudStore) -> None:
        OVERWRITE.act(store)
        for key in [key for key in server.objects if "/packs/" in key]:
            del server.objects[key]

    verb = Verb("a save that loses its packs", OVERWRITE.prepare, act)  # type: ignore[arg-type]  # of this store only

    run = next(iter_request_runs(verb, "lose reply", server, lambda: open_cloud(server), ats=[1]))

    assert any("cannot be read" in line for line in find_wrong(run, old, new))


def test_the_fault_hits_the_request_that_was_meant(server: S3Server) -> None:
    store = open_cloud(server, options={"retry_config": {"max_retries": 0}})
    with failing_at(server, 2, "403") as seen:
        store.list_all("packs/")
        with pytest.raises(HoldfastError, match="do not allow"):
            store.list_all("leases/")
        store.list_all("marks/")

    assert [request.key for request in seen] == ["store/packs/", "store/leases/", "store/marks/"]
