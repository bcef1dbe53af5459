"""Records: small JSON files (config, snapshot, tag, lease, mark), each with its own length and digest in its header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.digest import Digest, fingerprint, hash_bytes, parse_digest
from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json, canonical_json, parse_json

MAX_RECORD_BYTES: Final = 4 << 20
"""Longer content is split, or refused before it is written: metadata may have 1 MiB."""
RECORD_VERSION: Final = 1
_HEADER_BYTES: Final = 112
_HEADER: Final = re.compile(rb"holdfast-record ([0-9a-f]{4}) ([0-9a-f]{8}) ([0-9a-f]{64}) ")


def encode_record(fields: Mapping[str, Json]) -> bytes:
    """Encode a record: a header of fixed size with a checksum of its own, then canonical JSON."""
    body = canonical_json(fields) + b"\n"
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a record has at most {MAX_RECORD_BYTES} bytes, this one has {len(body)}")
    start = f"holdfast-record {RECORD_VERSION:04x} {len(body):08x} {hash_bytes(body).hex()} ".encode()
    return start + fingerprint(start)[:8].hex().encode() + b"\n" + body


def decode_record(data: bytes, *, key: str) -> Fields | None:
    """Decode a record; returns None if it is torn, that is cut short; raises Corrupt if it is damaged otherwise.

    The two differ in what they mean: a torn record was never committed, a damaged one was. The header
    proves itself, so a damaged length cannot pass for a torn record.
    """
    if len(data) < _HEADER_BYTES:
        return None
    found = _HEADER.match(data)
    start = data[: found.end()] if found else b""
    if not found or data[len(start) : _HEADER_BYTES] != fingerprint(start)[:8].hex().encode() + b"\n":
        raise Corrupt(f"record {key} has a damaged header", key=key)
    version, length, digest = int(found[1], 16), int(found[2], 16), bytes.fromhex(found[3].decode())
    if version > RECORD_VERSION:
        raise NewerFormat(f"record {key} has version {version}, this Holdfast reads up to {RECORD_VERSION}: upgrade")
    body = data[_HEADER_BYTES:]
    if len(body) < length:
        return None
    if len(body) > length or hash_bytes(body) != digest:
        raise Corrupt(f"record {key} is damaged: its bytes do not have the digest that it states", key=key)
    fields = parse_json(body, where=key)
    if not isinstance(fields, dict):
        raise Corrupt(f"record {key} is not a JSON object", key=key)
    return Fields(key, fields)


@dataclass(frozen=True, slots=True)
class Fields:
    """The decoded fields of one record; each accessor checks the type and names the record if it is wrong."""

    key: str
    values: dict[str, Json]

    def text(self, field: str) -> str:
        """Return a string field."""
        return str(self._take(field, str))

    def integer(self, field: str) -> int:
        """Return a whole number that is not negative."""
        value = self._take(field, int)
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise Corrupt(f"record {self.key}: field {field!r} is out of range", key=self.key)
        return int(value)

    def number(self, field: str) -> float:
        """Return a finite number."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise Corrupt(f"record {self.key}: field {field!r} is not a number", key=self.key)
        return float(value)

    def mapping(self, field: str) -> dict[str, Json]:
        """Return an object field."""
        return dict(self._take(field, dict))

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._take(field, list)
        if not all(isinstance(value, str) for value in values):
            raise Corrupt(f"record {self.key}: field {field!r} is not a list of strings", key=self.key)
        return tuple(values)

    def digest(self, field: str) -> Digest:
        """Return a digest field."""
        return parse_digest(self.values.get(field), where=f"record {self.key}, field {field!r}")

    def expect(self, **wanted: Json) -> None:
        """Raise Corrupt unless these fields have these values: a record under the wrong key is damaged."""
        for field, value in wanted.items():
            if self.values.get(field) != value:
                raise Corrupt(
                    f"record {self.key} belongs to another key: its {field} is {str(self.values.get(field))[:80]!r},"
                    f" not {str(value)[:80]!r}",
                    key=self.key,
                )

    def _take(self, field: str, kind: type) -> Json:
        value = self.values.get(field)
        if not isinstance(value, kind):
            raise Corrupt(f"record {self.key}: field {field!r} is missing or of the wrong type", key=self.key)
        return value
