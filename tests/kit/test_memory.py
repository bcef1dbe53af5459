"""The measure of memory notices what was freed again, also below an earlier peak."""

from __future__ import annotations

from tests.kit.memory import measure_rise_kib

MIB = 1 << 20


def test_what_was_freed_again_is_noticed_even_below_an_earlier_peak() -> None:
    bytearray(200 * MIB)

    assert measure_rise_kib(lambda: bytearray(100 * MIB)) > 99 << 10
    assert measure_rise_kib(lambda: None) < 10 << 10
