"""Pickles are read as data: plain values come back, names are asked for, and nothing is ever called."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest

from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.pickle_reader import Maker, PickledObject, make_inert, measure_pickle, read_pickle

_PLAIN = {
    "numbers": [0, 1, -5, 1 << 70, 2.5, True, None],
    "texts": ("a", "é" * 300, b"bytes" * 100, bytearray(b"x")),
    "nested": [{"a": {(1, 2): {3, 4}}}, frozenset({5}), [], (), {}],
}


def _refuse(module: str, name: str) -> object:
    raise Untrusted(f"{module}.{name}", name=f"{module}.{name}")


def _refuse_storage(value: object) -> object:
    raise BadFile("no storage")


def _read(data: bytes, find_global: Any = _refuse) -> Any:
    return read_pickle(data, find_global, _refuse_storage, where="x.pkl")


def test_plain_values_come_back_equal() -> None:
    assert _read(pickle.dumps(_PLAIN, 5)) == _PLAIN


def test_values_that_are_shared_stay_shared() -> None:
    shared = [1]

    found = _read(pickle.dumps({"a": shared, "b": shared}))

    assert found["a"] is found["b"]


class Bomb:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("the pickle ran code",))


def test_a_function_is_refused_by_name_and_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Untrusted, match=r"builtins\.print"):
        _read(pickle.dumps(Bomb()))

    assert capsys.readouterr().out == ""


def test_an_object_of_an_inert_class_keeps_its_arguments_and_state() -> None:
    data = pickle.dumps(OrderedDict(a=1))

    found = _read(data, lambda module, name: make_inert(f"{module}.{name}"))

    assert isinstance(found, PickledObject)
    assert (found.class_name, found.args, found.items) == ("collections.OrderedDict", (), [("a", 1)])


def test_a_maker_gets_the_arguments() -> None:
    found = _read(pickle.dumps(complex(1, 2)), lambda module, name: Maker(name, lambda args: ("made", *args)))

    assert found == ("made", 1.0, 2.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        pickle.dumps(_PLAIN, 5)[:-20],
        b"\x80\x04.",  # no value
        b"\x80\x04K\x01K\x02.",  # two values
        b"\x80\x04K\x01K\x02R.",  # a number is called
        b"\x80\x04h\x05.",  # a memo that does not exist
        b"\x80\x04](K\x01K\x02u.",  # items of a list
        b"\x80\x04}(K\x01u.",  # a key without a value
        b"\x80\x04}(]K\x02u.",  # a key that is a list
        b"\x80\x04](.",  # a mark at the end
        b"\x80\x04e.",  # no mark
        b"\x80\x04]}b.",  # attributes of a list
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0fx.",  # 2**60 bytes
        b"\x80\x04\x8b\xff\xff\xff\x7fx.",  # a number of 2**31 bytes
        b"(i__main__\nx\n.",  # an instruction that is not used
    ],
)
def test_a_damaged_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(BadFile, match=r"x\.pkl has a damaged pickle"):
        _read(data)


def test_a_list_that_contains_itself_is_read_without_end() -> None:
    loop: list[Any] = []
    loop.append(loop)

    found = _read(pickle.dumps(loop))

    assert found[0] is found


def test_the_end_of_the_first_pickle_is_found() -> None:
    first = pickle.dumps([1, 2])

    assert measure_pickle(first + pickle.dumps("next")) == len(first)


# A tuple of two, put into the memo and nested in itself sixty times: 2 ** 60 parts.
NESTED = b"K\x01" + b"q\x00h\x00\x86" * 60


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04}" + NESTED + b"K\x01s.",
        b"\x80\x04\x8f(" + NESTED + b"\x90.",
        b"\x80\x04(" + NESTED + b"\x91.",
    ],
    ids=["dict", "set", "frozenset"],
)
def test_a_key_that_takes_long_to_hash_is_refused(data: bytes) -> None:
    with pytest.raises(BadFile, match="a key has too many parts"):
        _read(data)
