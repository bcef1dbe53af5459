"""The API: what each path answers, in pages, and as the verbs print it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadExpression, BadName, NotFound, SnapshotGone
from holdfast.repo.format.layout import manifest_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.serving import routes
from holdfast.serving.answer import parse_request
from holdfast.serving.answers.outline import SnapshotOutline, read_outline
from holdfast.serving.routes import API, StoreApi


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    """Three snapshots of one run, and a tag."""
    with holdfast.open(tmp_path_factory.mktemp("serving") / "store") as opened:
        for step in range(3):
            layers = {str(at): {"weight": torch.full((4, 6), float(at + step))} for at in range(4)}
            state = {"model": {"layers": layers, "head": torch.arange(5000.0)}, "lr": 0.1}
            opened.save(f"run/step-{step}", state, metadata={"metrics": {"loss": 1.0 / (step + 1)}, "note": "x"})
        opened.tag("best", "run/step-2")
        yield opened


@pytest.fixture(scope="module")
def api(store: holdfast.Store) -> StoreApi:
    return StoreApi(store.repository)


def ask(api: StoreApi, path: str, **parameters: str | list[str]) -> Any:
    """Return the JSON that the API answers; of a stream, the list of its lines."""
    query = urlencode(parameters, doseq=True)
    body = api.answer(parse_request(f"{API}{path}" + (f"?{query}" if query else ""))).body
    return json.loads(body) if isinstance(body, bytes) else [json.loads(line) for line in body]


def test_the_store_and_its_state(api: StoreApi, store: holdfast.Store) -> None:
    found = ask(api, "store")

    assert (found["store"], found["api"], found["snapshots"]) == (store.url, 1, 3)
    assert ask(api, "changes")["state"] == found["state"]


def test_snapshots_are_those_of_ls(api: StoreApi, store: holdfast.Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-s", store.url, "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["snapshots"]

    found = ask(api, "snapshots")["snapshots"]

    assert [{key: each[key] for key in listed[0]} for each in found] == listed
    assert [(each["step"], each["numbers"]["loss"]) for each in found] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert [each["previous"] for each in found] == [None, "run/step-0", "run/step-1"]


def test_pages_filters_and_order(api: StoreApi) -> None:
    page = ask(api, "snapshots", sort="-loss", offset="1", limit="1")

    assert (page["total"], page["offset"], [each["name"] for each in page["snapshots"]]) == (3, 1, ["run/step-1"])
    assert ask(api, "snapshots", filter="loss < 0.6 and tag = 'best'")["total"] == 1
    assert ask(api, "snapshots", filter="*/step-[01]")["total"] == 2
    assert ask(api, "snapshots", filter="step-2")["total"] == 1
    assert ask(api, "snapshots", filter="loss exists")["total"] == 3
    assert ask(api, "snapshots", filter="nothing")["total"] == 0
    with pytest.raises(BadExpression):
        ask(api, "snapshots", filter="loss <")


def test_series_are_columns(api: StoreApi) -> None:
    found = ask(api, "series")

    assert found["names"] == ["run/step-0", "run/step-1", "run/step-2"]
    assert found["step"] == [0, 1, 2]
    assert found["numbers"] == {"loss": [1.0, 0.5, pytest.approx(1 / 3)]}
    assert found["tags"] == {"run/step-2": ["best"]}


def test_sizes_and_a_snapshot_are_those_of_show(
    api: StoreApi, store: holdfast.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-s", store.url, "show", "run/step-1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    sizes = ask(api, "sizes", name=["run/step-1", "best"])["sizes"]
    found = ask(api, "snapshot", name="run/step-1")

    assert sizes["run/step-1"]["new_bytes"] == shown["new_bytes"] == found["new_bytes"]
    assert sizes["run/step-1"]["reused_bytes"] == shown["reused_bytes"] > 0
    assert found["stored_bytes"] == shown["stored_bytes"]
    assert (found["leaves"], found["items"], found["children"]) == (6, 4 * 24 + 5000, ["run/step-2"])
    assert [part["name"] for part in found["parts"]] == ["model", "lr"]


def test_leaves_are_folded_opened_filtered_and_sorted(api: StoreApi) -> None:
    folded = ask(api, "leaves", name="best", folded="true")
    assert [(line["name"], line["count"]) for line in folded["lines"]] == [
        ("model.layers.#.weight", 4),
        ("model.head", 1),
        ("lr", 1),
    ]
    members = ask(api, "leaves", name="best", fold="model.layers.#.weight", offset="1", limit="2")
    assert (members["total"], [line["name"] for line in members["lines"]]) == (
        4,
        ["model.layers.1.weight", "model.layers.2.weight"],
    )
    assert ask(api, "leaves", name="best", sort="-bytes")["lines"][0]["name"] == "model.head"
    assert ask(api, "leaves", name="best", filter="layers.3")["total"] == 1


def test_a_tensor_is_summarised_mapped_and_read(api: StoreApi) -> None:
    (summary,) = ask(api, "tensor", name="best", leaf="model.head")
    assert (summary["min"], summary["max"], summary["done"], summary["items"]) == (0, 4999, 5000, 5000)
    assert sum(summary["histogram"]["counts"]) == 5000
    assert ask(api, "values", name="best", leaf="model.head", index="7:9")["values"] == [7.0, 8.0]
    assert len(ask(api, "heat", name="best", leaf="model.layers.0.weight")["cells"]) == 4


def test_a_diff_is_that_of_the_verb(api: StoreApi, store: holdfast.Store, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-s", store.url, "diff", "run/step-0", "run/step-1", "--values", "--json"])
    expected = json.loads(capsys.readouterr().out)

    head, *batches = ask(api, "diff", a="run/step-0", b="run/step-1", values="true")

    assert [change for batch in batches for change in batch["changes"]] == expected.pop("changes")
    assert head == {**expected, "total": 4}
    quick = ask(api, "diff", a="run/step-0", b="run/step-1")
    assert quick[1]["changes"][0]["distances"] == []


@pytest.mark.parametrize(
    ("path", "parameters", "error"),
    [
        ("nothing", {}, NotFound),
        ("../../server.py", {}, NotFound),
        ("snapshot", {"name": "nobody"}, NotFound),
        ("snapshot", {}, BadName),
        ("leaves", {"name": "best", "sort": "color"}, BadName),
        ("leaves", {"name": "best", "fold": "nobody"}, BadName),
        ("tensor", {"name": "best", "leaf": "nobody"}, NotFound),
        ("tensor", {"name": "best", "leaf": "lr"}, NotFound),
        ("values", {"name": "best", "leaf": "model.head", "index": "x"}, BadName),
        ("values", {"name": "best", "leaf": "model.head", "index": "9999"}, BadName),
        ("values", {"name": "best", "leaf": "model.head", "index": ":"}, BadName),
        ("values", {"name": "best", "leaf": "model.head", "index": "0, 0"}, BadName),
        ("snapshots", {"limit": "501"}, BadName),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_holdfast(
    api: StoreApi, path: str, parameters: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(api, path, **parameters)


def test_manifests_are_read_once(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    api = StoreApi(store.repository)
    reads: list[str] = []

    def read(repo: Repository, found: CommittedSnapshot) -> SnapshotOutline:
        reads.append(found.name)
        return read_outline(repo, found)

    monkeypatch.setattr(routes, "read_outline", read)

    for offset in ("0", "1", "2"):
        ask(api, "leaves", name="best", offset=offset, limit="1")
    ask(api, "snapshot", name="run/step-2")

    assert reads == ["run/step-2"]


def test_a_snapshot_that_is_deleted_while_it_is_looked_at_is_not_found(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"x": torch.arange(100_000.0)})
        api = StoreApi(store.repository)
        ask(api, "snapshot", name="a")
        for pack in (tmp_path / "store/packs").rglob("*"):
            if pack.is_file():
                pack.unlink()

        lines = ask(api, "tensor", name="a", leaf="x")

    assert "error" in lines[-1]
    assert lines[-1]["error"]["message"].endswith(".")


@pytest.mark.parametrize("path", ["sizes", "snapshot", "leaves", "ranks"])
def test_a_snapshot_that_was_collected_after_it_was_listed_is_a_sentence(tmp_path: Path, path: str) -> None:
    with holdfast.open(tmp_path / "store") as opened:
        opened.save("a", {"w": torch.ones(3)})
        gone = StoreApi(opened.repository)
        ask(gone, "snapshots")
        opened.repository.store.delete(manifest_key(opened.snapshot("a").record.manifest.manifest_id))

        with pytest.raises(SnapshotGone, match=r"'a' is gone: .* list the snapshots again"):
            ask(gone, path, name="a")
