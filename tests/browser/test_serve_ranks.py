"""A snapshot of four ranks in a real browser: who stored what, how tensors are cut, and where the pieces are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

import holdfast
from tests.browser.chromium import Browser
from tests.browser.looking import CONTRAST, NAMES, ROWS, show
from tests.browser.stores import add_sharded

pytestmark = pytest.mark.timeout(900)

NAME: Final = "fsdp/step-200"
CELLS: Final = f"{ROWS}.map((row) => [...row.children].map((cell) => cell.textContent))"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path_factory.mktemp("ranks") / "store") as made:
        add_sharded(made)
        yield made


def test_a_snapshot_shows_what_each_rank_stored_and_how_leaves_are_cut(page: Browser) -> None:
    show(page, f"#/snapshot?name={NAME}", "document.querySelectorAll('[aria-labelledby=ranks-title] .row').length >= 4")
    rows = page.run(
        "[...document.querySelectorAll('[aria-labelledby=ranks-title] .row:not([hidden])')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert sorted(row[0] for row in rows) == ["0", "1", "2", "3"]
    assert all("iB" in row[2] for row in rows)
    page.wait_for("document.querySelector('[aria-labelledby=leaves-title] .row .name')")
    cut = page.run(
        "Object.fromEntries([...document.querySelectorAll('[aria-labelledby=leaves-title] .row:not([hidden])')]"
        ".map((row) => [row.querySelector('.name').textContent, row.children[5].textContent]))"
    )
    assert cut["model.layers.#.attn.weight"] == "Shard(0)"
    assert cut["model.layers.#.up.weight"] == "Shard(1)"
    assert cut["model.layers.#.down.weight"] == "Shard(0), Shard(1)"
    assert cut["model.positions"] == "Replicate"
    assert cut["model.layers.#.norm"] == "one rank"
    assert cut["rng"] == "one each"
    page.click("[aria-labelledby=ranks-title] [data-key=new_bytes] button")
    page.wait_for("location.hash.includes('ranks=-new_bytes')")


def test_a_tensor_shows_its_pieces_and_one_of_them_is_opened(page: Browser) -> None:
    leaf = "model.layers.3.down.weight"
    show(page, f"#/tensor?name={NAME}&leaf={leaf}", f"document.querySelector('#piece-map rect') && {ROWS}.length === 4")

    assert page.run("document.querySelector('#cut').textContent") == (
        "Cut along dims 0, 1 into 2 x 2 pieces, as Shard(0), Shard(1) on a mesh of 2 x 2 does."
    )
    assert page.run("document.querySelectorAll('#piece-map rect').length") == 4
    assert page.run(NAMES) == ["(0, 0)", "(0, 32)", "(128, 0)", "(128, 32)"]
    page.run("document.querySelector('.grid').focus()")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait_for("document.querySelector('#index').value === '0:128, 32:64'")


@pytest.mark.slow
def test_new_and_reused_pieces_are_told_apart(page: Browser) -> None:
    for leaf, is_new in (("model.layers.3.attn.weight", True), ("model.layers.0.attn.weight", False)):
        show(page, f"#/tensor?name={NAME}&leaf={leaf}", f"document.title.startsWith('{leaf}') && {ROWS}.length === 4")
        assert {row[-1] == row[-2] for row in page.run(CELLS)} == {is_new}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [f"#/snapshot?name={NAME}", f"#/tensor?name={NAME}&leaf=model.positions"])
@pytest.mark.slow
def test_ranks_and_pieces_have_contrast_and_fit_a_telephone(page: Browser, view: str, scheme: str) -> None:
    page.size(420, 900)
    page.emulate(scheme=scheme)
    show(page, view, "document.querySelector('#ranks-title, #piece-map rect') && document.querySelector('.row .num')")

    assert page.run("document.documentElement.scrollWidth") <= 420
    assert page.run(CONTRAST) == []
