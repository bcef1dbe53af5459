"""Streams over entries read what any binary stream of the same bytes would, verified, and only what is asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.utils import _create_file_view

import holdfast
from holdfast.errors import DigestMismatch, NotFound
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.read.stream import RangeView, open_entry
from holdfast.trees.encoding import MAX_INLINE
from tests.kit.capabilities import needs_ability

DATA = random.Random(7).randbytes(3 * CHUNK_BYTES + 12_345)


class Source:
    """Bytes that note what is read of them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def read_into(self, start: int, buffer: memoryview, /) -> None:
        assert start >= 0
        assert start + buffer.nbytes <= len(self.data)
        self.reads.append((start, start + buffer.nbytes))
        buffer[:] = self.data[start : start + buffer.nbytes]


class OnlyReads:
    """A file as some libraries make it: it has no readinto, and a read may return less than was asked for."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(min(size, 3) if size >= 0 else size)


def make_disk_file(data: bytes) -> io.BufferedReader:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(data)
    opened = open(file.name, "rb")  # noqa: SIM115 - the test closes it
    Path(file.name).unlink()
    return opened


def make_spooled_file(data: bytes) -> Any:
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115 - the test closes it
    file.write(data)
    return file


FILES: dict[str, Callable[[bytes], Any]] = {
    "source": Source,
    "disk": make_disk_file,
    "unbuffered": lambda data: make_disk_file(data).detach(),
    "memory": io.BytesIO,
    "spooled": make_spooled_file,
    "only reads": OnlyReads,
    "view of a file": lambda data: RangeView(io.BytesIO(b"xx" + data + b"xx"), 2, len(data)),
    "reader of a view": lambda data: io.BufferedReader(RangeView(Source(data), 0, len(data)), buffer_size=4),
}
"""Everything that a view can be opened over, each with these bytes."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.integers(-40, 40), st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])),
        st.tuples(st.just("read"), st.integers(-1, 40)),
        st.tuples(st.just("readinto"), st.integers(0, 40)),
        st.tuples(st.just("readline")),
        st.tuples(st.just("tell")),
    ),
    max_size=12,
)


def run(stream: Any, step: tuple[Any, ...]) -> object:
    """Take one step; return what it gives, or the kind of its error."""
    name, *arguments = step
    if name == "readinto":
        buffer = bytearray(arguments[0])
        return stream.readinto(buffer), bytes(buffer)
    try:
        return getattr(stream, name)(*arguments)
    except (ValueError, OSError):
        return "refused"


@pytest.mark.parametrize("kind", FILES)
@given(st.binary(max_size=60), st.integers(0, 60), st.integers(0, 60), STEPS, st.booleans())
def test_a_view_is_a_stream_of_the_bytes_in_its_window(
    kind: str, data: bytes, offset: int, size: int, steps: list[tuple[Any, ...]], is_buffered: bool
) -> None:
    offset = min(offset, len(data))
    size = min(size, len(data) - offset)
    source = FILES[kind](data)
    raw = RangeView(source, offset, size)
    view: Any = io.BufferedReader(raw, buffer_size=4) if is_buffered else raw
    with tempfile.TemporaryFile(buffering=-1 if is_buffered else 0) as model:
        model.write(data[offset : offset + size])
        model.seek(0)
        for step in steps:
            assert run(view, step) == run(model, step), step
    if isinstance(source, Source):
        assert all(offset <= start <= stop <= offset + size for start, stop in source.reads)
    elif not isinstance(source, OnlyReads):
        source.close()


@given(st.binary(max_size=20), st.integers(0, 30), st.integers(0, 30), STEPS)
def test_a_view_of_a_file_ends_where_the_file_ends(
    data: bytes, offset: int, size: int, steps: list[tuple[Any, ...]]
) -> None:
    """Reads what is there; only positions from the end count from the end that was stated."""
    with io.BytesIO(data) as file, make_disk_file(data[offset : offset + size]).detach() as model:
        view = RangeView(file, offset, size)
        for step in steps:
            if step[0] != "seek" or step[2] != os.SEEK_END:
                assert run(view, step) == run(model, step), step


def test_several_views_of_one_file_have_positions_of_their_own() -> None:
    with io.BytesIO(bytes(range(20))) as file:
        first, second = RangeView(file, 0, 10), RangeView(file, 10, 10)

        assert [first.read(2), second.read(2), first.read(2), second.read()] == [
            bytes([0, 1]),
            bytes([10, 11]),
            bytes([2, 3]),
            bytes(range(12, 20)),
        ]
        first.close()
        assert not file.closed


@pytest.mark.parametrize("text", [io.StringIO("abc"), io.StringIO("äöü")])
def test_a_file_of_text_is_refused_and_named(text: io.StringIO) -> None:
    with pytest.raises(TypeError, match=r"a StringIO returned str and not bytes; open the file in binary mode, 'rb'"):
        RangeView(text, 0, 2).read()


