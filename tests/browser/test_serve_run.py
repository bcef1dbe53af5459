"""The view of one recorded run: its facts, its first NaN or Inf, and its tensors, by mouse, keys and addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import CONTRAST, NAMES, ROWS, SHOWN, fill, serving, show
from tests.kit.recordings import Recording, write_recorded
from tests.kit.thinning import thin

pytestmark = pytest.mark.timeout(900)

HOSTILE: Final = "<img src=//evil.example/x onerror=document.title='owned'>"
NAN: Final = "document.querySelector('#nonfinite .pill')?.textContent"
ACTIVE: Final = "document.querySelector('.row.on .name')?.textContent"
EVENT: Final = "document.querySelector('#event h3')?.textContent"
FOCUSED: Final = "document.activeElement.matches('.grid')"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path_factory.mktemp("runs") / "store") as made:
        settings = {"torch": "2.9", "host": "gpu-07"}
        for recording in (
            Recording(
                "bad", is_bad=True, level="stats", hole=math.nan, steps=4, environment=settings, notes=("a note",)
            ),
            Recording("digests", is_bad=True, level="digest", hole=math.nan),
            Recording("good", level="stats", steps=40, layers=4, first_step=10),
            Recording(HOSTILE.replace("/", "-"), is_bad=True, level="stats", hole=math.inf, stem=HOSTILE),
        ):
            write_recorded(made.repository, recording)
        yield made


def open_run(page: Browser, query: str) -> None:
    """Go to a run by its address; wait for its rows and for what is known of NaN."""
    show(page, f"#/run?{query}", f"{NAN} && {ROWS}.length && {FOCUSED}")


def test_a_run_opens_from_the_list_by_its_name_and_back_returns(page: Browser) -> None:
    show(page, "#/runs", f"{NAMES}.length === 4")

    page.click(".row[data-at='1'] a")
    page.wait_for(f"{NAN} && {ROWS}.length")

    assert page.run("location.hash") == "#/run?name=bad"
    assert page.run("document.querySelector('h1').textContent") == "bad"
    assert page.run("document.title") == "bad \u00b7 Run \u00b7 Holdfast"
    about = page.run("document.querySelector('#about').textContent")
    for text in ("complete", "Steps4from 0 to 3", "Tensors36with statistics", "Ranks1all recorded", "Note: a note"):
        assert text in about
    assert "gpu-07" in about
    assert page.run("document.querySelector('details').open") is False
    page.run("history.back()")
    page.wait_for(f"location.hash === '#/runs' && {NAMES}.length === 4")


def test_the_first_nan_leads_to_its_row_and_back_returns(page: Browser) -> None:
    open_run(page, "name=bad")
    assert page.run(NAN) == "Found"
    assert "step 1, forward, layers.1: output is not finite" in page.run(
        "document.querySelector('#nonfinite').textContent"
    )

    page.click("#nan-row")
    page.wait_for(f"{EVENT} === 'layers.1' && {ACTIVE} === 'layers.1'")

    assert page.run("location.hash") == "#/run?name=bad&step=1&row=6"
    cells = page.run("[...document.querySelector('.row.on').children].map((cell) => cell.textContent)")
    assert cells[:5] == ["1", "output", "layers.1", "float32", "(3, 4)"]
    assert cells[5:7] == ["0.25", "4.75"]
    assert cells[-2:] == ["1", "0"]
    assert "model.py:7" in page.run("document.querySelector('#event').textContent")
    page.run("history.back()")
    page.wait_for(f"location.hash === '#/run?name=bad' && {SHOWN} === '36 tensors'")


def test_a_row_is_opened_by_its_address_before_the_browser_tells_the_width_of_the_table(page: Browser) -> None:
    page.run(
        "window.ResizeObserver = class extends ResizeObserver"
        " { constructor(told) { super((...entries) => setTimeout(() => told(...entries), 1000)); } }, null"
    )

    show(page, "#/run?name=bad&step=1&row=6", f"{EVENT} === 'layers.1' && {ACTIVE} === 'layers.1'")


@pytest.mark.parametrize(
    ("name", "verdict", "sentence"),
    [
        ("good", "None", "no NaN found, and no infinity was produced"),
        ("digests", "Not known", "27 tensors were recorded by digest only"),
    ],
)
def test_without_a_nan_the_page_says_what_is_known(page: Browser, name: str, verdict: str, sentence: str) -> None:
    open_run(page, f"name={name}")

    assert page.run(NAN) == verdict
    assert sentence in page.run("document.querySelector('#nonfinite').textContent")
    assert page.run("document.querySelector('#nan-row')") is None
    numbers = page.run(f"{ROWS}[0].children[9].textContent")
    assert numbers == ("" if name == "digests" else "0")


@pytest.mark.slow
def test_steps_and_filters_are_chosen_and_are_in_the_address(page: Browser) -> None:
    open_run(page, "name=good")
    assert page.run(SHOWN) == "480 tensors"
    assert page.run("document.querySelector('#previous-step').disabled")

    page.click("#next-step")
    page.wait_for(f"{SHOWN} === '12 of 480 tensors'")
    assert page.run("document.querySelector('#step').value") == "10"
    page.click("#next-step")
    page.wait_for(
        "document.querySelector('#step').value === '11' && !document.querySelector('#previous-step').disabled"
    )
    fill(page, "input[type=search]", "output layers.2")
    page.wait_for(f"{SHOWN} === '1 of 480 tensors'")
    assert page.run("location.hash") == "#/run?name=good&step=11&filter=output+layers.2"
    page.click("#every-step")
    page.wait_for(f"{SHOWN} === '40 of 480 tensors'")
    assert set(page.run(NAMES)) == {"layers.2"}
    fill(page, "input[type=search]", "nothing")
    page.wait_for("document.querySelector('.none').checkVisibility()")


@pytest.mark.slow
def test_an_address_opens_a_step_with_a_filter(page: Browser) -> None:
    open_run(page, "name=good&step=49&filter=parameter")

    assert page.run(NAMES) == [f"layers.{at}.weight" for at in range(4)]
    assert page.run(SHOWN) == "4 of 480 tensors"
    assert page.run("document.querySelector('#step').value") == "49"
    assert page.run("document.querySelector('#next-step').disabled")
    assert page.run("document.querySelector('input[type=search]').value") == "parameter"


@pytest.mark.slow
def test_a_run_is_used_by_keys_alone(page: Browser) -> None:
    show(page, "#/runs", f"{NAMES}.length === 4 && {FOCUSED}")
    page.press(" ")
    page.press("ArrowDown")
    page.press(" ")
    page.wait_for("document.querySelector('#compare')")
    page.press("Enter")
    page.wait_for(f"location.hash === '#/run?name=bad' && {NAN} && {ROWS}.length && {FOCUSED}")
    page.press("End")
    page.press("Enter")
    page.wait_for(f"{EVENT} === 'layers.2' && location.hash.endsWith('row=35')")
    page.press("/")
    page.wait_for("document.activeElement.type === 'search'")
    page.press("Tab")
    page.press("Tab")
    page.wait_for("document.activeElement.id === 'next-step'")
    for _ in range(4):
        page.press("Enter")
    page.wait_for(f"document.querySelector('#step').value === '3' && {SHOWN} === '9 of 36 tensors'")

    # The last step has no next one: the focus is not lost with the button.
    page.wait_for("document.activeElement.id === 'step'")


def test_markup_in_names_is_text(page: Browser) -> None:
    show(page, "#/runs", f"{NAMES}.length === 4")
    page.click(".row[data-at='0'] a")
    page.wait_for(f"{NAN} && {ROWS}.length")
    page.click("#nan-row")
    page.wait_for(f"{EVENT}?.startsWith('<img')")

    assert all(name.startswith("<img src=//evil") for name in page.run(NAMES))
    assert "<img src=//evil" in page.run("document.querySelector('#nonfinite').textContent")
    assert page.run("document.querySelectorAll('img, [onerror]').length") == 0
    assert page.run("document.title").startswith("<img")


@pytest.mark.parametrize(
    ("query", "sentence"),
    thin(
        [
            ("name=goood", "did you mean 'good'?"),
            ("name=good&step=x", "is not a whole number"),
            ("name=", "'name' is missing"),
        ]
    ),
)
def test_an_error_is_a_sentence(page: Browser, query: str, sentence: str) -> None:
    show(page, f"#/run?{query}", "document.querySelector('main .alarm')")

    told = page.run("document.querySelector('main .alarm').textContent")

    assert sentence in told
    assert told.endswith(".")
    page.complaints[:] = [each for each in page.complaints if "Failed to load resource" not in each]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_nothing_is_cut_on_a_telephone(page: Browser, scheme: str) -> None:
    page.size(420, 900)
    page.emulate(scheme=scheme)
    open_run(page, "name=bad&step=1&row=6")
    page.wait_for(EVENT)
    page.run("document.querySelector('summary').click()")

    assert page.run("document.documentElement.scrollWidth") <= 420
    assert page.run("[...document.querySelectorAll('.grid')].every((grid) => grid.scrollWidth <= grid.clientWidth + 1)")
    assert page.run("[...document.querySelectorAll('[data-key]')].map((head) => head.textContent)") == [
        *("Kind", "Name", "NaN", "Inf")
    ]
    assert page.run(CONTRAST) == []


@pytest.mark.slow
def test_a_run_that_is_being_recorded_grows_by_itself(browser: Browser, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = "document.querySelectorAll('#about .fact strong')[1]?.textContent"
    with holdfast.open(tmp_path / "store") as store, serving(browser, store) as page:
        page.run("window.here = true")
        with store.record("live", model, optimizer, level="stats", segment_steps=1):
            train()
            train()  # a segment ends when the next step begins
            show(page, "#/runs", f"{NAMES}.includes('live')")
            open_run(page, "name=live")
            assert page.run("document.querySelector('#status').textContent") == "unfinished"
            before = int(page.run(steps))
            for _ in range(3):
                train()
            page.wait_for(f"Number({steps}) > {before}")
        page.wait_for(f"document.querySelector('#status').textContent === 'complete' && {steps} === '5'")
        page.wait_for(f"{SHOWN} === document.querySelectorAll('#about .fact strong')[2].textContent + ' tensors'")
        assert page.run("window.here"), "the page was loaded again"
