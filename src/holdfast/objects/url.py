"""Opens object stores by path or URL, and finds the nearest store above a directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from holdfast.errors import BadName, StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.texts import mask_url

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/|[^/]*://")
"""A scheme, or a chain of them as in `simplecache::s3://`, and one slash: pathlib turns two slashes into one."""
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_CLOUD: Final = ("s3", "gs", "az")

# A directory with this object is a store. It is the repository's first object; its key is part of the format.
_CONFIG: Final = "config"
_GENERATION: Final = re.compile(r"[0-9]{8}\Z")


class _SystemClock:
    """The clock of this host."""

    def now(self) -> float:
        return time.time()


def is_url(text: str) -> bool:
    """Return whether a text is a URL, perhaps shortened by pathlib; such a text is never used as a path."""
    return _URL.match(text) is not None


def verify_path(text: str) -> str:
    """Return a local path; raises BadName for a URL, which would create a directory named like its scheme."""
    if is_url(text):
        shown = mask_url(text)
        raise BadName(f"{shown} is a URL and not a local path; a directory of that name is ./{shown}")
    return text


def open_store(
    url: str,
    *,
    read_only: bool = False,
    single_writer: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ObjectStore:
    """Open the object store at a path or URL, without I/O; raises BadName, StoreError.

    A path or `file://` is a directory. `s3://`, `gs://` and `az://` are buckets, for which `storage_options` are
    settings of obstore. `memory://` is a new, empty, private store. Any other text that looks like a URL is refused.
    With `single_writer`, a filesystem or server that cannot create exclusively is accepted.
    """
    shown = mask_url(url)
    if not url or "\0" in url:
        raise BadName(f"{shown[:80]!r} is not a path of a store; give a path, as in ./ckpts")
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    rest = url[found.end() :] if found else url
    if not found and is_url(url):
        raise BadName(f"{shown}: a URL begins with a scheme and two slashes; a directory of that name is ./{shown}")
    if storage_options and scheme not in _CLOUD:
        raise BadName(f"storage_options are for s3://, gs:// and az://, and not for {shown}; leave them out")
    if scheme == "memory":
        return MemoryStore(clock=_SystemClock(), read_only=read_only)
    if scheme in _CLOUD:
        return _open_cloud(url, storage_options, read_only=read_only, single_writer=single_writer)
    if scheme not in ("", "file"):
        raise BadName(f"{shown}: the scheme {scheme!r} is not supported; use a path, s3://, gs://, az:// or memory://")
    path = _decode_file_url(url, rest) if scheme else rest
    return LocalStore(path, read_only=read_only, single_writer=single_writer)


def find_path(url: str) -> str | None:
    """Return the absolute path of a path or a file URL; None for any other URL."""
    found = _SCHEME.match(url)
    if found is None:
        return None if is_url(url) else os.path.abspath(url)
    return os.path.abspath(_decode_file_url(url, url[found.end() :])) if found[1].lower() == "file" else None


def locate_store_root(start: str | os.PathLike[str]) -> str | None:
    """Return the nearest directory at or above `start` that is a store, or None."""
    directory = os.path.abspath(start)
    while not holds_config(directory):
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent
    return directory


def _decode_file_url(url: str, rest: str) -> str:
    """Return the path of a file URL; only this host's files can be opened."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BadName(f"{mask_url(url)}: a file URL has three slashes and an absolute path, as in file:///data/ckpts")
    decoded = os.fsdecode(_ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), os.fsencode("/" + path)))
    if "\0" in decoded:
        raise BadName(f"{mask_url(url)} contains an escaped zero byte, which no path can have")
    return decoded


def holds_config(directory: str) -> bool:
    """Return whether a directory contains the config of a store."""
    try:
        names = PosixFiles(directory).list_directory(os.path.join(directory, _CONFIG))
        return any(map(_GENERATION.match, names))
    except OSError:
        # Absent, a link, not a directory, or not readable: not a store that we could use.
        return False


def _open_cloud(url: str, options: Mapping[str, Any] | None, *, read_only: bool, single_writer: bool) -> ObjectStore:
    from holdfast.objects.cloud.place import parse_place

    place = parse_place(url)
    try:
        from holdfast.objects.cloud.cloud_store import CloudStore
    except ImportError as error:
        raise StoreError(f"{url} needs the package obstore: install it with `pip install obstore` ({error})") from error
    return CloudStore(place, read_only=read_only, single_writer=single_writer, options=options)
