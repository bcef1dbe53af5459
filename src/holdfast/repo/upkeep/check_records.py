"""Checks every record of a store (config, snapshots, tags, leases, marks), and collects the current snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, StoreError
from holdfast.objects.protocol import ObjectStore, is_key
from holdfast.repo.format.layout import (
    BAD,
    CONFIG,
    INDEX,
    LEASES,
    MANIFESTS,
    MARKS,
    PACKS,
    PREFIXES,
    SNAPSHOTS,
    TAGS,
    generation_key,
    is_file_id,
    is_lease_id,
    split_generation,
    split_stem,
)
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.config import parse_config
from holdfast.repo.names.generations import ReadRecord, iter_records, iter_stems, read_record
from holdfast.repo.names.leases import EXPIRE_S
from holdfast.repo.names.roots import verify_record
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot
from holdfast.repo.upkeep.findings import Finding, Severity, Tally


@dataclass(slots=True)
class Roots:
    """The current snapshots, filled in while records are checked."""

    current: list[CommittedSnapshot] = field(default_factory=list)
    is_newer: bool = False
    """The store has a newer format than this version supports, so nothing else in it can be checked."""


def check_records(store: ObjectStore, roots: Roots, tally: Tally) -> Iterator[Finding]:
    """Check all records, current and replaced ones; add the current snapshots to `roots`."""
    yield from _check_config(store, roots, tally)
    if roots.is_newer:
        return
    for prefix in (SNAPSHOTS, TAGS):
        stems = list(iter_stems(store, prefix))
        keys = (generation_key(stem, number) for stem, generations in stems for number in reversed(generations))
        records = iter_records(store, keys)
        for stem, generations in stems:
            tally.objects += len(generations)
            yield from _check_name(stem, generations, records, roots)
    infos = [info for objects in store.list_together((LEASES, MARKS, BAD)) for info in objects]
    # Keys are ordered, so the last record of a lease has its state.
    last = {info.key.rpartition("@")[0]: info.key for info in infos}
    now_s = store.clock()
    for info, record in zip(infos, iter_records(store, (info.key for info in infos)), strict=True):
        tally.objects += 1
        is_old = now_s - info.modified_s > EXPIRE_S
        yield from _check_temporary(info.key, record, is_old=is_old and last[info.key.rpartition("@")[0]] == info.key)
    yield from _check_keys(store)


def check_links(store: ObjectStore) -> Iterator[Finding]:
    """Report each symbolic link: no operation follows it, and listings that meet it raise an error."""
    for path in store.iter_links():
        text = f"{path} is a symbolic link; links inside a store are never followed"
        if is_key(path):
            advice = "replace it by its target, or remove it; until then saves and collections may be refused"
            yield Finding("error", "link", path, text, advice)
        else:
            yield Finding("warning", "link", path, text, "Holdfast does not write such a file; remove it")


def _check_config(store: ObjectStore, roots: Roots, tally: Tally) -> Iterator[Finding]:
    """Check all generations of the config, the highest first: the first that can be read is the one that counts."""
    infos = list(store.iter_objects(CONFIG))
    tally.objects += len(infos)
    num_torn = 0
    is_known = False
    for info in reversed(infos):
        try:
            fields = read_record(store, info.key)
            if fields is None:
                num_torn += 1
                yield _torn(info.key)
                continue
            split = split_generation(info.key)
            fields.expect(generation=split[1] if split else -1)
            parse_config(fields, url=store.url)
            is_known = True
        except NewerFormat as error:
            if not is_known:
                roots.is_newer = True
                advice = "upgrade Holdfast; nothing else was checked, because this version does not know the format"
                yield Finding("error", "newer-format", info.key, str(error), advice)
                return
        except HoldfastError as error:
            severity: Severity = "warning" if is_known else "error"
            yield Finding(
                severity, "config-damaged", info.key, str(error), "restore this file from a copy of the store"
            )
    if num_torn < len(infos):
        return
    has_others = any(not key.startswith(CONFIG) for key in _iter_first_keys(store))
    if has_others and list(store.iter_objects(CONFIG)) != infos:
        # A writer creates the config before anything else: the store was made after the configs were listed.
        yield from _check_config(store, roots, tally)
    elif has_others or not infos:
        # A torn config never counted. If the store has nothing else, its creation was interrupted: that is no error.
        yield Finding("error", "config-missing", CONFIG, "the store has no config", "restore config/ from a copy")


def _iter_first_keys(store: ObjectStore) -> Iterator[str]:
    """Yield the first key under each prefix of the format."""
    return (info.key for prefix in PREFIXES for info in store.list(prefix, limit=1))


def _check_name(stem: str, generations: list[int], records: Iterator[ReadRecord], roots: Roots) -> Iterator[Finding]:
    """Check all generations of a name, the highest first: the first that is not torn is the one that counts."""
    is_current = True
    for generation in reversed(generations):
        key = generation_key(stem, generation)
        try:
            fields = next(records).take_fields()
            if fields is None:
                yield _torn(key)
                continue
            snapshot = _parse_fields(fields, stem, generation)
            if snapshot and is_current:
                roots.current.append(snapshot)
        except NotFound:
            continue  # collected since it was listed
        except (Corrupt, NewerFormat, StoreError) as error:
            severity: Severity = "error" if is_current else "warning"
            advice = "it is not needed any more: `holdfast gc --yes` removes it"
            if is_current:
                advice = "restore this file from a copy of the store; reading the name fails until then"
            name = split_stem(stem) if stem.startswith(SNAPSHOTS) else ""
            yield Finding(severity, "record-damaged", key, str(error), advice, snapshot=name)
        is_current = False


def _parse_fields(fields: Fields, stem: str, generation: int) -> CommittedSnapshot | None:
    """Check the fields of a snapshot or tag record; return the snapshot if the record is a live one."""
    verify_record(fields, stem, generation)
    if fields.text("state") != "live":
        return None
    if stem.startswith(SNAPSHOTS):
        return parse_snapshot(fields)
    fields.digest("digest")
    return None


def _check_temporary(key: str, record: ReadRecord, *, is_old: bool) -> Iterator[Finding]:
    """Check a temporary record: a lease, which may be the last and old, a mark or a note of a bad pack."""
    try:
        fields = record.take_fields()
        if fields is None:
            yield _torn(key)
            return
        if key.startswith(LEASES):
            stem, generation = split_generation(key) or (key, -1)
            fields.expect(kind="lease", lease=stem.removeprefix(LEASES), generation=generation)
            if is_old and fields.text("state") == "live":
                text = f"a save on {fields.text('host')} ended without releasing its lease: {fields.text('purpose')}"
                yield Finding("note", "lease-abandoned", key, text, "`holdfast gc --yes` removes it")
        if key.startswith(MARKS):
            fields.expect(kind="mark")
            fields.texts("keys")
    except NotFound:
        return
    except (Corrupt, NewerFormat, StoreError) as error:
        advice = "no snapshot depends on it; delete the file when no save or collection is running"
        yield Finding("warning", "record-damaged", key, str(error), advice)


def _check_keys(store: ObjectStore) -> Iterator[Finding]:
    for info in store.iter_folders("", PREFIXES):
        if not _is_known(info.key):
            text = f"{info.key} is not a file that this version of Holdfast writes"
            advice = "if a later version put it there, upgrade; otherwise move it away"
            yield Finding("warning", "unknown-object", info.key, text, advice)


def _is_known(key: str) -> bool:
    prefix = key.partition("/")[0] + "/"
    rest = key.removeprefix(prefix)
    if prefix not in PREFIXES:
        return False
    if prefix in (PACKS, MANIFESTS):
        return is_file_id(rest)
    if prefix in (CONFIG, SNAPSHOTS, TAGS):
        return split_generation(key) is not None
    if prefix == LEASES:
        return is_lease_id(rest.partition("@")[0]) and split_generation(key) is not None
    if prefix == INDEX:
        return len(rest) == 64 and all(char in "0123456789abcdef" for char in rest)
    return True


def _torn(key: str) -> Finding:
    text = f"record {key} is cut short: it counts as never written"
    # A crash cannot tear a record if creates are atomic, so a torn permanent record deserves a warning.
    is_permanent = key.startswith((SNAPSHOTS, TAGS, CONFIG))
    advice = "if a save of that name had returned, restore this file from a copy; otherwise it is harmless"
    if not is_permanent:
        advice = "`holdfast gc --yes` removes it"
    return Finding("warning" if is_permanent else "note", "record-torn", key, text, advice)