@needs_ability("end a view of a file where it ends")
@given(
    st.binary(min_size=1, max_size=60),
    st.integers(0, 59),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 70)), max_size=8),
)
def test_a_view_reads_what_torchs_reader_view_reads(
    data: bytes, offset: int, size: int, reads: list[tuple[int, int]]
) -> None:
    offset = min(offset, len(data) - 1)
    size = min(size, len(data) - offset)
    ours, theirs = RangeView(io.BytesIO(data), offset, size), _create_file_view(io.BytesIO(data), offset, size)

    assert (ours.readable(), ours.seekable(), ours.writable()) == (True, True, False)
    for position, count in reads:
        # Torch's reads past the end of its window if it is asked to begin there.
        at = min(position, size)
        assert ours.seek(at) == at
        assert theirs.seek(at) == offset + at
        assert ours.read(count) == theirs.read(count)
        assert ours.tell() == theirs.tell()
        buffer, other = bytearray(max(count, 0)), bytearray(max(count, 0))
        assert ours.readinto(buffer) == theirs.readinto(other)  # type: ignore[attr-defined]  # it has one
        assert buffer == other
        ours.seek(0, os.SEEK_END)
        theirs.seek(0, os.SEEK_END)
        assert ours.tell() == theirs.tell() == size


def test_the_end_is_counted_from_as_in_any_stream() -> None:
    view = RangeView(Source(bytes(range(10))), 2, 5)

    assert view.seek(-2, os.SEEK_END) == 3
    assert view.read() == bytes([5, 6])
    assert view.seek(3, os.SEEK_END) == 8
    assert view.read() == b""
    with pytest.raises(ValueError, match="before the start of the stream"):
        view.seek(-6, os.SEEK_END)
    with pytest.raises(ValueError, match="whence=7"):
        view.seek(0, 7)


def test_a_closed_view_refuses_everything_and_says_so_once() -> None:
    closed: list[str] = []
    view = RangeView(Source(b"abc"), 0, 3, on_close=lambda: closed.append("closed"))
    with view:
        assert view.read(1) == b"a"
    view.close()

    assert closed == ["closed"]
    for act in (lambda: view.read(1), lambda: view.seek(0), view.tell, view.readall):
        with pytest.raises(ValueError, match="closed"):
            act()


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    opened = holdfast.open(tmp_path / "s")
    opened.save("a", {"blob": DATA, "weights": torch.arange(400_000, dtype=torch.float32), "text": "x\n" * 5000})
    return opened


def count_read(store: holdfast.Store) -> int:
    stages = store.statistics().stages
    return stages["read"].size_bytes if "read" in stages else 0


def test_an_entry_is_opened_as_a_file(store: holdfast.Store) -> None:
    with store.open_file("a", "blob") as stream:
        assert isinstance(stream, io.BufferedReader)
        assert (stream.read(), stream.read(), stream.tell()) == (DATA, b"", len(DATA))
        stream.seek(CHUNK_BYTES - 5)
        assert stream.read(10) == DATA[CHUNK_BYTES - 5 : CHUNK_BYTES + 5]
        assert stream.seek(-4, os.SEEK_END) == len(DATA) - 4
        assert stream.peek(4)[:4] == stream.read() == DATA[-4:]
        with pytest.raises(io.UnsupportedOperation):
            stream.write(b"x")
    assert stream.closed
    with store.open_file("a", "weights") as stream:
        assert torch.equal(torch.frombuffer(bytearray(stream.read()), dtype=torch.float32), torch.arange(400_000))


def test_only_the_chunks_that_are_touched_are_read(store: holdfast.Store) -> None:
    again = holdfast.open(store.url)
    with again.open_file("a", "blob") as stream:
        assert count_read(again) == 0
        stream.seek(2 * CHUNK_BYTES + 7)
        assert stream.read(100) == DATA[2 * CHUNK_BYTES + 7 :][:100]
        assert count_read(again) == CHUNK_BYTES
        for _ in range(2000):
            stream.read(50)
        assert count_read(again) == CHUNK_BYTES
        stream.seek(CHUNK_BYTES)
        stream.read(CHUNK_BYTES)
        assert count_read(again) <= 3 * CHUNK_BYTES


def test_reading_byte_by_byte_reads_each_chunk_once(store: holdfast.Store) -> None:
    again = holdfast.open(store.url)
    with again.open_file("a", "text") as stream:
        assert list(stream) == [b"x\n"] * 5000

    assert count_read(again) == 10_000


def test_a_damaged_chunk_is_an_error_only_when_it_is_read(store: holdfast.Store) -> None:
    for pack in (Path(store.url) / "packs").rglob("*"):
        data = pack.read_bytes() if pack.is_file() else b""
        at = data.find(DATA[CHUNK_BYTES : CHUNK_BYTES + 64])
        if at >= 0:
            pack.write_bytes(data[: at + 9] + bytes([data[at + 9] ^ 1]) + data[at + 10 :])
    with holdfast.open(store.url).open_file("a", "blob") as stream:
        assert stream.read(1000) == DATA[:1000]
        stream.seek(CHUNK_BYTES + 500_000)
        with pytest.raises(DigestMismatch, match="'a', entry 'blob'"):
            stream.read(1)
        stream.seek(2 * CHUNK_BYTES)
        assert stream.read(1000) == DATA[2 * CHUNK_BYTES :][:1000]


