"""The config record: it makes a directory or bucket a store, and says which versions may read and change it.

Also describes what is at a path without a config: files and folders of other tools, and what to do with them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from holdfast.errors import NewerFormat, NotAStore, ObjectExists, StoreError, StoreFull
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import find_path, holds_config, locate_store_root
from holdfast.repo.format.layout import CONFIG, PREFIXES, SHELVES, new_write_id
from holdfast.repo.format.record import Fields
from holdfast.repo.names.generations import create_generation, read_newest

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0
OPERATIONS: Final = ("read", "write", "collect")
"""The operations that can require a feature."""
CODEC_FEATURE: Final = "codec-blosc2"
"""A store needs it once a chunk may have been encoded; see `codec`."""
DELTA_FEATURE: Final = "delta-xor"
"""A store needs it once a chunk may have been stored as a delta; see `codec`."""
KNOWN_FEATURES: Final = frozenset({CODEC_FEATURE, DELTA_FEATURE})
LIKELY: Final = (1, 2)
"""The generations of the config in most stores: the first one is written once more, to confirm it; a codec is declared
in a third."""
_ATTEMPTS: Final = 8
_HEAD_BYTES: Final = 512
_MAX_NAMES: Final = 10_000
"""How many names of a folder are read; a folder of a million files can be described without listing them all."""

_ZIP: Final = b"PK\x03\x04"
_ZIP_NAME_SIZE_AT: Final = 26
_ZIP_NAME_AT: Final = 30
_LEGACY_TORCH: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save wrote before version 1.6: a pickled magic number."""
_MAX_SAFETENSORS_HEADER: Final = 100_000_000

_IMPORT: Final = "to save its tensors, use `holdfast -s STORE import {path} NAME`"
_KEEP_FILE: Final = "to keep the file as it is, use `holdfast -s STORE put NAME {path}`"
_KEEP_FOLDER: Final = "to keep the files as they are, use `holdfast -s STORE put NAME {path}/`"
_SAVE: Final = "and save what that returns with holdfast.open(STORE).save(NAME, ...)"


@dataclass(frozen=True, slots=True)
class Config:
    """The content of a store's config record."""

    store_id: str
    major: int
    minor: int
    features: dict[str, tuple[str, ...]]
    """Per operation, the features that a version must support to do it."""
    is_confirmed: bool = False
    """The config was written a second time, after the first was durable: a loss of power cannot undo it."""

    @property
    def has_codec(self) -> bool:
        """Whether chunks may be encoded."""
        return CODEC_FEATURE in self.features.get("read", ())

    @property
    def has_deltas(self) -> bool:
        """Whether chunks may be stored as deltas."""
        return DELTA_FEATURE in self.features.get("read", ())

    def verify_may(self, operation: str, *, url: str) -> None:
        """Raise NewerFormat unless this version supports every feature that `operation` requires."""
        unknown = sorted(set(self.features.get(operation, ())) - KNOWN_FEATURES)
        if unknown:
            raise NewerFormat(
                f"{url} needs the feature {unknown[0]!r} to {operation}, which this Holdfast does not know: upgrade"
            )


def create_config(store: ObjectStore) -> Config:
    """Create a store in an empty location; raises ObjectExists if there is one, NotAStore if it is not empty."""
    newest = read_newest(store, CONFIG)
    if newest.fields:
        raise ObjectExists(f"{store.url} has a config already", key=newest.fields.key)
    verify_empty(store)
    config = Config(new_write_id(), FORMAT_MAJOR, FORMAT_MINOR, dict.fromkeys(OPERATIONS, ()))
    fields = {
        "kind": "config",
        "store_id": config.store_id,
        "format": {"major": config.major, "minor": config.minor},
        "features": {operation: list(names) for operation, names in config.features.items()},
    }
    store.prepare([*PREFIXES, *SHELVES])
    # Not always generation 0: an earlier process may have died while writing it, and a torn record does not count.
    create_generation(store, CONFIG, newest.next_generation, {**fields, "write_id": new_write_id()})
    with suppress(StoreFull):  # the config is durable and valid; the next writer confirms it
        return confirm_config(store)
    return config


