"""From what a user writes to an object store: paths and URLs, and the nearest store above a directory."""

from __future__ import annotations

import os
import re
import time
from typing import Final

from holdfast.errors import BadName, StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/|[^/]*://")
"""A scheme, or a chain of them as in `simplecache::s3://`, and one slash: pathlib leaves no more of two."""
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_CLOUD: Final = ("s3", "gs", "az")

# What makes a directory a store: the repository's first object. Its key is part of the format.
_CONFIG: Final = "config"
_GENERATION: Final = re.compile(r"[0-9]{8}\Z")


class _SystemClock:
    """This host's time."""

    def now(self) -> float:
        return time.time()


def is_url(text: str) -> bool:
    """Tell whether a text is a URL, whole or shortened by pathlib; such a text is never taken for a path."""
    return _URL.match(text) is not None


def verify_path(text: str) -> str:
    """Return a path of this machine; raises BadName for a URL, which would make a directory named like its scheme."""
    if is_url(text):
        raise BadName(f"{text} is a URL, and no path of this machine; a directory of that name is ./{text}")
    return text


def open_store(url: str, *, read_only: bool = False, single_writer: bool = False) -> ObjectStore:
    """Open the object store at a path or URL, touching nothing; raises BadName, StoreError.

    A path or `file://` is a directory; `memory://` is a new empty store that nobody else sees; any other text that
    looks like a URL is refused. With `single_writer` a filesystem that cannot create exclusively is accepted.
    """
    if not url or "\0" in url:
        raise BadName(f"{url[:80]!r} is no place for a store; give a path, as in ./ckpts")
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    rest = url[found.end() :] if found else url
    if not found and is_url(url):
        raise BadName(f"{url}: a URL begins with a scheme and two slashes; a directory of that name is ./{url}")
    if scheme == "memory":
        return MemoryStore(clock=_SystemClock(), read_only=read_only)
    if scheme in _CLOUD:
        raise StoreError(f"{url}: object stores in the cloud are not supported by this version; use a local path")
    if scheme not in ("", "file"):
        raise BadName(f"{url}: the scheme {scheme!r} is not supported; use a path, file:// or memory://")
    path = _decode_file_url(url, rest) if scheme else rest
    return LocalStore(path, read_only=read_only, single_writer=single_writer)


def find_path(url: str) -> str | None:
    """Return the absolute path that a path or a file URL means; None for any other URL."""
    found = _SCHEME.match(url)
    if found is None:
        return os.path.abspath(url)
    return os.path.abspath(_decode_file_url(url, url[found.end() :])) if found[1].lower() == "file" else None


def locate_store_root(start: str | os.PathLike[str]) -> str | None:
    """Return the nearest directory at or above `start` that holds a store, or None."""
    place = os.path.abspath(start)
    while not holds_config(place):
        parent = os.path.dirname(place)
        if parent == place:
            return None
        place = parent
    return place


def _decode_file_url(url: str, rest: str) -> str:
    """Return the path of a file URL; only this host's files can be opened."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BadName(f"{url}: a file URL has three slashes and an absolute path, as in file:///data/ckpts")
    decoded = os.fsdecode(_ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), os.fsencode("/" + path)))
    if "\0" in decoded:
        raise BadName(f"{url} holds an escaped zero byte, which no path can have")
    return decoded


def holds_config(directory: str) -> bool:
    """Tell whether a directory holds the config of a store."""
    try:
        names = PosixFiles(directory).list_directory(os.path.join(directory, _CONFIG))
        return any(map(_GENERATION.match, names))
    except OSError:
        # Not there, a link, not a directory, or not ours to see: no store that we could use.
        return False
