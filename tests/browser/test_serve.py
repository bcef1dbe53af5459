"""The page of `holdfast serve` in a real browser: every view opens, sorts, filters, links and goes back, in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

import holdfast
from holdfast.serving.server import StoreServer
from tests.browser.chromium import Browser
from tests.browser.looking import NAMES, ROWS, SHOWN, fill, show
from tests.browser.stores import make_store
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.recordings import Recording, write_recorded
from tests.kit.thinning import thin

# The first of them may have to install the browser.
pytestmark = pytest.mark.timeout(900)

A: Final = "llama/base/step-400"
B: Final = "llama/base/step-1200"
LEAF: Final = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with make_store(tmp_path_factory.mktemp("serve") / "ckpts") as made:
        yield made


@pytest.fixture(scope="module")
def server(store: holdfast.Store) -> Iterator[StoreServer]:
    with store.serve() as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: StoreServer) -> Iterator[Browser]:
    """The list of snapshots; a test that leaves a complaint, or a request to elsewhere, has failed."""
    browser.size(1440, 1000)
    browser.emulate(scheme="light")
    browser.visit("about:blank")
    browser.visit(server.url)
    browser.wait_for(f"{ROWS}.length > 10")
    yield browser
    base = server.url.partition("#")[0]
    assert browser.complaints == []
    assert [each for each in browser.requests if not each.startswith(base)] == []


def test_the_token_leaves_the_address(page: Browser, server: StoreServer) -> None:
    assert "token" not in page.run("location.href")
    assert page.run("document.title").startswith("Snapshots")


def test_snapshots_are_listed_plotted_and_measured(page: Browser) -> None:
    assert page.run(SHOWN) == "27 snapshots"
    assert page.run(f"{NAMES}[0]") == "llama/finetune/step-1500"
    assert page.run("document.querySelectorAll('#timeline .line[d]').length") >= 3
    assert page.run("[...document.querySelectorAll('.metric')].map((tile) => tile.dataset.metric)")[:3] == [
        *("loss", "val_loss"),
        "grad_norm",
    ]
    page.wait_for("document.querySelector('.row .num:nth-child(6)').textContent.includes('iB')")


def test_the_table_is_sorted_and_the_address_says_so(page: Browser) -> None:
    page.click("[data-key=name] button")
    page.wait_for(f"{NAMES}[0] === 'llama/base/step-100'")

    assert "sort=name" in page.run("location.hash")
    assert page.run("document.querySelector('[data-key=name]').getAttribute('aria-sort')") == "ascending"


@pytest.mark.parametrize(
    ("text", "number"), thin([("loss < 1.5", 5), ("tag = 'best'", 1), ("llama/finetune/", 3), ("*/*/step-?00", 18)])
)
def test_the_filter_box_takes_conditions_and_globs(page: Browser, text: str, number: int) -> None:
    page.run("document.querySelector('#filter').focus()")
    page.type(text)

    page.wait_for(f"{SHOWN} === '{number} snapshot{'' if number == 1 else 's'}'")
    assert page.run("new URLSearchParams(location.hash.split('?')[1]).get('filter')") == text


@pytest.mark.slow
def test_a_mistake_in_a_condition_is_a_sentence_with_its_place(page: Browser) -> None:
    fill(page, "#filter", "loss < < 3")
    page.wait_for("document.querySelector('.alarm')")

    assert page.run("document.querySelector('.alarm .sentence').textContent").endswith(".")
    assert page.run("document.querySelector('.alarm mark').textContent") == "<"
    # The browser itself reports a request that was refused.
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]


@pytest.mark.slow
def test_an_address_opens_the_same_view_again(page: Browser, server: StoreServer) -> None:
    address = server.url.partition("#")[0] + "#/snapshots?filter=finetune&sort=-step&metric=val_loss&by=time"
    page.visit("about:blank")
    page.visit(address)
    page.wait_for(f"{ROWS}.length === 3")

    assert page.run(f"{NAMES}[0]") == "llama/finetune/step-1500"
    assert page.run("document.querySelector('.metric[aria-pressed=true]').dataset.metric") == "val_loss"
    assert page.run("document.querySelector('[data-by=time]').getAttribute('aria-pressed')") == "true"


def test_keys_open_a_snapshot_its_layers_and_a_tensor_and_the_way_back(page: Browser) -> None:
    page.wait_for("document.activeElement.matches('.grid')")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait_for("document.querySelector('h1')?.textContent === 'llama/finetune/step-1400'")
    page.wait_for("document.activeElement.matches('.grid')")
    assert page.run(SHOWN) == "15 lines for 54 leaves"
    page.press("ArrowDown")
    page.press("Enter")
    page.wait_for(f"{NAMES}.length === 6 && document.activeElement.matches('.grid')")
    assert page.run(f"{NAMES}[0]") == "model.layers.0.attn.q_proj.weight"
    page.press("Enter")
    page.wait_for("document.querySelector('#histogram svg') && document.querySelector('#heat canvas')")
    assert page.run("document.querySelector('#facts-line').textContent") == "float32 (64, 64), 4,096 values, 16.0 KiB"
    page.run("history.back()")
    page.wait_for(f"location.hash.includes('fold') && {NAMES}.length === 6")
    page.run("history.back()")
    page.wait_for(f"!location.hash.includes('fold') && {NAMES}.length === 15")
    page.run("history.back()")
    page.wait_for(f"location.hash.startsWith('#/snapshots') && {ROWS}.length > 10")


@pytest.mark.slow
def test_two_snapshots_are_chosen_with_keys_and_compared(page: Browser) -> None:
    page.wait_for("document.activeElement.matches('.grid')")
    page.press(" ")
    page.press("ArrowDown")
    page.press(" ")
    page.wait_for("document.querySelector('#compare')")
    page.click("#compare")
    page.wait_for("document.querySelector('#layers canvas') && !document.querySelector('progress')")

    assert page.run("document.querySelector('#side-a').value") == "llama/finetune/step-1500"
    assert page.run("document.querySelector('#counts-row strong').textContent") != "0"


@pytest.mark.slow
def test_changes_are_sorted_filtered_and_opened(page: Browser) -> None:
    show(page, f"#/compare?a={A}&b={B}", f"{ROWS}.length > 10 && !document.querySelector('progress')")
    assert page.run(f"{NAMES}[0]") == "model.layers.5.mlp.down_proj.weight"
    page.click("[data-key=name] button")
    page.wait_for(f"{NAMES}[0] === 'model.layers.0.attn.k_proj.weight'")
    fill(page, "input[type=search]", "norm layers.2")
    page.wait_for(f"{NAMES}.length === 1")
    page.run("document.querySelector('.grid').focus()")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#stats thead th').length === 2 && document.querySelector('.steps-b')")

    assert page.run("document.querySelector('h1').textContent") == "model.layers.2.norm.weight"
    page.run("history.back()")
    page.wait_for(f"location.hash.includes('filter=norm') && {NAMES}.length === 1")


@pytest.mark.slow
def test_a_cell_of_the_map_of_layers_opens_its_tensor(page: Browser) -> None:
    show(
        page,
        f"#/compare?a={A}&b={B}",
        "document.querySelector('#layers canvas') && !document.querySelector('progress')",
    )
    page.run("document.querySelector('#layers canvas').focus()")
    page.press("ArrowRight")
    page.press("ArrowDown")
    assert "model.layers.1.attn.k_proj.weight" in page.run("document.querySelector('#tip').textContent")
    page.press("Enter")

    page.wait_for("location.hash.includes('leaf=model.layers.1.attn.k_proj.weight')")


def test_a_tensor_is_zoomed_by_index_and_by_click(page: Browser) -> None:
    show(page, f"#/tensor?name={B}&leaf={LEAF}", "document.querySelector('#values td')")
    page.run("document.querySelector('#index').focus()")
    page.type("2, 10:14")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#values td.num').length === 4")
    assert "index=2" in page.run("location.hash")
    page.click("#whole")
    page.wait_for("document.querySelectorAll('#values td.num').length === 144")
    page.click("#heat canvas")
    page.wait_for("document.querySelector('#index').value.includes(':')")


@pytest.mark.slow
def test_a_wrong_index_is_a_sentence(page: Browser) -> None:
    show(page, f"#/tensor?name={B}&leaf={LEAF}&index=99", "document.querySelector('.alarm')")

    assert page.run("document.querySelector('.alarm').textContent") == "Index 99 is outside of a dim of size 64."
    page.complaints[:] = [each for each in page.complaints if "400 (Bad Request)" not in each]


def test_two_recorded_runs_are_compared_and_the_report_opens(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for recording in (Recording("good"), Recording("bad", is_bad=True)):
            write_recorded(store.repository, recording)
        with store.serve() as server:
            browser.size(1440, 1000)
            browser.visit(server.url)
            show(browser, "#/runs", f"{NAMES}.length === 2 && document.activeElement.matches('.grid')")
            browser.press(" ")
            browser.press("ArrowDown")
            browser.press(" ")
            browser.wait_for("document.querySelector('#compare')")
            browser.click("#compare")
            browser.wait_for("document.querySelector('#report')")
            assert "layers.1" in browser.run("document.querySelector('#comparison h1').textContent")
            browser.click("#report")
            browser.wait_for("location.pathname.startsWith('/report/') && document.querySelector('#verdict h1')")
            assert "layers.1" in browser.run("document.querySelector('#verdict h1').textContent")
            browser.run("history.back()")
            browser.wait_for("location.hash.includes('a=') && document.querySelector('#report')")

    assert browser.complaints == []


def test_compiled_graphs_are_listed_and_a_miss_is_explained(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        for seed in "ab":
            store_artifact(store.repository, make_artifact(seed))
        with store.serve() as server:
            browser.size(1440, 1000)
            browser.visit(server.url)
            show(browser, "#/cache", f"{NAMES}.length === 2 && document.activeElement.matches('.grid')")
            browser.press("Enter")
            browser.wait_for("document.querySelector('#why pre')")
            assert "missed: " in browser.run("document.querySelector('#why pre').textContent")
            assert "key=" in browser.run("location.hash")

    assert browser.complaints == []


def test_health_checks_the_structure_and_then_every_byte(page: Browser) -> None:
    show(page, "#/health", "document.querySelector('#verdict-line .pill')")
    assert page.run("document.querySelector('#verdict-line').textContent").startswith("Healthy Checked 27 snapshots")
    assert "No process is saving." in page.run("document.querySelector('#activity').textContent")
    page.click("[data-read=true]")

    page.wait_for("document.querySelector('#verdict-line').textContent.includes('were read')")


@pytest.mark.parametrize(
    ("address", "sentence"),
    thin(
        [
            ("#/snapshot?name=nobody", "There is no snapshot or tag 'nobody'; it may have been deleted."),
            ("#/compare?a=nobody&b=best", "There is no snapshot or tag 'nobody'; it may have been deleted."),
            ("#/tensor?name=best&leaf=nobody", "No leaf 'nobody' in"),
            ("#/nothing", "There is no such view: choose one above."),
        ]
    ),
)
def test_what_is_not_there_is_a_sentence(page: Browser, address: str, sentence: str) -> None:
    show(page, address, "document.querySelector('.alarm')")

    assert page.run("document.querySelector('.alarm').textContent").startswith(sentence)
    page.complaints[:] = [each for each in page.complaints if "404 (Not Found)" not in each]


def test_without_the_token_the_page_says_what_to_do(browser: Browser, server: StoreServer) -> None:
    base = server.url.partition("#")[0]
    browser.visit("about:blank")
    browser.visit(base + "#/snapshots")
    browser.run("localStorage.clear()")
    browser.visit("about:blank")
    browser.visit(base + "#/snapshot?name=best")
    browser.wait_for("document.querySelector('.alarm')")

    assert "open the address that `holdfast serve` printed" in browser.run("document.body.textContent")


@pytest.mark.parametrize(
    ("view", "some"),
    [
        ("#/snapshots", ["By time", "How far each layer moves"]),
        ("#/sharing", ["Compute again", "Bytes that each two of 27", "Metric of the best", "Plan"]),
        (
            "#/movement?filter=llama/base/",
            ["Which tensors", "Measure", "How far each of 7 layers", "Tensors of this layer"],
        ),
    ],
)
@pytest.mark.slow
def test_every_control_is_reached_by_tab_and_has_a_name(page: Browser, view: str, some: list[str]) -> None:
    show(page, view, "document.querySelector('.row .name, #moves canvas') && !document.querySelector('progress')")
    seen: list[str] = []
    for _ in range(48):
        page.press("Tab")
        name = page.run(
            "(() => { const node = document.activeElement, label = node.labels?.[0]?.textContent;"
            " return node === document.body ? '' : node.tagName + ' ' +"
            " (node.getAttribute('aria-label') || label || node.textContent || node.placeholder); })()"
        )
        assert name == "" or len(name.split(" ", 1)[1].strip()) > 0, name
        seen.append(name)

    assert any(name.startswith("INPUT") for name in seen)
    for text in (*some, "System theme"):
        assert any(text in name for name in seen), text


HOSTILE: Final = "<img src=//evil.example/x onerror=document.title='owned'><script>document.title='owned'</script>"


def test_markup_in_every_name_and_value_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        older, name = (f"{HOSTILE.replace('/', '-')}{number}" for number in (1, 2))
        for number, each in enumerate((older, name), 1):
            tree = {
                HOSTILE: torch.full((4, 4), float(number)),
                "text": HOSTILE,
                "deep": {f"{HOSTILE}.{at}.x": torch.ones(2) * number * at for at in range(4)},
            }
            store.save(each, tree, metadata={HOSTILE: HOSTILE, "metrics": {HOSTILE: float(number)}})
        store.tag(HOSTILE.replace("/", "-"), name)
        with store.serve() as server:
            base = server.url.partition("#")[0]
            browser.size(1440, 1000)
            browser.visit(server.url)
            browser.wait_for(f"{NAMES}.length === 2")
            browser.run(f"location.hash = '#/snapshot?' + new URLSearchParams({{name: {json.dumps(name)}}})")
            browser.wait_for(f"{NAMES}.length > 2")
            leaf = json.dumps({"name": name, "leaf": HOSTILE})
            browser.run(f"location.hash = '#/tensor?' + new URLSearchParams({leaf})")
            browser.wait_for("document.querySelector('#values td')")
            both = json.dumps({"a": older, "b": name})
            browser.run(f"location.hash = '#/compare?' + new URLSearchParams({both})")
            browser.wait_for(f"{NAMES}.length > 3 && document.querySelector('#layers canvas')")

            assert HOSTILE in browser.run(NAMES)
            chosen = json.dumps({"with": name, "prefix": HOSTILE.replace("/", "-"), "keep_last": "1"})
            browser.run(f"location.hash = '#/sharing?' + new URLSearchParams({chosen})")
            browser.wait_for("document.querySelector('#shares-head a') && document.querySelector('#pairs canvas')")
            browser.run("document.querySelector('#plan').previousElementSibling.requestSubmit()")
            browser.wait_for("document.querySelector('#plan .row .name')")
            browser.run("location.hash = '#/movement?by=leaf'")
            browser.wait_for("document.querySelector('#moves canvas') && document.querySelector('#tip')")
            browser.run("document.querySelector('#moves canvas').focus()")
            browser.press("ArrowDown")

            assert "<img src=" in browser.run("document.querySelector('#tip').textContent")
            assert browser.run("document.querySelectorAll('img, iframe, main script').length") == 0
            assert "owned" not in browser.run("document.title").replace("'owned'", "")
            assert [each for each in browser.requests if not each.startswith(base)] == []
            assert browser.complaints == []


@pytest.mark.slow
def test_a_store_that_is_deleted_or_damaged_while_it_is_looked_at(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"w": torch.randn(600, 600)})
        with store.serve() as server:
            browser.visit(server.url)
            browser.wait_for(f"{NAMES}.length === 1")
            for pack in (each for each in (tmp_path / "store/packs").rglob("*") if each.is_file()):
                data = bytearray(pack.read_bytes())
                data[len(data) // 3] ^= 1
                pack.chmod(0o644)
                pack.write_bytes(data)
            browser.run("location.hash = '#/tensor?name=a&leaf=w'")
            browser.wait_for("document.querySelector('.alarm')")
            damaged = browser.run("document.querySelector('.alarm').textContent")
            shutil.rmtree(tmp_path / "store")
            browser.wait_for("document.querySelector('#live').textContent.length > 10")
            gone = browser.run("document.querySelector('#live').textContent")

    assert "w" in damaged
    assert damaged.endswith(".")
    assert "gone" in gone


@pytest.mark.slow
def test_a_server_that_has_ended_is_a_sentence(browser: Browser, tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"w": torch.ones(3)})
        with store.serve() as server:
            browser.visit(server.url)
            browser.wait_for(f"{NAMES}.length === 1")
        browser.wait_for("document.querySelector('#live').textContent.includes('does not answer')")
