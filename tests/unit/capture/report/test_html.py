"""The page: names that users choose stay text, nothing is loaded, and the file is replaced atomically."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.report import report as html
from holdfast.capture.report.report import Detail, Report, ReportRow, describe, make_report, render_html, write_html
from holdfast.capture.stored.events import Stats
from holdfast.capture.stored.runs import RunFacts
from holdfast.capture.stored.statistics import TensorSummary
from tests.kit.hooking import Hook
from tests.kit.made_reports import make_diff
from tests.kit.made_runs import WEIGHT, hash_elsewhere, make_tensor_run
from tests.kit.runs_in_memory import make_run

HOSTILE: Final = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<!--<script>",
    "]]>&lt;b&gt;",
    "@data@@script@@policy@",
    "\u2028\u2029\u202eevil\x00\x1b[31m",
    "\ud800 alone",
    "'; DROP TABLE runs; --",
    "${7*7}{{7*7}}",
)


def _report(name: str) -> Report:
    row = ReportRow(
        verdict=name,
        step=0,
        rank=0,
        phase=name,
        kind=name,
        fqn=name,
        path=name,
        dtype=name,
        module=name,
        source=name,
        note=name,
    )
    facts = RunFacts(name, notes=(name,))
    return Report(
        facts,
        facts,
        make_diff(name),
        ((0,), (0,)),
        rows=(row,),
        origin=0,
        tolerance=name,
        notes=(name,),
        details={0: Detail((0,), (name, name))},
    )


class _Page(HTMLParser):
    """What a browser would make of a page: its elements, and the texts of scripts and styles."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.policy = ""
        self._open = ""
        self.feed(page.decode("ascii"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self._open = tag
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given.get("content") or ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style", "title"):
            self.texts.append((self._open, data))

    @property
    def data(self) -> Any:
        return json.loads(next(text for tag, text in self.texts if tag == "script"))


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_adds_no_element_and_no_attribute(name: str) -> None:
    hostile, harmless = _Page(render_html(_report(name))), _Page(render_html(_report("layers.0")))

    assert hostile.elements == harmless.elements
    assert hostile.policy == harmless.policy


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_arrives_as_it_is(name: str) -> None:
    found = _Page(render_html(_report(name))).data

    assert found["strings"] == [name, ""]
    assert found["a"]["name"] == name
    assert found["headline"] == f"step 0, forward, {name}: {name} ({name})"
    assert found["inputs"] == found["parameters"] == [f"{name} (equal)"]
    assert found["environment"] == [[name, name, name]]


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    page = _Page(render_html(_report("a")))
    script = [text for tag, text in page.texts if tag == "script"][-1]
    style = next(text for tag, text in page.texts if tag == "style")

    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))

    assert rules == {
        "default-src": "'none'",
        "script-src": f"'{_digest(script)}'",
        "style-src": f"'{_digest(style)}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_page_refers_to_nothing_outside_of_itself() -> None:
    page = render_html(_report("a")).decode("ascii")

    places = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert places == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|srcset|@import|url\()\s*=?", page.replace("-src", ""))
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|eval|innerHTML|insertAdjacentHTML|document\.write)\b", page
    )


def test_the_files_of_the_page_are_ascii_and_end_no_script() -> None:
    for file in (files("holdfast.capture.report") / "page").iterdir():
        text = file.read_bytes().decode("ascii")
        assert file.name == "page.html" or "</script" not in text.lower()


def test_numbers_that_json_cannot_represent_are_distinguished() -> None:
    rows = [
        ReportRow("ORIGIN", 0, 0, "forward", "output", "x", rel=value, cos=value)
        for value in (None, math.nan, math.inf, 0.25)
    ]
    summary = TensorSummary(Stats(-math.inf, math.inf, math.nan, 0.0, 1, 2, 0, (1, 2)), 0.0, 1.0)
    report = Report(RunFacts("a"), RunFacts("b"), make_diff("x"), rows=tuple(rows), details={2: Detail(a=summary)})

    found = json.loads(json.dumps(describe(report), allow_nan=False))

    assert found["columns"]["rel"] == [None, None, "Infinity", 0.25]
    assert found["columns"]["cos"] == [None, None, None, 0.25]
    assert found["details"]["2"]["a"]["min"] == "-Infinity"
    assert found["details"]["2"]["a"]["mean"] is None


def test_a_time_that_is_no_date_is_shown_as_a_number() -> None:
    found = describe(Report(RunFacts("a", started_s=1e300), RunFacts("b"), make_diff("x")))

    assert found["a"] == {
        "name": "a",
        "steps": [],
        "world": 1,
        "status": "complete",
        "started": "@1e+300",
        "notes": [],
    }


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, hook: Hook) -> None:
    place = tmp_path / "report.html"
    place.write_text("old")
    hook(html, "render_html", _fail)

    with pytest.raises(MemoryError):
        write_html(_report("a"), place)

    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert place.read_text() == "old"


def _fail(report: Report) -> bytes:
    raise MemoryError


def test_a_page_replaces_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text("old")

    write_html(_report("a"), place)

    assert place.read_bytes() == render_html(_report("a"))
    assert len(list(tmp_path.iterdir())) == 1


# Text on its ground: 4.5 to 1 is what WCAG asks for.
ON_CARD: Final = ("ink", "muted", "accent", "a", "b", "origin", "propagated", "close", "equal", "missing")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["card", "soft", "bg"])
def test_every_text_has_enough_contrast(theme: str, ground: str) -> None:
    colours = _read_colours(theme)

    ratios = {name: _find_contrast(colours[name], colours[ground]) for name in ON_CARD}

    assert {name: round(ratio, 2) for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_both_ways_to_the_dark_theme_have_the_same_colours() -> None:
    style = (files("holdfast.capture.report") / "page/page.css").read_text()

    blocks = re.findall(r"color-scheme: dark;(.*?)\}", style, re.DOTALL)

    assert len(blocks) == 2
    assert _parse_colours(blocks[0]) == _parse_colours(blocks[1])


def _read_colours(theme: str) -> dict[str, str]:
    style = (files("holdfast.capture.report") / "page/page.css").read_text()
    light, dark = (re.findall(rf"color-scheme: {name};(.*?)\}}", style, re.DOTALL)[0] for name in ("light", "dark"))
    return _parse_colours(light) | (_parse_colours(dark) if theme == "dark" else {})


def _parse_colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", text))


def _find_contrast(one: str, other: str) -> float:
    light, dark = sorted((_find_luminance(one), _find_luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _find_luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_comparison_of_digests_of_different_kinds_is_undecided() -> None:
    ours = make_tensor_run([("lin", "output", WEIGHT)], name="host")
    theirs = make_run(RunFacts("device"), map(hash_elsewhere, ours.events(0)))
    bare = make_run(ours.facts, [event._replace(leaf="") for event in ours.events(0)])
    diff = diff_runs(bare, theirs)

    found = describe(make_report(bare, theirs, diff))

    assert (found["undecided"], found["equal"], found["origin"]) == (True, False, -1)
    assert found["counts"]["UNKNOWN"] == 1
    assert "UNKNOWN" in found["strings"]
    assert b"Not all could be compared" in render_html(make_report(bare, theirs, diff))
