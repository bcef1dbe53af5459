"""Hostile stores behind `holdfast serve`: every path of the API ends fast, with an answer or a sentence."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import holdfast
from attacks.hostile import ATTACKS, Nest, build
from attacks.hostile_codecs import CODEC_ATTACKS
from attacks.hostile_deltas import DELTA_ATTACKS
from holdfast.capture.stored.events import Event, Site, Stats
from holdfast.capture.stored.segments import TABLE, TENSORS, encode_events
from holdfast.json_text import Json
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.manifest import encode_manifest
from holdfast.serving.server import StoreServer
from holdfast.snapshot.save import SaveOptions, save_tree
from holdfast.trees.registered import Types
from tests.kit.runs_in_memory import as_observed
from tests.kit.saving import inline_ref
from tests.kit.thinning import thin

MAX_CPU_S = 2.0
ALL_ATTACKS = {**ATTACKS, **CODEC_ATTACKS, **DELTA_ATTACKS}
EVERY = {"leaf": "weights", "b": "good", "key": "00" * 32, "keep_last": "1", "index": "", "values": "true"}
"""Parameters for every path; each takes what it knows."""


def plant_tree(spec: Json, tree: Json) -> Callable[[Nest], None]:
    """Return an attack: one honest entry of 8 bytes with this spec, in this tree."""
    entry = Entry("weights", 8, (inline_ref(bytes(8)),), spec)
    return lambda nest: nest.put_manifest(encode_manifest({"tree": tree}, [entry]))


TENSOR: dict[str, Json] = {"type": "tensor", "dtype": "float32", "shape": [2]}
LEAF = ["dict", "weights", ["@tensor", 0]]
TREES: dict[str, Callable[[Nest], None]] = {
    "an honest tree": plant_tree(TENSOR, LEAF),
    "a tensor of 2^60 values": plant_tree({**TENSOR, "shape": [1 << 60]}, LEAF),
    "a tensor of 2^600 values": plant_tree({**TENSOR, "shape": [1 << 60] * 10}, LEAF),
    "a tensor of 65 dims": plant_tree({**TENSOR, "shape": [1] * 65}, LEAF),
    "a shape of texts": plant_tree({**TENSOR, "shape": ["<b>"]}, LEAF),
    "a negative shape": plant_tree({**TENSOR, "shape": [-2]}, LEAF),
    "strides beyond the entry": plant_tree({**TENSOR, "stride": [1 << 50]}, LEAF),
    "an unknown dtype": plant_tree({**TENSOR, "dtype": "float32; rm -rf /"}, LEAF),
    "a dtype that is a list": plant_tree({**TENSOR, "dtype": [1]}, LEAF),
    "a spec that is a list": plant_tree([1, 2], LEAF),
    "no spec": plant_tree(None, LEAF),
    "an entry that is not there": plant_tree(TENSOR, ["dict", "weights", ["@tensor", 7]]),
    "an entry of true": plant_tree(TENSOR, ["dict", "weights", ["@tensor", True]]),
    "a negative entry": plant_tree(TENSOR, ["dict", "weights", ["@tensor", -1]]),
    "a leaf of a later version": plant_tree(TENSOR, ["dict", "weights", ["@later", 0]]),
    "parts without end": plant_tree(TENSOR, ["dict", "weights", ["@parts", "subclass", {}, None, "values"]]),
    "a dict with half a pair": plant_tree(TENSOR, ["dict", "weights"]),
    "a tree that is a number": plant_tree(TENSOR, 7),
    "a tree that is a list without a tag": plant_tree(TENSOR, [[], []]),
    "a number of 4000 digits": plant_tree(TENSOR, ["dict", "weights", ["@tensor", 0], "n", ["int", "9" * 4000]]),
    "two leaves of one name": plant_tree(TENSOR, ["dict", "a.b", ["@tensor", 0], "a", ["dict", "b", ["@tensor", 0]]]),
    "names of ends of lines": plant_tree(TENSOR, ["dict", "weights\n\u2028\x00\u202e", ["@tensor", 0]]),
}


def ask(server: StoreServer, path: str, **parameters: str) -> tuple[int, list[dict[str, Json]]]:
    """Answer a request in this thread; return the status and the JSON lines."""
    token = server.url.partition("#token=")[2]
    headers = {"Host": f"127.0.0.1:{server.port}", "Authorization": f"Bearer {token}"}
    answer = server.answer(f"/api/v1/{path}?{urlencode(parameters)}", headers)
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    return answer.status, [json.loads(line) for line in body.splitlines()]


def find_faults(server: StoreServer) -> Iterator[str]:
    """Ask every path about the hostile snapshot; yield what went wrong."""
    for path in server._api._answers:
        started_s = time.process_time()
        status, lines = ask(server, path, name="evil", a="evil", **EVERY)
        took_s = time.process_time() - started_s
        error = lines[-1].get("error") if lines else None
        message = str(error["message"]) if isinstance(error, dict) else ""
        if status != 200 and not message:
            yield f"{path}: {status} without a sentence"
        if message and (not message.endswith(".") or "bug in Holdfast" in message or "Traceback" in message):
            yield f"{path}: {message[:300]}"
        if took_s > MAX_CPU_S:
            yield f"{path}: took {took_s:.1f} s"


@pytest.mark.parametrize("name", thin([*ALL_ATTACKS, *TREES]))
def test_every_path_of_the_api_ends_fast_and_with_a_sentence(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nest = build(tmp_path / "store")
    {**ALL_ATTACKS, **TREES}[name](nest)
    with holdfast.open(nest.root) as store, store.serve() as server, caplog.at_level(logging.ERROR):
        assert list(find_faults(server)) == []
        assert ask(server, "leaves", name="good")[1][0]["total"] == 2
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def make_event(**changes: Any) -> Event:
    """Return an output of a layer that was recorded at level digest."""
    return Event(0, Site(0, "forward", "output", "layers.0", 0, ""), 0, "float32", (2,), bytes(16))._replace(**changes)


def make_table(*events: Event, **columns: Any) -> dict[str, Any]:
    """Return a table of events, some columns of which are replaced."""
    return {**encode_events(as_observed(list(events) or [make_event()])), **columns}


def spell(text: str) -> np.ndarray[Any, Any]:
    """Return JSON as the column of texts."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


