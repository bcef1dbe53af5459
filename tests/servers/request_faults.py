"""The fault loop on a server: the n-th request of a verb goes wrong, for each n, until a run has fewer requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Final

from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import Fault as StoreFault
from holdfast.testing.faults import Operation
from tests.faults.fault_loop import Run, attempt
from tests.faults.scenario import Verb
from tests.kit.s3_server import Fault, Request, S3Server, Stored

TRANSIENT: Final[tuple[Fault, ...]] = ("lose reply", "lose request", "503 before", "503 after", "409")
"""Faults that do not come back when the request is repeated."""
FAULTS: Final[tuple[Fault, ...]] = (*TRANSIENT, "403", "bad signature")
_LIKE: Final[dict[Fault, StoreFault]] = {"lose reply": StoreFault.REPLY_LOST, "503 after": StoreFault.REPLY_LOST}


@contextmanager
def failing_at(server: S3Server, at: int, fault: Fault, *, kind: str = "") -> Iterator[list[Request]]:
    """Let the `at`-th request of a kind, or of any kind, go wrong, counted from 1; yields those requests so far."""
    seen: list[Request] = []
    lock = Lock()

    def choose(request: Request) -> Fault | None:
        if kind not in ("", request.kind):
            return None
        with lock:
            seen.append(request)
            return fault if len(seen) == at else None

    server.fault_of = choose
    try:
        yield seen
    finally:
        server.fault_of = lambda request: None


def iter_request_runs(
    verb: Verb,
    fault: Fault,
    server: S3Server,
    open_clean: Callable[[], ObjectStore],
    *,
    ats: Iterable[int] | None = None,
    kind: str = "",
) -> Iterator[Run]:
    """Yield a run for each request of `verb`, or each of a kind, each on the objects that the server has now."""
    base = copy_objects(server)
    for at in ats or count(1):
        server.objects = dict(base)
        with failing_at(server, at, fault, kind=kind) as seen:
            outcome, error = attempt(verb, open_clean())
        if len(seen) < at:
            assert outcome == "returned", (verb, fault, at, error)
            return
        met = Operation(seen[at - 1].kind, seen[at - 1].key)
        yield Run(verb, _LIKE.get(fault, StoreFault.ONCE), at, met, outcome, error, open_clean())


def copy_objects(server: S3Server) -> dict[str, Stored]:
    """Return the objects as they are; they are never changed in place."""
    with server.lock:
        return dict(server.objects)
