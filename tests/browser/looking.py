"""How tests look at the page of `holdfast serve`: its rows, its status line, its boxes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import holdfast
from tests.browser.chromium import Browser

ROWS: Final = (
    "[...document.querySelectorAll('.row:not([hidden])')].filter((row) => row.dataset.full === 'true')"
    ".sort((p, q) => p.dataset.at - q.dataset.at)"
)
NAMES: Final = f"{ROWS}.map((row) => row.querySelector('.name').textContent)"
SHOWN: Final = "document.querySelector('#shown').textContent"
CONTRAST: Final = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const found = [], SKIPPED = 'svg, script, option, .hidden, .skip';
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.closest(SKIPPED)) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([walk.currentNode.data.trim().slice(0, 40), ratio]);
  }
  return found;
})()"""


def show(page: Browser, address: str, condition: str) -> None:
    """Go to a view by its address, and wait until it is drawn."""
    page.run(f"location.hash = {json.dumps(address)}")
    page.wait_for(condition)


def fill(page: Browser, selector: str, text: str) -> None:
    """Replace the text of a box, as typing does."""
    page.run(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)}); box.value = {json.dumps(text)};"
        " box.dispatchEvent(new Event('input')); })()"
    )


@contextmanager
def serving(browser: Browser, store: holdfast.Store) -> Iterator[Browser]:
    """Serve a store and open its page; what the browser complains of, or asks another host for, is a failure."""
    with store.serve() as server:
        browser.size(1440, 1000)
        browser.emulate(scheme="light")
        browser.visit("about:blank")
        browser.visit(server.url)
        browser.wait_for("document.querySelector('.grid')")
        yield browser
        base = server.url.partition("#")[0]
        assert browser.complaints == []
        assert [each for each in browser.requests if not each.startswith(base)] == []
