"""Limits that the reference states are those of the code, and each of them is stated once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import json_text
from holdfast.cli.verbs import doctor
from holdfast.files import keep
from holdfast.objects import protocol
from holdfast.repo.format import chunk, columns, layout, record
from holdfast.repo.names import leases, snapshots
from holdfast.trees import encoding, outline

REFERENCE = Path(__file__).parents[2] / "docs/reference"
KIB, MIB = 1 << 10, 1 << 20

LIMITS = [
    ("format.md", r"A component is 1 to (\d+) characters", protocol.MAX_COMPONENT_BYTES),
    ("format.md", r"in NFC, 1 to (\d+) bytes in UTF-8", layout.MAX_NAME_BYTES),
    ("format.md", r"If that is longer than (\d+) characters, the escaped form", layout.MAX_ESCAPED_BYTES),
    ("format.md", r"its final newline included; at most (\d+) MiB", record.MAX_RECORD_BYTES // MIB),
    ("format.md", r"The body is JSON in UTF-8, nested at most (\d+) deep", json_text.MAX_DEPTH),
    ("format.md", r"`metadata` is the user's, at most (\d+) MiB", snapshots.MAX_METADATA_BYTES // MIB),
    ("format.md", r"u16 number of columns \(<= (\d+)\)", columns.MAX_COLUMNS),
    ("format.md", r"are cut at every multiple of (\d+) MiB", chunk.CHUNK_BYTES // MIB),
    ("format.md", r"of up to (\d+) bytes\.", chunk.INLINE_BYTES),
    ("format.md", r"a save MUST renew its lease at least every (\d+) seconds", int(leases.RENEW_S)),
    ("format.md", r"a lease without a new generation for (\d+) seconds may be", int(leases.EXPIRE_S)),
    ("format.md", r"where each tensor of (\d+) KiB or more begins", keep.MIN_TENSOR_BYTES // KIB),
    ("trees.md", r"Containers nest at most (\d+) deep", outline.MAX_TREE_DEPTH),
    ("trees.md", r"text that is not valid Unicode; bytes of at most (\d+)", encoding.MAX_INLINE),
    ("trees.md", r"surrogates passed\) and bytes of more than (\d+)", encoding.MAX_INLINE),
    ("../../README.md", r"a small save waits for (\d+) requests, one after the other", doctor.SMALL_SAVE_ROUNDS),
    ("../how-to/use-object-stores.md", r"a small save waits for (\d+), one after the other", doctor.SMALL_SAVE_ROUNDS),
    ("../design/0025-rounds-of-a-save.md", r"small save, same handle \|.*\| \d+, (\d+) \|", doctor.SMALL_SAVE_ROUNDS),
]


@pytest.mark.parametrize(("page", "pattern", "limit"), LIMITS)
def test_the_reference_states_the_limit_of_the_code(page: str, pattern: str, limit: int) -> None:
    text = (REFERENCE / page).read_text()

    assert re.findall(pattern, text) == [str(limit)]
