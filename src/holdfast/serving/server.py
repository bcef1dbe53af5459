"""The web server: owns the socket and threads, decides who may ask, and sends the page's files and answers."""

from __future__ import annotations

import errno
import hmac
import html
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import IPv4Address, IPv6Address, ip_address
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Final

from typing_extensions import Self

from holdfast.errors import BadName, StoreError
from holdfast.repo.handle.repository import Repository
from holdfast.serving.answer import (
    MAX_TARGET_BYTES,
    HttpAnswer,
    answer_error,
    answer_refusal,
    end_sentence,
    parse_request,
)
from holdfast.serving.routes import API, StoreApi

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_HTTP_PORT: Final = 80
_OWN_SITE: Final = ("same-origin", "none")
"""Values of Sec-Fetch-Site for a request by the page itself, and for one that the user typed."""
_BEARER: Final = "Bearer "


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered: an HTTP status, and a sentence."""

    status: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: requests to one of these hosts, and for data, with the token."""

    token: str
    hosts: frozenset[str]
    """Values of the Host header, each an address and the port. Any other value may be a rebound DNS name."""

    def check(self, headers: Mapping[str, str], *, needs_token: bool) -> Refusal | None:
        """Return why a request is refused, or None if it is not."""
        if headers.get("Host", "").lower() not in self.hosts:
            return Refusal(421, "This server answers only under the address that `holdfast serve` printed.")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return Refusal(403, "Pages of other sites may not read this store.")
        if not needs_token:
            return None
        if headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE:
            return Refusal(403, "Pages of other sites may not read this store.")
        given = headers.get("Authorization", "")
        expected = _BEARER + self.token
        # Compared as bytes, in constant time: a header may contain any character.
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()):
            return Refusal(401, "The token is missing or wrong: open the address that `holdfast serve` printed.")
        return None


def make_access(token: str, host: str, port: int) -> Access:
    """Return the access rules of a server that listens at an address and port."""
    names = [bracket(name).lower() for name in (LOOPBACK if host in LOOPBACK else (host,))]
    hosts = {f"{name}:{port}" for name in names}
    # Browsers leave out the port of plain HTTP.
    return Access(token, frozenset(hosts.union(names) if port == _HTTP_PORT else hosts))


def verify_host(host: str) -> str:
    """Return an address to listen on, as browsers write it; raises BadName for one that stands for all addresses."""
    address = _find_address(host)
    if not host or (address is not None and _is_everywhere(address)):
        raise BadName(
            f"{host!r} stands for every address of this machine, and the server must know under which it is asked:"
            " name one address"
        )
    # A scope, as in fe80::1%eth0, is not part of the address.
    return host if address is None or "%" in host else str(address)


def _find_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return a numeric address in any notation that sockets take, such as 127.1 or ::0; None for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError):
        return None


