"""One browser for all tests here; installed if that can be done, and what cannot run without it says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import holdfast
from tests.browser.chromium import Browser, find_chromium, install_chromium
from tests.browser.looking import serving
from tests.browser.stores import make_store


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    program = find_chromium() or install_chromium()
    if program is None:
        pytest.skip("there is no chromium, and apt-get cannot install it here: run `apt-get install chromium` as root")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    """The runs of a training; a file that needs another store has its own fixture of this name."""
    with make_store(tmp_path_factory.mktemp("served") / "ckpts") as made:
        yield made


@pytest.fixture
def page(browser: Browser, store: holdfast.Store) -> Iterator[Browser]:
    """The page of the store."""
    with serving(browser, store) as opened:
        yield opened
