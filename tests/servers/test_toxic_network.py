"""Slow, cut and refused connections: a save and a load succeed or end with a clear error, in bounded time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest

from holdfast.errors import CommitUnknown, StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from tests.faults.scenario import FIRST, SECOND, Content, check_store, holds, random_bytes, read_state, save_content
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.toxic_proxy import Direction, ToxicProxy, serve_proxy
from tests.unit.objects.cloud.servers import QUICK, open_cloud

OFTEN: Final = {**QUICK, "max_retries": 5}
LARGE: Final[Content] = {"own": random_bytes("large", 3 << 20)}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[ToxicProxy]:
    with serve_proxy(server.endpoint) as running:
        yield running


def open_through(proxy: ToxicProxy, server: S3Server, **options: Any) -> CloudStore:
    return open_cloud(server, options={"endpoint": proxy.endpoint, **options})


def find_problems(server: S3Server) -> list[str]:
    return [str(finding) for finding in check_store(open_cloud(server)) if finding.severity != "note"]


def test_a_slow_trickle_is_only_slow(server: S3Server, proxy: ToxicProxy) -> None:
    proxy.latency_s, proxy.piece_bytes, proxy.pause_s = 0.002, 64_000, 0.001
    save_content(open_through(proxy, server), "run/1", LARGE)

    assert holds(read_state(open_through(proxy, server)), "run/1", LARGE)
    assert find_problems(server) == []


@pytest.mark.parametrize("after_bytes", [40, 900_000])
def test_replies_that_are_cut_are_read_again(server: S3Server, proxy: ToxicProxy, after_bytes: int) -> None:
    save_content(open_cloud(server), "run/1", LARGE)
    proxy.cut_after_bytes, proxy.cuts_left = after_bytes, 2

    state = read_state(open_through(proxy, server, retry_config=OFTEN))

    assert holds(state, "run/1", LARGE)
    assert proxy.num_cuts == 2


@pytest.mark.parametrize("after_bytes", [0, 300, 1_000_000])
def test_requests_that_are_cut_are_sent_again(server: S3Server, proxy: ToxicProxy, after_bytes: int) -> None:
    proxy.cut_direction, proxy.cut_after_bytes, proxy.cuts_left = "request", after_bytes, 2

    save_content(open_through(proxy, server, retry_config=OFTEN), "run/1", LARGE)

    assert proxy.num_cuts == 2
    assert holds(read_state(open_cloud(server)), "run/1", LARGE)
    assert find_problems(server) == []


@pytest.mark.parametrize(("direction", "after_bytes"), [("request", 2_000), ("reply", 20)])
def test_a_line_that_is_always_cut_ends_in_an_error_and_loses_nothing(
    server: S3Server, proxy: ToxicProxy, direction: Direction, after_bytes: int
) -> None:
    save_content(open_cloud(server), "run/1", FIRST)
    store = open_through(proxy, server)
    save_content(store, "run/2", FIRST)
    proxy.cut_direction, proxy.cut_after_bytes, proxy.cuts_left = direction, after_bytes, 10_000

    with pytest.raises((StoreError, CommitUnknown), match="did not answer"):
        save_content(store, "run/3", SECOND)

    proxy.cuts_left = 0
    state = read_state(open_through(proxy, server))
    assert holds(state, "run/1", FIRST)
    assert holds(state, "run/2", FIRST)
    assert find_problems(server) == []
    save_content(open_through(proxy, server), "run/3", SECOND)
    assert holds(read_state(open_cloud(server)), "run/3", SECOND)


def test_connections_that_are_refused_are_named_with_the_time(server: S3Server, proxy: ToxicProxy) -> None:
    proxy.refuses = True

    with pytest.raises(StoreError, match=r"the server did not answer: check the network.*\d tries in \d+\.\d s"):
        save_content(open_through(proxy, server), "run/1", FIRST)

    assert server.objects == {}


def test_a_line_on_which_nothing_moves_ends_in_an_error(server: S3Server, proxy: ToxicProxy) -> None:
    """The limit for one request is short here; nothing else in the test waits for it."""
    save_content(open_cloud(server), "run/1", LARGE)
    proxy.latency_s = 3600.0
    options = {"client_options": {"timeout": timedelta(seconds=0.2)}, "retry_config": {**QUICK, "max_retries": 1}}

    with pytest.raises(StoreError, match="did not answer"):
        read_state(open_through(proxy, server, **options))
