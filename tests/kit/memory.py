"""How much memory a call takes, in KiB, whatever this process took before."""

from __future__ import annotations

from collections.abc import Callable

from bench.kit.resident import measure_rise


def measure_rise_kib(act: Callable[[], object]) -> int:
    """Return by how much the resident memory of this process rose, at most, while something ran."""
    return measure_rise(act) // 1024
