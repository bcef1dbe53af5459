"""A small S3 server on loopback that counts requests, waits before answers, and misbehaves when a test asks for it."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

Fault = (
    Literal["lose reply", "lose request", "503 before", "503 after", "409", "403", "bad signature", "damage"]
    | tuple[int, str]
)
"""What the server does wrong: "lose reply" and "503 after" carry the request out first; a status and code refuse it;
"damage" changes the bytes that it gets."""

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""

BUCKET: Final = "bucket"
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """One request that the server has seen."""

    method: str
    key: str
    """The key, or the prefix of a listing; the keys of a request that deletes several, one on each line."""
    kind: Literal["GET", "HEAD", "PUT", "DELETE", "LIST"]
    authorization: str = ""
    """The header that names the key of the client."""


@dataclass(slots=True)
class Stored:
    """One object."""

    data: bytes
    modified_s: float
    etag: str = field(init=False)

    def __post_init__(self) -> None:
        self.etag = f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class S3Server:
    """The state of the server; a test reads and sets it directly."""

    objects: dict[str, Stored] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    fault_of: Callable[[Request], Fault | None] = lambda request: None
    """Called for each request: what to do wrong this time."""
    change_answer: Callable[[Request, Answer], Answer] = lambda request, answer: answer
    """Called for each request that is carried out: what to answer instead of the truth."""
    latency_s: float = 0.0
    skew_s: float = 0.0
    """How far the clock of the server is ahead."""
    ignores_conditions: bool = False
    """Whether a conditional put overwrites, as on servers that do not know the header."""
    ignores_checksums: bool = False
    """Whether a put is accepted whose bytes do not fit their checksum."""
    order: Callable[[str], Any] = str
    """The sort key of listings; S3 itself lists keys in the order of their bytes."""
    endpoint: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def options(self) -> dict[str, Any]:
        """The storage options for this server."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }

    def count(self, kind: str = "", below: str = "") -> int:
        """Return how many requests of a kind were made for keys that contain a text."""
        return sum(kind in ("", request.kind) and below in request.key for request in self.requests)


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Run a server with one empty bucket."""
    state = S3Server()
    with serve_objects(state, S3Handler):
        yield state


@contextmanager
def serve_objects(state: S3Server, handler: type[S3Handler]) -> Iterator[None]:
    """Run a server with a state; the handler defines the dialect of its protocol."""

    class Handler(handler):  # type: ignore[misc,valid-type]  # a class made from an argument
        server_state = state

    with _QuietServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _QuietServer(ThreadingHTTPServer):
    # Clients open many connections at once. One that does not fit in the queue is tried again after seconds.
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about connections that a client or a proxy has cut."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class S3Handler(BaseHTTPRequestHandler):
    """Speaks what obstore uses of S3."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: S3Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def must_be_absent(self) -> bool:
        """Return whether a put has the condition that there is no object yet."""
        return self.headers.get("If-None-Match") == "*"

    def _serve(self) -> None:
        state = self.server_state
        body = self._read_body()
        if body is None:
            self._hang_up()
            return
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        is_list = self.command == "GET" and "list-type" in query
        if self.command == "POST" and "delete" in query:  # many deletes in one request
            key = "\n".join(map(unescape, re.findall(r"<Key>([^<]*)</Key>", body.decode())))
        kind: Any = "LIST" if is_list else self.command.replace("POST", "DELETE")
        named = query.get("prefix", "") if is_list else key
        request = Request(self.command, named, kind, self.headers.get("Authorization") or "")
        with state.lock:
            state.requests.append(request)
            fault = state.fault_of(request)
        if fault == "damage":
            body = bytes([*body[:-1], body[-1] ^ 1])
        if state.latency_s:
            time.sleep(state.latency_s)
        if bucket != BUCKET:
            self._fail(404, "NoSuchBucket")
        elif fault == "lose request":
            self._hang_up()
        elif isinstance(fault, tuple):
            self._fail(*fault)
        elif fault in _REFUSALS:
            self._fail(*_REFUSALS[fault])
        else:
            with state.lock:
                answer = self.act(kind, key, query, body)
            self._finish(fault, state.change_answer(request, answer))

    def _read_body(self) -> bytes | None:
        """Return the body of a request, or None if the connection ended before its end."""
        size = int(self.headers.get("Content-Length") or 0)
        try:
            body = self.rfile.read(size)
        except ConnectionError:
            return None
        return body if len(body) == size else None

    def _finish(self, fault: Fault | None, answer: Answer) -> None:
        if fault == "lose reply":
            self._hang_up()
        elif fault == "503 after":
            self._fail(503, "SlowDown")
        else:
            self._answer(*answer)

    def act(self, kind: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        """Carry a request out, and return the answer to it."""
        state = self.server_state
        found = state.objects.get(key)
        if kind == "LIST":
            return 200, {"Content-Type": "application/xml"}, _list(state, query)
        if kind == "PUT":
            if not state.ignores_checksums and not self._fits_checksums(body):
                return 400, {}, make_error("BadDigest")
            if self.must_be_absent() and found and not state.ignores_conditions:
                return 412, {}, make_error("PreconditionFailed")
            state.objects[key] = Stored(body, time.time() + state.skew_s)
            return 200, {"ETag": state.objects[key].etag}, b""
        if kind == "DELETE":
            for each in key.split("\n"):
                state.objects.pop(each, None)
            deleted = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in key.split("\n"))
            return 200, {}, f"<?xml version='1.0'?><DeleteResult>{deleted}</DeleteResult>".encode()
        if found is None:
            return 404, {}, make_error("NoSuchKey")
        return self._read(found)

    def _fits_checksums(self, body: bytes) -> bool:
        digests = {
            "x-amz-checksum-sha256": hashlib.sha256(body),
            "Content-MD5": hashlib.md5(body, usedforsecurity=False),
        }
        fits = {name: b64encode(digest.digest()).decode() for name, digest in digests.items()}
        return all(self.headers.get(name, fits[name]) == fits[name] for name in fits)

    def _read(self, found: Stored) -> Answer:
        modified = datetime.fromtimestamp(found.modified_s, timezone.utc)
        headers = {"ETag": found.etag, "Last-Modified": format_datetime(modified, usegmt=True)}
        wanted = self.headers.get("Range")
        if not wanted:
            return 200, headers, found.data
        start, _, last = wanted.removeprefix("bytes=").partition("-")
        if int(start) >= len(found.data):
            return 416, {}, make_error("InvalidRange")
        stop = min(int(last) + 1, len(found.data)) if last else len(found.data)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found.data)}"
        return 206, headers, found.data[int(start) : stop]

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, {}, make_error(code))

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            # A body that is not as long as stated: what follows on the connection could not be understood.
            self.close_connection |= "Content-Length" in headers