def _is_everywhere(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def bracket(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of every answer: nothing is loaded from elsewhere, and no inline script runs."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_REPORT: Final = ("report.css", "cursor.js", "elements.js", "histogram.js", "rows.js", "theme.js")
"""Files that the page shares with the report on two runs."""
_OWN: Final = (
    "serve.css",
    "icon.svg",
    "api.js",
    "cache.js",
    "charts.js",
    "compare.js",
    "errors.js",
    "grid.js",
    "health.js",
    "lineage.js",
    "main.js",
    "movement.js",
    "pairs.js",
    "prune.js",
    "ranks.js",
    "router.js",
    "run.js",
    "runs.js",
    "sharing.js",
    "snapshot.js",
    "snapshots.js",
    "tensor.js",
)


def find_page_file(path: str) -> HttpAnswer | None:
    """Return the file of the page at a path of the server, or None if there is none."""
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    # Compared with a list: no text of a request ever becomes a path.
    if name not in ("index.html", *_REPORT, *_OWN) or path not in ("/", f"/page/{name}"):
        return None
    return HttpAnswer(200, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8", _read(name))


@cache
def _read(name: str) -> bytes:
    if name == "report.css":
        return (files("holdfast.capture.report") / "page" / "page.css").read_bytes()
    if name in _REPORT:
        return (files("holdfast.capture.report") / "page" / name).read_bytes()
    return (files("holdfast.serving") / "page" / name).read_bytes()


_log = logging.getLogger(__name__)

DEFAULT_HOST: Final = "127.0.0.1"
_THREADS: Final = 32
"""Connections that are answered at the same time; others wait in the queue of the socket."""
_TIMEOUT_S: Final = 20.0
"""A client that neither sends nor takes bytes for so long is disconnected."""
_HEAD_S: Final = 10.0
"""A client that has not sent its whole request after so long is disconnected, however often it sends a byte."""
_SHORT_HEAD_S: Final = 1.0
"""The same, while others wait for a thread."""
_PIECE_BYTES: Final = 256 << 10
"""What is written at a time, so that `_TIMEOUT_S` holds for each piece and not for a whole answer."""
_POLL_S: Final = 0.1
"""How soon `close` is noticed."""
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class StoreServer:
    """A running server that shows a store. `url` opens the page; `close` ends it, and so does the end of a `with`."""

    def __init__(self, repo: Repository, *, host: str = DEFAULT_HOST, port: int = 0) -> None:
        """Listen, without answering yet; raises StoreError if the address or port cannot be used."""
        self._host = verify_host(host)
        self._token = secrets.token_urlsafe(24)
        self._api = StoreApi(repo)
        self._server = _listen(self._host, port, self)
        self.access: Access = make_access(self._token, self._host, self.port)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._last_s = time.monotonic()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, with the token. Browsers send nothing behind the # to any server."""
        return f"http://{bracket(self._host)}:{self.port}/#token={self._token}"

    def __repr__(self) -> str:
        """Show the address."""
        return f"<StoreServer {self.url}>"

    def _repr_html_(self) -> str:
        """Return a link for notebooks."""
        address = html.escape(self.url)
        return f'<a href="{address}" target="_blank" rel="noopener noreferrer">{address}</a>'

    def __enter__(self) -> Self:
        """Return this server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the server."""
        self.close()

    def start(self) -> Self:
        """Answer requests on a background thread, until `close`."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="holdfast-serve", daemon=True
        )
        self._thread.start()
        return self

    def wait(self, *, idle_s: float | None = None) -> None:
        """Wait until there was no request for `idle_s` seconds; without a number, until `close` or an interrupt."""
        while not self._closed.is_set():
            left_s = None if idle_s is None else self._last_s + idle_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._closed.wait(left_s)

    def close(self) -> None:
        """Stop listening. Requests that are being answered are cut off when the process ends."""
        self._closed.set()
        self._server.is_closing.set()
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def answer(self, target: str, headers: Any) -> HttpAnswer:
        """Return the answer to a GET request."""
        self._last_s = time.monotonic()
        is_data = target.startswith(API)
        refusal = self.access.check(headers, needs_token=is_data)
        if refusal is not None:
            return answer_refusal(refusal.status, refusal.sentence)
        if len(target) > MAX_TARGET_BYTES:
            return answer_refusal(414, f"The address of a request may have {MAX_TARGET_BYTES} characters.")
        try:
            request = parse_request(target)
            if not is_data:
                found = find_page_file(request.path) or self._api.answer_page(request.path)
                return found or answer_refusal(404, "There is no page at this address.")
            return self._api.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the browser gets a sentence and the server goes on
            return answer_error(error)


def _listen(host: str, port: int, owner: StoreServer) -> _HttpServer:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _HttpServer(host, port, owner, family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        is_elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        advice = "name an address of this machine" if is_elsewhere else "choose another port"
        raise StoreError(f"cannot listen on {bracket(host)}:{port}: {reason}; {advice}") from error


class _HttpServer(ThreadingHTTPServer):
    """Answers each connection on a thread of its own, and at most `_THREADS` at a time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, host: str, port: int, owner: StoreServer, family: socket.AddressFamily) -> None:
        self.address_family = family
        self.owner = owner
        self.is_closing = threading.Event()
        self._slots = threading.BoundedSemaphore(_THREADS)
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, float] = {}
        """Connections whose request is not complete yet, and since when."""
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not that of HTTPServer, which asks the DNS for the name of this machine.
        TCPServer.server_bind(self)
        verify_host(str(self.server_address[0]))  # a name, too, can stand for all addresses

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._slots.acquire(timeout=_POLL_S):
            # Clients that send nothing must neither keep others waiting, nor keep the server from closing.
            self._drop_silent(_SHORT_HEAD_S)
            if self.is_closing.is_set():
                self.shutdown_request(request)
                return
        with self._lock:
            self._silent[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.note_request(request)
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.note_request(request)
            self._slots.release()

    def service_actions(self) -> None:
        self._drop_silent(_HEAD_S)

    def note_request(self, request: socket.socket) -> None:
        """Note that a connection has sent its request, or has ended."""
        with self._lock:
            self._silent.pop(request, None)

    def _drop_silent(self, age_s: float) -> None:
        """Disconnect clients that have not sent their request for so long; their threads then end."""
        now_s = time.monotonic()
        with self._lock:
            late = [request for request, since_s in self._silent.items() if now_s - since_s > age_s]
            for request in late:
                del self._silent[request]
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection ended early", exc_info=True)


def _iter_pieces(body: bytes) -> Iterator[bytes]:
    return (body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES))


class _Handler(BaseHTTPRequestHandler):
    """One connection with one request."""

    server: _HttpServer
    server_version = "holdfast"
    sys_version = ""
    timeout = _TIMEOUT_S

    def parse_request(self) -> bool:
        is_parsed = super().parse_request()
        self.server.note_request(self.connection)
        return is_parsed

    def do_GET(self) -> None:
        self._send(self.server.owner.answer(self.path, self.headers))

    def do_HEAD(self) -> None:
        self._send(self.server.owner.answer(self.path, self.headers))

    def __getattr__(self, name: str) -> Any:
        # The base class looks for do_POST, do_PUT and so on: all of them are refused alike.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that the base class cannot parse, as every other one is refused: not with a page of HTML."""
        self.close_connection = True
        self._send(answer_refusal(code, end_sentence((message or HTTPStatus(code).phrase)[:200])))

    def _refuse_method(self) -> None:
        self._send(answer_refusal(405, "This server only reads: it answers GET and HEAD."))

    def _send(self, answer: HttpAnswer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        for name, value in {**_HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        if isinstance(answer.body, bytes):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self._write(_iter_pieces(answer.body) if isinstance(answer.body, bytes) else answer.body)

    def _write(self, pieces: Iterator[bytes]) -> None:
        try:
            for piece in pieces:
                self.wfile.write(piece)
        except OSError:
            _log.debug("the client went away", exc_info=True)
        finally:
            # Frees what a stream holds, although it did not come to its end.
            close = getattr(pieces, "close", None)
            if close is not None:
                close()

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
