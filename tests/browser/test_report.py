"""The report in a real browser: it opens, filters, sorts, draws and opens tensors, in silence and without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from holdfast.capture.compare.result import RunDiff, StepDiff
from holdfast.capture.report.report import Report, ReportRow, write_html
from holdfast.capture.stored.runs import RunFacts
from tests.browser.chromium import Browser
from tests.browser.pages import make_page_report
from tests.kit.made_reports import make_diff

# The first of them may have to install the browser.
pytestmark = pytest.mark.timeout(900)

ROWS: Final = "[...document.querySelectorAll('.row:not([hidden])')].sort((p, q) => p.dataset.at - q.dataset.at)"
NAMES: Final = f"{ROWS}.map((row) => row.querySelector('.name').textContent)"
SHOWN: Final = "document.querySelector('#shown').textContent"
FRAMES: Final = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on runs that diverge in step 3."""
    place = tmp_path_factory.mktemp("page") / "report.html"
    write_html(make_page_report(), place)
    return place


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    """The report, just opened; a test that leaves a complaint behind has failed."""
    browser.size(1440, 1000)
    browser.emulate(scheme="light")
    browser.open(page)
    yield browser
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]


def _text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).innerText"


def _cells(column: str) -> str:
    """Return the texts of a column as they are shown, from top to bottom."""
    index = f"[...document.querySelector('.head').children].findIndex((cell) => cell.dataset.key === '{column}')"
    return f"{ROWS}.map((row) => row.children[{index}].textContent)"


def test_the_overview_says_where_the_runs_diverge(opened: Browser) -> None:
    assert "layers.3.mlp.down_proj: output differs" in opened.run(_text("#verdict h1"))
    assert opened.run(_text("[data-verdict=ORIGIN] strong")) == "1"
    assert "torch.backends.cudnn.benchmark" in opened.run(_text("#facts"))
    assert "the compiled module 'head'" in opened.run(_text("#facts"))


def test_the_origin_is_in_sight_at_once(opened: Browser) -> None:
    assert "layers.3.mlp.down_proj" in opened.run("document.querySelector('.row.on .name').textContent")


def test_both_plots_are_drawn(opened: Browser) -> None:
    lines = opened.run("[...document.querySelectorAll('#steps-plot .line')].map((line) => line.getTotalLength())")
    dots = opened.run("document.querySelector('#depth-plot .dots.c-propagated').getAttribute('d').split('M').length")

    assert len([length for length in lines if length > 200]) >= 3
    assert dots > 50
    assert opened.run("document.querySelector('#depth-plot .origin-text').textContent") == "origin"


def test_a_plot_describes_the_point_under_the_pointer(opened: Browser) -> None:
    place = opened.run(
        "(() => { const box = document.querySelector('#depth-plot svg').getBoundingClientRect();"
        " return [box.left + box.width * 0.8, box.top + box.height * 0.4]; })()"
    )

    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    assert "PROPAGATED" in opened.run(_text("#tip"))


def test_another_step_is_drawn_when_it_is_chosen(opened: Browser) -> None:
    before = opened.run("document.querySelector('#depth-plot svg').ariaLabel")

    opened.click("#step-on")

    assert "of step 3" in before
    assert "of step 4" in opened.run("document.querySelector('#depth-plot svg').ariaLabel")


def test_words_filter_the_table(opened: Browser) -> None:
    opened.click("#words")
    opened.type("norm1 Backward")

    assert opened.run(SHOWN) == "60 of 1,681"
    assert all(name.endswith("norm1") for name in opened.run(NAMES))
    assert set(opened.run(_cells("phase"))) == {"backward"}


def test_what_fits_nothing_says_so_and_can_be_cleared(opened: Browser) -> None:
    opened.click("#words")
    opened.type("no such thing")

    assert opened.run(NAMES) == []
    assert "No tensor matches" in opened.run(_text(".none"))

    opened.click("#clear")

    assert opened.run(SHOWN) == "1,681 tensors"


def test_a_tile_shows_its_class_and_pressed_again_all(opened: Browser) -> None:
    opened.click("[data-verdict=MISSING]")

    assert opened.run(NAMES) == ["layers.5.dropout"]
    assert opened.run("document.querySelector('[data-verdict=MISSING]').ariaPressed") == "true"

    opened.click("[data-verdict=MISSING]")

    assert opened.run(SHOWN) == "1,681 tensors"


def test_a_column_sorts_by_size_then_the_other_way_then_not(opened: Browser) -> None:
    def read() -> list[float]:
        return [float(text) for text in opened.run(_cells("rel")) if text]

    opened.click("[data-key=rel] button")
    falling = read()
    state = opened.run("document.querySelector('[data-key=rel]').ariaSort")
    opened.click("[data-key=rel] button")
    rising = read()
    opened.click("[data-key=rel] button")

    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    assert falling[0] > rising[-1]
    assert state == "descending"
    assert opened.run(_cells("step"))[0] == "0"


