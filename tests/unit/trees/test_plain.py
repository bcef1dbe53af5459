"""Plain values of Python keep their type and every bit, in one form each."""

from __future__ import annotations

import struct
import sys
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath

import pytest

from holdfast.errors import Unsupported
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.trees import plain

ENCODERS, DECODERS = plain.ENCODERS, plain.DECODERS

SIGNALLING = struct.unpack(">d", bytes.fromhex("fff0000000000abc"))[0]


def encode(value: object) -> Json:
    return ENCODERS[type(value)](value)


def decode(node: Json) -> object:
    return plain.decode_checked(node, DECODERS[node[0]], ENCODERS)


def through_text(node: Json) -> Json:
    return parse_json(canonical_json(node), where="x")


@pytest.mark.parametrize("value", [None, True, False, 0, 1, -1, 2**63 - 1, 1.0, -0.0, 5e-324, 1e22, "", "a", "é\n\0😀"])
def test_what_json_can_hold_stands_for_itself(value: object) -> None:
    node = through_text(encode(value))
    assert (type(node), repr(node)) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (2**63, ["int", "8000000000000000"]),
        (-(2**63), ["int", "-8000000000000000"]),
        (float("inf"), ["float", "7ff0000000000000"]),
        (complex(-0.0, float("-inf")), ["complex", -0.0, ["float", "fff0000000000000"]]),
        ("\ud800", ["str", "7aCA"]),
        (b"\0\xff", ["bytes", "AP8="]),
        (bytearray(b"a"), ["bytearray", "YQ=="]),
        (range(3, 0, -1), ["range", 3, 0, -1]),
        (PosixPath("a/b"), ["path", "PosixPath", "a/b"]),
        (PurePosixPath("/"), ["path", "PurePosixPath", "/"]),
        (PureWindowsPath("C:/a"), ["path", "PureWindowsPath", "C:\\a"]),
        (date(2026, 1, 2), ["date", "2026-01-02"]),
        (datetime(2026, 1, 2, 3, 4, fold=1), ["datetime", "2026-01-02T03:04:00", 1, None]),
        (datetime(1, 1, 1, tzinfo=timezone.utc), ["datetime", "0001-01-01T00:00:00", 0, ["timezone", 0, 0, 0, None]]),
        (time(1, 2, 3, 4), ["time", "01:02:03.000004", 0, None]),
        (timedelta(-1, 5), ["timedelta", -1, 5, 0]),
        (timezone(timedelta(hours=-1), "here"), ["timezone", -1, 82800, 0, "here"]),
        (Fraction(-1, 3), ["fraction", -1, 3]),
        (Decimal("-0E-7"), ["decimal", "-0E-7"]),
        (Decimal("-Infinity"), ["decimal", "-Infinity"]),
        (Decimal("-sNaN12"), ["decimal", "-sNaN12"]),
        (Decimal("1E+999999999999999999"), ["decimal", "1E999999999999999999"]),
    ],
)
def test_everything_else_has_one_form_and_comes_back_from_it(value: object, node: Json) -> None:
    assert encode(value) == node
    found = decode(through_text(node))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_the_bits_of_a_signalling_nan_are_kept() -> None:
    found = decode(encode(SIGNALLING))
    assert struct.pack(">d", found) == struct.pack(">d", SIGNALLING)


def test_an_integer_beyond_the_limit_of_digits_comes_back() -> None:
    value = 7**20_000
    assert decode(through_text(encode(value))) == value


def test_the_form_of_a_decimal_does_not_depend_on_the_context() -> None:
    with localcontext() as context:
        context.capitals, context.prec = 0, 2
        assert encode(Decimal("1.23456E+50")) == ["decimal", "123456E45"]
        assert str(decode(["decimal", "123456E45"])) == "1.23456e+50"


def test_a_path_of_another_system_comes_back_pure() -> None:
    assert decode(["path", "WindowsPath", "C:\\a"]) == PureWindowsPath("C:\\a")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its text stands for it there")
def test_a_path_that_its_text_does_not_stand_for_is_refused() -> None:
    with pytest.raises(Unsupported, match="a path whose text is parsed as another path cannot be saved; convert it to"):
        encode(PureWindowsPath("./c:x"))


def test_a_path_of_this_system_comes_back_as_one_that_can_be_opened() -> None:
    assert type(decode(encode(Path("a")))) is type(Path("a"))


class Zone(tzinfo):
    def utcoffset(self, _when: datetime | None) -> timedelta:
        return timedelta(0)

    def dst(self, _when: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, _when: datetime | None) -> str:
        return "here"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2026, 1, 1, tzinfo=Zone()), r"a time with a Zone cannot be saved; convert it with .astimezone"),
        (time(1, tzinfo=Zone()), "a time with a Zone cannot be saved"),
        (Fraction(1, 3**60_000), "a fraction of more than 65536 bits cannot be saved; save its integers"),
        (range(1 << 70_000), "a range of more than 65536 bits"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_the_next_step(value: object, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        encode(value)


@pytest.mark.parametrize(
    "node",
    [
        ["int"],
        ["int", 5],
        ["int", "5"],
        ["int", "0x8000000000000000"],
        ["int", "08000000000000000"],
        ["int", "8000000000000000", 0],
        ["int", "\uff18000000000000000"],
        ["float", "3ff0000000000000"],
        ["float", "7FF0000000000000"],
        ["float", "7ff0"],
        ["float", "xyz"],
        ["str", "YQ=="],
        ["str", "7a"],
        ["complex", 1, 0.0],
        ["complex", 1.0],
        ["bytes", "AP8"],
        ["bytes", "AP9="],
        ["bytes", "AP8=\n"],
        ["bytes", None],
        ["range", 0, 5, 0],
        ["range", 0, 5],
        ["range", 0, True, 1],
        ["range", 0, 1 << 63, 1],
        ["path", "Path", "a"],
        ["path", "PosixPath", 5],
        ["path", "PosixPath"],
        ["date", "2026-1-1"],
        ["date", "20260101"],
        ["date", "2026-02-30"],
        ["datetime", "2026-01-01T00:00:00+00:00", 0, None],
        ["datetime", "2026-01-01T00:00:00", 2, None],
        ["datetime", "2026-01-01T00:00:00", 1 << 62, None],
        ["datetime", "2026-01-01T00:00:00", 0, ["zone", 1]],
        ["datetime", "2026-01-01T00:00:00", 0, ["timezone", 1, 0, 0, None]],
        ["datetime", "2026-01-01T00:00:00", 0],
        ["time", "25:00:00", 0, None],
        ["timedelta", 0, 86400, 0],
        ["timedelta", 1 << 62, 0, 0],
        ["timezone", 0, 0, 0],
        ["timezone", 0, 0, 0, None, "a"],
        ["timezone", 0, 0, 0, "UTC"],
        ["fraction", 2, 4],
        ["fraction", 1, 0],
        ["fraction", 1, -2],
        ["fraction", 1, ["int", "f" * 20_000]],
        ["range", 0, ["int", "f" * 20_000], 1],
        ["decimal", "1.5"],
        ["decimal", "1e5"],
        ["decimal", "01E5"],
        ["decimal", "1E9999999999999999999"],
        ["decimal", ""],
    ],
    ids=lambda node: str(node)[:40],
)
def test_a_malformed_or_second_form_is_refused(node: Json) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        decode(node)
