"""The page stays fluid with 5,000 snapshots, 100,000 tensors in one of them, and recorded runs of 50,000 events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pytest
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.serving.server import StoreServer
from holdfast.store import OpenOptions, Store
from tests.browser.chromium import Browser
from tests.browser.work import PageMeter, PageWork, time_python_loop
from tests.kit.memory import measure_rise_kib
from tests.kit.recordings import Recording, write_recorded
from tests.kit.saving import save_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SNAPSHOTS = 5000
TENSORS = 100_000
LAYERS = 112
STEPS = 150
"""Of recorded runs: three events for each layer and step."""
FULL = "document.querySelectorAll('.row[data-full=true]:not([hidden])').length > 5"
"""Visible rows have arrived."""
GRID = "document.querySelector('.grid')"
Acts = Mapping[str, tuple[str, str]]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store(MemoryStore(), OpenOptions(environment=False))
    for step in range(SNAPSHOTS):
        metrics = {"loss": 1 / (step + 1), "acc": step / SNAPSHOTS}
        save_bytes(store.repository, f"run{step % 7}/step-{step}", {"x": b"%d" % step}, metadata={"metrics": metrics})
    tree = {f"layers.{at}": {name: torch.full((2,), float(at)) for name in "abcd"} for at in range(TENSORS // 4)}
    store.save("large/a", tree)
    changed = {name: {part: value + (part == "a") for part, value in parts.items()} for name, parts in tree.items()}
    store.save("large/b", changed)
    for name, is_bad in (("good", False), ("bad", True)):
        write_recorded(store.repository, Recording(name, is_bad=is_bad, level="stats", steps=STEPS, layers=LAYERS))
    yield store
    store.close()


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[StoreServer]:
    with store.serve() as started:
        yield started


@pytest.fixture(scope="module")
def meter(browser: Browser) -> PageMeter:
    browser.size(1440, 1000)
    return PageMeter(browser)


def type_into(selector: str, text: str) -> str:
    """Return a script that replaces the text of a box, as typing does."""
    return (
        f"(() => {{ const box = document.querySelector('{selector}'); box.value = '{text}';"
        " box.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def hover(selector: str) -> str:
    """Return a script that moves the pointer over a plot, in ten moves."""
    return (
        f"(() => {{ const plot = document.querySelector('{selector}'), box = plot.getBoundingClientRect();"
        " for (let at = 0; at < 10; at++) plot.dispatchEvent(new PointerEvent('pointermove',"
        " {clientX: box.left + 100 + 20 * at, clientY: box.top + 80})); })()"
    )


def wait_long(page: Browser, condition: str) -> None:
    """Wait for what takes the server long, however slow the machine is; the time limit of the test ends it."""
    while not page.run(f"Boolean({condition})"):
        page.run("new Promise((done) => setTimeout(done, 500))")


def find_slow(meter: PageMeter, acts: Acts) -> dict[str, PageWork]:
    """Do each act; return those whose scripts take more than 100 ms, or which take 200 ms with layout and paint."""
    took = {name: meter.measure(*act) for name, act in acts.items()}
    return {name: work for name, work in took.items() if work.script > 1 or work.all > 2}


def test_the_first_rows_of_five_thousand_snapshots_take_less_than_a_second(
    meter: PageMeter, server: StoreServer
) -> None:
    meter.measure_first(server.url, FULL)  # stores the token, and fills the caches of both sides
    again = meter.measure_first(server.url.partition("#")[0] + "#/snapshots?metric=loss", FULL)

    assert again.all < 10


def test_five_thousand_snapshots_are_fluid(browser: Browser, meter: PageMeter, server: StoreServer) -> None:
    meter.measure_first(server.url, FULL)
    assert browser.run("document.querySelector('#shown').textContent") == f"{SNAPSHOTS + 2:,} snapshots"
    plot = "#timeline svg"

    assert (
        find_slow(
            meter,
            {
                "scroll to the end": (f"{GRID}.scrollTop = 1e9", FULL),
                "scroll to the middle": (f"{GRID}.scrollTop = 70000", FULL),
                "sort": ("document.querySelector('[data-key=step] button').click()", FULL),
                "hover": (hover(plot), "!document.querySelector('#tip').hidden"),
                "another number": ("document.querySelector('[data-metric=acc]').click()", FULL),
                "filter": (
                    type_into("#filter", "loss < 0.001"),
                    "document.querySelector('#shown').textContent === '4,000 snapshots' && " + FULL,
                ),
            },
        )
        == {}
    )
    assert browser.run("document.querySelectorAll('.row').length") < 60
    assert browser.run("document.querySelectorAll('*').length") < 3000
    assert browser.complaints == []


def test_the_first_look_at_a_hundred_thousand_tensors_takes_the_server_about_a_second(
    browser: Browser, store: Store
) -> None:
    unit_s = time_python_loop()
    with store.serve() as server:
        browser.visit("about:blank")
        browser.visit(server.url)
        browser.wait_for(FULL)
        started_s = time.process_time()
        browser.run("location.hash = '#/snapshot?name=large/a&folded=false'")
        browser.wait_for(FULL + f" && document.querySelector('#shown').textContent.startsWith('{TENSORS:,}')")
        took_s = time.process_time() - started_s
        browser.visit("about:blank")

    assert took_s / unit_s < 25, f"{took_s:.2f} s of processor time; the loop of 0.1 s took {unit_s:.3f} s"


def test_a_hundred_thousand_tensors_are_fluid(browser: Browser, meter: PageMeter, server: StoreServer) -> None:
    browser.visit(server.url)
    first = meter.measure_first(server.url.partition("#")[0] + "#/snapshot?name=large/a&folded=false", FULL)
    assert first.all < 10
    assert browser.run("document.querySelector('#shown').textContent") == "100,000 of 100,000 leaves"

    assert (
        find_slow(
            meter,
            {
                "scroll to the end": (f"{GRID}.scrollTop = 1e9", FULL),
                "sort": ("document.querySelector('[data-key=name] button').click()", FULL),
                "filter": (
                    type_into("input[type=search]", "*.77*.c"),
                    "document.querySelector('#shown').textContent.startsWith('111 of')",
                ),
                "fold": (
                    "document.querySelector('#folded').click()",
                    "document.querySelector('#shown').textContent.includes('lines')",
                ),
                "open": (
                    "location.hash = '#/tensor?name=large/a&leaf=layers.77.a'",
                    "document.querySelector('#values td')",
                ),
                "back": ("history.back()", "document.querySelector('#shown')?.textContent.includes('lines')"),
            },
        )
        == {}
    )
    assert browser.run("document.querySelectorAll('.row').length") < 60


def test_a_diff_of_a_hundred_thousand_tensors_is_shown_while_it_is_measured(
    browser: Browser, meter: PageMeter, server: StoreServer
) -> None:
    browser.visit(server.url)
    browser.visit(server.url.partition("#")[0] + "#/compare?a=large/a&b=large/b")
    wait_long(browser, FULL)
    assert browser.run("Boolean(document.querySelector('progress'))")
    wait_long(browser, "!document.querySelector('progress')")

    assert browser.run("document.querySelector('#counts-row strong').textContent") == "25,000"
    assert browser.run("document.querySelector('#shown').textContent") == "25,000 of 25,000"
    assert (
        find_slow(
            meter,
            {
                "scroll": (f"{GRID}.scrollTop = 1e9", FULL),
                "sort": ("document.querySelector('[data-key=name] button').click()", FULL),
                "filter": (
                    type_into("main input[type=search]", "layers.777"),
                    "document.querySelector('#shown').textContent.startsWith('11 of')",
                ),
            },
        )
        == {}
    )
    assert browser.run("document.querySelectorAll('.row').length") < 60
    assert browser.complaints == []


def test_runs_of_fifty_thousand_events_are_compared_and_their_report_is_fluid(
    browser: Browser, meter: PageMeter, server: StoreServer
) -> None:
    unit_s = time_python_loop()
    browser.visit(server.url)
    started_s = time.process_time()
    browser.run("location.hash = '#/runs?a=good&b=bad'")
    wait_long(browser, "document.querySelector('#report')")
    assert (time.process_time() - started_s) / unit_s < 60
    assert "layers.1" in browser.run("document.querySelector('#comparison h1').textContent")
    rows = "document.querySelectorAll('.row').length > 5"

    first = meter.measure_first(browser.run("document.querySelector('#report').href"), rows)

    assert first.all < 10
    assert browser.run("rows.size") == 50_000 < 3 * STEPS * LAYERS
    assert (
        find_slow(
            meter,
            {
                "scroll": ("document.querySelector('#grid').scrollTop = 700000", rows),
                "sort by name": ("document.querySelector('[data-key=fqn] button').click()", rows),
                "sort by a number": ("document.querySelector('[data-key=rel] button').click()", rows),
                "filter": (
                    type_into("#words", "layers.77"),
                    "document.querySelector('#shown').textContent.includes(' of 50,000')",
                ),
                "measure": ("document.querySelector('#step-on').click()", rows),
                "hover": (hover("#depth-plot svg"), rows),
                "open": ("document.querySelector('.row').click()", "!document.querySelector('#detail').hidden"),
            },
        )
        == {}
    )
    assert browser.run("document.querySelectorAll('.row').length") < 60
    assert browser.complaints == []


def test_a_run_of_fifty_thousand_events_is_fluid(browser: Browser, meter: PageMeter, server: StoreServer) -> None:
    unit_s = time_python_loop()
    events = f"{3 * STEPS * LAYERS:,}"
    browser.visit(server.url)
    started_s = time.process_time()
    browser.run("location.hash = '#/run?name=bad'")
    wait_long(browser, f"document.querySelector('#nonfinite .pill') && {FULL}")
    assert (time.process_time() - started_s) / unit_s < 40
    browser.run("location.hash = '#/runs'")
    browser.wait_for("document.querySelector('#shown')?.textContent.endsWith('runs')")
    shown = "document.querySelector('#shown')?.textContent"

    assert (
        find_slow(
            meter,
            {
                "open": ("location.hash = '#/run?name=bad'", f"{shown} === '{events} tensors' && {FULL}"),
                "scroll to the end": (
                    f"{GRID}.scrollTop = 1e9",
                    f"{FULL} && document.querySelector('.row[data-full=true][id$=\"-{3 * STEPS * LAYERS - 1}\"]')",
                ),
                "scroll to the middle": (f"{GRID}.scrollTop = 700000", FULL),
                "filter": (type_into("main input[type=search]", "output layers.77"), f"{shown}.startsWith('150 of')"),
                "all again": (type_into("main input[type=search]", ""), f"{shown} === '{events} tensors' && {FULL}"),
                "a step": ("document.querySelector('#next-step').click()", f"{shown}.startsWith('336 of') && {FULL}"),
                "a row": (
                    "document.querySelector('.row').click()",
                    "document.querySelector('#event td')",
                ),
            },
        )
        == {}
    )
    assert browser.run("document.querySelectorAll('.row').length") < 60
    assert browser.complaints == []


def test_the_server_forgets_what_is_beyond_its_limit(server: StoreServer) -> None:
    api = server._api

    def read_all() -> None:
        for name in ("large/a", "large/b") * 3:
            facts = next(each for each in api._listing.read().facts if each.snapshot.name == name)
            api._read_outline(facts.snapshot)

    assert measure_rise_kib(read_all) < 256 << 10  # KiB
    assert api._outlines.size <= 400_000