def test_names_sort_as_people_count(opened: Browser) -> None:
    opened.run("document.querySelector('[data-key=fqn] button').click()")

    names = opened.run(NAMES)
    assert names == sorted(names)
    assert names[0].startswith("layers.0.attn.k_proj")


def test_a_tensor_opens_with_its_histograms(opened: Browser) -> None:
    opened.click("#show-origin")

    shown = opened.run(_text("#detail"))
    assert "layers.3.mlp.down_proj" in shown
    assert "(3, 118, 202)" in shown
    assert opened.run("document.querySelectorAll('#detail .bars-a').length") == 40
    assert opened.run("document.querySelector('#detail .steps-b').getTotalLength()") > 500

    linear = opened.run("document.querySelectorAll('#detail .bars-a')[5].getBBox().height")
    opened.run("[...document.querySelectorAll('#detail button')].find((b) => b.innerText === 'Logarithmic').click()")

    assert opened.run("document.querySelectorAll('#detail .bars-a')[5].getBBox().height") > linear


def test_the_keyboard_is_enough(opened: Browser) -> None:
    opened.run("document.querySelector('#grid').focus()")
    before = opened.run("document.querySelector('#grid').getAttribute('aria-activedescendant')")
    opened.press("ArrowDown")
    after = opened.run("document.querySelector('#grid').getAttribute('aria-activedescendant')")
    opened.press("Enter")
    first = opened.run(_text("#detail h2"))
    opened.press("End")
    last = opened.run(_text("#detail h2"))
    opened.press("Escape")

    assert (before, after) == ("row-573", "row-574")
    assert first == "layers.3.norm2"
    assert last != first
    assert opened.run("document.querySelector('#detail').hidden")
    assert opened.run("document.activeElement.id") == "grid"


def test_a_narrow_table_shows_the_names(browser: Browser, page: Path) -> None:
    browser.size(420, 900)
    browser.open(page)

    keys = browser.run("[...document.querySelectorAll('.head > *')].map((cell) => cell.dataset.key)")
    assert keys[:2] == ["verdict", "fqn"]
    box = "document.querySelector('.row.on .name').getBoundingClientRect()"
    assert browser.run(f"{box}.left < innerWidth - 150")


