"""The work of a page and of a server, in units that do not depend on how fast the machine is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Final

from tests.browser.chromium import Browser

_LOOP: Final = (
    "(() => { let x = 1; for (let i = 0; i < 4.3e6; i++) x = (x * 1103515245 + 12345) % 2147483648; return x; })()"
)
"""About 100 ms in a browser on a server core of 2024; with others on the same core, longer, as is all other work."""
_FRAMES: Final = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@dataclass(frozen=True, slots=True)
class PageWork:
    """What an act took the thread of a page, as multiples of a loop of about 100 ms."""

    script: float
    """Everything but style and layout."""
    all: float


class PageMeter:
    """Measures acts on a page by the processor time of its thread."""

    def __init__(self, page: Browser) -> None:
        """Time the loop in this browser."""
        self._page = page
        page.visit("about:blank")
        self._unit_s = median(self._time_loop() for _ in range(3))

    def _time_loop(self) -> float:
        before = self._page.read_busy_s()
        self._page.run(_LOOP)
        return self._page.read_busy_s() - before

    def measure(self, script: str, condition: str) -> PageWork:
        """Run a script, and wait until a condition is true and the page is drawn."""
        script_s, busy_s = self._page.read_script_s(), self._page.read_busy_s()
        self._page.run(script)
        self._page.wait_for(condition)
        self._page.run(_FRAMES)
        return PageWork(
            (self._page.read_script_s() - script_s) / self._unit_s, (self._page.read_busy_s() - busy_s) / self._unit_s
        )

    def measure_first(self, url: str, condition: str) -> PageWork:
        """Open an address, and wait until a condition is true and the page is drawn."""
        self._page.visit("about:blank")
        self._page.visit(url)
        self._page.wait_for(condition)
        self._page.run(_FRAMES)
        # The counters start again with the page.
        return PageWork(self._page.read_script_s() / self._unit_s, self._page.read_busy_s() / self._unit_s)


def time_python_loop() -> float:
    """Return the processor seconds of a loop that takes Python 3.11 about 100 ms on a server core of 2024."""
    found = []
    for _ in range(3):
        started_s = time.thread_time()
        names = {f"layers.{at}.weight": (at, str(at)) for at in range(160_000)}
        found.append(time.thread_time() - started_s)
        names.clear()
    return median(found)
