"""The contract of stores on every server: small ones and moto in each run, SeaweedFS and Azurite if installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.objects.protocol import ObjectStore
from holdfast.testing.store_contract import StoreContract
from tests.servers.places import SERVERS, ServerPlace, make_prefix


class ServedContract(StoreContract):
    """The contract, on one server for all its tests."""

    server: str
    place: ServerPlace

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with SERVERS[cls.server](tmp_path_factory.mktemp("server")) as cls.place:
            yield

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return self.place.open(make_prefix(place), read_only=read_only)


@pytest.mark.slow
class TestMoto(ServedContract):
    server = "moto"


class TestSmallGcs(ServedContract):
    server = "small GCS"


@pytest.mark.slow
class TestSeaweedfs(ServedContract):
    server = "SeaweedFS"


@pytest.mark.slow
class TestAzurite(ServedContract):
    server = "Azurite"
