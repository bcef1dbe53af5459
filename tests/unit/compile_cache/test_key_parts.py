"""A key has nine parts, and each has its own digest."""

from __future__ import annotations

import json

from holdfast.compile_cache.key_parts import PARTS, hash_parts
from tests.kit.graph_key_cases import BASE


def test_a_key_has_nine_parts_and_each_has_its_digest() -> None:
    key = BASE()

    assert tuple(key.digests) == PARTS == tuple(key.parts)
    assert all(len(digest) == 64 for digest in (key.digest, *key.digests.values()))
    assert hash_parts(key.parts) == key


def test_a_key_survives_json() -> None:
    key = BASE()

    assert hash_parts(json.loads(json.dumps(dict(key.parts)))).digest == key.digest
