"""Hostile texts in every place of a store that takes a text, shown by the page: they stay texts in the document."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

import pytest
import torch

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import NAMES, ROWS, serving, show
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.recordings import Recording, write_recorded
from tests.kit.thinning import keep

pytestmark = pytest.mark.timeout(900)

TEXTS: Final = (
    "<img src=x onerror=window.hit=1>",
    "\"'><script>window.hit=2</script>",
    "javascript:window.hit=3",
    "{{7*7}}${window.hit=4}",
    "</title></style></textarea><svg onload=window.hit=5>",
    "&lt;b&gt;&#x41;",
    "__proto__",
    "constructor",
    "toString",
    "#/health?name=x",
    "a?b=c&d=e%2f%00+g",
    "url(data:image/svg+xml;x)",
    "\u202egnp.exe",
    "n" * 180,
)
"""What a page that builds HTML, scripts, styles, addresses or plain objects from texts would stumble over."""
RUN: Final = "evil/"
RUNS: Final = 8
"""How many of the texts name a recorded run."""
DOCUMENT: Final = """(() => {
  const wrong = [];
  if (window.hit !== undefined) wrong.push("a script ran: " + window.hit);
  if (({}).polluted !== undefined || Object.keys(Object.prototype).length) wrong.push("Object.prototype was changed");
  for (const node of document.querySelectorAll("*")) {
    const tag = node.tagName.toLowerCase();
    if (["script", "img", "iframe", "object", "embed", "base"].includes(tag) && !node.closest("head"))
      wrong.push("an element " + tag);
    for (const { name, value } of node.attributes) {
      if (name.startsWith("on")) wrong.push(tag + " has " + name);
      if (["href", "src", "action", "xlink:href"].includes(name) && !/^(#|\\/page\\/|\\/report\\/[\\w-]+$)/.test(value))
        wrong.push(tag + " " + name + "=" + value);
      if (name === "style" && /url\\(/.test(value)) wrong.push(tag + " has a style with an address");
    }
  }
  return [...new Set(wrong)];
})()"""
QUIET: Final = "!document.querySelector('progress')"


def thin(number: int) -> list[object]:
    """Return numbers, of which all but the first and the name of a prototype are slow tests."""
    return [
        at if at in (0, TEXTS.index("__proto__")) else pytest.param(at, marks=pytest.mark.slow) for at in range(number)
    ]


def list_names() -> list[str]:
    """Return two names for each text."""
    return [f"{RUN}{text}/{step}" for text in TEXTS for step in (0, 1)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path_factory.mktemp("hostile") / TEXTS[0].replace("/", "")) as made:
        for at, name in enumerate(list_names()):
            text = TEXTS[at // 2]
            leaves = {each: torch.full((16, 16), float(at + number)) for number, each in enumerate(TEXTS)}
            numbers = {each: [1.0 + at, math.nan, -math.inf][number % 3] for number, each in enumerate(TEXTS)}
            metadata = {"metrics": numbers, text: text, "nested": {text: [text, {text: text}]}, "valueOf": "kept"}
            made.save(name, {"model": leaves, text: text, "step": at}, metadata=metadata)
            made.tag(f"tag {text} {at}", name)
        settings = {text: text for text in TEXTS}
        for at, text in enumerate(TEXTS[:RUNS]):
            recording = Recording(
                text, is_bad=bool(at % 2), stem=text, level="stats", notes=(text,), environment=settings
            )
            write_recorded(made.repository, recording)
        store_artifact(made.repository, make_artifact("a"))
        yield made


@pytest.fixture
def page(browser: Browser, store: holdfast.Store) -> Iterator[Browser]:
    with serving(browser, store) as opened:
        yield opened


def find_wrong(page: Browser) -> list[str]:
    """Return what a hostile text has become in the document, other than a text."""
    wrong: list[str] = page.run(DOCUMENT)
    return wrong


def test_a_hostile_text_that_became_an_element_is_found(page: Browser) -> None:
    page.run("document.querySelector('#main').insertAdjacentHTML('beforeend', '<img alt=x><a href=javascript:0>x</a>')")

    assert find_wrong(page) == ["an element img", "a href=javascript:0"]


@pytest.mark.slow
def test_a_series_is_listed_by_its_name_as_it_was_given(page: Browser) -> None:
    # Characters that change the direction of a text are shown by their codes.
    for text in filter(str.isprintable, TEXTS):
        names = json.dumps(sorted(name for name in list_names() if name.startswith(f"{RUN}{text}/")))

        show(page, "#/snapshots?" + urlencode({"filter": f"{RUN}{text}/"}), f"`${{{NAMES}.sort()}}` === `${{{names}}}`")

    assert find_wrong(page) == []


@pytest.mark.slow
def test_metadata_named_like_a_method_of_every_object_is_shown(page: Browser) -> None:
    show(page, "#/snapshot?" + urlencode({"name": list_names()[0]}), "document.querySelector('#facts')")

    assert "valueOf" in page.run("document.querySelector('#facts').textContent")


@pytest.mark.parametrize("at", thin(len(TEXTS)))
def test_every_view_of_a_hostile_name_shows_texts_only(page: Browser, at: int) -> None:
    text = TEXTS[at]
    name, other = list_names()[2 * at : 2 * at + 2]
    views = {
        "snapshot": ({"name": name}, "document.querySelector('.row .name')"),
        "tensor": ({"name": name, "leaf": f"model.{text}"}, "document.querySelector('#values td, main .alarm')"),
        "compare": ({"a": name, "b": other}, f"document.querySelector('.row .name') && {QUIET}"),
        "snapshots": ({"metric": text, "filter": RUN, "by": "step"}, "document.querySelector('.metric')"),
        "movement": ({"filter": f"{RUN}{text}/"}, f"document.querySelector('#moves canvas') && {QUIET}"),
        "sharing": ({"prefix": RUN, "pairs": f"{RUN}{text}/"}, "document.querySelector('#plan, .alarm')"),
    }

    for view, (parameters, condition) in views.items():
        show(page, f"#/{view}?{urlencode(parameters)}", condition)
        assert find_wrong(page) == [], (view, text)


@pytest.mark.parametrize("at", thin(RUNS - 1))
def test_every_view_of_a_hostile_run_shows_texts_only(page: Browser, at: int) -> None:
    query = urlencode({"name": TEXTS[at], "a": TEXTS[at], "b": TEXTS[at + 1]})
    views = {
        "runs": f"{NAMES}.length === {RUNS}",
        "run": f"{ROWS}.length && document.title.includes('Run')",
        "cache": "document.querySelector('main .grid, main .muted')",
        "health": "document.querySelector('#verdict-line .pill')",
    }
    for view, condition in views.items():
        show(page, f"#/{view}?{query}", condition)
        assert find_wrong(page) == [], (view, TEXTS[at])


@pytest.mark.parametrize(
    "view", keep(["constructor", "__proto__", "toString", "<script>", "snapshots/../health"], "__proto__")
)
def test_a_view_that_does_not_exist_is_refused_in_a_sentence(page: Browser, view: str) -> None:
    show(page, f"#/{view}", "document.querySelector('main .alarm')")

    assert "There is no such view" in page.run("document.querySelector('main .alarm').textContent")
    assert find_wrong(page) == []