def confirm_config(store: ObjectStore) -> Config:
    """Write the config a second time, unless that was done before.

    A visible config may not be durable: the process that created it may have died before the fsync. The second one is
    created only after the first is durable, so a writer that sees the second needs no fsync.
    """
    newest = read_newest(store, CONFIG)
    if newest.fields is None:
        raise NotAStore(f"{store.url}: its config was just created and has vanished; is another process deleting it?")
    config = parse_config(newest.fields, url=store.url)
    config.verify_may("write", url=store.url)
    if config.is_confirmed:
        return config
    store.sync(CONFIG)
    repeated = {**newest.fields.values, "write_id": new_write_id(), "confirms": newest.generation}
    with suppress(ObjectExists):  # another process confirmed it, after making the first one durable
        create_generation(store, CONFIG, newest.next_generation, repeated)
    return replace(config, is_confirmed=True)


def ensure_config(store: ObjectStore) -> Config:
    """Return the config for a writer; create it if the location is empty. Concurrent writers agree on one."""
    if read_config(store) is None:
        with suppress(ObjectExists):
            return create_config(store)
    return confirm_config(store)


def declare_feature(store: ObjectStore, feature: str) -> Config:
    """Make versions that do not know `feature` refuse to read the store; durable when this returns.

    Writers that do this at the same time agree: one creates the next config, and the others find the feature in it.
    """
    for _ in range(_ATTEMPTS):
        newest = read_newest(store, CONFIG)
        if newest.fields is None:
            raise NotAStore(f"{store.url}: its config has vanished; is another process deleting it?")
        config = parse_config(newest.fields, url=store.url)
        config.verify_may("write", url=store.url)
        if feature in config.features.get("read", ()):
            # The process that declared it may have died before that was durable.
            store.sync(CONFIG)
            return config
        features = {**config.features, "read": (*config.features.get("read", ()), feature)}
        lists = {operation: list(names) for operation, names in features.items()}
        changed = {**newest.fields.values, "features": lists, "write_id": new_write_id()}
        with suppress(ObjectExists):  # another writer was first: perhaps it has declared the same
            create_generation(store, CONFIG, newest.next_generation, changed)
            return replace(config, features=features)
    raise StoreError(f"{store.url}: other processes keep changing its config; save again")


def verify_empty(store: ObjectStore) -> None:
    """Raise NotAStore if there are objects without a config: a damaged store, or other files."""
    other = read_first_other(store)
    # Read the config again: a process that is creating the store writes the config before anything else.
    if other and read_config(store) is None:
        raise NotAStore(
            describe_foreign(store.url)
            or f"{store.url} is not empty and has no config, so it is no store: {other!r} is there."
            " Choose an empty directory; if this was a store, its config/ was lost: restore it from a copy"
        )
    # The path may be a file, which contains no objects either.
    foreign = "" if other else describe_foreign(store.url)
    if foreign:
        raise NotAStore(foreign)


def read_first_other(store: ObjectStore) -> str:
    """Return the first key that is not a config; empty if there is none."""
    page = store.list("", limit=1)
    if page and page[0].key.startswith(CONFIG):
        page = store.list("", after=CONFIG + "~", limit=1)
    return page[0].key if page else ""


def read_config(store: ObjectStore) -> Config | None:
    """Return the config of a store, None if there is none; raises NewerFormat if this version cannot read it."""
    newest = read_newest(store, CONFIG, likely=LIKELY)
    return parse_config(newest.fields, url=store.url) if newest.fields else None


def parse_config(fields: Fields, *, url: str) -> Config:
    """Check and convert the fields of a config record."""
    fields.expect(kind="config")
    version = Fields(fields.key, fields.mapping("format"))
    major, minor = version.integer("major"), version.integer("minor")
    if major < FORMAT_MAJOR:
        raise NotAStore(
            f"{url} has format {major}.{minor}, a draft that no release reads; create a new store, and save there"
        )
    if major > FORMAT_MAJOR:
        raise NewerFormat(f"{url} has format {major}.{minor}, this Holdfast reads up to {FORMAT_MAJOR}: upgrade")
    lists = Fields(fields.key, fields.mapping("features"))
    features = {operation: lists.texts(operation) for operation in lists.values}
    config = Config(fields.text("store_id"), major, minor, features, is_confirmed="confirms" in fields.values)
    config.verify_may("read", url=url)
    return config


