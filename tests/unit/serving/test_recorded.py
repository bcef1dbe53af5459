"""One run over the API: read once for a state of the runs, in pages, with errors of Holdfast."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import holdfast
from holdfast.errors import BadName, Corrupt, NotFound
from holdfast.repo.handle.repository import Repository
from holdfast.serving.answer import answer_error, parse_request
from holdfast.serving.answers import runs
from holdfast.serving.routes import API, StoreApi
from tests.kit.recordings import Recording, write_recorded


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path / "store") as opened:
        write_recorded(opened.repository, Recording("nan", is_bad=True, level="stats", hole=math.nan))
        yield opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs whose events are read."""
    found: list[str] = []
    read = runs.read_outline

    def count(repo: Repository, name: str) -> runs.RunOutline:
        found.append(name)
        return read(repo, name)

    monkeypatch.setattr(runs, "read_outline", count)
    return found


def ask(api: StoreApi, path: str, **parameters: str) -> Any:
    body = api.answer(parse_request(f"{API}{path}?{urlencode(parameters)}")).body
    assert isinstance(body, bytes)
    return json.loads(body)


def test_events_are_read_once_for_all_pages_and_questions(store: holdfast.Store, reads: list[str]) -> None:
    api = StoreApi(store.repository)

    run = ask(api, "run", name="nan")
    pages = [ask(api, "events", name="nan", offset=str(offset), limit="10") for offset in (0, 10, 20)]
    found = ask(api, "nonfinite", name="nan")

    assert reads == ["nan"]
    assert (run["events"], run["steps"]["count"]) == (27, 3)
    assert [len(page["events"]) for page in pages] == [10, 10, 7]
    assert pages[2]["events"][-1]["stats"]["nan"] == 0
    assert found["headline"].startswith("step 1, forward, layers.1:")
    step = ask(api, "events", name="nan", step="1")
    assert step["events"][found["row"]]["stats"]["nan"] == 1
    assert ask(api, "events", name="nan", step="1", filter="output layers.1")["total"] == 1


def test_a_new_part_of_a_run_is_seen(store: holdfast.Store, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.serving import remembered

    monkeypatch.setattr(remembered, "_AGE_S", 0.0)
    api = StoreApi(store.repository)
    with pytest.raises(NotFound):
        ask(api, "run", name="more")
    write_recorded(store.repository, Recording("more", steps=1))

    assert ask(api, "run", name="more")["events"] == 9
    assert ask(api, "run", name="nan")["events"] == 27
    assert reads == ["more", "more", "nan"]


def test_what_is_remembered_has_a_limit(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.serving import routes

    monkeypatch.setattr(routes, "_MAX_REMEMBERED_EVENTS", 300)
    for at in range(4):
        write_recorded(store.repository, Recording(f"run-{at}"))
    api = StoreApi(store.repository)

    for at in range(4):
        assert ask(api, "events", name=f"run-{at}", filter="output")["total"] == 9

    runs = next(each.__self__ for path, each in api._answers.items() if path == "run")  # type: ignore[attr-defined]
    assert runs._outlines.size <= 300


@pytest.mark.parametrize(
    ("path", "parameters", "error"),
    [
        ("run", {}, BadName),
        ("run", {"name": "nobody"}, NotFound),
        ("run", {"name": "@runs/nan"}, BadName),
        ("run", {"name": "../nan"}, BadName),
        ("run", {"name": "<script>"}, NotFound),
        ("events", {"name": "nobody"}, NotFound),
        ("events", {"name": "nan", "limit": "1001"}, BadName),
        ("events", {"name": "nan", "offset": "-1"}, BadName),
        ("events", {"name": "nan", "step": "x"}, BadName),
        ("events", {"name": "nan", "step": "-1"}, BadName),
        ("events", {"name": "nan", "step": "9" * 40}, BadName),
        ("nonfinite", {"name": "nobody"}, NotFound),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(
    store: holdfast.Store, path: str, parameters: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        ask(StoreApi(store.repository), path, **parameters)

    answered = answer_error(caught.value)
    assert answered.status in (400, 404)
    assert isinstance(answered.body, bytes)
    assert json.loads(answered.body)["error"]["message"].endswith(".")


@pytest.mark.parametrize("path", ["run", "events", "nonfinite"])
def test_a_run_whose_events_are_gone_or_damaged_is_an_error_of_holdfast(
    store: holdfast.Store, tmp_path: Path, path: str
) -> None:
    for pack in (tmp_path / "store/packs").rglob("*"):
        if pack.is_file():
            content = bytearray(pack.read_bytes())
            content[: len(content) // 2] = bytes(len(content) // 2)
            pack.chmod(0o644)
            pack.write_bytes(content)

    with pytest.raises((Corrupt, NotFound)):
        ask(StoreApi(store.repository), path, name="nan")
