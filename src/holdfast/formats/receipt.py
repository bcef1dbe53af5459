"""Receipts: per tensor, what an import or export read and what it wrote, so that anyone can check it later.

A receipt is one JSON object. Its digest covers every other field, so an edited or truncated receipt is refused.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from holdfast.digest import Digest, hash_kind, parse_digest, short_hex
from holdfast.errors import BadFile, Corrupt
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.objects.local.upload import new_temp_name
from holdfast.objects.url import verify_path

ReceiptKind = Literal["import", "export"]
ReceiptSide = Literal["source", "result"]
"""What was read, or what was written: for an import, the source is the files; for an export, it is the snapshot."""

MAX_RECEIPT_BYTES: Final = 1 << 29
_VERSION: Final = 1
_MAX_TEXT: Final = 1 << 16
_MAX_DIMS: Final = 64
_MAX_NUMBER: Final = 1 << 60
_HEAD: Final = ("receipt", "kind", "format", "snapshot", "root", "time", "holdfast", "place")
_FIELDS: Final = frozenset({*_HEAD, "tensors", "files", "left_out", "digest"})
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor as bytes: its items in C order, little endian."""

    dtype: str
    """torch's own name: "float32"."""
    shape: tuple[int, ...]
    digest: Digest
    """Taken over its cells: docs/reference/receipts.md."""

    def __str__(self) -> str:
        """Describe it in a line."""
        return f"{self.dtype} {self.shape}, digest {short_hex(self.digest)}"


@dataclass(frozen=True, slots=True)
class CastErrors:
    """How much a cast changed the values of one tensor, computed in float64."""

    max_abs: float
    max_rel: float
    """Largest absolute error divided by the value, over the values that are not zero."""
    num_overflowed: int = 0
    """Finite values that became infinite or NaN; they do not count in the other two numbers."""


