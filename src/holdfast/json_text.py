"""JSON as Holdfast stores it: equal values have equal text, and the parser limits depth and numbers."""

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

from holdfast.errors import Corrupt

MAX_DEPTH: Final = 250

Json = Any
"""A value that JSON can represent. (Any: a recursive alias would have to be narrowed at every use.)"""

_make_encoder: Final = partial(
    json.JSONEncoder, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
_ENCODER: Final = _make_encoder()


class DeferredList:
    """A placeholder for a list that is built only when the encoder reaches it.

    A value with very many short lists then takes 8 bytes for each list instead of more than a hundred.
    """

    def __iter__(self) -> Iterator[Json]:
        """Yield nothing, so that a measurement of nesting depth counts this as a list without nested lists."""
        return iter(())


DEFERRED: Final = DeferredList()
"""The only instance; `canonical_json` gets the lists that replace it from `iter_deferred`."""
_ENCODED_TEXTS: Final = 4096
_CONTAINERS: Final = (list, dict, tuple, DeferredList)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_OBJECT_START: Final = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*")
_NAME_END: Final = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_FIELD_END: Final = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")

IterLists = Callable[[], Iterator[list[Json]]]


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """Canonical JSON that is already encoded and verified, for a value that is part of several others."""

    data: bytes


def canonical_json(value: Json, *, depth: int = 0, iter_deferred: IterLists | None = None) -> bytes:
    """Encode a JSON value so that equal values give equal bytes; raises TypeError or ValueError for any other value.

    `depth` is the nesting level of the value inside another one; it counts towards MAX_DEPTH.
    `iter_deferred` yields the lists that replace each DEFERRED, in order, and may be called more than once.
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
    assert next(lists, None) is None, "there is one list for each DEFERRED"
    return text


def iter_object(fields: Mapping[str, Json]) -> Iterator[bytes]:
    """Yield the canonical JSON of an object in parts; values of type EncodedJson are used as they are."""
    for number, name in enumerate(sorted(fields)):
        yield (b"," if number else b"{") + canonical_json(name) + b":"
        yield canonical_json(fields[name], depth=1)
    yield b"}" if fields else b"{}"


def encode_texts(texts: Sequence[str]) -> EncodedJson:
    """Encode a list of strings in batches, because the encoder allocates an object for each string of a batch."""
    data = bytearray(b"[")
    for start in range(0, len(texts), _ENCODED_TEXTS):
        some = _ENCODER.encode(texts[start : start + _ENCODED_TEXTS])
        data += (b"," if start else b"") + some[1:-1].encode()
    data += b"]"
    return EncodedJson(bytes(data))


def _with_room(act: Callable[[Any], Any], value: Any) -> Any:
    """Call `act`, which recurses once per nesting level; on a RecursionError, call it again on a thread's fresh stack.

    Raises ValueError if that stack overflows too: then the value is nested too deep.
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
    """Refuse keys that are not strings, which JSON would change, and nesting that the parser might refuse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1 - depth):
        # Level by level and by type: there may be millions of values of few types, and few are containers.
        kinds = {kind for kind in set(map(type, level)) if issubclass(kind, _CONTAINERS)}
        if not kinds:
            return
        containers = [each for each in level if type(each) in kinds]
        if not any(issubclass(kind, dict) for kind in kinds):
            level = list(chain.from_iterable(containers))
            continue
        for found in containers:
            if isinstance(found, dict) and not all(isinstance(key, str) for key in found):
                odd = next(key for key in found if not isinstance(key, str))
                raise TypeError(f"the key {odd!r} is not a string")
        level = [each for found in containers for each in (found.values() if isinstance(found, dict) else found)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def parse_json(data: bytes | memoryview, *, where: str) -> Json:
    """Parse JSON from a store, or raise Corrupt."""
    try:
        encoded = bytes(data)
        text = encoded.decode()
        value = _with_room(_DECODER.decode, text)
        if "\\u" in text:
            canonical_json(value)  # raises for a lone surrogate, which JSON can escape and UTF-8 cannot encode
        if _may_be_deep(encoded):
            _verify_keys(value)
        return value
    except ValueError as error:
        raise Corrupt(f"{where} is not valid JSON: {error}", key=where) from error


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
            at = _expect(_NAME_END, text, at, "a field has no value").end()
            value, at = _with_room(partial(_DECODER.raw_decode, idx=at), text)
            if has_escapes:
                canonical_json([name, value])
            if may_be_deep:
                _verify_keys(value, 1)
            yield name, value
            del value  # before the next one is parsed
            found = _expect(_FIELD_END, text, at, "the object does not end")
            mark, at = found[1], found.end()
        if text[at:].strip(" \t\n\r"):
            raise ValueError("there is text after the object")
    except ValueError as error:
        raise Corrupt(f"{where} is not valid JSON: {error}", key=where) from error


def _expect(pattern: re.Pattern[str], text: str, at: int, why_not: str) -> re.Match[str]:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(why_not)
    return found


def _may_be_deep(data: bytes) -> bool:
    """Return whether JSON may be nested too deep. Brackets in strings count too; flat JSON takes one pass."""
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


def is_number(value: object) -> bool:
    """Return whether a value is an integer or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe_number(value: Json) -> Json:
    """Return a number for JSON, which has no infinity and no NaN: these as texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
