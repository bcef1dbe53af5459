"""Every store that Holdfast ships, under the contract that it ships."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import FaultyStore
from holdfast.testing.store_contract import StoreContract
from tests.kit.power import SimulatedDisk


class WithoutLinks(PosixFiles):
    """A filesystem without hard links."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)


class WithoutLinksOrNoReplace(WithoutLinks):
    """A filesystem that knows neither links nor rename without replacement."""

    def rename_noreplace(self, source: str, target: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, target)


class TestMemoryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _no_places(self) -> None:
        self.places: dict[Path, MemoryStore] = {}

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        store = self.places.setdefault(place, MemoryStore())
        return store.clone(read_only=True) if read_only else store


class TestLocalStore(StoreContract):
    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return LocalStore(place / "store", read_only=read_only)


class TestLocalStoreWithoutLinks(StoreContract):
    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return LocalStore(place / "store", read_only=read_only, files=WithoutLinks())


class TestLocalStoreOfASingleWriter(StoreContract):
    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return LocalStore(place / "store", read_only=read_only, single_writer=True, files=WithoutLinksOrNoReplace())


class TestLocalStoreOnASimulatedDisk(StoreContract):
    @pytest.fixture(autouse=True)
    def _no_places(self) -> None:
        self.places: dict[Path, SimulatedDisk] = {}

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return LocalStore("/store", read_only=read_only, files=self.places.setdefault(place, SimulatedDisk()))

    def test_a_map_is_private_memory_of_the_object(self, store: ObjectStore) -> None:
        pytest.skip("the system cannot map files of a simulated disk")


class TestFaultyStoreWithoutAFault(StoreContract):
    @pytest.fixture(autouse=True)
    def _no_places(self) -> None:
        self.places: dict[Path, MemoryStore] = {}

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        store = self.places.setdefault(place, MemoryStore())
        return FaultyStore(store.clone(read_only=True) if read_only else store)
