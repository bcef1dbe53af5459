"""A digest of code changes with everything that the code reads."""

from __future__ import annotations

import abc
import collections.abc
from collections.abc import Callable

import pytest

from holdfast.compile_cache.code.digest import digest_code
from holdfast.compile_cache.key_parts import Uncacheable


def _with_closure(value: object) -> Callable[[], object]:
    return lambda: value


def _by_default(value: object = 1) -> object:
    return value


def _calls_itself(number: int) -> int:
    return _calls_itself(number - 1) if number else 0


def test_closures_and_defaults_change_the_digest() -> None:
    assert digest_code(_with_closure(1), where="it") == digest_code(_with_closure(1), where="it")
    assert digest_code(_with_closure(1), where="it") != digest_code(_with_closure(2), where="it")
    assert digest_code(_with_closure(1), where="it") != digest_code(_with_closure(1.0), where="it")
    assert digest_code(_with_closure(_by_default), where="it") != digest_code(_with_closure(_calls_itself), where="it")


def test_a_function_that_calls_itself_has_a_digest() -> None:
    assert digest_code(_calls_itself, where="it") == digest_code(_calls_itself, where="it")


_Abstract = abc.ABCMeta("_Abstract", (), {})


def _make_class() -> type:
    return type("Made", (), {})


def test_code_has_no_digest_once_a_class_that_it_uses_is_registered_with_another() -> None:
    made = _make_class()
    others = [_with_closure((made, kind)) for kind in (_Abstract, collections.abc.Sized)]
    for function in others:
        digest_code(function, where="it")

    _Abstract.register(made)
    collections.abc.Sized.register(made)

    for function, kind in zip(others, ("_Abstract", "Sized"), strict=True):
        with pytest.raises(Uncacheable, match=f"it uses Made, which is registered as a subclass of {kind}"):
            digest_code(function, where="it")


def test_registering_a_class_that_code_does_not_use_keeps_its_digest() -> None:
    function = _with_closure(_Abstract)
    before = digest_code(function, where="it")

    _Abstract.register(_make_class())

    assert digest_code(function, where="it") == before


def test_code_that_is_nested_too_deeply_has_no_digest() -> None:
    chain: Callable[[], object] = _with_closure(None)
    for _ in range(50):
        chain = _with_closure(chain)

    with pytest.raises(Uncacheable, match="it uses more than 40 nested levels of functions, which is the limit"):
        digest_code(chain, where="it")
