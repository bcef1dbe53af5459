"""The row of a filesystem in the table is found by trying, not by looking alone."""

from __future__ import annotations

import os
from pathlib import Path

from tests.filesystems.features import probe_features


def test_features_are_what_plain_calls_say(tmp_path: Path) -> None:
    (tmp_path / "lower").write_bytes(b"")
    is_sensitive = not (tmp_path / "LOWER").exists()
    try:
        os.link(tmp_path / "lower", tmp_path / "second")
        has_links = True
    except OSError:
        has_links = False

    features = probe_features(tmp_path)

    assert (features.hard_links, features.case_sensitive) == (has_links, is_sensitive)
    assert features.longest_name_bytes >= 64
