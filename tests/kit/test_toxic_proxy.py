"""The proxy does to connections what a test asks for."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPException
from time import time
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.kit.s3_server import BUCKET, Stored, serve_s3
from tests.kit.toxic_proxy import ToxicProxy, serve_proxy

DATA = bytes(range(256)) * 400


@pytest.fixture
def proxy() -> Iterator[ToxicProxy]:
    with serve_s3() as server:
        server.objects["one"] = Stored(DATA, time())
        with serve_proxy(server.endpoint) as running:
            yield running


def read(proxy: ToxicProxy) -> bytes:
    with urlopen(f"{proxy.endpoint}/{BUCKET}/one") as answer:
        data: bytes = answer.read()
    return data


def test_bytes_pass_unchanged(proxy: ToxicProxy) -> None:
    assert read(proxy) == DATA


def test_a_trickle_is_made_of_small_pieces(proxy: ToxicProxy) -> None:
    proxy.piece_bytes, proxy.pause_s, proxy.latency_s = 50_000, 0.001, 0.001

    assert read(proxy) == DATA


def test_a_reply_is_cut_after_so_many_bytes_as_often_as_asked(proxy: ToxicProxy) -> None:
    proxy.cut_after_bytes, proxy.cuts_left = 60_000, 1

    with pytest.raises((OSError, HTTPException)):
        read(proxy)

    assert read(proxy) == DATA
    assert proxy.num_cuts == 1


def test_a_request_is_cut(proxy: ToxicProxy) -> None:
    proxy.cut_direction, proxy.cut_after_bytes, proxy.cuts_left = "request", 10, 1

    with pytest.raises((OSError, HTTPException)):
        read(proxy)

    assert proxy.num_cuts == 1


def test_connections_are_refused(proxy: ToxicProxy) -> None:
    proxy.refuses = True

    with pytest.raises((URLError, OSError)):
        read(proxy)
