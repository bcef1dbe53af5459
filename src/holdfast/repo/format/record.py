"""Records: the small JSON files (config, snapshot, tag, lease, mark), each proving its own length and bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Thread
from typing import Any, Final

from holdfast.digest import Digest, fingerprint, hash_bytes, parse_digest
from holdfast.errors import Corrupt, NewerFormat

MAX_RECORD_BYTES: Final = 4 << 20
"""Whatever would be longer is split, or refused before it is written: metadata may have 1 MiB."""
RECORD_VERSION: Final = 1
MAX_DEPTH: Final = 250

Json = Any
"""A value that JSON can hold. (Any: a recursive alias would have to be narrowed at every use.)"""

_HEADER_BYTES: Final = 112
_HEADER: Final = re.compile(rb"holdfast-record ([0-9a-f]{4}) ([0-9a-f]{8}) ([0-9a-f]{64}) ")

_make_encoder: Final = partial(
    json.JSONEncoder, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
_ENCODER: Final = _make_encoder()


class DeferredList:
    """Stands in a value for a list of plain values that is made when the encoder gets there.

    A value of very many short lists then takes 8 bytes for each, where the lists would take more than a hundred.
    """

    def __iter__(self) -> Iterator[Json]:
        """Yield nothing: to whoever measures the depth of a value, this is a list that holds no other."""
        return iter(())


DEFERRED: Final = DeferredList()
"""The only one: `canonical_json` is told what each stands for."""
_ENCODED_TEXTS: Final = 4096
_HOLDERS: Final = (list, dict, tuple, DeferredList)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_OBJECT_START: Final = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*")
_NAME_END: Final = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_FIELD_END: Final = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")

IterLists = Callable[[], Iterator[list[Json]]]


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """The canonical JSON of a value that many need: encoded and verified once."""

    data: bytes


def canonical_json(value: Json, *, depth: int = 0, iter_deferred: IterLists | None = None) -> bytes:
    """Encode a JSON value in the one way that equal values share; raises TypeError or ValueError if it is none.

    With `depth`, there is room for it that deep in another value. `iter_deferred` yields what each DEFERRED in it
    stands for, in order, and may be called more than once.
    """
    if type(value) is EncodedJson:
        return value.data
    text: str = _with_room(partial(_encode_deferred, iter_deferred) if iter_deferred else _ENCODER.encode, value)
    _verify_keys(value, depth)
    return text.encode()


def _encode_deferred(iter_deferred: IterLists, value: Json) -> str:
    lists = iter_deferred()

    def make(found: object) -> list[Json]:
        if found is not DEFERRED:
            raise TypeError(f"Object of type {type(found).__name__} is not JSON serializable")
        return next(lists)

    text = _make_encoder(default=make).encode(value)
    assert next(lists, None) is None, "each list has its place"
    return text


def iter_object(fields: Mapping[str, Json]) -> Iterator[bytes]:
    """Yield the canonical JSON of an object in parts; some of its fields may be encoded already, with room for it."""
    for number, name in enumerate(sorted(fields)):
        yield (b"," if number else b"{") + canonical_json(name) + b":"
        yield canonical_json(fields[name], depth=1)
    yield b"}" if fields else b"{}"


def encode_texts(texts: Sequence[str]) -> EncodedJson:
    """Encode a list of strings, some at a time: the encoder makes an object for each that it has at once."""
    data = bytearray(b"[")
    for start in range(0, len(texts), _ENCODED_TEXTS):
        some = _ENCODER.encode(texts[start : start + _ENCODED_TEXTS])
        data += (b"," if start else b"") + some[1:-1].encode()
    data += b"]"
    return EncodedJson(bytes(data))


def _with_room(act: Callable[[Any], Any], value: Any) -> Any:
    """Call `act`, which recurses as deep as JSON nests; if the caller's stack has no room for that, in a new thread.

    Raises ValueError if a stack of its own is not enough: then the nesting is to blame.
    """
    try:
        return act(value)
    except RecursionError:
        done: list[Any] = []
        failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(act(value))
        except RecursionError:
            failed.append(ValueError(f"it is nested more than {MAX_DEPTH} deep"))
        except Exception as error:  # noqa: BLE001 - raised below, where the caller is
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _verify_keys(value: Json, depth: int = 0) -> None:
    """Refuse what would not come back: keys that are no strings sort otherwise then, and deep nesting may not parse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1 - depth):
        # Level by level and by type: there may be millions of values, of few types, and few of them hold others.
        kinds = {kind for kind in set(map(type, level)) if issubclass(kind, _HOLDERS)}
        if not kinds:
            return
        holders = [each for each in level if type(each) in kinds]
        if not any(issubclass(kind, dict) for kind in kinds):
            level = list(chain.from_iterable(holders))
            continue
        for found in holders:
            if isinstance(found, dict) and not all(isinstance(key, str) for key in found):
                odd = next(key for key in found if not isinstance(key, str))
                raise TypeError(f"the key {odd!r} is not a string")
        level = [each for found in holders for each in (found.values() if isinstance(found, dict) else found)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def encode_record(fields: Mapping[str, Json]) -> bytes:
    """Encode a record: a header of fixed size that proves itself, then canonical JSON."""
    body = canonical_json(fields) + b"\n"
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a record holds at most {MAX_RECORD_BYTES} bytes, this one has {len(body)}")
    start = f"holdfast-record {RECORD_VERSION:04x} {len(body):08x} {hash_bytes(body).hex()} ".encode()
    return start + fingerprint(start)[:8].hex().encode() + b"\n" + body


def decode_record(data: bytes, *, key: str) -> Fields | None:
    """Decode a record; None if it is torn, that is cut short; Corrupt if it is damaged in any other way.

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
        raise Corrupt(f"record {key} does not hold an object", key=key)
    return Fields(key, fields)


def parse_json(data: bytes | memoryview, *, where: str) -> Json:
    """Parse JSON from a store, or raise Corrupt."""
    try:
        encoded = bytes(data)
        text = encoded.decode()
        value = _with_room(_DECODER.decode, text)
        if "\\u" in text:
            canonical_json(value)  # half a surrogate pair is no text, though JSON can spell it
        if _may_be_deep(encoded):
            _verify_keys(value)
        return value
    except ValueError as error:
        raise Corrupt(f"{where} does not hold valid JSON: {error}", key=where) from error


def iter_fields(data: bytes, *, where: str) -> Iterator[tuple[str, Json]]:
    """Parse a JSON object from a store and yield its fields one after the other, or raise Corrupt.

    Only one value is in memory at a time, unless the caller keeps them.
    """
    try:
        text = data.decode()
        has_escapes, may_be_deep = "\\u" in text, _may_be_deep(data)
        del data  # the text takes as much memory
        at = _expect(_OBJECT_START, text, 0, "it is not an object").end()
        mark = "}" if text.startswith("}", at) else ","
        at += mark == "}"
        while mark == ",":
            name, at = _DECODER.raw_decode(text, at)
            if type(name) is not str:
                raise ValueError("the name of a field is not a string")
            at = _expect(_NAME_END, text, at, "a field without a value").end()
            value, at = _with_room(partial(_DECODER.raw_decode, idx=at), text)
            if has_escapes:
                canonical_json([name, value])
            if may_be_deep:
                _verify_keys(value, 1)
            yield name, value
            del value  # before the next one is parsed
            found = _expect(_FIELD_END, text, at, "an object without an end")
            mark, at = found[1], found.end()
        if text[at:].strip(" \t\n\r"):
            raise ValueError("something stands after the object")
    except ValueError as error:
        raise Corrupt(f"{where} does not hold valid JSON: {error}", key=where) from error


def _expect(pattern: re.Pattern[str], text: str, at: int, why_not: str) -> re.Match[str]:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(why_not)
    return found


def _may_be_deep(data: bytes) -> bool:
    """Return whether JSON may be nested too deep; brackets in strings count as well, what is flat is passed fast."""
    brackets = data.translate(None, delete=_NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    return bool(brackets)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_finite)


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
        """Check that this record is the one its key says; a file in another's place is damage too."""
        for field, value in wanted.items():
            if self.values.get(field) != value:
                raise Corrupt(
                    f"record {self.key} is not its own: its {field} is {str(self.values.get(field))[:80]!r},"
                    f" its key says {str(value)[:80]!r}",
                    key=self.key,
                )

    def _take(self, field: str, kind: type) -> Json:
        value = self.values.get(field)
        if not isinstance(value, kind):
            raise Corrupt(f"record {self.key}: field {field!r} is missing or of the wrong type", key=self.key)
        return value
