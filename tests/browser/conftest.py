"""One browser for all tests here; installed if that can be done, and what cannot run without it says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, find_chromium, install_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    program = find_chromium() or install_chromium()
    if program is None:
        pytest.skip("there is no chromium, and apt-get cannot install it here: run `apt-get install chromium` as root")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as started:
        yield started
