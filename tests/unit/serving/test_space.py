"""Space over the API: computed once for a state of the store, however many pages are asked for."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import pytest

from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import ManifestRef
from holdfast.repo.format.rank_manifests import iter_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.serving.answer import parse_request
from holdfast.serving.answers import sharing
from holdfast.serving.routes import API, StoreApi
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.saving import new_repo, save_bytes

STEPS = 70


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def repo(clock: VirtualClock) -> Repository:
    made = new_repo(MemoryStore(clock=clock))
    for step in range(STEPS):
        contents = {
            "x": random.Random(step // 2).randbytes(2000),
            "n": random.Random(100 + step).randbytes(1000 + 50 * step),
        }
        save_bytes(made, f"run/step-{step}", contents, metadata={"loss": float(STEPS - step)})
    return made


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each time that the space of the store is computed: of the manifests that were read."""
    found: list[int] = []

    def read(store: ObjectStore, refs: Sequence[ManifestRef]) -> Iterator[object]:
        found.append(len(refs))
        return iter_manifests(store, refs)

    monkeypatch.setattr(sharing, "iter_manifests", read)
    return found


def ask(api: StoreApi, path: str, **parameters: str) -> Any:
    body = api.answer(parse_request(f"{API}{path}?{urlencode(parameters)}")).body
    assert isinstance(body, bytes)
    return json.loads(body)


def test_pages_orders_pairs_and_plans_need_one_reading(repo: Repository, computed: list[int]) -> None:
    api = StoreApi(repo)
    names = [
        row["name"]
        for offset in range(0, STEPS, 20)
        for row in ask(api, "usage", sort="-own_bytes", offset=str(offset), limit="20")["snapshots"]
    ]
    assert len(set(names)) == STEPS
    assert names[0] == f"run/step-{STEPS - 1}"
    assert ask(api, "usage", sort="name", limit="1")["snapshots"][0]["name"] == "run/step-0"
    pairs = ask(api, "pairs", filter="run/", sort="step")
    assert (pairs["total"], len(pairs["names"]), pairs["names"][:2]) == (STEPS, 64, ["run/step-0", "run/step-1"])
    assert pairs["shared"][0][:3] == [3000, 2000, 0]
    assert len(ask(api, "pairs", filter="run/", sort="step", offset="64")["names"]) == STEPS - 64
    assert [row["name"] for row in ask(api, "shares", name="run/step-6")["snapshots"]] == ["run/step-7"]
    for offset in ("0", "50"):
        plan = ask(api, "prune", keep_best="loss:3:max", offset=offset, limit="50")
        assert (plan["delete"], plan["keep"], len(plan["verdicts"])) == (STEPS - 3, 3, 50 if offset == "0" else 20)

    assert computed == [STEPS]


def test_a_new_snapshot_is_read_and_no_other_again(repo: Repository, clock: VirtualClock, computed: list[int]) -> None:
    api = StoreApi(repo)
    assert ask(api, "usage")["total"] == STEPS
    save_bytes(repo, "run/last", {"x": random.Random(0).randbytes(2000)})
    assert ask(api, "usage")["total"] == STEPS  # the listing is at most a second old
    clock.advance(2.0)

    assert ask(api, "usage")["total"] == STEPS + 1
    assert ask(api, "usage", fresh="true")["computed"] > "2001"
    assert computed == [STEPS, 1, 0]


def test_compiled_graphs_are_sorted_and_cut_into_pages(repo: Repository) -> None:
    for seed in "abc":
        store_artifact(repo, make_artifact(seed))
    api = StoreApi(repo)

    pages = [ask(api, "cache", sort="key", offset=str(at), limit="1") for at in range(3)]
    keys = [page["keys"][0]["key"] for page in pages]
    assert keys == sorted(keys)
    assert (pages[0]["total"], pages[0]["damaged"]) == (3, 0)
    assert [row["key"] for row in ask(api, "cache", sort="-key")["keys"]] == keys[::-1]


def test_what_was_computed_is_used_for_ten_minutes(repo: Repository, clock: VirtualClock, computed: list[int]) -> None:
    api = StoreApi(repo)
    for seconds in (0.0, 1.0, 700.0):
        clock.advance(seconds)
        ask(api, "usage")

    assert computed == [STEPS, 0]


def test_the_ledger_is_read_by_one_thread_at_a_time(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = threading.Lock()
    overlaps: list[bool] = []
    read = sharing.LedgerReader.read

    def read_alone(reader: sharing.LedgerReader, snapshots: Sequence[CommittedSnapshot]) -> sharing.ChunkLedger:
        is_alone = reading.acquire(blocking=False)
        overlaps.append(not is_alone)
        try:
            return read(reader, snapshots)
        finally:
            if is_alone:
                reading.release()

    monkeypatch.setattr(sharing.LedgerReader, "read", read_alone)
    api = StoreApi(repo)
    threads = [threading.Thread(target=ask, args=(api, "usage"), kwargs={"fresh": "true"}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(overlaps) > 1
    assert not any(overlaps)
