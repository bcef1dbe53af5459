"""Every request of every verb goes wrong once, in every way: the state is old or new, and check accepts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.cloud.cloud_store import CloudStore
from tests.faults.fault_loop import Run, find_wrong
from tests.faults.scenario import FIRST_SAVE, INIT, OVERWRITE, SAVE_AGAIN, VERBS, State, Verb, read_state
from tests.kit.gcs_server import serve_gcs
from tests.kit.s3_server import Fault, S3Server, serve_s3
from tests.kit.thinning import keep
from tests.servers.places import ServerPlace
from tests.servers.request_faults import FAULTS, TRANSIENT, copy_objects, failing_at, iter_request_runs

_STEP: Final = 9
"""Every ninth request by default; the faults differ in which."""
_SERVE: Final[dict[str, Callable[[], AbstractContextManager[S3Server]]]] = {"s3": serve_s3, "gs": serve_gcs}


@dataclass(frozen=True, slots=True)
class Served:
    """A small server, and stores on it."""

    state: S3Server
    scheme: str

    def open(self) -> CloudStore:
        return ServerPlace(self.scheme, self.state.options).open("store")


@pytest.fixture(params=["s3"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with _SERVE[request.param]() as running:
        yield Served(running, request.param)


def find_all_wrong(
    server: Served, verb: Verb, fault: Fault, ats: Iterable[int], *, kind: str = ""
) -> tuple[list[str], list[Run]]:
    """Run the loop; return what is wrong, and the runs."""
    old, new = prepare(server, verb)
    runs, wrong = [], []
    for run in iter_request_runs(verb, fault, server.state, server.open, ats=ats, kind=kind):
        runs.append(run)
        wrong += [*find_unclear(run, fault), *find_wrong(excuse_init(run), old, new)]
    return wrong, runs


def excuse_init(run: Run) -> Run:
    """Return a run as it is judged: making a place a store takes several objects, and the first makes it one."""
    return replace(run, outcome="unknown") if run.verb is INIT and run.outcome == "failed" else run


def prepare(server: Served, verb: Verb) -> tuple[State, State]:
    """Prepare the server for a verb; return the state before and after it."""
    verb.prepare(server.open())
    base, old = copy_objects(server.state), read_state(server.open())
    verb.act(server.open())
    new = read_state(server.open())
    server.state.objects = base
    return old, new


def find_unclear(run: Run, fault: Fault) -> Iterator[str]:
    """Yield a run that failed although its fault does not come back, or whose error does not say what is wrong."""
    # Servers answer with 409 only to a put.
    if fault in TRANSIENT and (fault != "409" or run.met.name == "PUT") and run.outcome != "returned":
        yield f"{run}: a request that can be repeated"
    text = str(run.error)
    if run.error is not None and not (isinstance(run.error, HoldfastError) and "://bucket/store" in text):
        yield f"{run}: the error does not name the place"
    if fault == "403" and run.error is not None and "do not allow" not in text:
        yield f"{run}: the error does not name the cause"


@pytest.mark.parametrize("fault", keep(["lose reply", "503 after", "409"], "lose reply"))
def test_each_put_that_seems_to_fail_leaves_the_old_or_the_new_state(server: Served, fault: Fault) -> None:
    wrong, runs = find_all_wrong(server, FIRST_SAVE, fault, count(1), kind="PUT")

    assert wrong == []
    # Lease, pack, manifest and record at least.
    assert len({run.met.key.split("/")[1] for run in runs}) >= 4


@pytest.mark.parametrize("fault", keep(["lose request", "503 before", "403"], "503 before"))
def test_a_request_that_goes_wrong_leaves_the_old_or_the_new_state(server: Served, fault: Fault) -> None:
    ats = count(1 + FAULTS.index(fault), _STEP)

    wrong, runs = find_all_wrong(server, FIRST_SAVE, fault, ats)

    assert wrong == []
    assert len(runs) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS, ids=str)
@pytest.mark.parametrize("server", _SERVE, indirect=True)
def test_each_request_that_goes_wrong_leaves_the_old_or_the_new_state(server: Served, verb: Verb, fault: Fault) -> None:
    wrong, runs = find_all_wrong(server, verb, fault, count(1))

    assert wrong == []
    assert [run.at for run in runs] == list(range(1, len(runs) + 1))
    # A repeated save of the same content only reads.
    assert ({"LIST"} if verb is SAVE_AGAIN else {"LIST", "PUT"}) <= {run.met.name for run in runs}


def test_the_loop_reports_a_loss(server: Served) -> None:
    old, new = prepare(server, OVERWRITE)

    def act(store: CloudStore) -> None:
        OVERWRITE.act(store)
        for key in [key for key in server.state.objects if "/packs/" in key]:
            del server.state.objects[key]

    verb = Verb("a save that loses its packs", OVERWRITE.prepare, act)  # type: ignore[arg-type]  # of this store only

    run = next(iter_request_runs(verb, "lose reply", server.state, server.open, ats=[1]))

    assert any("cannot be read" in line for line in find_wrong(run, old, new))


def test_the_fault_hits_the_request_that_was_meant(server: Served) -> None:
    store = server.open()
    with failing_at(server.state, 2, "403") as seen:
        store.list_all("packs/")
        with pytest.raises(HoldfastError, match="do not allow"):
            store.list_all("leases/")
        store.list_all("marks/")

    assert [request.key for request in seen] == ["store/packs/", "store/leases/", "store/marks/"]
