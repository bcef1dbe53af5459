"""Globals, their attributes and imports are read from bytecode, also from nested code."""

from __future__ import annotations

import textwrap
from types import CodeType

import pytest

from holdfast.compile_cache.code.digest import Import, Reads, read_code


def reads_of(body: str) -> Reads:
    """Return what a function with this body reads."""
    source = f"def f(x, c):\n{textwrap.indent(textwrap.dedent(body), '    ')}"
    (code,) = [each for each in compile(source, "<test>", "exec").co_consts if isinstance(each, CodeType)]
    return read_code(code)


def test_attributes_are_not_globals() -> None:
    reads = reads_of("return x.scale + scale.rules(x).y")

    assert reads.chains == (("scale", "rules"),)
    assert reads.attributes == {"scale", "y"}


@pytest.mark.parametrize(
    ("body", "chain"),
    [
        ("return a.b.c(x)", ("a", "b", "c")),
        ("return [a.b for _ in x]", ("a", "b")),
        ("return lambda: a.b", ("a", "b")),
        ("def g():\n    def h():\n        return a.b\n    return h", ("a", "b")),
        ("class K:\n    held = a.b", ("a", "b")),
        ("return x if c else a.b", ("a", "b")),
    ],
    ids=["call", "comprehension", "lambda", "nested", "class", "branch"],
)
def test_globals_are_read_with_their_attributes(body: str, chain: tuple[str, ...]) -> None:
    assert chain in reads_of(body).chains


def test_an_attribute_of_one_of_two_values_belongs_to_neither_or_to_both() -> None:
    reads = reads_of("return (a if c else b).held")

    # Python 3.13 compiles the attribute once for each of the values.
    assert (reads.chains, reads.attributes) in [
        ((("a",), ("b",)), frozenset({"held"})),
        ((("a", "held"), ("b", "held")), frozenset()),
    ]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import a.b", Import("a.b", 0, ())),
        ("import a.b as c", Import("a.b", 0, ())),
        ("from a.b import c as d, e", Import("a.b", 0, ("c", "e"))),
        ("from ..a import b", Import("a", 2, ("b",))),
        ("from . import b", Import("", 1, ("b",))),
    ],
    ids=["plain", "as", "from", "relative", "package"],
)
def test_imports_are_read(statement: str, expected: Import) -> None:
    assert reads_of(statement).imports == (expected,)


@pytest.mark.parametrize("call", ['getattr(x, "held")', 'getattr(x.y, "held", None)', 'hasattr(a.b, "held")'])
def test_getattr_with_a_name_in_the_source_reads_an_attribute(call: str) -> None:
    reads = reads_of(f"return {call}")

    assert "held" in reads.attributes
    assert not reads.computed


@pytest.mark.parametrize(
    "call",
    ["getattr(x, c)", 'getattr(x, "a" + c)', 'getattr(x, f"{c}")', 'getattr(x, "a" if c else "b")', "map(getattr, x)"],
)
def test_getattr_with_another_name_is_computed(call: str) -> None:
    assert reads_of(f"return {call}").computed == {"getattr"}
