"""Temporary directories on a disk, for tests of what differs in memory: unbuffered reads, attributes, cached pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory where the system has temporary files; removed after the test."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        yield Path(folder)
