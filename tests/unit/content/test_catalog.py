"""Notes of entries are parsed strictly."""

from __future__ import annotations

import pytest

from holdfast.content.catalog import StorageSpan, parse_storage_note
from holdfast.errors import Corrupt
from holdfast.json_text import Json


@pytest.mark.parametrize(
    "value", ["", 7, "g:0:00:0:0", f"g:0:{'0' * 64}:0:-1", f"a:0:{'0' * 64}:-5:9", f"a:{10**18 * 9}:{'0' * 64}:0:1"]
)
def test_a_malformed_note_is_refused(value: Json) -> None:
    with pytest.raises(Corrupt, match=r"'batch', 'x': .*run `holdfast check`"):
        parse_storage_note({"storage": value}, what="'batch', 'x'")


def test_a_note_may_be_absent_or_mention_no_storage() -> None:
    assert parse_storage_note(None, what="x") is None
    assert parse_storage_note({"device": "cuda:0"}, what="x") is None
    assert parse_storage_note({"storage": f"a.1:8:{'0' * 64}:-8:16"}, what="x") == StorageSpan(
        "a.1", 8, "0" * 64, -8, 16
    )
