"""A compile cache in a bucket, and one that reaches a bucket through a mirror: signed graphs load, others do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.integration.compile_cache.processes import Place
from tests.kit.s3_server import BUCKET, serve_s3

CASES = ("infer_mlp",)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signed_graph_is_loaded_from_a_bucket_and_from_a_mirror(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64, encoding="utf-8")
    key.chmod(0o600)
    options = {"key_file": str(key)}
    with serve_s3() as server:
        variables = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        place, bucket = Place(tmp_path, variables), f"s3://{BUCKET}/cache"

        cold = place.run(CASES, bucket, options=options).cases["infer_mlp"]
        warm = place.run(CASES, bucket, options=options, has_compiler=False).cases["infer_mlp"]
        stranger = place.run(CASES, bucket).cases["infer_mlp"]
        mirrored = holdfast.open(bucket, mirror=tmp_path / "mirror", storage_options=server.options).mirror
        assert mirrored is not None
        mirrored.sync()
        there = place.run(CASES, tmp_path / "mirror", options=options, has_compiler=False).cases["infer_mlp"]

    assert (cold["miss"], cold["saved"]) == (1, 1)
    assert (warm["hit"], warm["miss"]) == (1, 0)
    assert (stranger["hit"], stranger["refused"]) == (0, 1)
    assert (there["hit"], there["miss"]) == (1, 0)
    assert cold["digest"] == warm["digest"] == stranger["digest"] == there["digest"]
