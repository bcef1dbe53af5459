"""Tests of local stores have their files on a disk."""

from tests.kit.on_disk import tmp_path  # noqa: F401 - a fixture
