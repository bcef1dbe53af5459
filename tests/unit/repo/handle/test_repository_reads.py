"""Reading a store in a directory writes nothing there, not even the scratch files that test the filesystem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import FileNamer
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.latest import read_latest
from holdfast.repo.names.listed import RecordCache, list_user_names
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import iter_names, iter_tags, read_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import plan_collect, verify_may_collect
from holdfast.repo.upkeep.usage import read_usage
from tests.kit.hooking import forbidden
from tests.kit.saving import new_repo, noise, save_bytes

READS: dict[str, Callable[[ObjectStore], object]] = {
    "open": open_repository,
    "latest": lambda store: read_latest(store, "", RecordCache()),
    "list": lambda store: list_user_names(store, "", RecordCache()),
    "names": lambda store: [*iter_names(store), *iter_tags(store), read_snapshot(store, "a")],
    "verify": verify_may_collect,
    "plan a collection": plan_collect,
    "measure": lambda store: read_usage(store, read_live(store).current),
    "check": lambda store: list(Checker(store, read=True).iter_findings()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_does_not_test_the_filesystem(tmp_path: Path, name: str) -> None:
    save_bytes(new_repo(LocalStore(tmp_path)), "a", {"x": noise(700)})

    with forbidden(FileNamer, "read_naming"):
        READS[name](LocalStore(tmp_path))
