"""The config record: it makes a directory or bucket a store, and says which versions may read and change it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from holdfast.errors import NewerFormat, NotAStore, ObjectExists, StoreFull
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import CONFIG, PREFIXES, SHELVES, new_write_id
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.foreign import describe_foreign
from holdfast.repo.names.generations import create_generation, read_newest

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0
OPERATIONS: Final = ("read", "write", "collect")
"""The operations that can require a feature."""
_KNOWN_FEATURES: Final[frozenset[str]] = frozenset()


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

    def verify_may(self, operation: str, *, url: str) -> None:
        """Raise NewerFormat unless this version supports every feature that `operation` requires."""
        unknown = sorted(set(self.features.get(operation, ())) - _KNOWN_FEATURES)
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


def verify_empty(store: ObjectStore) -> None:
    """Raise NotAStore if there are objects without a config: a damaged store, or other files."""
    page = store.list("", limit=1)
    if page and page[0].key.startswith(CONFIG):
        page = store.list("", after=CONFIG + "\x7f", limit=1)
    # Read the config again: a process that is creating the store writes the config before anything else.
    if page and read_config(store) is None:
        raise NotAStore(
            describe_foreign(store.url)
            or f"{store.url} is not empty and has no config, so it is no store: {page[0].key!r} is there."
            " Choose an empty directory; if this was a store, its config/ was lost: restore it from a copy"
        )
    # The path may be a file, which contains no objects either.
    foreign = "" if page else describe_foreign(store.url)
    if foreign:
        raise NotAStore(foreign)


def read_config(store: ObjectStore) -> Config | None:
    """Return the config of a store, None if there is none; raises NewerFormat if this version cannot read it."""
    newest = read_newest(store, CONFIG)
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
    after = ""
    while True:
        page = store.list("", after=after, limit=1)
        if not page:
            return None
        prefix = page[0].key.partition("/")[0] + "/"
        if prefix not in PREFIXES:
            return page[0].key
        after = prefix + "\x7f"
