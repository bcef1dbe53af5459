"""Time limits of tests that also hold on a busy machine.

A test that expects something to happen waits `PATIENCE_S` for it; only a hang takes that long. How much work something
is, is measured in CPU seconds, which other processes do not add to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 300.0
"""How long to wait for one thing that is expected to happen."""
RUN_S: Final = 480.0
"""How long a process or a group of ranks may run; less than pytest's own timeout, which tells less about it."""
PROMPT_S: Final = 100.0
"""What one rank tells another arrives sooner than this; what a timeout has to find takes `PATIENCE_S`."""


def measure_cpu_s(act: Callable[[], object]) -> float:
    """Return how many CPU seconds a call takes, all threads of this process together."""
    began = time.process_time()
    act()
    return time.process_time() - began
