"""A small server on loopback that speaks what obstore uses of Google Cloud Storage: its XML interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.s3_server import Answer, S3Handler, S3Server, make_error, serve_objects


class GcsServer(S3Server):
    """The state of the server: the same objects, faults and log of requests as the S3 server has."""

    @property
    def options(self) -> dict[str, Any]:
        """The storage options for this server."""
        return {"base_url": self.endpoint, "bearer_token": "token"}


@contextmanager
def serve_gcs() -> Iterator[GcsServer]:
    """Run a server with one empty bucket."""
    state = GcsServer()
    with serve_objects(state, GcsHandler):
        yield state


class GcsHandler(S3Handler):
    """Speaks the XML interface: conditions are generations, and each delete is a request of its own."""

    def must_be_absent(self) -> bool:
        """Return whether a put has the condition that there is no object yet, which is generation 0."""
        return self.headers.get("x-goog-if-generation-match") == "0"

    def act(self, kind: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        """Carry a request out; unlike S3, deleting what is absent is an error."""
        if not self.headers.get("Authorization", "").startswith("Bearer "):
            return 401, {}, make_error("AuthenticationRequired")
        if kind != "DELETE":
            return super().act(kind, key, query, body)
        if self.server_state.objects.pop(key, None) is None:
            return 404, {}, make_error("NoSuchKey")
        return 204, {}, b""
