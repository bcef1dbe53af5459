"""Laws of codecs: what was encoded comes back, and any mix of codecs and saves loads as it was saved."""

from __future__ import annotations

import random
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import BLOSC2
from holdfast.repo.format.codec import ITEM_SIZES, LEAST_BYTES, WORTH_SHARE, CodecLevel, decode, encode
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.compression import LEVELS, Compression
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.saving import load_bytes, new_repo, read_entries, snapshot_of

SIZES = st.one_of(st.integers(1, 20_000), st.sampled_from([LEAST_BYTES - 1, LEAST_BYTES, 65_537, (1 << 20) + 4097]))
CHOICES: st.SearchStrategy[Compression] = st.sampled_from([None, "fast", "small", "auto"])


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Bytes of one kind: noise, zeros, a pattern, few values, or one kind after the other."""
    size, seed = draw(SIZES), draw(st.integers(0, 3))
    rng = random.Random(seed)
    kind = draw(st.sampled_from(["noise", "zeros", "pattern", "few", "mixed"]))
    if kind == "noise":
        return rng.randbytes(size)
    if kind == "zeros":
        return bytes(size)
    if kind == "pattern":
        return (draw(st.binary(min_size=1, max_size=20)) * size)[:size]
    if kind == "few":
        return rng.randbytes(size).translate(bytes(value & 0x13 for value in range(256)))
    return (bytes(size // 2) + rng.randbytes(size))[:size]


@given(contents(), st.sampled_from(LEVELS), st.sampled_from([*ITEM_SIZES, 3, 0, 32]))
def test_what_was_encoded_is_decoded(data: bytes, level: CodecLevel, item_bytes: int) -> None:
    data = data[: 1 << 20]
    stored = encode(memoryview(data), level, item_bytes)
    if stored is not None:
        assert len(stored) <= WORTH_SHARE * len(data)
        assert bytes(decode(memoryview(stored), len(data))) == data


@given(st.binary(max_size=200), st.integers(0, (1 << 20) + 1))
def test_no_bytes_crash_the_decoder(stored: bytes, raw_bytes: int) -> None:
    with suppress(Corrupt):
        assert len(decode(memoryview(stored), raw_bytes)) == raw_bytes


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abc"), contents(), max_size=3), CHOICES), min_size=1, max_size=4
    ),
    st.sampled_from([1, 2, 4]),
)
def test_any_mix_of_codecs_and_saves_loads_as_it_was_saved(
    saves: list[tuple[dict[str, bytes], Compression]], item_bytes: int
) -> None:
    store, target = MemoryStore(), new_repo()
    for number, (content, compression) in enumerate(saves):
        sources = [BytesSource(name, data, item_bytes=item_bytes) for name, data in content.items()]
        save(new_repo(store), Request(str(number), sources, options=WriteOptions(compression=compression)))
    repo = new_repo(store)
    for number, (content, _) in enumerate(saves):
        assert load_bytes(repo, str(number)) == content
        copy_snapshot(repo, snapshot_of(repo, str(number)), target)
        assert load_bytes(target, str(number)) == content
        with SnapshotReader(repo, snapshot_of(repo, str(number)), verify="fast") as reader:
            for name, data in content.items():
                middle = bytearray(len(data) - len(data) // 3)
                reader.read_into(reader.find_entry(name), len(data) // 3, memoryview(middle))
                assert bytes(middle) == data[len(data) // 3 :]
        places = [chunk.location for entry in read_entries(repo, str(number)).values() for chunk in entry.chunks]
        assert all(at.stored_bytes <= WORTH_SHARE * (1 << 20) for at in places if at and at.codec == BLOSC2)
    for each in (repo, target):
        assert [
            finding for finding in Checker(each.store, read=True).iter_findings() if finding.severity != "note"
        ] == []
