"""A small tree of files to be saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MTIME_NS: Final = 1_700_000_000_123_456_789
TREE_BYTES: Final = 256 * 5000 + 5 + 10


def make_tree(data: Path) -> Path:
    """Fill the directory `data` with four files, one hidden and empty, one executable, one of a known time."""
    (data / "sub/empty").mkdir(parents=True)
    (data / "b.bin").write_bytes(bytes(range(256)) * 5000)
    (data / "a.txt").write_text("hello")
    (data / "sub/.hidden").write_bytes(b"")
    (data / "sub/run.sh").write_text("#!/bin/sh\n")
    (data / "sub/run.sh").chmod(0o755)
    os.utime(data / "a.txt", ns=(MTIME_NS, MTIME_NS))
    return data
