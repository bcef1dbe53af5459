"""Invalid options are refused when they are created."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.snapshot.batches import LoadOptions
from holdfast.snapshot.into.plan import IntoOptions


@pytest.mark.parametrize(
    ("kind", "option", "said"),
    [
        (LoadOptions, {"aliases": "other"}, "aliases must be 'preserve' or 'fresh', not 'other'"),
        (LoadOptions, {"verify": True}, "verify must be 'full', 'fast', 'device' or False, not True"),
        (IntoOptions, {"verify": "slow"}, "verify must be 'full', 'fast', 'device' or False, not 'slow'"),
        (IntoOptions, {"replicas": "all"}, "replicas must be 'auto', 'each' or 'broadcast', not 'all'"),
    ],
)
def test_a_word_that_means_nothing_is_refused(kind: type, option: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        kind(**option)
