"""Counts the requests that a store has made to its server, by kind, and their bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

RequestKind = Literal["get", "head", "list", "put", "delete"]
KINDS: Final[tuple[RequestKind, ...]] = get_args(RequestKind)


class RequestCount(NamedTuple):
    """Requests of one kind, and the bytes of objects that they sent or received."""

    requests: int = 0
    size_bytes: int = 0


class RequestTally:
    """Requests since it was created. Safe in any thread. A pickle of it counts from zero.

    A request that the client library repeats by itself, after a fault of the network, counts once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[RequestKind, RequestCount] = dict.fromkeys(KINDS, RequestCount())

    def add(self, kind: RequestKind, *, requests: int = 1, size_bytes: int = 0) -> None:
        """Count requests, or bytes of a request that was counted before."""
        with self._lock:
            old = self._counts[kind]
            self._counts[kind] = RequestCount(old.requests + requests, old.size_bytes + size_bytes)

    def read(self) -> Mapping[RequestKind, RequestCount]:
        """Return the counts so far, for every kind."""
        with self._lock:
            return dict(self._counts)

    def __reduce__(self) -> Any:
        """Pickle nothing but the class."""
        return RequestTally, ()
