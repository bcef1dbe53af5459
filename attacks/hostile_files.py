"""Files that lie about the tensors in them, and a program that puts each into a store, takes it out and measures."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.cli.main import main

_MIB: Final = 1 << 20
_DATA: Final = bytes(range(256)) * 1200
"""Enough for a file to be looked into."""


def _header(text: bytes, *, length: int | None = None) -> bytes:
    stated = len(text) if length is None else length
    return stated.to_bytes(8, "little") + text + _DATA


def _tensors(**places: tuple[list[int], int, int]) -> bytes:
    fields = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        for name, (shape, start, stop) in places.items()
    }
    return json.dumps(fields).encode()


def _many_tensors() -> bytes:
    fields = (b'"%d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}' % (n, 4 * n, 4 * n + 4) for n in range(60_000))
    return b"{" + b",".join(fields) + b"}"


def _zip(members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def _archive(data_pickle: bytes, storage: bytes = _DATA) -> bytes:
    return _zip({"a/data.pkl": data_pickle, "a/data/0": storage})


class _Run:
    """A value that, when it is unpickled, creates a file in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("open('executed', 'w').close()",)


def _tensor(num_items: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return the opcodes that rebuild a tensor, as torch.save writes them, and drop it."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    numbers = b"".join(pickle.dumps(each, protocol=2)[2:-1] for each in (offset, shape, stride))
    count = pickle.dumps(num_items, protocol=2)[2:-1]
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + count + b"tQ" + numbers + b"tR0"


def _overlapping_tensors() -> bytes:
    """Return tensors that begin at each item of one storage: cut at all edges, it would have a chunk for each item."""
    return b"".join(_tensor(len(_DATA) // 4, first, (5000,), (1,)) for first in range(5000))


def _nested_tuples() -> bytes:
    """Return a tuple of 2^60 items that are all the same two."""
    return b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)) + b"0" * 61


def _wrong_directory(field: int, value: int) -> bytes:
    """Return an archive whose end of the directory states another number."""
    data = bytearray(_archive(b"\x80\x02}."))
    struct.pack_into("<L", data, len(data) - 22 + field, value)
    return bytes(data)


FILES: Final[dict[str, Callable[[], bytes]]] = {
    "header: truncated": lambda: (_header(_tensors(a=([76_800], 0, 307_200))))[:-1],
    "header: longer than all memory": lambda: _header(b"{}", length=(1 << 63) - 1),
    "header: longer than the file": lambda: _header(b"{}", length=4 * _MIB),
    "header: 8 MiB": lambda: _header(b"{" + b" " * 8 * _MIB + b"}"),
    "header: 60,000 tensors": lambda: _header(_many_tensors()),
    "header: nested lists": lambda: _header(b'{"a":[' + b",".join([b"[" * 200 + b"]" * 200] * 9000) + b"]}"),
    "header: 100,000 deep": lambda: _header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "header: nested lists that name tensors": lambda: _header(
        b'{"a":[' + b",".join([(b'["data_offsets",' + b"[],[],") * 200 + b"0" + b"]" * 200] * 800) + b"]}"
    ),
    "header: overlapping": lambda: _header(_tensors(a=([2000], 0, 8000), b=([2000], 4000, 12_000))),
    "header: outside of the file": lambda: _header(_tensors(a=([1 << 40], 0, 1 << 42))),
    "header: a shape beyond all bounds": lambda: _header(_tensors(a=([1 << 62] * 60, 0, 8000))),
    "header: 100,000 dims": lambda: _header(_tensors(a=([1] * 100_000, 0, 4))),
    "header: a number of 1,000,000 digits": lambda: _header(b'{"a":{"shape":[' + b"9" * 1_000_000 + b"]}}"),
    "header: half a surrogate": lambda: _header(b'{"\\ud800":{}}'),
    "header: not a number": lambda: _header(b'{"a":{"shape":[NaN],"data_offsets":[Infinity,-1e999]}}'),
    "zip: truncated": lambda: _archive(b"\x80\x02}.")[:-1],
    "zip: a directory of 4 GiB": lambda: _wrong_directory(12, 0xFFFFFFFE),
    "zip: a directory outside of the file": lambda: _wrong_directory(16, 0x7FFFFFFF),
    "zip: 34,000 members": lambda: _zip({f"a/data/{n}": b"" for n in range(34_000)} | {"a/data.pkl": _DATA}),
    "zip: a pickle that decompresses to 64 MiB": lambda: _zip(
        {"a/data.pkl": bytes(64 * _MIB), "a/x": _DATA}, compression=zipfile.ZIP_DEFLATED
    ),
    "zip: a name that is a path": lambda: _zip({"../../a/data.pkl": b"\x80\x02}.", "../../a/data/0": _DATA}),
    "pickle: runs code": lambda: _archive(pickle.dumps(_Run(), protocol=2)),
    "pickle: 4,000,000 opcodes": lambda: _archive(b"\x80\x02" + b")0" * 2_000_000 + b"."),
    "pickle: a number of 2 GiB": lambda: _archive(b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "pickle: a text of 16 EiB": lambda: _archive(b"\x80\x04\x8d" + b"\xff" * 8 + b"."),
    "pickle: 2^60 items": lambda: _archive(b"\x80\x02" + _nested_tuples() + b"N."),
    "pickle: an item of 300 KB": lambda: _archive(b"\x80\x02" + _tensor(1, 0, (1,), (1,)) + b"N."),
    "pickle: an item of 4 MiB": lambda: _archive(b"\x80\x02" + _tensor(1, 0, (), ()) + b"N.", bytes(4 * _MIB)),
    "pickle: beyond the storage": lambda: _archive(b"\x80\x02" + _tensor(76_800, 1 << 80, (9,), (1 << 90,)) + b"N."),
    "pickle: overlapping tensors": lambda: _archive(b"\x80\x02" + _overlapping_tensors() + b"N."),
}


def run(number: int, name: str) -> dict[str, object]:
    """Put one file into the store in the working directory, take it out, and measure."""
    data = FILES[name]()
    Path(f"file-{number}").write_bytes(data)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    codes = [main(["-s", "store", *verb]) for verb in (["put", name, f"file-{number}"], ["get", name, "out"])]
    cpu_s = time.process_time() - started
    extra_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    is_same = Path(f"out/file-{number}").read_bytes() == data
    return {"name": name, "codes": codes, "cpu_s": cpu_s, "extra_kib": extra_kib, "is_same": is_same}


def run_all(report: Path) -> None:
    """Run all attacks on one store, check it, and write a report."""
    main(["-s", "store", "init"])
    runs = [run(number, name) for number, name in enumerate(FILES)]
    report.write_text(json.dumps({"runs": runs, "check": main(["-s", "store", "check", "--read"])}))


if __name__ == "__main__":
    # The verbs print too: the report goes to a file.
    run_all(Path(sys.argv[1]))
