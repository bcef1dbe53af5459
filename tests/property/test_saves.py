"""Laws of saving: any state loads as it was, any range is a slice, nothing is stored twice, every check is clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import NameInUse
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.check import Checker
from tests.kit.saving import load_bytes, new_repo, noise, save_bytes, snapshot_of

SMALL_CHUNK = 4096

# Sizes around what matters: nothing, the inline limit, a chunk, several chunks, more than is read at once.
SIZES = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, SMALL_CHUNK - 1, SMALL_CHUNK, SMALL_CHUNK + 1, 3 * SMALL_CHUNK]),
    st.integers(0, 12 * SMALL_CHUNK),
)
VALUES = st.builds(noise, SIZES, st.integers(0, 3))
STATES = st.dictionaries(st.text("abc.", max_size=4), VALUES, max_size=5)


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Cut into 4 KiB, and read and write 16 KiB at once: the same code, in less time."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("format.chunk", "format.source", "format.manifest", "format.pack"):
            patch.setattr(f"holdfast.repo.{module}.CHUNK_BYTES", SMALL_CHUNK)
        for module in ("format.chunk", "write.packing", "read.reader"):
            patch.setattr(f"holdfast.repo.{module}.UNIT_BYTES", 4 * SMALL_CHUNK)
        patch.setattr("holdfast.repo.format.pack.PACK_LIMIT_BYTES", 20 * SMALL_CHUNK)
        yield


def fresh() -> tuple[Repository, MemoryStore]:
    store = MemoryStore()
    return new_repo(store), store


@given(STATES)
def test_a_state_loads_as_it_was_and_checks_clean(state: dict[str, bytes]) -> None:
    repo, store = fresh()
    result = save_bytes(repo, "a", state)
    assert load_bytes(repo, "a") == state
    assert result.logical_bytes == sum(map(len, state.values()))
    assert list(Checker(store, read=True).iter_findings()) == []


@given(st.lists(STATES, min_size=1, max_size=4))
def test_no_chunk_is_stored_twice(states: list[dict[str, bytes]]) -> None:
    repo, store = fresh()
    for number, state in enumerate(states):
        save_bytes(repo, f"{number % 2}/{number}", state)
    checker = Checker(store, read=True)
    assert list(checker.iter_findings()) == []
    values = [value for state in states for value in state.values()]
    cut = {value[i : i + SMALL_CHUNK] for value in values for i in range(0, len(value), SMALL_CHUNK)}
    assert checker.tally.chunks == len([chunk for chunk in cut if len(chunk) > 512])
    for number, state in enumerate(states):
        assert load_bytes(repo, f"{number % 2}/{number}") == state


@given(STATES, STATES)
def test_equal_digests_mean_equal_states(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    repo, _ = fresh()
    first, second = save_bytes(repo, "a", one), save_bytes(new_repo(), "b", other)
    assert (first.digest == second.digest) == (list(one.items()) == list(other.items()))


@given(STATES, STATES)
def test_a_name_keeps_what_it_holds_until_it_is_overwritten(old: dict[str, bytes], new: dict[str, bytes]) -> None:
    repo, store = fresh()
    save_bytes(repo, "a", old)
    before = store.contents()
    if list(old.items()) == list(new.items()):
        assert save_bytes(repo, "a", new).existed
    else:
        with pytest.raises(NameInUse):
            save_bytes(repo, "a", new)
    assert store.contents() == before
    save_bytes(repo, "a", new, overwrite=True)
    assert load_bytes(repo, "a") == new


DATA = noise(30 * SMALL_CHUNK + 100)


@pytest.fixture(scope="module")
def reader(small_chunks: None) -> Iterator[SnapshotReader]:
    """A reader of DATA, of which one half was held before."""
    repo, _ = fresh()
    save_bytes(repo, "before", {"half": DATA[: 15 * SMALL_CHUNK]})
    save_bytes(repo, "a", {"x": DATA})
    with SnapshotReader(repo, snapshot_of(repo, "a")) as opened:
        yield opened


@given(start=st.integers(0, len(DATA)), stop=st.integers(0, len(DATA)))
def test_a_range_is_a_slice(reader: SnapshotReader, start: int, stop: int) -> None:
    buffer = bytearray(max(stop - start, 0))
    reader.read_into(reader.find_entry("x"), start, memoryview(buffer))
    assert buffer == DATA[start:stop]
