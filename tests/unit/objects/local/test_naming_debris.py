"""Temporary files are old by the clock that stamps files, not by that of the host that clears them away."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.objects.local import local_store as local
from holdfast.objects.local.local_store import LocalStore

HOUR_S = 3600.0


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """A temporary file, as a save under way has one."""
    LocalStore(tmp_path / "store").create("packs/one", b"first")
    path = tmp_path / "store/packs/.tmp-0123456789abcdef"
    path.write_bytes(b"half")
    return path


def list_temps(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob(".tmp-*"))


@pytest.mark.parametrize("off_s", [7 * HOUR_S, 400 * 24 * HOUR_S, -7 * HOUR_S])
def test_a_host_whose_clock_is_off_spares_the_files_of_saves_under_way(
    temp: Path, tmp_path: Path, off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "time", lambda: time.time() + off_s)

    assert LocalStore(tmp_path / "store").remove_debris(older_than_s=HOUR_S) == 0

    assert list_temps(tmp_path / "store") == [temp.name]


@pytest.mark.parametrize("off_s", [0.0, -7 * HOUR_S])
def test_files_that_are_old_by_the_filesystem_clock_are_removed(
    temp: Path, tmp_path: Path, off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "time", lambda: time.time() + off_s)
    old_s = time.time() - 2 * HOUR_S
    os.utime(temp, (old_s, old_s))

    assert LocalStore(tmp_path / "store").remove_debris(older_than_s=HOUR_S) == 1

    assert list_temps(tmp_path / "store") == []


def test_all_are_removed_if_age_does_not_matter_even_those_from_the_future(temp: Path, tmp_path: Path) -> None:
    later_s = time.time() + 7 * HOUR_S
    os.utime(temp, (later_s, later_s))

    assert LocalStore(tmp_path / "store").remove_debris(older_than_s=0.0) == 1

    assert list_temps(tmp_path / "store") == []
