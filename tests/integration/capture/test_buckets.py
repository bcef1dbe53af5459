"""Recorded runs in a bucket, and in a mirror of a local store: the same diagnosis wherever they are."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast
from tests.kit.s3_server import BUCKET, serve_s3


def record(store: holdfast.Store, name: str, *, fault: float = 0.0) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model.get_parameter("2.weight").add_(fault)
    with store.record(name, model):
        model(torch.ones(2, 4))


def test_runs_are_recorded_in_a_bucket_and_compared_there() -> None:
    with serve_s3() as server:
        store = holdfast.open(f"s3://{BUCKET}/runs", storage_options=server.options)
        record(store, "good")
        record(store, "same")
        record(store, "bad", fault=0.5)
        assert {run.name for run in store.runs()} == {"good", "same", "bad"}
        assert not store.diff_runs("good", "same").origins
        assert store.diff_runs("good", "bad").origins


def test_a_mirror_in_a_bucket_has_the_runs(tmp_path: Path) -> None:
    with serve_s3() as server:
        url = f"s3://{BUCKET}/mirror"
        with holdfast.open(tmp_path / "here", mirror=url, mirror_options=server.options) as store:
            record(store, "good")
            record(store, "bad", fault=0.5)
            (origin,) = store.diff_runs("good", "bad").origins[:1]
        mirrored = holdfast.open(url, storage_options=server.options).diff_runs("good", "bad")
        assert mirrored.origins[0].to_json() == origin.to_json()
