"""The suite `objects`: what it counts, what it measures on a small server, and a contestant that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kit.buckets import RawObjects
from bench.kit.measure import TINY, WrongResult, random_bytes
from bench.suites import objects as objects_suite
from tests.kit.s3_server import serve_s3


def test_it_counts_the_rounds_and_requests_of_each_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_suite, "find_weed", lambda: None)

    results = objects_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"rounds", "requests"}
    assert all(0 < result.figure < 1000 for result in results)
    assert len({result.workload for result in results}) == 9


def test_it_measures_saves_and_loads_against_obstore_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_suite, "find_bucket_peers", lambda endpoint: [])

    with serve_s3() as server:
        results = objects_suite._measure_transfers(server.endpoint, TINY, tmp_path)

    assert [result.workload.partition(",")[0] for result in results] == [
        "save to a bucket", "load from a bucket", "load from a bucket", "load from a bucket",
    ]  # fmt: skip
    assert all(result.figure > 0 for result in results)


def test_raw_objects_that_were_changed_end_the_run() -> None:
    with serve_s3() as server:
        raw = RawObjects(server.endpoint, random_bytes(3000, seed=1), object_bytes=1000, range_bytes=300)
        raw.save("p")
        objects_suite._verify_raw(raw, raw.load("p"))
        server.objects["p/1000"].data = bytes(1000)

        with pytest.raises(WrongResult, match="other bytes"):
            objects_suite._verify_raw(raw, raw.load("p"))
