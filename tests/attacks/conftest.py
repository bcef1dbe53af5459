"""What tests of a second user share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own; only root can write to it."""
    made = Path(tempfile.mkdtemp(prefix="holdfast-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