def test_a_part_of_an_entry_can_be_opened_as_a_stream(store: holdfast.Store) -> None:
    snapshot = store.snapshot("a")
    with snapshot.open_file("blob", start=10, size_bytes=CHUNK_BYTES) as stream:
        assert stream.seek(0, os.SEEK_END) == CHUNK_BYTES
        stream.seek(0)
        assert stream.read() == DATA[10 : 10 + CHUNK_BYTES]
    for start, size in ((-1, 5), (0, len(DATA) + 1), (len(DATA) + 1, None)):
        with pytest.raises(ValueError, match="bytes"):
            snapshot.open_file("blob", start=start, size_bytes=size)
    with pytest.raises(NotFound, match="no entry 'blub' in 'a'"):
        store.open_file("a", "blub")


LENGTHS = [0, 1, MAX_INLINE, MAX_INLINE + 1]


@pytest.mark.parametrize(
    "value",
    [make(length) for length in LENGTHS for make in (lambda n: "x" * n, lambda n: "\udcff" * n, bytes, bytearray)],
    ids=lambda value: f"{type(value).__name__}-{len(value)}",
)
def test_a_text_opens_as_the_same_bytes_however_long_it_is(value: str | bytes | bytearray) -> None:
    store = holdfast.open("memory://")
    store.save("a", {"deep": [value]})
    data = value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)

    with store.open_file("a", "deep.0") as stream:
        assert isinstance(stream, io.BufferedReader)
        assert (stream.read(), stream.seek(0, os.SEEK_END)) == (data, len(data))
    with store.snapshot("a").open_file("deep.0", start=len(data) // 2) as stream:
        assert stream.read() == data[len(data) // 2 :]
    with pytest.raises(ValueError, match=f"'deep.0' has {len(data)} bytes"):
        store.snapshot("a").open_file("deep.0", start=len(data) + 1)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("step", r"it is an int, which has no bytes; store.load\('a'\) loads it"),
        ("lrs", r"it has 2 leaves below it; open one of them, such as 'lrs.0'"),
        ("none", r"it is None, which has no bytes"),
        (
            "sparse",
            r"it is a sparse_coo tensor, which is stored as 'sparse.indices', 'sparse.values'; open one of them",
        ),
        ("stepp", r"no entry 'stepp' in 'a'"),
    ],
)
def test_what_has_no_bytes_of_its_own_says_what_it_is(path: str, what: str) -> None:
    store = holdfast.open("memory://")
    sparse = torch.tensor([[0.0, 1.0]]).to_sparse()
    store.save("a", {"step": 3, "lrs": [0.1, 0.2], "none": None, "sparse": sparse})

    with pytest.raises(NotFound, match=what):
        store.open_file("a", path)


def test_others_can_use_it_as_the_file_that_was_saved(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5000)}, tmp_path / "model.pt")
    store = holdfast.open(tmp_path / "s")
    store.save("a", {"model.pt": (tmp_path / "model.pt").read_bytes(), "config": b'{"lr": 1}' + b" " * 100_000})

    with store.open_file("a", "model.pt") as stream:
        assert torch.load(stream)["w"].tolist() == list(range(5000))
        assert zipfile.is_zipfile(stream)
    with store.open_file("a", "config") as stream:
        assert json.load(io.TextIOWrapper(stream)) == {"lr": 1}


@given(st.integers(0, len(DATA)), st.integers(0, 2 * CHUNK_BYTES))
def test_any_part_reads_right(start: int, size: int) -> None:
    store = _kept_store()
    size = min(size, len(DATA) - start)
    with store.snapshot("a").open_file("blob", start=start, size_bytes=size) as stream:
        assert stream.read() == DATA[start : start + size]


_STORES: list[holdfast.Store] = []


def _kept_store() -> holdfast.Store:
    if not _STORES:
        _STORES.append(holdfast.open("memory://"))
        _STORES[0].save("a", {"blob": DATA})
    return _STORES[0]


def test_an_open_reader_may_serve_many_streams(store: holdfast.Store) -> None:
    with open_snapshot(store.repository, store.snapshot("a").record) as reader:
        first, second = open_entry(reader, "blob"), open_entry(reader, "blob", start=5)
        assert (first.read(3), second.read(3), first.read(2)) == (DATA[:3], DATA[5:8], DATA[3:5])


def test_a_stream_is_not_pickled(store: holdfast.Store) -> None:
    with store.open_file("a", "blob") as stream, pytest.raises(TypeError):
        pickle.dumps(stream)
