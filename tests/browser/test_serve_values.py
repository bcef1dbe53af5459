"""What is easily shown wrong: NaN, infinities, booleans, large integers, no values, many metrics, and resumed runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pytest
import torch

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import NAMES, ROWS, show

pytestmark = pytest.mark.timeout(900)

NAN, INF = math.nan, math.inf
DONE: Final = "!document.querySelector('progress')"
# A copy is read: the browser warns if a canvas of the page is read several times.
PIXEL: Final = (
    "((canvas, column) => {{ const copy = new OffscreenCanvas(canvas.width, canvas.height);"
    " const context = copy.getContext('2d', {{willReadFrequently: true}}); context.drawImage(canvas, 0, 0);"
    " return [...context.getImageData(column, 0, 1, 1).data].join(); }})(document.querySelector({place}), {column})"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    """Two runs: in `odd/`, tensors of all kinds become NaN or infinite; `wild/` has metrics of very different sizes."""
    with holdfast.open(tmp_path_factory.mktemp("values") / "ckpts") as made:
        odd: dict[str, object] = {
            "mask": torch.tensor([[True, False], [False, True]]),
            "large": torch.tensor([[-(2**45) - 1, 7]]),
            "bad": torch.tensor([[1.0, NAN], [INF, -INF]]),
            "nothing": torch.zeros(0, 4),
            "waves": torch.ones(3, dtype=torch.complex64),
        }
        for step, loss in ((1, 1.0), (2, "nan"), (3, "inf")):
            layers = {str(layer): {"w": torch.full((4, 4), 1.0 + (step - 1) * (1 + layer))} for layer in range(4)}
            layers["2"]["w"][0, 0] = NAN if step > 1 else 1.0
            layers["3"]["w"] *= step > 1
            made.save(f"odd/step-{step}", {**odd, "layers": layers}, metadata={"metrics": {"loss": loss}})
        for step in (0, 1, 2):
            metrics = {f"metric/{number}": 10.0**number * (step + 1) for number in range(-15, 15)}
            made.save(f"wild/step-{step}", {"w": torch.ones(3)}, metadata={"metrics": metrics})
        yield made


def open_tensor(page: Browser, leaf: str, condition: str) -> None:
    show(page, "#/tensor?" + urlencode({"name": "odd/step-1", "leaf": leaf}), condition)


def read_values(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#values td.num')].map((cell) => cell.textContent)")
    return found


@pytest.mark.slow
def test_booleans_are_true_or_false(page: Browser) -> None:
    open_tensor(page, "mask", "document.querySelector('#values td')")

    assert read_values(page) == ["true", "false", "false", "true"]


def test_integers_have_all_their_digits(page: Browser) -> None:
    open_tensor(page, "large", "document.querySelector('#values td') && document.querySelector('#stats td')")

    assert read_values(page) == ["-35,184,372,088,833", "7"]
    assert page.run("document.querySelector('#stats td').textContent") == "-35,184,372,088,833"


def test_what_is_not_finite_has_a_colour_that_is_explained(page: Browser) -> None:
    open_tensor(page, "bad", "document.querySelector('#heat canvas') && document.querySelector('#values td')")
    good, bad = (page.run(PIXEL.format(place="'#heat canvas'", column=column)) for column in (0, 1))

    assert good != bad
    swatch = page.run("getComputedStyle(document.querySelector('.legend .swatch')).backgroundColor")
    assert swatch == f"rgb({', '.join(bad.split(',')[:3])})"
    assert "NaN or infinite" in page.run("document.querySelector('.legend').textContent")


@pytest.mark.slow
def test_a_tensor_without_values_is_no_error(page: Browser) -> None:
    open_tensor(page, "nothing", "document.querySelector('#heat').textContent && document.querySelector('#stats td')")

    assert page.run("document.querySelector('#heat').textContent") == "The tensor has no values."
    assert page.run("document.querySelector('#histogram').textContent") == "The tensor has no values."
    assert page.run("document.querySelector('.alarm')") is None


@pytest.mark.slow
def test_complex_numbers_are_said_to_be_magnitudes(page: Browser) -> None:
    open_tensor(page, "waves", "document.querySelector('#stats td')")

    assert "magnitudes" in page.run("document.querySelector('#facts-line').textContent")


@pytest.mark.slow
def test_a_map_says_which_dims_it_shows(page: Browser) -> None:
    open_tensor(page, "bad", "document.querySelector('#heat canvas')")

    assert (
        page.run("document.querySelector('#heat .help').textContent") == "Down: dim 0, 0 to 1. Across: dim 1, 0 to 1."
    )


def test_tensors_that_became_nan_or_were_zero_are_the_first_of_the_changes(page: Browser) -> None:
    show(page, "#/compare?a=odd/step-1&b=odd/step-2", f"{NAMES}.length === 4 && {DONE}")
    cells = page.run(f"{ROWS}.map((row) => [...row.children].map((cell) => cell.textContent))")
    found = {cell[1]: cell for cell in cells}

    assert {cell[1] for cell in cells[:2]} == {"layers.2.w", "layers.3.w"}
    assert found["layers.2.w"][3] == "values, NaN 0 → 1"
    assert found["layers.2.w"][4] == "NaN"
    assert found["layers.3.w"][4] == "inf"


@pytest.mark.slow
def test_the_map_of_changes_marks_a_layer_that_became_nan(page: Browser) -> None:
    show(page, "#/compare?a=odd/step-1&b=odd/step-2", f"document.querySelector('#layers canvas') && {DONE}")
    colors = [page.run(PIXEL.format(place="'#layers canvas'", column=column)) for column in range(4)]

    assert len(set(colors)) == 4 - 1  # the layer that was zero has the strongest colour, as the second one has
    assert "NaN or infinite in one of the two" in page.run("document.querySelector('.legend').textContent")
    page.run("document.querySelector('#layers canvas').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        page.press(key)
    assert "relative L2 NaN" in page.run("document.querySelector('#tip').textContent")
    page.press("Escape")
    assert page.run("document.querySelector('#tip').hidden")


@pytest.mark.slow
def test_the_scale_of_a_map_has_the_colours_of_its_cells(page: Browser) -> None:
    show(page, "#/compare?a=odd/step-1&b=odd/step-2", f"document.querySelector('#layers canvas') && {DONE}")

    ends = [page.run(PIXEL.format(place="'.scale'", column=column)) for column in (0, 23)]
    assert ends == [page.run(PIXEL.format(place="'#layers canvas'", column=column)) for column in (0, 1)]


@pytest.mark.slow
def test_equal_snapshots_are_said_to_be_equal(page: Browser) -> None:
    show(page, "#/compare?a=wild/step-0&b=wild/step-1", "document.activeElement.matches('.grid')")

    assert page.run("document.querySelector('#progress').textContent") == "The snapshots are equal"


@pytest.mark.slow
def test_movement_says_that_values_became_nan(page: Browser) -> None:
    show(page, "#/movement?filter=odd/&leaves=layers.", f"document.querySelector('#moves canvas') && {DONE}")
    page.run("document.querySelector('#moves canvas').focus()")
    for key in ("ArrowDown", "ArrowDown"):
        page.press(key)

    assert "values became NaN or infinite" in page.run("document.querySelector('#tip').textContent")
    assert "values became NaN or infinite" in page.run("document.querySelector('.legend').textContent")


def test_a_metric_that_is_nan_is_marked_in_the_plot_the_tile_and_the_table(page: Browser) -> None:
    show(page, "#/snapshots?filter=odd/&metric=loss", f"{NAMES}.length === 3 && document.querySelector('.origin-text')")

    texts = "[...document.querySelectorAll('#timeline .origin-text')].map((node) => node.textContent)"
    assert page.run(texts) == ["NaN", "inf"]
    assert page.run("document.querySelector('.metric[data-metric=loss] strong').textContent") == "inf"
    column = "[...document.querySelector('.head').children].findIndex((cell) => cell.dataset.key === 'number-loss')"
    assert page.run(f"{ROWS}.map((row) => row.children[{column}].textContent)") == ["inf", "NaN", "1"]


@pytest.mark.slow
def test_every_metric_can_be_plotted(page: Browser) -> None:
    show(page, "#/snapshots?filter=wild/", "document.querySelectorAll('#more-numbers option').length > 1")
    assert page.run("document.querySelectorAll('#more-numbers option').length") == 1 + 30 - 7
    page.run(
        "(() => { const list = document.querySelector('#more-numbers'); list.value = 'metric/14';"
        " list.dispatchEvent(new Event('change')); })()"
    )

    assert page.run("document.querySelector('.metric[aria-pressed=true]').dataset.metric") == "metric/14"
    assert "metric%2F14" in page.run("location.hash")
    assert page.run("document.querySelector('#timeline .axis-name').textContent") == "metric/14"


@pytest.mark.slow
def test_a_plot_is_logarithmic_if_wanted_and_the_address_says_so(page: Browser) -> None:
    show(page, "#/snapshots?filter=wild/", "document.querySelector('#timeline svg')")
    page.click("#log")
    assert "log=true" in page.run("location.hash")
    assert page.run("document.querySelector('#timeline .axis-name').textContent").endswith(", logarithmic")

    show(page, "#/snapshots?filter=odd/", "document.querySelector('#log[aria-pressed=false]')")
    show(page, "#/snapshots?filter=wild/&log=true", "document.querySelector('#log[aria-pressed=true]')")


@pytest.mark.slow
def test_steps_have_no_fractions(page: Browser) -> None:
    show(page, "#/snapshots?filter=wild/&by=step", "document.querySelector('#timeline svg')")
    ticks = "[...document.querySelectorAll('#timeline text[text-anchor=middle]')].map((node) => node.textContent)"

    assert page.run(ticks) == ["0", "1", "2"]


@pytest.mark.slow
def test_a_filter_without_match_or_with_a_mistake_leaves_no_large_empty_table(page: Browser) -> None:
    show(page, "#/snapshots?filter=nobody", "document.querySelector('.none')?.checkVisibility()")
    assert page.run("document.querySelector('.grid').offsetHeight") < 250
    show(page, "#/snapshots?filter=loss+<+<+3", "document.querySelector('.alarm')")
    assert not page.run("document.querySelector('.grid').checkVisibility()")
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]


def test_a_new_store_is_empty_and_not_damaged(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "new") as store, store.serve() as server:
        browser.visit(server.url)
        show(browser, "#/health", "document.querySelector('#verdict-line .pill')")

        assert browser.run("document.querySelector('#verdict-line').textContent") == "Empty Nothing was saved yet."


def test_a_snapshot_with_a_damaged_record_is_said_to_be_damaged(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"w": torch.ones(3)})
        (record,) = (each for each in (tmp_path / "store/snapshots").rglob("*") if each.is_file())
        record.chmod(0o644)
        record.write_bytes(record.read_bytes().replace(b"logical", b"logicat"))
        with store.serve() as server:
            browser.visit(server.url)
            browser.wait_for("document.querySelector('#shown a')")
            assert browser.run("document.querySelector('#shown').textContent") == "0 snapshots; 1 damaged: see Health"
            show(browser, "#/snapshot?name=a", "document.querySelector('.alarm')")

            assert "is damaged" in browser.run("document.querySelector('.alarm').textContent")


def test_a_damaged_manifest_does_not_hide_the_sizes_of_other_snapshots(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for step in (1, 2):
            store.save(f"run/step-{step}", {"w": torch.full((300,), float(step))})
        manifest = min(each for each in (tmp_path / "store/manifests").rglob("*") if each.is_file())
        data = bytearray(manifest.read_bytes())
        data[len(data) // 2] ^= 1
        manifest.chmod(0o644)
        manifest.write_bytes(data)
        with store.serve() as server:
            browser.size(1440, 1000)
            browser.visit(server.url)
            new = f"{ROWS}.map((row) => row.children[5].textContent)"
            browser.wait_for(f"{new}.filter(Boolean).length === 2")
            cells = browser.run(new)

    assert sorted(cells)[1] == "damaged"
    assert sorted(cells)[0].endswith("KiB")
    assert browser.complaints == []


@pytest.mark.parametrize("place", ["#timeline", "#lineage"])
@pytest.mark.slow
def test_a_plot_keeps_the_focus_when_a_new_snapshot_appears(browser: Browser, tmp_path: Path, place: str) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for step in (1, 2):
            store.save(f"base/step-{step}", {"w": torch.ones(3)}, metadata={"metrics": {"loss": 1.0}})
            store.load(f"base/step-{step}")
        with store.serve() as server:
            browser.visit(server.url)
            browser.wait_for(f"{NAMES}.length === 2 && document.querySelector('{place} svg')")
            browser.run(f"document.querySelector('{place} svg').focus()")
            store.save("base/step-3", {"w": torch.ones(3)}, metadata={"metrics": {"loss": 1.0}})
            browser.wait_for(f"{NAMES}.length === 3 && document.querySelectorAll('#links li').length > 1")

            assert browser.run(f"document.querySelector('{place} svg') === document.activeElement")


def test_a_name_on_a_plot_is_text(browser: Browser, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=document.title='owned'>"
    with holdfast.open(tmp_path / "store") as store:
        for name in (f"{hostile}a-1", f"{hostile}b-2"):
            store.save(name, {"w": torch.ones(3)}, metadata={"metrics": {hostile: "nan"}})
            store.load(name)
        with store.serve() as server:
            browser.visit(server.url)
            browser.wait_for(f"document.querySelector('#lineage svg') && {NAMES}.length === 2")

            assert browser.run("document.querySelectorAll('img').length") == 0
            assert hostile in browser.run("document.querySelector('#lineage').textContent")
