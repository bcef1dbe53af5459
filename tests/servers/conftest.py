"""Servers for tests: one of each kind in a session, started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.servers.places import SERVERS, ServerPlace

PlaceOf = Callable[[str], ServerPlace]


@pytest.fixture(scope="session")
def place_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaceOf]:
    """Return what starts a server by its name, once."""
    places: dict[str, ServerPlace] = {}
    with ExitStack() as stack:

        def find(name: str) -> ServerPlace:
            if name not in places:
                places[name] = stack.enter_context(SERVERS[name](tmp_path_factory.mktemp("server")))
            return places[name]

        yield find
