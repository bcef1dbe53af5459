"""rclone's S3 server ignores conditions: it is refused, unless there is a single writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StoreError
from tests.servers.places import ServerPlace, serve_rclone

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPlace]:
    with serve_rclone(tmp_path / "server") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def test_a_server_that_ignores_conditions_is_refused_and_left_as_it_was(place: ServerPlace, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"ignores the condition.*single_writer=True"):
        holdfast.open(place.url("store")).save("run/1", {"step": 1})

    assert [path for path in (tmp_path / "server/buckets").rglob("*") if path.is_file()] == []


def test_a_single_writer_may_use_it(place: ServerPlace) -> None:
    holdfast.open(place.url("store"), single_writer=True).save("run/1", {"step": 1})

    store = holdfast.open(place.url("store"), single_writer=True)

    assert store.load("run/1") == {"step": 1}
    assert [finding for finding in store.check(read=True) if finding.severity != "note"] == []
