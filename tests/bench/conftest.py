"""Benchmarks have their files on a disk: the page cache is a part of what they measure."""

from tests.kit.on_disk import tmp_path  # noqa: F401 - a fixture
