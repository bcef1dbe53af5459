"""A store that changes while it is looked at: saves, tags and runs appear; a large tensor is drawn while it is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.serving.answers.tensors import Index, OpenTensor
from tests.browser.chromium import Browser
from tests.kit.hooking import Hook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = "[...document.querySelectorAll('.row:not([hidden])')].filter((row) => row.dataset.full === 'true')"
TEXTS = f"{ROWS}.map((row) => row.textContent)"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path / "store") as made:
        made.save("run/step-1", {"w": torch.ones(3)})
        yield made


def test_a_save_and_a_moved_tag_appear_in_the_list_and_in_the_snapshot(browser: Browser, store: holdfast.Store) -> None:
    store.tag("best", "run/step-1")
    with store.serve() as server:
        browser.size(1440, 1000)
        browser.visit("about:blank")
        browser.visit(server.url)
        browser.wait_for(f"{ROWS}.length === 1 && {TEXTS}[0].includes('best')")
        browser.run("window.here = true")
        store.save("run/step-2", {"w": torch.ones(3)}, metadata={"loss": 0.5})
        browser.wait_for(f"{ROWS}.length === 2 && document.querySelector('[data-metric=loss]')")
        browser.run("location.hash = '#/snapshot?name=run/step-1'")
        browser.wait_for("document.querySelector('#about .pill')?.textContent === 'best'")
        store.tag("best", "run/step-2", move=True)
        browser.wait_for("document.querySelector('#about') && !document.querySelector('#about .pill')")
        browser.wait_for("document.querySelector('#facts').textContent.includes('run/step-2')")
        browser.run("location.hash = '#/snapshots'")
        browser.wait_for(f"{TEXTS}.some((text) => text.includes('step-2') && text.includes('best'))")
        store.tag("other", "run/step-1")
        browser.wait_for(f"{TEXTS}.some((text) => text.includes('step-1') && text.includes('other'))")

        assert browser.run("window.here"), "the page was loaded again"
        assert browser.complaints == []


def test_a_run_appears_while_it_is_recorded_and_is_complete_at_its_end(browser: Browser, store: holdfast.Store) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with store.serve() as server:
        browser.size(1440, 1000)
        browser.visit("about:blank")
        browser.visit(server.url)
        browser.run("location.hash = '#/runs'; window.here = true")
        browser.wait_for("document.querySelector('#shown')?.textContent === '0 runs'")
        with store.record("live", model, optimizer, segment_steps=1):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            browser.wait_for(f"{TEXTS}.some((text) => text.includes('live') && text.includes('unfinished'))")
        browser.wait_for(f"{TEXTS}.some((text) => text.includes('live') && text.includes('complete'))")

        assert browser.run("document.querySelector('#shown').textContent") == "1 run"
        assert browser.run("window.here"), "the page was loaded again"
        assert browser.complaints == []


class SlowReads:
    """Counts the blocks that a server reads; stops at one until the test goes on, and is slow after it."""

    def __init__(self, hook: Hook, *, stop_at: int) -> None:
        """Watch all reads of tensors in this process."""
        self.blocks = 0
        self.most_bytes = 0
        self.go_on = threading.Event()
        read = OpenTensor.read

        def read_slowly(tensor: OpenTensor, index: Index) -> Any:
            found = read(tensor, index)
            self.blocks += 1
            self.most_bytes = max(self.most_bytes, read_rss_bytes())
            if self.blocks == stop_at:
                assert self.go_on.wait(120)
            elif self.blocks > stop_at:
                time.sleep(0.02)
            return found

        hook(OpenTensor, "read", read_slowly)


def read_rss_bytes() -> int:
    """Return the memory that this process has in RAM, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_a_tensor_of_a_gibibyte_is_drawn_while_it_is_read_and_leaving_stops_that(
    browser: Browser, store: holdfast.Store, hook: Hook
) -> None:
    store.save("large", {"w": torch.arange(1 << 28, dtype=torch.float32).reshape(1 << 14, 1 << 14)})
    before_bytes = read_rss_bytes()
    reads = SlowReads(hook, stop_at=40)
    with store.serve() as server:
        browser.size(1440, 1000)
        browser.visit("about:blank")
        browser.visit(server.url)
        browser.run("location.hash = '#/tensor?name=large&leaf=w&index=0:8,0:8'")
        # The reader stands still: what is drawn now comes from a part of the tensor.
        browser.wait_for("document.querySelector('#histogram svg') && document.querySelector('#progress progress')")
        drawn = browser.run("document.querySelector('#progress').textContent")
        assert drawn.endswith(" of 268,435,456 values read")
        assert 0 < int(drawn.split()[0].replace(",", "")) <= 40 << 20
        reads.go_on.set()
        browser.wait_for(f"document.querySelector('#progress').textContent !== {drawn!r}")
        browser.visit("about:blank")
        stopped = wait_until_still(lambda: reads.blocks)

    assert stopped < 256, "all blocks were read, although nobody looked any more"
    assert reads.most_bytes - before_bytes < 300 << 20


def wait_until_still(read: Any) -> int:
    """Return a number once it has not changed for two seconds."""
    last = -1
    while (now := int(read())) != last:
        last = now
        time.sleep(2)
    return last
