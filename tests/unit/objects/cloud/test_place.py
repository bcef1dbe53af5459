"""URLs of object stores."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName
from holdfast.objects.cloud.place import CloudPlace, parse_place


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://my-bucket", CloudPlace("s3", "my-bucket", "")),
        ("S3://my-bucket/", CloudPlace("s3", "my-bucket", "")),
        ("gs://b.c_d/team a".replace(" ", "/"), CloudPlace("gs", "b.c_d", "team/a")),
        ("az://container/ckpts/run=1/", CloudPlace("az", "container", "ckpts/run=1")),
    ],
)
def test_a_url_has_a_bucket_and_a_prefix(url: str, place: CloudPlace) -> None:
    assert parse_place(url) == place
    assert parse_place(str(place)) == place


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://-bucket",
        "s3://user:secret@bucket/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a b",
        "s3://bucket/a?x=1",
        "s3://bucket/a#b",
        "s3://bucket/%2e%2e",
        "s3://bucket/a\nb",
        "s3://bucket/" + "a" * 500,
        "ftp://bucket/a",
        "bucket/a",
    ],
)
def test_other_texts_are_refused(url: str) -> None:
    with pytest.raises(BadName):
        parse_place(url)