_REFUSALS: Final[dict[str, tuple[int, str]]] = {
    "503 before": (503, "SlowDown"),
    "409": (409, "ConditionalRequestConflict"),
    "403": (403, "AccessDenied"),
    "bad signature": (403, "SignatureDoesNotMatch"),
}


def make_error(code: str) -> bytes:
    """Return the body of an answer that refuses a request."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()


def _list(state: S3Server, query: dict[str, str]) -> bytes:
    objects = state.objects
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    rows: dict[str, str] = {}
    for key in sorted(objects, key=state.order):
        if not key.startswith(prefix) or key <= after:
            continue
        head, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        name = prefix + head + slash if slash else key
        if name <= after:
            continue
        rows.setdefault(name, _folder(name) if slash else _entry(key, objects[key]))
        if len(rows) > _PAGE:
            break
    names = list(rows)[:_PAGE]
    is_cut = len(rows) > _PAGE
    token = f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if is_cut else ""
    text = "".join(rows[name] for name in names)
    return (
        "<?xml version='1.0'?><ListBucketResult>"
        f"<Name>{BUCKET}</Name><KeyCount>{len(names)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        f"{token}{text}</ListBucketResult>"
    ).encode()


def _folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


def _entry(key: str, found: Stored) -> str:
    modified = datetime.fromtimestamp(found.modified_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(found.etag)}</ETag>"
        f"<Size>{len(found.data)}</Size></Contents>"
    )
