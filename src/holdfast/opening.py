"""`holdfast.open`: opens the store at a path or URL, with the options of the handle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.facade import Store, make_store
from holdfast.objects.disk_cache import CACHE_BYTES, DiskCache
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import verify_path
from holdfast.repo.handle.compression import Compression, DeltaChoice
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
    compression: Compression = "default",
    delta: DeltaChoice = "auto",
    create: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_wait: bool | float = True,
    mirror_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Store:
    """Open the store at a path or URL. Opening writes nothing; the first save creates the store if there is none.

    A handle changes only the store that it opened first: if that is unmounted or replaced, changes raise StoreGone.

    Args:
        url: a path, `file://...`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `memory://`
            for a store that exists only while it is open.
        read_only: refuse to write.
        budget_bytes: memory that a save or load may use for buffers, besides the tensors themselves. Bookkeeping for
            each tensor (name, spec, digests) comes on top: about 0.6 KB on save, 0.3 KB on load.
        single_writer: accept a filesystem or server where only one writer at a time is safe.
        types: enums, dataclasses, named tuples and tensor classes that trees may contain.
        environment: record host and versions with each snapshot.
        change_hints: skip BLAKE3 for bytes that, by XXH3-128 with a secret seed, have not changed since this handle
            saved them. Much faster if little changes. Not safe against an attacker inside this process.
        compression: of new bytes: None, "fast", "small", "auto"; "default" is "auto" in a bucket, None in a directory.
        delta: store new bytes as their difference from the latest snapshot with the same prefix, but one save in N
            whole: "off", N, or "auto", which is 10 with compression "fast" or "small", otherwise "off".
        create: let the first save create the store if there is none; False raises NotAStore here instead.
        storage_options: settings of obstore for a bucket, such as `endpoint`, `region` or `access_key_id`. Without
            them, credentials come from the environment, an AWS profile or the machine. None is stored or pickled.
        mirror: a second store, usually in a bucket. Each snapshot that is saved here is uploaded there in the
            background, and what is missing here is read from there. See `Store.mirror`.
        mirror_wait: whether `close` waits until the mirror has everything; a number is the longest time in seconds.
        mirror_options: what `storage_options` is for the store, for the mirror.
        cache_dir: a local directory that keeps what was read from a bucket; processes and stores may share it.
        cache_bytes: how much the cache may take; what was not used for longest is deleted first.
    """
    options: dict[str, Any] = {"read_only": read_only, "single_writer": single_writer}
    options |= {"environment": environment, "change_hints": change_hints, "create": create}
    options |= {"compression": compression, "delta": delta}
    if storage_options is not None:
        options["storage_options"] = StorageOptions(storage_options)
    if mirror is not None:
        from holdfast.mirror.mirror import choose_mirror

        store_url, more = os.fspath(url), mirror_options
        options["mirror"] = choose_mirror(mirror, store_url=store_url, wait=mirror_wait, options=more)
    if cache_dir is not None:
        options["cache"] = DiskCache(verify_path(os.fspath(cache_dir)), limit_bytes=cache_bytes)
    return make_store(os.fspath(url), budget_bytes, tuple(types), options, "")
