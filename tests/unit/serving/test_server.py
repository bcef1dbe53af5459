"""The server against requests that should not be answered, and many that should."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadName, StoreError
from holdfast.serving import server as access
from holdfast.serving.server import POLICY, StoreServer
from tests.kit.patience import PATIENCE_S


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A server of a store with one snapshot."""
    with holdfast.open(tmp_path / "store") as store:
        store.save("run/step-1", {"w": torch.arange(12.0).reshape(3, 4)}, metadata={"loss": 0.5})
        with store.serve() as started:
            yield started


def ask(server: StoreServer, target: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Send one request and return status, body and headers; with the token unless headers say otherwise."""
    token = server.url.partition("#token=")[2]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request(method, target, headers={"Authorization": f"Bearer {token}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        connection.close()


def read(server: StoreServer, target: str, **headers: str) -> Any:
    status, body, _ = ask(server, target, **headers)
    assert status == 200, body
    return json.loads(body)


def test_data_needs_the_token_and_the_page_does_not(server: StoreServer) -> None:
    assert read(server, "/api/v1/snapshots")["total"] == 1
    assert ask(server, "/api/v1/snapshots", Authorization="Bearer wrong")[0] == 401
    assert ask(server, "/", Authorization="")[0] == 200
    assert b"run/step-1" not in ask(server, "/", Authorization="")[1]


def test_every_server_has_a_token_of_its_own(server: StoreServer, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "other") as store, store.serve() as other:
        assert other.url.partition("#")[2] != server.url.partition("#")[2]
        assert len(other.url.partition("#token=")[2]) >= 32


def test_another_host_or_origin_is_refused(server: StoreServer) -> None:
    assert ask(server, "/api/v1/store", Host=f"evil.example:{server.port}")[0] == 421
    assert ask(server, "/", Host="rebound.example")[0] == 421
    assert ask(server, "/api/v1/store", Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/v1/store", Host=f"localhost:{server.port}")[0] == 200


def test_every_answer_has_strict_headers(server: StoreServer) -> None:
    for target in ("/", "/page/main.js", "/api/v1/store", "/nothing"):
        headers = ask(server, target)[2]
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers.get("Server", "")


@pytest.mark.parametrize(
    "target",
    ["/../etc/passwd", "/page/../../store.py", "/page/%2e%2e/server.py", "/page/..%2fserver.py", "//etc/passwd"],
)
def test_no_path_leads_out_of_the_list_of_files(server: StoreServer, target: str) -> None:
    status, body, _ = ask(server, target)

    assert status == 404
    assert b"import" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_possible(server: StoreServer, method: str) -> None:
    status, body, _ = ask(server, "/api/v1/snapshots", method)

    assert status == 405
    assert b"only reads" in body


def test_head_has_no_body(server: StoreServer) -> None:
    status, body, headers = ask(server, "/api/v1/store", "HEAD")

    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 10


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 150 + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / <script> HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_a_request_that_cannot_be_parsed_gets_json_and_strict_headers(
    server: StoreServer, request_text: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request_text)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read(int(answer.headers["Content-Length"]))

    assert answer.status == status
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert json.loads(body)["error"]["message"].endswith(".")


def test_an_oversized_query_is_refused(server: StoreServer) -> None:
    assert ask(server, "/api/v1/snapshots?filter=" + "a" * 20_000)[0] == 414
    assert ask(server, "/api/v1/snapshots?filter=" + "a" * 100_000)[0] == 414
    nested = "(" * 3000 + "loss < 1" + ")" * 3000
    assert ask(server, f"/api/v1/snapshots?filter={nested.replace(' ', '%20')}")[0] == 400


def test_two_hundred_requests_at_once_are_all_answered(server: StoreServer) -> None:
    found: list[int] = []
    targets = [
        "/api/v1/snapshots",
        "/api/v1/tensor?name=run/step-1&leaf=w",
        "/page/main.js",
        "/api/v1/heat?name=run/step-1&leaf=w",
    ]
    threads = [
        threading.Thread(target=lambda target=targets[at % 4]: found.append(ask(server, target)[0]))
        for at in range(200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert found == [200] * 200


def test_clients_that_say_nothing_or_go_away_do_not_stop_the_server(server: StoreServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for connection in silent[:4]:
        connection.sendall(b"GET /api/v1/tensor?name=run/step-1&leaf=w HTTP/1.1\r\n")
        connection.close()
    garbage = socket.create_connection(("127.0.0.1", server.port))
    garbage.sendall(b"\x16\x03\x01\x00\xff\r\n\r\n")

    assert read(server, "/api/v1/store")["snapshots"] == 1
    for connection in (*silent[4:], garbage):
        connection.close()


def test_more_slow_clients_than_threads_neither_stop_the_server_nor_keep_it_from_closing(server: StoreServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for connection in slow[::2]:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.2):
            for connection in slow[::2]:
                with suppress(OSError):
                    connection.send(b"y")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    try:
        assert read(server, "/api/v1/store")["snapshots"] == 1
        again = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    finally:
        stop.set()
        trickling.join()
        for connection in (*slow, *again):
            connection.close()


def test_a_store_that_is_deleted_while_it_is_looked_at_is_a_sentence(server: StoreServer, tmp_path: Path) -> None:
    server.close()
    with holdfast.open(tmp_path / "store", create=False) as store, store.serve() as fresh:
        shutil.rmtree(tmp_path / "store")

        status, body, _ = ask(fresh, "/api/v1/snapshots")

    assert status == 503
    assert json.loads(body)["error"]["kind"] == "StoreGone"
    assert json.loads(body)["error"]["message"].endswith(".")


def test_a_store_that_is_replaced_while_it_is_looked_at_is_a_sentence(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store, store.serve() as fresh:
        store.save("a", {"w": torch.zeros(2)})
        assert ask(fresh, "/api/v1/leaves?name=a")[0] == 200
        shutil.rmtree(tmp_path / "store")
        with holdfast.open(tmp_path / "store") as other:
            other.save("a", {"secret": torch.ones(3)})
        time.sleep(1.1)  # the listing is read at most once a second
        paths = ("store", "snapshots", "leaves?name=a", "check", "usage", "runs", "activity", "diff?a=a&b=a")
        found = {path: ask(fresh, f"/api/v1/{path}") for path in paths}

    for path, (status, body, _) in found.items():
        error = json.loads(body)["error"]
        assert (status, error["kind"]) == (503, "StoreGone"), (path, body)
        assert error["message"].endswith(".")


def test_many_different_requests_take_bounded_memory(server: StoreServer) -> None:
    api = server._api
    for at in range(1500):
        assert ask(server, f"/api/v1/snapshots?filter=step{at}")[0] == 200
        assert ask(server, f"/api/v1/leaves?name=run/step-1&filter=x{at}")[0] == 200

    assert api._choices.size <= 8
    assert api._lines.size <= 400_000


def test_markup_in_names_and_values_stays_json(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    with holdfast.open(tmp_path / "s") as store:
        store.save(name, {name: torch.zeros(2)}, metadata={name: name, "metrics": {name: 1.0}})
        with store.serve() as started:
            _, body, headers = ask(started, "/api/v1/snapshots")

    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["snapshots"][0]["name"] == name


def test_an_address_that_cannot_be_used_is_an_error(server: StoreServer, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "other") as store:
        with pytest.raises(StoreError, match="choose another port"):
            store.serve(port=server.port)
        with pytest.raises(StoreError, match="cannot listen"):
            store.serve(port=70_000)
        with pytest.raises(StoreError, match="name an address of this machine"):
            store.serve(host="nowhere.invalid")
        with pytest.raises(StoreError, match="name an address of this machine"):
            store.serve(host="192.0.2.1")
        with pytest.raises(BadName, match="name one address"):
            store.serve(host="0.0.0.0")


def test_a_name_that_stands_for_all_addresses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = access._find_address
    # Sockets take "0" as 0.0.0.0; here it stands for a name that resolves to it.
    monkeypatch.setattr(access, "_find_address", lambda host: None if host == "0" else find(host))

    with holdfast.open(tmp_path / "store") as store, pytest.raises(BadName, match="name one address"):
        store.serve(host="0")


def test_a_notebook_gets_a_link(server: StoreServer) -> None:
    assert server._repr_html_().startswith('<a href="http://127.0.0.1:')
    assert server.url in repr(server)


def test_waiting_ends_without_requests_or_when_it_is_closed(server: StoreServer) -> None:
    server.wait(idle_s=0.0)
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    server.close()
    waiting.join(PATIENCE_S)

    assert not waiting.is_alive()
