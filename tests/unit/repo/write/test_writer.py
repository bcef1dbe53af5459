"""Saving: refusals come before any write, stored chunks are not written again, and saved data can be loaded."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from holdfast.errors import (
    BadName,
    HoldfastError,
    NameInUse,
    NotFound,
    ReadOnlyStore,
    StoreFull,
    TooLarge,
    Unsupported,
)
from holdfast.json_text import MAX_DEPTH, Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.saving import (
    MIB,
    keys,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    read_entries,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
    stored_bytes,
)

STATE = {"weights": noise(3 * MIB + 600), "bias": noise(5000, 1), "step": b"100"}


def refuse(repo: Repository, error: type[Exception], match: str, request: Request) -> None:
    """Check that a save is refused and leaves the store as it was."""
    assert isinstance(repo.store, MemoryStore)
    before = repo.store.contents()
    with pytest.raises(error, match=match):
        save(repo, request)
    assert repo.store.contents() == before


def findings(store: MemoryStore) -> list[str]:
    return [finding.code for finding in Checker(store, read=True).iter_findings()]


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"empty": b""},
        {"one": b"1"},
        {"inline": noise(512)},
        {"packed": noise(513)},
        {"mebibyte": noise(MIB)},
        {"more": noise(MIB + 1)},
        {"a": noise(9 * MIB + 3), "b": b"", "c": noise(600, 1), "d": b"x" * 512},
        STATE,
        {"": b"no name", "\n\0\\": b"odd", "\u00e9": b"1", "e\u0301": b"2"},
    ],
    ids=lambda entries: ",".join(map(repr, entries)),
)
def test_what_was_saved_is_loaded(repo: Repository, store: MemoryStore, entries: Mapping[str, bytes]) -> None:
    result = save_bytes(repo, "a", entries)
    assert load_bytes(repo, "a") == entries
    assert result.logical_bytes == result.new_bytes == sum(map(len, entries.values()))
    assert (result.name, result.generation, result.existed, result.reused_bytes) == ("a", 0, False, 0)
    assert findings(store) == []


def test_up_to_512_bytes_are_inline_and_more_are_not(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": noise(512)})
    assert keys(store, "packs/") == []
    save_bytes(repo, "b", {"x": noise(513)})
    assert len(keys(store, "packs/")) == 1


def test_a_finished_save_leaves_no_lease(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", STATE)
    assert keys(store, "leases/") == []


def test_a_thousand_scalars_cost_little_and_one_pack_at_most(repo: Repository, store: MemoryStore) -> None:
    entries = {f"optimizer.state.{number}.step": noise(8, number) for number in range(1000)}
    save_bytes(repo, "a", entries)
    assert stored_bytes(store) < 200_000
    assert len(keys(store, "packs/")) <= 1
    assert load_bytes(repo, "a") == entries


def test_the_same_bytes_under_an_unrelated_name_cost_next_to_nothing(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "run/1", STATE)
    before = stored_bytes(store)
    result = save_bytes(new_repo(store), "elsewhere/x", {"other name": STATE["weights"], "y": STATE["bias"]})
    assert stored_bytes(store) - before < before // 100
    assert (result.new_bytes, result.reused_bytes) == (0, result.logical_bytes)


def test_only_the_chunks_that_changed_are_written(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "run/1", STATE)
    before = stored_bytes(store)
    changed = bytearray(STATE["weights"])
    changed[MIB + 5] ^= 1
    result = save_bytes(repo, "run/2", {**STATE, "weights": changed})
    assert result.new_bytes == MIB + len(STATE["step"])
    assert stored_bytes(store) - before < MIB + 10_000
    assert load_bytes(repo, "run/2")["weights"] == changed


def test_what_a_deleted_snapshot_left_is_reused(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", STATE)
    delete_snapshot(store, "a")
    assert save_bytes(repo, "b", STATE).new_bytes == len(STATE["step"])


@pytest.mark.parametrize("verify_reuse", [True, False])
def test_a_rotten_copy_is_not_relied_on_if_reuse_is_verified(
    repo: Repository, store: MemoryStore, verify_reuse: bool
) -> None:
    save_bytes(repo, "a", {"x": STATE["bias"]})
    rot(store, only_pack(store), pack_of(repo, "a", "x").offset + 10)
    result = save_bytes(new_repo(store), "b", {"x": STATE["bias"]}, verify_reuse=verify_reuse)
    assert result.new_bytes == (len(STATE["bias"]) if verify_reuse else 0)
    if verify_reuse:
        assert load_bytes(repo, "b") == load_bytes(repo, "a") == {"x": STATE["bias"]}


@pytest.mark.parametrize("verify_reuse", [True, False])
def test_a_pack_that_is_gone_or_short_is_never_relied_on(
    repo: Repository, store: MemoryStore, verify_reuse: bool
) -> None:
    save_bytes(repo, "a", {"x": STATE["bias"]})
    replace_object(store, only_pack(store), store.contents()[only_pack(store)][:1000])
    save_bytes(repo, "b", {"x": STATE["bias"]}, verify_reuse=verify_reuse)
    assert load_bytes(repo, "b") == {"x": STATE["bias"]}


def test_a_pack_known_to_be_bad_is_not_relied_on(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": STATE["bias"]})
    pack = pack_of(repo, "a", "x").pack_id
    store.create(f"bad/{pack}", b"")
    save_bytes(repo, "b", {"x": STATE["bias"]}, verify_reuse=False)
    assert pack_of(repo, "b", "x").pack_id != pack


def test_a_name_in_use_is_refused_before_any_byte_is_written(repo: Repository) -> None:
    save_bytes(repo, "a", STATE)
    request = Request("a", [BytesSource("x", noise(MIB, 7))])
    refuse(repo, NameInUse, r"'a' is in use and holds other content; nothing was written\..*overwrite=True", request)


@pytest.mark.parametrize("metadata", [{"other": 1}, {"loss": 1}])
def test_other_metadata_is_other_content_for_a_name_in_use(repo: Repository, metadata: Mapping[str, Json]) -> None:
    save_bytes(repo, "a", {"x": b"1"}, metadata={"loss": 1.0})
    refuse(repo, NameInUse, "in use", Request("a", [BytesSource("x", b"1")], options=WriteOptions(metadata=metadata)))


def test_saving_the_same_again_is_a_success_that_writes_nothing(repo: Repository, store: MemoryStore) -> None:
    metadata = {"b": [1, {"c": None}], "a": 0.5}
    first = save_bytes(repo, "a", STATE, metadata=metadata, spec={"tree": 1})
    before = store.contents()
    again = save_bytes(new_repo(store), "a", STATE, metadata={"a": 0.5, "b": [1, {"c": None}]}, spec={"tree": 1})
    assert (again.existed, again.new_bytes, again.digest) == (True, 0, first.digest)
    assert again.generation == first.generation
    assert store.contents() == before


def test_another_spec_is_other_content(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": b"1"}, spec={"tree": 1})
    refuse(repo, NameInUse, "in use", Request("a", [BytesSource("x", b"1")], spec={"tree": 2}))


def test_overwriting_replaces_the_whole(repo: Repository) -> None:
    save_bytes(repo, "a", STATE)
    result = save_bytes(repo, "a", {"x": b"new"}, overwrite=True)
    assert result.generation == 1
    assert load_bytes(repo, "a") == {"x": b"new"}


def test_two_spellings_of_a_name_are_one_name(repo: Repository) -> None:
    save_bytes(repo, "caf\u00e9", {"x": b"1"})
    assert save_bytes(repo, "cafe\u0301", {"x": b"1"}).existed
    assert load_bytes(repo, "cafe\u0301") == {"x": b"1"}


def test_entries_that_share_a_name_are_refused(repo: Repository) -> None:
    twins = [BytesSource("x", b"1"), BytesSource("y", b""), BytesSource("x", b"2")]
    refuse(repo, BadName, "two entries of 'a' would have the name 'x'", Request("a", twins))


def test_one_name_twice_among_very_many_is_found_at_once(repo: Repository) -> None:
    sources = [BytesSource(str(number), b"") for number in range(50_000)] + [BytesSource("49999", b"")]
    refuse(repo, BadName, "'49999'", Request("a", sources))


@pytest.mark.parametrize("name", ["", "../x", "a\0b", "\ud800"])
def test_a_bad_name_is_refused(repo: Repository, name: str) -> None:
    refuse(repo, BadName, "is refused", Request(name, [BytesSource("x", b"1")]))


def test_an_entry_name_that_is_no_text_is_refused(repo: Repository) -> None:
    refuse(repo, BadName, "not valid Unicode", Request("a", [BytesSource("bad\udcff", b"1")]))


def nested(depth: int) -> Json:
    value: Json = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "metadata",
    [
        {"x": float("nan")},
        {"x": object()},
        {"x": b""},
        {"x": "\ud800"},
        {"x": {10: "a", 9: "b"}},
        {1: "a"},
        {"x": nested(100_000)},
    ],
    ids=["nan", "object", "bytes", "surrogate", "integer keys", "integer key", "deep"],
)
def test_metadata_that_would_not_come_back_is_refused(repo: Repository, metadata: dict[str, Json]) -> None:
    request = Request("a", [BytesSource("x", noise(1000))], options=WriteOptions(metadata=metadata))
    refuse(repo, Unsupported, "the metadata of 'a' is not plain JSON", request)


def test_metrics_that_are_not_finite_are_texts_and_a_retry_finds_them_equal(repo: Repository) -> None:
    metadata: dict[str, Json] = {"metrics": {"loss": float("nan"), "top": float("-inf"), "acc": 0.5}, "step": 3}
    save_bytes(repo, "a", {"x": b"1"}, metadata=metadata)

    assert snapshot_of(repo, "a").metadata == {
        "metrics": {"loss": "nan", "top": "-inf", "acc": 0.5},
        "step": 3,
    }
    assert save_bytes(repo, "a", {"x": b"1"}, metadata=metadata).existed


def test_metadata_has_a_limit(repo: Repository) -> None:
    save_bytes(repo, "fits", {}, metadata={"x": "y" * (MIB - 20)})
    request = Request("a", [], options=WriteOptions(metadata={"x": "y" * MIB}))
    refuse(repo, TooLarge, "the metadata of 'a' has .* save it as an entry", request)


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", [BytesSource("x", noise(1000), spec={1, 2})]),
        Request("a", [BytesSource("x", noise(1000), spec={10: 1, 9: 2})]),
        Request("a", [BytesSource("x", noise(1000), note=b"")]),
        Request("a", [BytesSource("x", noise(1000))], spec=float("inf")),
        Request("a", [BytesSource("x", noise(1000))], spec=nested(MAX_DEPTH)),
        Request("a", [BytesSource("x", noise(1000), spec=nested(MAX_DEPTH - 1))]),
        Request("a", [BytesSource("x", noise(1000), note=nested(MAX_DEPTH - 1))]),
    ],
    ids=["set", "integer keys", "note", "snapshot", "deep snapshot", "deep spec", "deep note"],
)
def test_a_spec_that_would_not_come_back_is_refused(repo: Repository, request_: Request) -> None:
    refuse(repo, Unsupported, "'a'", request_)


def test_specs_as_deep_as_a_manifest_holds_come_back(repo: Repository) -> None:
    deep, deeper = nested(MAX_DEPTH - 2), nested(MAX_DEPTH - 1)
    save(repo, Request("a", [BytesSource("x", b"1", spec=deep, note=deep)], spec=deeper))
    (entry,) = read_entries(repo, "a").values()
    assert (entry.spec, entry.note) == (deep, deep)


def test_specs_and_notes_come_back(repo: Repository) -> None:
    source = BytesSource("x", b"1", spec={"dtype": "f", "shape": [1, 2]}, note={"mtime": 5})
    save(repo, Request("a", [source], spec=[{"tree": None}]))
    entry = read_entries(repo, "a")["x"]
    assert (entry.spec, entry.note) == (source.spec, source.note)


def test_store_full_is_raised_before_anything_is_written() -> None:
    repo = new_repo(MemoryStore(capacity_bytes=MIB))
    match = r"saving 'a' needs \d+ bytes, memory:// has \d+ free; nothing was written"
    refuse(repo, StoreFull, match, Request("a", [BytesSource("x", noise(MIB + 1))]))


def test_bytes_that_are_already_stored_need_no_space() -> None:
    store = MemoryStore(capacity_bytes=4 * MIB)
    save_bytes(new_repo(store), "a", {"x": noise(3 * MIB)})
    save_bytes(new_repo(store), "b", {"x": noise(3 * MIB), "y": noise(3 * MIB)})
    assert load_bytes(new_repo(store), "b")["y"] == noise(3 * MIB)


@pytest.mark.parametrize("first", [True, False])
def test_a_read_only_store_refuses_and_stays_as_it_is(first: bool) -> None:
    store = MemoryStore()
    if not first:
        save_bytes(new_repo(store), "a", STATE)
    repo = new_repo(store.clone(read_only=True))
    refuse(repo, ReadOnlyStore, "read-only", Request("b", [BytesSource("x", noise(5000))]))
    with pytest.raises(NotFound):
        snapshot_of(repo, "b")


class Recording:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.done = 0
        self.ends = 0

    def begin(self, task: str, total_bytes: int) -> None:
        self.told.append((task, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes

    def end(self) -> None:
        self.ends += 1


def test_progress_adds_up_to_the_saved_bytes(repo: Repository) -> None:
    progress = Recording()
    sources = [BytesSource(name, data) for name, data in STATE.items()]
    save(repo, Request("a", sources), progress=progress)
    total = sum(map(len, STATE.values()))
    assert (progress.told, progress.done, progress.ends) == ([("save a", total)], total, 1)


def test_progress_ends_when_a_save_fails() -> None:
    progress = Recording()
    repo = new_repo(MemoryStore(read_only=True))
    with pytest.raises(HoldfastError):
        save(repo, Request("a", [BytesSource("x", noise(1000))]), progress=progress)
    assert progress.ends == len(progress.told)


def test_no_thread_of_a_save_remains(repo: Repository) -> None:
    before = threading.active_count()
    save_bytes(repo, "a", STATE)
    assert threading.active_count() == before
