"""Opening a store: a path or URL, and what is chosen for all that is done there."""

from __future__ import annotations

import os
from collections.abc import Iterable

from holdfast.facade import Store, make_store
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES


def open(
    url: str | os.PathLike[str],
    *,
    read_only: bool = False,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    single_writer: bool = False,
    types: Iterable[type] = (),
    environment: bool = True,
    change_hints: bool = False,
    create: bool = True,
) -> Store:
    """Open the store at a path or URL; nothing is written before the first save, which creates it.

    The handle stays with the store that it has seen first: if that is unmounted, moved away or replaced by another,
    every change raises StoreGone.

    Args:
        url: a path, `file://...`, or `memory://` for one that lives as long as it is open.
        read_only: refuse to write.
        budget_bytes: how many bytes of tensors a save or load may have under way, besides the tensors themselves. What
            is kept for each tensor (name, spec, digests) comes on top: about 1.2 KB on save, 0.3 KB on load.
        single_writer: accept a filesystem where only one writer at a time is safe.
        types: enums, dataclasses, named tuples and tensor classes that trees may hold.
        environment: record host and versions with each snapshot.
        change_hints: do not hash again what looks as it did when this store saved it last (by XXH3-128 with a secret
            seed): faster by far where little changes, and as sure against everything but a forger in this process.
        create: let the first save make a store where there is none; False raises NotAStore here instead.
    """
    options = {"read_only": read_only, "single_writer": single_writer}
    options |= {"environment": environment, "change_hints": change_hints, "create": create}
    return make_store(os.fspath(url), budget_bytes, tuple(types), options, "")