def test_every_control_has_a_name(opened: Browser) -> None:
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]

    controls = ("button", "combobox", "searchbox", "grid", "image", "columnheader")
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in controls and not node.get("name", {}).get("value")
    ]
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_until_the_user_chooses_a_theme(opened: Browser, scheme: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = {"light": "rgb(246, 246, 244)", "dark": "rgb(19, 20, 23)"}
    opened.emulate(scheme=scheme)

    assert opened.run(ground) == grounds[scheme]

    opened.click("#theme")
    assert opened.run(ground) == grounds["light"]
    opened.click("#theme")
    assert opened.run(ground) == grounds["dark"]


def test_a_narrow_window_does_not_scroll_sideways(opened: Browser) -> None:
    opened.size(600, 900)

    assert opened.run(f"{FRAMES}.then(() => document.documentElement.scrollWidth)") <= 600


def test_a_report_of_digests_counts_what_it_cannot_measure(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "digests.html"
    write_html(make_page_report(measured=False), place)

    browser.open(place)

    assert browser.run("document.querySelector('#measure').selectedOptions[0].text") == "tensors that differ"
    browser.click("#show-origin")
    assert 'level="full"' in browser.run(_text("#detail"))
    assert browser.complaints == []


def test_the_cause_and_where_it_shows_are_below_the_headline(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "cause.html"
    report = make_page_report()
    assert report.diff.origin is not None
    origin = replace(report.diff.origin, cause="module setting", notes=("first seen in layers.3: output differs",))
    write_html(replace(report, diff=replace(report.diff, origin=origin)), place)

    browser.open(place)

    assert browser.run(_text("#cause")) == "Cause: module setting"
    assert browser.run(_text("#verdict .hint")) == "first seen in layers.3: output differs"
    assert browser.complaints == []


def test_a_report_of_equal_runs_is_quiet(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "equal.html"
    diff = RunDiff("a", "b", None, steps=(StepDiff(0, {"equal": 1}), StepDiff(1, {"equal": 1})))
    write_html(Report(RunFacts("a"), RunFacts("b"), diff, ((0, 1), (0, 1))), place)

    browser.open(place)

    assert browser.run(_text("#verdict .pill")) == "The runs match"
    assert browser.run(SHOWN) == "0 tensors"
    assert browser.complaints == []


def test_an_equal_environment_takes_no_card_of_its_own(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "equal.html"
    diff = RunDiff("a", "b", None, steps=(StepDiff(0, {"equal": 1}),))
    write_html(Report(RunFacts("a"), RunFacts("b"), diff, ((0,), (0,))), place)

    browser.open(place)

    assert browser.run("document.querySelectorAll('#facts > .card').length") == 1
    assert "the same in both runs" in browser.run(_text("#facts"))


def test_classes_are_explained_axes_have_names_and_names_are_not_cut(opened: Browser) -> None:
    assert "computed from is equal" in opened.run("document.querySelector('.row .pill.c-origin').title")
    assert "The cause is earlier" in opened.run("document.querySelector('[data-verdict=PROPAGATED]').title")
    for plot, name in (("#steps-plot", "step"), ("#depth-plot", "tensors, in the order in which they were computed")):
        found = opened.run(f"[...document.querySelectorAll('{plot} .axis-name')].map((node) => node.textContent)")
        assert found == [name, "relative L2"]
    cells = "[...document.querySelectorAll('.row:not([hidden]) .name')]"
    assert opened.run(f"{cells}.filter((cell) => cell.scrollWidth > cell.clientWidth).length") == 0
    assert opened.run("document.querySelector('#theme').textContent") == "System theme"


HOSTILE: Final = (
    "<img src=//evil.example/x onerror=document.title='owned'></script><script>document.title='owned'</script>"
)


def test_a_hostile_name_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    row = ReportRow(HOSTILE, 0, 0, HOSTILE, HOSTILE, HOSTILE, path=HOSTILE, dtype=HOSTILE, note=HOSTILE, source=HOSTILE)
    facts = RunFacts(HOSTILE, notes=(HOSTILE,))
    rows = (row, replace(row, verdict="ORIGIN"))
    report = Report(facts, facts, make_diff(HOSTILE), ((0,), (0,)), rows, origin=1, notes=(HOSTILE,))
    place = tmp_path / "hostile.html"
    write_html(report, place)

    browser.open(place)
    browser.click("#show-origin")
    browser.run(FRAMES)

    assert HOSTILE in browser.run("document.querySelector('.row .name').textContent")
    assert browser.run("document.querySelectorAll('img, iframe, script:not([id])').length") == 1
    assert browser.run("document.title").startswith("<img")
    assert browser.requests == [place.as_uri()]
    assert browser.complaints == []


def test_what_turns_the_direction_of_a_line_is_shown_as_an_escape(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "turned.html"
    row = ReportRow("ORIGIN", 0, 0, "forward", "output", "good\u202edab\x00\u200b")
    write_html(Report(RunFacts("a"), RunFacts("b"), make_diff("x"), rows=(row,)), place)

    browser.open(place)

    assert browser.run(NAMES) == ["good\\u{202e}dab\\u{0}\\u{200b}"]


@pytest.mark.slow
def test_fifty_thousand_rows_are_filtered_and_sorted_at_once(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "large.html"
    report = make_page_report(steps=10, copies=30)
    write_html(replace(report, rows=report.rows[:50_000]), place)
    browser.size(1440, 1000)
    browser.open(place)
    reset = "clearFilters(); table.key = ''; table.orders.clear(); resort();"
    word = "words.dispatchEvent(new Event('input'))"
    act = {
        "type a word": f"words.value = 'down_proj'; {word}",
        "type two words": f"words.value = 'down_proj layers.4'; {word}",
        "type a letter that all have": f"words.value = 'l'; {word}",
        "choose a class": "document.querySelector('[data-verdict=PROPAGATED]').click()",
        "choose a step": "const step = document.querySelector('#choose-step');"
        " step.value = '3'; step.dispatchEvent(new Event('change'))",
        "sort by size": "document.querySelector('[data-key=rel] button').click()",
        "sort by name": "document.querySelector('[data-key=fqn] button').click()",
        "scroll": "grid.scrollTop = 600000",
    }

    took = {what: min(_measure(browser, reset, script) for _ in range(3)) for what, script in act.items()}

    assert browser.run("rows.size") == 50_000 == len(report.rows[:50_000])
    assert browser.run("document.querySelectorAll('.row').length") < 60
    assert {what: ms for what, ms in took.items() if ms >= 200} == {}, took
    assert browser.complaints == []


def _measure(browser: Browser, reset: str, script: str) -> float:
    """Return how many milliseconds the page computes from an act until it is painted.

    Of its own thread's time: on a shared machine a clock measures the neighbours.
    """
    about = "const words = document.querySelector('#words'), grid = document.querySelector('#grid');"
    browser.run(f"(async () => {{ {about} {reset} await {FRAMES}; }})()")
    before = browser.read_busy_s()
    browser.run(f"(async () => {{ {about} {script}; await {FRAMES}; }})()")
    return 1000 * (browser.read_busy_s() - before)