def read_unknown_prefix(store: ObjectStore) -> str | None:
    """Return the first key outside the format's prefixes, None if none; a later version may write such keys."""
    for name in store.iter_names(""):
        if f"{name.rstrip('/')}/" not in PREFIXES:
            found = store.list(name, limit=1)
            return found[0].key if found else name
    return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file or folder that another tool writes, and what to do with it."""

    what: str
    advice: str


_TORCH_SAVE: Final = _Kind("a file that torch.save wrote", f"{_IMPORT}; {_KEEP_FILE}")
_SAFETENSORS: Final = _Kind("a safetensors file", f"{_IMPORT}; {_KEEP_FILE}")
_DCP: Final = _Kind("a checkpoint that torch.distributed.checkpoint wrote", f"{_IMPORT}; {_KEEP_FOLDER}")
_HUGGING_FACE: Final = _Kind("a model folder as Hugging Face writes it", f"{_IMPORT}; {_KEEP_FOLDER}")
_SAFETENSORS_FOLDER: Final = _Kind("a folder of safetensors files", f"{_IMPORT}; {_KEEP_FOLDER}")
_MAGIC: Final[Sequence[tuple[bytes, str]]] = (
    (b"\x93NUMPY", "a numpy array file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"(\xb5/\xfd", "a zstd file"),
)


def describe_foreign(url: str) -> str:
    """Return a sentence that describes what is at a path or URL that is not a store, and what to do.

    Returns an empty string if nothing is there, or it is unknown or unreadable. Only names and the first bytes of a
    file are read.
    """
    path = find_path(url)
    if path is None:
        return ""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return _describe_folder(path)
        kind = _find_file_kind(path, status)
    except OSError:
        return ""
    return _describe_kind(path, kind)


def _describe_kind(path: str, kind: _Kind) -> str:
    return f"{path} is {kind.what}, not a store; {kind.advice.format(path=path)}"


def _find_file_kind(path: str, status: os.stat_result) -> _Kind:
    if not stat.S_ISREG(status.st_mode):
        return _Kind("neither a file nor a directory", "give the path of a directory")
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_ZIP):
        return _find_zip_kind(head)
    if head.startswith(_LEGACY_TORCH):
        return _TORCH_SAVE
    if _is_safetensors(head, status.st_size):
        return _SAFETENSORS
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return _Kind("a pickle file", _KEEP_FILE)
    what = next((what for magic, what in _MAGIC if head.startswith(magic)), "a file")
    return _Kind(what, f"a store is a directory; {_KEEP_FILE}")


def _find_zip_kind(head: bytes) -> _Kind:
    """Recognize an archive by the name of its first member."""
    size = int.from_bytes(head[_ZIP_NAME_SIZE_AT : _ZIP_NAME_SIZE_AT + 2], "little")
    name = head[_ZIP_NAME_AT : _ZIP_NAME_AT + size]
    if name.endswith(b"/data.pkl"):
        return _TORCH_SAVE
    if name.endswith(b".npy"):
        return _Kind("a numpy archive", f"load it with numpy.load, {_SAVE}; {_KEEP_FILE}")
    if b"/data/" in name or b"/code/" in name:
        return _Kind("an archive that torch.jit.save wrote", _KEEP_FILE)
    return _Kind("a zip archive", _KEEP_FILE)


def _is_safetensors(head: bytes, size_bytes: int) -> bool:
    header_bytes = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= header_bytes <= min(_MAX_SAFETENSORS_HEADER, size_bytes - 8)


def _describe_folder(path: str) -> str:
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry, _ in zip(entries, range(_MAX_NAMES), strict=False))
    if not names:
        return ""  # a store can be created here, even inside the directory of another one
    root = locate_store_root(os.path.dirname(path))
    # Only the format's own directories are part of a store. Others below it belong to the user.
    if root is not None and os.path.relpath(path, root).split(os.sep)[0] + "/" in PREFIXES:
        return f"{path} is a part of the store {root}, not a store; use {root}"
    for applies, kind in _FOLDERS:
        if applies(names):
            return _describe_kind(path, kind)
    inner = next((name for name in names if holds_config(os.path.join(path, name))), None)
    if inner is not None:
        return f"{path} is not a store, but {inner} in it is; use {os.path.join(path, inner)}"
    return ""


def _has(names: Sequence[str], ending: str, start: str = "") -> bool:
    return any(name.endswith(ending) and name.startswith(start) for name in names)


_FOLDERS: Final[Sequence[tuple[Callable[[Sequence[str]], bool], _Kind]]] = (
    (lambda names: ".metadata" in names and _has(names, ".distcp"), _DCP),
    (
        lambda names: (
            "config.json" in names
            and (_has(names, ".safetensors") or _has(names, ".bin", "pytorch_model") or _has(names, ".index.json"))
        ),
        _HUGGING_FACE,
    ),
    (lambda names: _has(names, ".safetensors"), _SAFETENSORS_FOLDER),
)