@dataclass(frozen=True, slots=True)
class ReceiptTensor:
    """One tensor of a conversion."""

    name: str
    """Its name in the snapshot."""
    name_in_files: str
    file: str
    """The file that contains it, relative to the place; the first one, if it is spread over several."""
    source: TensorDigest
    result: TensorDigest
    cast: CastErrors | None = None
    """None if the values were not changed; then source and result are equal."""


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that was copied as it is, such as a configuration or a tokenizer."""

    path: str
    size_bytes: int
    digest: Digest

    def __str__(self) -> str:
        """Describe it in a line."""
        return f"{self.size_bytes} bytes, BLAKE3 {short_hex(self.digest)}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of the source that the result does not have."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one import or export read and wrote."""

    kind: ReceiptKind
    format: str
    snapshot: str
    """The name of the snapshot."""
    root: Digest
    """The digest of the snapshot."""
    time: str
    """When the conversion ended, as UTC: "2026-01-31T12:00:00Z"."""
    holdfast: str
    """The version that made it."""
    place: str
    """The path of the files, as the user gave it."""
    tensors: tuple[ReceiptTensor, ...] = ()
    files: tuple[CarriedFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiptFinding:
    """One difference between a receipt and what was found."""

    name: str
    """The tensor or the file."""
    expected: str
    """What the receipt says; empty if it does not have this tensor or file."""
    found: str
    """What is there; empty if nothing is."""

    def __str__(self) -> str:
        """Describe it in a line."""
        if not self.found:
            return f"{self.name}: missing; the receipt has {self.expected}"
        if not self.expected:
            return f"{self.name}: not in the receipt; found {self.found}"
        return f"{self.name}: the receipt has {self.expected}; found {self.found}"


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the receipt as canonical JSON, with its digest."""
    fields = _encode_fields(receipt)
    return canonical_json({**fields, "digest": _digest_fields(fields).hex()}) + b"\n"


def decode_receipt(data: bytes, *, where: str) -> Receipt:
    """Parse a receipt; raises BadFile if it is malformed, or was changed after it was written."""
    try:
        fields = parse_json(data, where=where)
        _verify(isinstance(fields, dict) and fields.keys() == _FIELDS, "it does not have the fields of a receipt")
        stated = parse_digest(fields.pop("digest"), where="its digest")
        receipt = _decode_fields(fields)
    except (Corrupt, ValueError) as error:
        raise BadFile(f"{where} is not a receipt of Holdfast: {error}", path=where) from error
    if _digest_fields(fields) != stated:
        raise BadFile(f"{where} was changed after it was written: its digest does not fit its content", path=where)
    return receipt


def write_receipt(path: str, receipt: Receipt) -> None:
    """Write a receipt to a file, which appears whole or not at all; replaces an older one."""
    temp = os.path.join(os.path.dirname(os.path.abspath(path)), new_temp_name())
    try:
        with open(temp, "xb") as file:
            file.write(encode_receipt(receipt))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        if os.path.lexists(temp):
            os.unlink(temp)
        raise


def read_receipt(path: str) -> Receipt:
    """Read a receipt from a file; raises BadFile if it is malformed, too large, or was changed."""
    verify_path(path)
    # Non-blocking: opening a pipe must not wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECEIPT_BYTES:
            raise BadFile(f"{path} is not a receipt of Holdfast: it is no file, or larger than any receipt", path=path)
        return decode_receipt(file.read(MAX_RECEIPT_BYTES), where=path)


def check_tensors(
    receipt: Receipt, measured: Iterable[tuple[str, TensorDigest]], *, side: ReceiptSide, by_file_names: bool
) -> Iterator[ReceiptFinding]:
    """Yield every tensor that is missing, added or different: `measured` against one side of the receipt.

    `measured` has the names in the files if `by_file_names`, otherwise the names in the snapshot.
    """
    expected = {
        tensor.name_in_files if by_file_names else tensor.name: tensor.source if side == "source" else tensor.result
        for tensor in receipt.tensors
    }
    yield from _check_items(expected, measured)


def check_files(receipt: Receipt, measured: Iterable[CarriedFile]) -> Iterator[ReceiptFinding]:
    """Yield every carried file that is missing, added or different."""
    yield from _check_items({file.path: file for file in receipt.files}, ((file.path, file) for file in measured))


def _check_items(expected: Mapping[str, Item], measured: Iterable[tuple[str, Item]]) -> Iterator[ReceiptFinding]:
    missing = dict(expected)
    for name, found in measured:
        stated = missing.pop(name, None)
        if stated != found:
            yield ReceiptFinding(name, "" if stated is None else str(stated), str(found))
    for name, stated in missing.items():
        yield ReceiptFinding(name, str(stated), "")


def _digest_fields(fields: Mapping[str, Json]) -> Digest:
    return hash_kind("receipt", [canonical_json(dict(fields))])


def _encode_fields(receipt: Receipt) -> dict[str, Json]:
    return {
        "receipt": _VERSION,
        "kind": receipt.kind,
        "format": receipt.format,
        "snapshot": receipt.snapshot,
        "root": receipt.root.hex(),
        "time": receipt.time,
        "holdfast": receipt.holdfast,
        "place": receipt.place,
        "tensors": [_encode_tensor(tensor) for tensor in receipt.tensors],
        "files": [{"path": f.path, "size_bytes": f.size_bytes, "digest": f.digest.hex()} for f in receipt.files],
        "left_out": [{"name": each.name, "reason": each.reason} for each in receipt.left_out],
    }


def _encode_tensor(tensor: ReceiptTensor) -> Json:
    cast = tensor.cast
    fields = {
        "name": tensor.name,
        "name_in_files": tensor.name_in_files,
        "file": tensor.file,
        "source": _encode_facts(tensor.source),
        "result": _encode_facts(tensor.result),
    }
    if cast is None:
        return fields
    errors = {"max_abs": cast.max_abs, "max_rel": cast.max_rel, "num_overflowed": cast.num_overflowed}
    return {**fields, "cast": errors}


def _encode_facts(facts: TensorDigest) -> Json:
    return {"dtype": facts.dtype, "shape": list(facts.shape), "digest": facts.digest.hex()}


def _decode_fields(fields: Mapping[str, Any]) -> Receipt:
    _verify(fields["receipt"] == _VERSION, f"its version is {str(fields['receipt'])[:20]!r}, not {_VERSION}")
    _verify(fields["kind"] in ("import", "export"), "its kind is neither import nor export")
    receipt = Receipt(
        kind=fields["kind"],
        format=_text(fields["format"]),
        snapshot=_text(fields["snapshot"]),
        root=parse_digest(fields["root"], where="its root"),
        time=_text(fields["time"]),
        holdfast=_text(fields["holdfast"]),
        place=_text(fields["place"]),
        tensors=tuple(_decode_tensor(each) for each in _list(fields["tensors"])),
        files=tuple(_decode_file(each) for each in _list(fields["files"])),
        left_out=tuple(_decode_left_out(each) for each in _list(fields["left_out"])),
    )
    twice = Counter(tensor.name for tensor in receipt.tensors).most_common(1)
    _verify(not twice or twice[0][1] == 1, f"it has the tensor {twice and twice[0][0][:80]!r} twice")
    return receipt


def _decode_tensor(value: Json) -> ReceiptTensor:
    names = {"name", "name_in_files", "file", "source", "result"}
    has_cast = isinstance(value, dict) and "cast" in value
    fields = _object(value, names | {"cast"} if has_cast else names)
    source, result = _decode_facts(fields["source"]), _decode_facts(fields["result"])
    _verify(has_cast or source == result, "a tensor changed without a cast")
    cast = _decode_cast(fields["cast"]) if has_cast else None
    return ReceiptTensor(
        _text(fields["name"]), _text(fields["name_in_files"]), _text(fields["file"]), source, result, cast
    )


def _decode_facts(value: Json) -> TensorDigest:
    fields = _object(value, {"dtype", "shape", "digest"})
    shape = _list(fields["shape"])
    _verify(len(shape) <= _MAX_DIMS, "a tensor has too many dimensions")
    digest = parse_digest(fields["digest"], where="a tensor")
    return TensorDigest(_text(fields["dtype"]), tuple(_number(size) for size in shape), digest)


def _decode_cast(value: Json) -> CastErrors:
    fields = _object(value, {"max_abs", "max_rel", "num_overflowed"})
    errors = [fields["max_abs"], fields["max_rel"]]
    _verify(all(type(error) in (int, float) and error >= 0 for error in errors), "a cast has an invalid error")
    return CastErrors(float(errors[0]), float(errors[1]), _number(fields["num_overflowed"]))


def _decode_file(value: Json) -> CarriedFile:
    fields = _object(value, {"path", "size_bytes", "digest"})
    digest = parse_digest(fields["digest"], where="a file")
    return CarriedFile(_text(fields["path"]), _number(fields["size_bytes"]), digest)


def _decode_left_out(value: Json) -> LeftOut:
    fields = _object(value, {"name", "reason"})
    return LeftOut(_text(fields["name"]), _text(fields["reason"]))


def _verify(is_valid: object, why_not: str) -> None:
    if not is_valid:
        raise ValueError(why_not)


def _object(value: Json, names: Iterable[str]) -> dict[str, Any]:
    _verify(isinstance(value, dict) and value.keys() == set(names), "an item has other fields than a receipt has")
    fields: dict[str, Any] = value
    return fields


def _list(value: Json) -> list[Any]:
    _verify(isinstance(value, list), "a list is missing")
    items: list[Any] = value
    return items


def _text(value: Json) -> str:
    _verify(isinstance(value, str) and len(value) <= _MAX_TEXT, "a text is missing or too long")
    return str(value)


def _number(value: Json) -> int:
    _verify(type(value) is int and 0 <= value <= _MAX_NUMBER, "a number is missing or out of range")
    return int(value)
