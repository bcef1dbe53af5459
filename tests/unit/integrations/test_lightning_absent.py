"""Lightning is not installed: the error says what to install, and the rest of Holdfast does not need it."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

_BLOCKED: Final = "import sys; sys.modules['lightning'] = None; "


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _BLOCKED + code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_without_lightning_the_error_says_what_to_install() -> None:
    last = _run("import holdfast.integrations.lightning").stderr.splitlines()[-1]

    assert "this needs Lightning" in last
    assert "pip install 'holdfast[lightning]'" in last


@pytest.mark.slow
def test_markers_are_read_without_lightning() -> None:
    assert _run("import holdfast.integrations.marker").returncode == 0
