"""The config record: what makes a place a store, and which versions may do what to it."""

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
"""What a feature flag can be mandatory for."""
_KNOWN_FEATURES: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Config:
    """What a store says about itself."""

    store_id: str
    major: int
    minor: int
    features: dict[str, tuple[str, ...]]
    """Per operation, the features that whoever does it must know."""
    is_confirmed: bool = False
    """It was written down a second time, after the first was durable: the store cannot vanish any more."""

    def verify_may(self, operation: str, *, url: str) -> None:
        """Raise NewerFormat unless this version knows all that `operation` needs here."""
        unknown = sorted(set(self.features.get(operation, ())) - _KNOWN_FEATURES)
        if unknown:
            raise NewerFormat(
                f"{url} needs the feature {unknown[0]!r} to {operation}, which this Holdfast does not know: upgrade"
            )


def create_config(store: ObjectStore) -> Config:
    """Make an empty place a store; raises ObjectExists if it is one already, NotAStore if it is not empty."""
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
    # Not always 0: who was first may have died over it, and a torn record never counted.
    create_generation(store, CONFIG, newest.next_generation, {**fields, "write_id": new_write_id()})
    with suppress(StoreFull):  # it is durable and counts; the next writer confirms it
        return confirm_config(store)
    return config


def confirm_config(store: ObjectStore) -> Config:
    """Write the config down a second time, unless that was done.

    A config that is visible may not be durable yet, for whoever created it may have died over it. Its repetition is
    created only after it is durable, so a writer that sees the repetition need not wonder, nor pay for an fsync.
    """
    newest = read_newest(store, CONFIG)
    if newest.fields is None:
        raise NotAStore(f"{store.url}: its config was created and is gone again")
    config = parse_config(newest.fields, url=store.url)
    config.verify_may("write", url=store.url)
    if config.is_confirmed:
        return config
    store.sync(CONFIG)
    repeated = {**newest.fields.values, "write_id": new_write_id(), "confirms": newest.generation}
    with suppress(ObjectExists):  # somebody else did it, and had made the first one durable before
        create_generation(store, CONFIG, newest.next_generation, repeated)
    return replace(config, is_confirmed=True)


def ensure_config(store: ObjectStore) -> Config:
    """Return the config for a writer, creating it if the place is empty; two that come at once agree on one."""
    if find_config(store) is None:
        with suppress(ObjectExists):
            return create_config(store)
    return confirm_config(store)


def verify_empty(store: ObjectStore) -> None:
    """Raise NotAStore if there are objects without a config: a damaged store, or somebody else's files."""
    page = store.list("", limit=1)
    if page and page[0].key.startswith(CONFIG):
        page = store.list("", after=CONFIG + "\x7f", limit=1)
    # Whoever is making it a store just now has created the config before anything else.
    if page and find_config(store) is None:
        raise NotAStore(
            describe_foreign(store.url)
            or f"{store.url} is not empty and has no config, so it is no store: {page[0].key!r} is there."
            " Choose an empty place; if this was a store, its config/ was lost: restore it from a copy"
        )
    # A file has no objects in it either.
    foreign = "" if page else describe_foreign(store.url)
    if foreign:
        raise NotAStore(foreign)


def find_config(store: ObjectStore) -> Config | None:
    """Return the config of a store, None if there is none; raises NewerFormat for one we may not read."""
    newest = read_newest(store, CONFIG)
    return parse_config(newest.fields, url=store.url) if newest.fields else None


def parse_config(fields: Fields, *, url: str) -> Config:
    """Check and convert the fields of a config record."""
    fields.expect(kind="config")
    version = Fields(fields.key, fields.mapping("format"))
    major, minor = version.integer("major"), version.integer("minor")
    if major < FORMAT_MAJOR:
        raise NotAStore(
            f"{url} has format {major}.{minor}, a draft that no release reads; make a new store, and save there"
        )
    if major > FORMAT_MAJOR:
        raise NewerFormat(f"{url} has format {major}.{minor}, this Holdfast reads up to {FORMAT_MAJOR}: upgrade")
    lists = Fields(fields.key, fields.mapping("features"))
    features = {operation: lists.texts(operation) for operation in lists.values}
    config = Config(fields.text("store_id"), major, minor, features, is_confirmed="confirms" in fields.values)
    config.verify_may("read", url=url)
    return config


def find_unknown_prefix(store: ObjectStore) -> str | None:
    """Return the first key outside the format's prefixes: a later version may have put it there."""
    after = ""
    while True:
        page = store.list("", after=after, limit=1)
        if not page:
            return None
        prefix = page[0].key.partition("/")[0] + "/"
        if prefix not in PREFIXES:
            return page[0].key
        after = prefix + "\x7f"
