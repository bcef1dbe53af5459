"""Recorded runs: the list is that of the verb, and a comparison is the page of the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import NotFound
from holdfast.serving.answer import parse_request
from holdfast.serving.answers.runs import compare_runs, list_runs
from holdfast.serving.routes import API, REPORTS, StoreApi
from tests.kit.recordings import Recording, write_recorded


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path / "store") as opened:
        for recording in (Recording("good"), Recording("bad", is_bad=True)):
            write_recorded(opened.repository, recording)
        yield opened


def test_runs_are_those_of_the_verb(store: holdfast.Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-s", store.url, "run", "ls", "--json"]) == 0

    assert list_runs(store.repository) == json.loads(capsys.readouterr().out)


def test_a_comparison_has_the_headline_and_the_page(store: holdfast.Store) -> None:
    found = compare_runs(store.repository, "good", "bad")

    assert not found.is_match
    assert "layers.1" in found.headline
    assert found.page.startswith(b"<!doctype html>")
    assert found.policy.encode() in found.page
    assert compare_runs(store.repository, "good", "good").is_match
    with pytest.raises(NotFound):
        compare_runs(store.repository, "good", "nobody")


def test_a_report_is_opened_by_an_address_that_cannot_be_guessed(store: holdfast.Store) -> None:
    api = StoreApi(store.repository)
    body = api.answer(parse_request(f"{API}report?a=good&b=bad")).body
    assert isinstance(body, bytes)
    path = json.loads(body)["path"]

    page = api.answer_page(path)

    assert page is not None
    assert "sha256-" in page.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    assert len(path) >= len(REPORTS) + 32
    assert api.answer_page(REPORTS) is None
    assert api.answer_page(path[:-1]) is None
