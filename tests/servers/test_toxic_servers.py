"""Connections to every server that are cut in requests and replies: a save and a load succeed, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.faults.scenario import FIRST, Content, check_store, holds, random_bytes, read_state, save_content
from tests.kit.toxic_proxy import Direction, ToxicProxy, serve_proxy
from tests.servers.conftest import PlaceOf
from tests.servers.places import REAL_SERVERS, ServerPlace, make_prefix
from tests.unit.objects.cloud.servers import QUICK

LARGE: Final[Content] = {"own": random_bytes("large", 3 << 20)}
_OFTEN: Final = {**QUICK, "max_retries": 8}


@pytest.fixture(params=["small GCS", *(pytest.param(name, marks=pytest.mark.slow) for name in REAL_SERVERS)])
def place(request: pytest.FixtureRequest, place_of: PlaceOf) -> ServerPlace:
    return place_of(request.param)


@pytest.fixture
def proxy(place: ServerPlace) -> Iterator[ToxicProxy]:
    with serve_proxy(f"http://{urlsplit(find_endpoint(place)).netloc}") as running:
        yield running


def find_endpoint(place: ServerPlace) -> str:
    return str(place.options.get("endpoint") or place.options["base_url"])


def put_behind(place: ServerPlace, proxy: ToxicProxy) -> ServerPlace:
    """Return the same place, reached through the proxy."""
    direct = find_endpoint(place)
    through = proxy.endpoint + urlsplit(direct).path
    options = {name: through if value == direct else value for name, value in place.options.items()}
    return replace(place, options=options)


@pytest.mark.parametrize("after_bytes", [0, 500, 1_000_000])
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_connections_that_are_cut_are_made_again(
    place: ServerPlace, proxy: ToxicProxy, tmp_path: Path, direction: Direction, after_bytes: int
) -> None:
    prefix, behind = make_prefix(tmp_path), put_behind(place, proxy)
    save_content(place.open(prefix), "run/1", FIRST)
    proxy.cut_direction, proxy.cut_after_bytes, proxy.cuts_left = direction, after_bytes, 2

    save_content(behind.open(prefix, retry_config=_OFTEN), "run/2", LARGE)

    proxy.cuts_left = 2
    state = read_state(behind.open(prefix, retry_config=_OFTEN))
    assert holds(state, "run/1", FIRST)
    assert holds(state, "run/2", LARGE)
    assert proxy.num_cuts >= 2
    assert [str(finding) for finding in check_store(place.open(prefix)) if finding.severity != "note"] == []
