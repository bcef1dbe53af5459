"""A repr that people can read: digests in hex, sizes and times with units, nothing that is as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from holdfast.display.markup import format_when, readable_repr


@dataclass(frozen=True, slots=True)
class Sample:
    """A value with a field of each kind."""

    name: str
    digest: bytes = b""
    size_bytes: int = 0
    time_s: float = 0.0
    seconds: float = 0.0
    names: tuple[str, ...] = ()
    numbers: list[int] = field(default_factory=list)
    facts: Mapping[str, int] = field(default_factory=dict)
    hidden: str = field(default="", repr=False)
    _private: int = 0

    __repr__ = readable_repr


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (Sample("a"), "Sample(name='a')"),
        (Sample("a", digest=bytes(range(32))), "Sample(name='a', digest=000102030405)"),
        (Sample("a", size_bytes=3 << 20), "Sample(name='a', size_bytes=3.0 MiB)"),
        (Sample("a", time_s=86400.0), "Sample(name='a', time_s=1970-01-02 00:00:00 UTC)"),
        (Sample("a", seconds=0.09163), "Sample(name='a', seconds=0.0916 s)"),
        (Sample("a", names=("b",)), "Sample(name='a', names=('b',))"),
        (Sample("a", numbers=[*range(9)]), "Sample(name='a', numbers=[0, 1, 2, ... 6 more])"),
        (Sample("a", facts=dict.fromkeys("abcde", 1)), "Sample(name='a', facts={'a': 1, 'b': 1, 'c': 1, ... 2 more})"),
        (Sample("a", hidden="b", _private=3), "Sample(name='a')"),
    ],
)
def test_a_value_is_shown_with_units_and_without_what_is_as_usual(sample: Sample, text: str) -> None:
    assert repr(sample) == text


def test_a_long_text_is_cut() -> None:
    assert len(repr(Sample("x" * 10_000))) < 200


def test_a_number_that_is_no_date_is_shown_as_it_is() -> None:
    assert format_when(1e300) == "@1e+300"
