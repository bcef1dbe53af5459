"""A proxy on loopback between a client and a server that slows connections down, cuts them and refuses them."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

Direction = Literal["request", "reply"]
_PIECE: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing sends a reset instead of what is left."""


@dataclass
class ToxicProxy:
    """What the proxy does to connections; a test sets it directly, also while connections are open."""

    upstream: tuple[str, int]
    endpoint: str = ""
    latency_s: float = 0.0
    """How much later a reply begins to arrive."""
    piece_bytes: int = _PIECE
    """At most so many bytes of a reply are passed on at once ..."""
    pause_s: float = 0.0
    """... with such a pause after each piece: a trickle."""
    refuses: bool = False
    """Reset new connections at once."""
    cut_after_bytes: int = 0
    """Reset a connection when so many bytes have passed in `cut_direction`, as long as `cuts_left` is positive."""
    cut_direction: Direction = "reply"
    cuts_left: int = 0
    num_connections: int = 0
    num_cuts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)

    def serve(self, client: socket.socket) -> None:
        """Pass bytes between a new client and the server until one of them ends."""
        self.num_connections += 1
        if self.refuses:
            reset(client)
            return
        try:
            server = socket.create_connection(self.upstream)
        except OSError:
            reset(client)
            return
        with self._lock:
            self._open |= {client, server}
        upward = threading.Thread(target=self._pump, args=(client, server, "request"), daemon=True)
        upward.start()
        self._pump(server, client, "reply")
        for connection in (client, server):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        upward.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def close(self) -> None:
        """Reset every connection."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            reset(connection)

    def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        passed = 0
        with suppress(OSError):
            while piece := source.recv(self.piece_bytes if direction == "reply" else _PIECE):
                if direction == "reply":
                    time.sleep(self.pause_s if passed else self.latency_s)
                allowed = self._cut(direction, passed, len(piece))
                target.sendall(piece[:allowed])
                passed += len(piece)
                if allowed is not None:
                    reset(source)
                    reset(target)
                    return
            target.shutdown(socket.SHUT_WR)

    def _cut(self, direction: Direction, passed: int, size_bytes: int) -> int | None:
        """Return how many of the next bytes pass before the connection is cut; None if it is not cut now."""
        with self._lock:
            is_due = passed + size_bytes > self.cut_after_bytes
            if direction != self.cut_direction or self.cuts_left <= 0 or not is_due:
                return None
            self.cuts_left -= 1
            self.num_cuts += 1
            return max(0, self.cut_after_bytes - passed)


def reset(connection: socket.socket) -> None:
    """Close a connection so that the other end gets an error, and not the end of the bytes."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # Wakes a thread that waits for bytes of this connection; closing alone would not.
        connection.shutdown(socket.SHUT_RD)
    connection.close()


@contextmanager
def serve_proxy(endpoint: str) -> Iterator[ToxicProxy]:
    """Run a proxy in front of the server at `endpoint`, an address that begins with http://."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = ToxicProxy((host, int(port)), f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=_accept, args=(listener, proxy), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            proxy.close()


def _accept(listener: socket.socket, proxy: ToxicProxy) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()