FACTS: dict[str, Json] = {
    "version": 1,
    "world": 1,
    "started": 0.0,
    "environment": {},
    "notes": [],
    "roots": {"0": ""},
    "last": True,
}
NUMBERS = make_table()["numbers"]
LONG = "9" * 4000
NAN = float("nan")
RUNS: dict[str, tuple[dict[str, Json], object]] = {
    "an honest run": (FACTS, make_table()),
    "no table": (FACTS, None),
    "a table that is a list": (FACTS, [1, 2]),
    "a column that is a number": (FACTS, make_table(values=7)),
    "columns of no events": (FACTS, make_table(numbers=NUMBERS[:, :0])),
    "numbers of 2^62": (FACTS, make_table(numbers=np.full_like(NUMBERS, 1 << 62))),
    "negative numbers": (FACTS, make_table(numbers=np.full_like(NUMBERS, -1))),
    "numbers that are floats": (FACTS, make_table(numbers=NUMBERS.astype(np.float64))),
    "texts that are numbers": (FACTS, make_table(texts=spell("[1, 2, 3, 4, 5, 6, 7, 8]"))),
    "texts that are no JSON": (FACTS, make_table(texts=spell("["))),
    "texts of invisible characters": (FACTS, make_table(texts=spell('["\\u202e\\ud800", "", "", "", "", "", "", ""]'))),
    "a shape of 2^600 values": (FACTS, make_table(make_event(shape=(1 << 60,) * 10))),
    "a dtype that is another name of torch": (FACTS, make_table(make_event(dtype="load"))),
    "statistics that are not finite": (
        FACTS,
        make_table(make_event(stats=Stats(NAN, NAN, NAN, NAN, nan=1 << 62, inf=-1, zero=0))),
    ),
    "values that are not there": (FACTS, make_table(make_event(leaf="00000000/5"))),
    "values in no segment": (FACTS, make_table(make_event(leaf="00000009/0"))),
    "events of another step": (FACTS, make_table(make_event(site=Site(9, "forward", "output", "x", 0, "")))),
    "no steps": ({**FACTS, "roots": {}}, make_table()),
    "a step of 4000 digits": ({**FACTS, "roots": {LONG: "", "-" + LONG: ""}}, make_table()),
    "a step that is a word": ({**FACTS, "roots": {"<b>": ""}}, make_table()),
    "roots that are a list": ({**FACTS, "roots": []}, make_table()),
    "a world of 2^60 ranks": ({**FACTS, "world": 1 << 60}, make_table()),
    "a start that is no time": ({**FACTS, "started": 1e300}, make_table()),
    "notes that are numbers": ({**FACTS, "notes": [1]}, make_table()),
    "an environment that is a list": ({**FACTS, "environment": []}, make_table()),
    "a later version": ({**FACTS, "version": 99}, make_table()),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_path_about_a_hostile_run_ends_fast_and_with_a_sentence(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts, table = RUNS[name]
    with holdfast.open(tmp_path / "store") as store, store.serve() as server, caplog.at_level(logging.ERROR):
        options = SaveOptions(metadata={"run": facts})
        save_tree(store.repository, "@runs/evil/@r0/00000000", {TABLE: table, TENSORS: {}}, options, types=Types())
        ask(server, "run", name="evil")  # imports torch, which takes longer than a request may

        assert list(find_faults(server)) == []
        if name == "an honest run":
            assert ask(server, "events", name="evil")[1][0]["total"] == 1
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_the_measure_notices_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = build(tmp_path / "store")
    with holdfast.open(nest.root) as store, store.serve() as server:
        broken = {**server._api._answers, "store": lambda _: 1 // 0}
        monkeypatch.setattr(server._api, "_answers", broken)

        assert any("bug in Holdfast" in fault for fault in find_faults(server))
