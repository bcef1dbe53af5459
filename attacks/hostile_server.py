"""Answers that a hostile or broken S3 server could give; see README.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Final

from tests.kit.s3_server import Answer, Request

Lie = Callable[[Request, Answer], Answer]
"""Returns what the server answers instead of the truth."""

_BOMB: Final = b"".join(
    b'<!ENTITY a%d "%s">' % (level, (b"&a%d;" % (level - 1) if level else b"aaaaaaaaaa") * 10) for level in range(10)
)


def _entry(key: str, *, size: str = "1", modified: str = "2026-01-01T00:00:00.000Z") -> bytes:
    return (
        f"<Contents><Key>{key}</Key><LastModified>{modified}</LastModified><ETag>e</ETag><Size>{size}</Size></Contents>"
    ).encode()


def _list_also(*rows: bytes) -> Lie:
    """Add rows to each listing."""
    return _change("LIST", lambda status, headers, body: (status, headers, body.replace(_END, b"".join(rows) + _END)))


def _change(kind: str, change: Callable[[int, dict[str, str], bytes], Answer]) -> Lie:
    return lambda request, answer: change(*answer) if request.kind == kind else answer


def _list_for_ever() -> Lie:
    """List the same page again and again."""
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    last = b"<IsTruncated>false</IsTruncated>"
    return _change("LIST", lambda status, headers, body: (status, headers, body.replace(last, more)))


def _list_itself(request: Request, answer: Answer) -> Answer:
    """List the directory as a directory in itself."""
    status, headers, body = answer
    row = f"<CommonPrefixes><Prefix>{request.key}</Prefix></CommonPrefixes>".encode()
    return (status, headers, body.replace(_END, row + _END)) if request.kind == "LIST" else answer


def _set(name: str, value: str) -> Callable[[int, dict[str, str], bytes], Answer]:
    return lambda status, headers, body: (status, {**headers, name: value}, body)


def _range(value: str) -> Lie:
    """State another range than that of the bytes."""
    return _change("GET", _set("Content-Range", value))


def _new_etags() -> Lie:
    numbers = count()
    return _change("GET", lambda status, headers, body: (status, {**headers, "ETag": f'"{next(numbers)}"'}, body))


_END: Final = b"</ListBucketResult>"
LIES: Final[dict[str, Lie]] = {
    "a key outside of the prefix": _list_also(_entry("other/secret"), _entry("storeroom/x"), _entry("/etc/passwd")),
    "keys with two dots": _list_also(_entry("store/packs/../../x"), _entry("store/../y"), _entry("../z")),
    "keys with control characters": _list_also(_entry("store/packs/a\x1b[2Jb"), _entry("store/packs/a&#10;b")),
    "an empty key": _list_also(_entry("")),
    "a key twice": _list_also(_entry("store/packs/x"), _entry("store/packs/x")),
    "a directory in itself": _list_itself,
    "a negative size": _list_also(_entry("store/packs/x", size="-5")),
    "a size of 2^70": _list_also(_entry("store/packs/x", size=str(1 << 70))),
    "a size of 2^62": _list_also(_entry("store/packs/x", size=str(1 << 62))),
    "a size in words": _list_also(_entry("store/packs/x", size="many")),
    "a date in words": _list_also(_entry("store/packs/x", modified="yesterday")),
    "sizes that are wrong": _change(
        "LIST", lambda status, headers, body: (status, headers, re.sub(rb"<Size>\d+<", b"<Size>7<", body))
    ),
    "a listing that never ends": _list_for_ever(),
    "a listing in HTML": _change("LIST", lambda status, headers, body: (200, headers, b"<html>sign in</html>")),
    "a listing in plain text": _change("LIST", lambda status, headers, body: (200, headers, b"sign in")),
    "a listing that is a bomb": _change(
        "LIST",
        lambda status, headers, body: (
            200,
            headers,
            b"<!DOCTYPE l [" + _BOMB + b"]><ListBucketResult><Name>&a9;</Name></ListBucketResult>",
        ),
    ),
    "a body that is too short": _change(
        "GET", lambda status, headers, body: (status, {**headers, "Content-Length": str(len(body) + 100)}, body)
    ),
    "a body that is too long": _change("GET", lambda status, headers, body: (status, headers, body + bytes(1000))),
    "a length of 2^60": _change("GET", _set("Content-Length", str(1 << 60))),
    "a body of zeros": _change("GET", lambda status, headers, body: (status, headers, bytes(len(body)))),
    "the whole object for a range": _change("GET", lambda status, headers, body: (200, _without_range(headers), body)),
    "another range": _range("bytes 5-9/10"),
    "a range of 2^60 bytes": _range(f"bytes 0-{1 << 60}/{(1 << 60) + 1}"),
    "a range without numbers": _range("bytes some-more/all"),
    "no headers": _change("GET", lambda status, headers, body: (status, {}, body)),
    "a redirect to nowhere": _change(
        "GET", lambda status, headers, body: (307, {"Location": "http://127.0.0.1:1/"}, b"")
    ),
    "other ETags each time": _new_etags(),
    "an object of 2^60 bytes": _change("HEAD", _set("Content-Length", str(1 << 60))),
    "an error without a body": _change("GET", lambda status, headers, body: (418, {}, b"")),
    "an error of 4 MiB": _change("GET", lambda status, headers, body: (400, {}, b"\x1b[2J" * (1 << 20))),
}


def _without_range(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "Content-Range"}
