"""How much memory a call takes, whatever the process took before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def measure_rise(act: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process rose, at most, while something ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide a rise
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the high-water mark
    before = _read_status("VmRSS")
    act()
    return _read_status("VmHWM") - before


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))
