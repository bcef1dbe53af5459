"""Makes the store with every kind of tensor, once and for ever: `python -m tests.compat.make_tensors`."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.store import OpenOptions, Store
from tests.compat.archive import HERE, add, pack
from tests.kit.tensors import COMPOSITES, ORDINARY, SUBCLASSES, TENSORS

ARCHIVE: Final = HERE / "tensors" / "every.tar.gz"
_GEOMETRIES: Final = (
    "whole",
    "0-d",
    "empty 2-d",
    "expanded",
    "transposed",
    "columns",
    "overlapping",
    "conj neg",
    "meta",
)


def choose_names() -> list[str]:
    """Return what is kept: every layout, role and quantizer; every dtype in a few geometries."""
    few = [name for name in ORDINARY if name.startswith(("q", "role/", "grad/")) or name.endswith(_GEOMETRIES)]
    return [*few, *COMPOSITES]


def make_plain() -> dict[str, Any]:
    """Return plain values of all kinds."""
    state = OrderedDict(w=torch.arange(3.0))
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # as state dicts of modules have it
    return {
        "numbers": [None, True, 1 << 70, -0.0, float("-inf"), 1 - 2j, Fraction(1, 3), Decimal("1.50")],
        "text": ["", "\u00e9\U0001f600", "\ud800", "long " * 2000, b"\x00\xff" * 4000, bytearray(b"b")],
        "containers": (deque([1, 2], 3), {(1, "k"): {2, 3}}, frozenset({b"x"}), range(1, 9, 2), slice(None, 3), state),
        "torch": [torch.float8_e5m2, torch.Size([1, 2]), torch.device("cuda", 1), torch.channels_last, torch.jagged],
        "numpy": [np.float16(0.1), np.datetime64("2001-01-01"), np.arange(6, dtype=">i2").reshape(2, 3).T],
        "paths": PurePosixPath("a/b"),
    }


def make_shared() -> dict[str, torch.Tensor]:
    """Return tensors that share memory in every way there is."""
    base = torch.arange(4000, dtype=torch.int32)
    gappy = torch.arange(3000.0)[::7]
    views = {"base": base, "rows": base[1000:2000].view(10, 100), "bytes": base.view(torch.uint8)[7:9], "same": base}
    return {**views, "stepped": base[::3], "end": base[-1], "gappy": gappy, "tied": gappy.detach()}


def make_tree(names: list[str]) -> dict[str, Any]:
    """Return the tree that is saved."""
    return {"tensors": {name: TENSORS[name]() for name in names}, "plain": make_plain(), "shared": make_shared()}


def make_archive() -> bytes:
    """Return the store as a compressed archive, the same bytes every time."""
    inner = MemoryStore()
    with mock.patch("os.urandom", random.Random("tensors").randbytes):
        store = Store(inner, OpenOptions(types=SUBCLASSES, environment=False))
        store.save("every", make_tree(choose_names()), grads=True)
    return pack(inner.contents())


if __name__ == "__main__":
    add(ARCHIVE, make_archive)
