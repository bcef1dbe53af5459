"""Checks a store, its records, structure or every byte; yields a finding for each problem, with affected snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, Literal

from holdfast.digest import Digest, fingerprint, hash_bytes, short_hex
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, StoreError
from holdfast.lru import LruCache
from holdfast.objects.blocks import BlockPool
from holdfast.objects.protocol import ObjectInfo, ObjectStore, is_key
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine, Stages
from holdfast.repo.format.chunk import CHUNK_BYTES, DELTA, WHOLE, Base, ChunkRef, Location, has_possible_size
from holdfast.repo.format.codec import find_base_digest, open_delta, open_stored
from holdfast.repo.format.entry import Entry
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
    manifest_key,
    pack_key,
    split_generation,
    split_stem,
)
from holdfast.repo.format.manifest import decode_manifest
from holdfast.repo.format.pack import (
    HEADER,
    PAGE_BYTES,
    Footer,
    PackedChunk,
    iter_pack_footers,
    parse_pack_key,
    read_footer,
)
from holdfast.repo.format.rank_manifests import Manifests, iter_manifests, take_read
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.config import parse_config
from holdfast.repo.handle.index import Fragment
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES
from holdfast.repo.names.generations import ReadRecord, iter_records, iter_stems, read_record
from holdfast.repo.names.leases import EXPIRE_S
from holdfast.repo.names.roots import verify_record
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot, read_name
from holdfast.repo.read.any_copy import ROW_COST_BYTES, iter_footers
from holdfast.repo.upkeep.usage import PackPosition

Severity = Literal["error", "warning", "note"]
"""error: saved data cannot be read. warning: damage that has lost no data yet. note: harmless leftovers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem in a store."""

    severity: Severity
    code: str
    """A stable identifier for programs."""
    key: str
    """The key of the affected object."""
    message: str
    advice: str
    snapshot: str = ""
    entry: str = ""
    chunk: str = ""
    pack: str = ""


@dataclass(slots=True)
class Tally:
    """How much a check has covered."""

    objects: int = 0
    snapshots: int = 0
    manifests: int = 0
    packs: int = 0
    chunks: int = 0
    stored_bytes: int = 0
    """The size of all packs and manifests."""
    bytes_read: int = 0
    """How many of these bytes were read and verified: all of them, if every byte is checked and can be read."""


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


_READ_BYTES: Final = 4 * CHUNK_BYTES
"""Size of one read: smaller reads make a disk slower, larger ones do not fit in the CPU cache."""
_BATCH: Final = 4
"""Sections per task: handing over a single one costs as much as opening its file."""
_BUFFER_BYTES: Final = _READ_BYTES + 2 * PAGE_BYTES
_ZEROS: Final = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class PackSection:
    """A part of a pack that is read at once: whole chunks and their padding."""

    pack_id: str
    start: int
    stop: int
    chunks: tuple[PackedChunk, ...]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What was found when a section was read."""

    section: PackSection
    bad_chunks: tuple[PackedChunk, ...] = ()
    has_bad_padding: bool = False
    error: str = ""
    """Why the section could not be read; empty if it could."""


def cut_pack(pack_id: str, footer: Footer, *, data_start: int) -> Iterator[PackSection]:
    """Cut the part of a pack between header and footer into sections."""
    start = end = data_start
    chunks: list[PackedChunk] = []
    for chunk in footer.chunks:
        stop = chunk.location.offset + chunk.location.stored_bytes
        if chunks and stop - start > _READ_BYTES:
            yield PackSection(pack_id, start, end, tuple(chunks))
            start, chunks = end, []
        chunks.append(chunk)
        end = stop
    yield PackSection(pack_id, start, footer.footer_offset, tuple(chunks))


class Scrubber:
    """Reads and verifies sections on an engine's threads, which reuse their buffers."""

    def __init__(self, store: ObjectStore, engine: Engine, stages: Stages) -> None:
        """Read from `store` on the threads of `engine`."""
        self._store = store
        self._stages = stages
        self._engine = engine
        self._blocks = BlockPool(_BUFFER_BYTES, kept=engine.threads, huge=True)

    def scrub(self, sections: Iterable[PackSection]) -> Iterator[Scrubbed]:
        """Yield the result of each section, in order, while others are read in the background."""
        for batch in self._engine.iter_results(self._scrub_batch, _iter_batches(sections)):
            yield from batch

    def _scrub_batch(self, batch: Sequence[PackSection]) -> list[Scrubbed]:
        return [self._scrub_one(section) for section in batch]

    def _scrub_one(self, section: PackSection) -> Scrubbed:
        with self._blocks.lend() as block:
            return self._scrub_in(block, section)

    def _scrub_in(self, block: memoryview, section: PackSection) -> Scrubbed:
        # Read from a page boundary into an aligned buffer: direct I/O then needs no copy.
        before, size = section.start % PAGE_BYTES, section.stop - section.start
        if before + size > len(block):
            block = memoryview(bytearray(before + size))
        try:
            with self._stages.time("read", size):
                self._store.read_into(pack_key(section.pack_id), section.start - before, block[: before + size])
        except (NotFound, Corrupt, StoreError) as error:
            return Scrubbed(section, section.chunks, error=str(error))
        with self._stages.time("verify", size):
            return _verify_section(section, block[before : before + size])


def _verify_section(section: PackSection, data: memoryview) -> Scrubbed:
    """Return the chunks that are damaged, and whether padding is."""
    bad: list[PackedChunk] = []
    is_clean = True
    end = 0
    for chunk in section.chunks:
        first = chunk.location.offset - section.start
        is_clean = is_clean and _is_zero(data[end:first])
        end = first + chunk.location.stored_bytes
        if not _is_intact(data[first:end], chunk):
            bad.append(chunk)
    is_clean = is_clean and _is_zero(data[end:])
    return Scrubbed(section, tuple(bad), has_bad_padding=not is_clean)


def _iter_batches(sections: Iterable[PackSection]) -> Iterator[tuple[list[PackSection], int]]:
    left = iter(sections)
    while batch := list(islice(left, _BATCH)):
        yield batch, _BUFFER_BYTES  # the sections of a batch are read one by one into the same buffer


def _is_intact(stored: memoryview, chunk: PackedChunk) -> bool:
    # A delta needs its base, and a codec of a later version cannot be decoded: the fingerprint is of the stored bytes.
    if chunk.location.codec not in WHOLE:
        return fingerprint(stored) == chunk.location.fingerprint
    try:
        return hash_bytes(open_stored(chunk.location, stored, chunk.size_bytes)) == chunk.digest
    except Corrupt:
        return False


def _is_zero(padding: memoryview) -> bool:
    return padding == _ZEROS[: len(padding)]


_MAX_MANIFEST_BYTES: Final = 1 << 30
_RESTORE: Final = "restore the pack from a copy of the store, or delete the snapshot"


@dataclass(frozen=True, slots=True)
class _Problem:
    """A chunk that a snapshot needs and that is missing or damaged at the location in its manifest."""

    snapshot: CommittedSnapshot
    entry: Entry
    ref: ChunkRef
    start: int
    reason: str


class Checker:
    """One check of one store; also works if the config of the store is damaged."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        read: bool = False,
        progress: Progress | None = None,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        stages: Stages | None = None,
    ) -> None:
        """Check `store`; with `read`, every byte of every object."""
        self.tally = Tally()
        self._links = check_links(store)
        # Every other finding is about objects that can be reached without following a link.
        self._store = store.skipping_links()
        self._read = read
        self._progress = progress or Silent()
        self._budget_bytes = budget_bytes
        self._stages = stages or Stages()
        max_rows = budget_bytes // 4 // ROW_COST_BYTES
        self._footers: LruCache[str, dict[int, PackedChunk]] = LruCache(max_rows, size_of=len)
        self._has_unreadable = False
        self._unreadable_packs: set[str] = set()
        self._bad_footers: dict[str, str] = {}
        self._damaged_packs: dict[str, str] = {}
        self._damage_at: dict[PackPosition, str] = {}
        self._read_positions: set[PackPosition] = set()
        self._wrong_deltas: set[PackPosition] = set()
        self._used_packs: set[str] = set()
        self._used_manifests: set[str] = set()

    def iter_findings(self) -> Iterator[Finding]:
        """Yield all findings: links, records, packs, then the affected snapshots and entries."""
        yield from self._links
        roots = Roots()
        for finding in check_records(self._store, roots, self.tally):
            self._has_unreadable |= finding.code == "record-damaged"
            yield finding
        if roots.is_newer:
            return
        yield from self._check_packs()
        yield from self._check_snapshots(roots)
        yield from self._check_other_manifests(roots)
        yield from self._check_index()

    def _check_packs(self) -> Iterator[Finding]:
        packs = list(self._store.iter_objects(PACKS))
        pack_bytes = sum(info.size_bytes for info in packs)
        self.tally.stored_bytes += pack_bytes
        self._progress.begin("check packs", pack_bytes)
        try:
            with Engine("holdfast-scrub", budget_bytes=self._budget_bytes, waits=True) as engine:
                sections = self._iter_sections(packs)
                for outcome in Scrubber(self._store, engine, self._stages).scrub(sections):
                    yield from self._judge(outcome)
        finally:
            self._progress.end()

    def _iter_sections(self, listed: Iterable[ObjectInfo]) -> Iterator[PackSection]:
        """Check each pack's footer and, if every byte is checked, yield its sections."""
        packs = [(info.key.removeprefix(PACKS), info.size_bytes) for info in listed if parse_pack_key(info.key)]
        for (pack_id, _), footer in zip(packs, iter_pack_footers(self._store, packs), strict=True):
            self.tally.packs += 1
            self.tally.objects += 1
            if isinstance(footer, NotFound):
                continue
            if isinstance(footer, Corrupt | NewerFormat | StoreError):
                self._bad_footers[pack_id] = self._damaged_packs[pack_id] = str(footer)
                continue
            rows = take_read(footer)
            self.tally.chunks += len(rows.chunks)
            self._keep_rows(pack_id, rows)
            if self._read:
                self.tally.bytes_read += rows.pack_bytes
                yield from cut_pack(pack_id, rows, data_start=HEADER.size)

    def _judge(self, outcome: Scrubbed) -> Iterator[Finding]:
        section = outcome.section
        key = pack_key(section.pack_id)
        self._progress.advance(section.stop - section.start)
        if outcome.error and section.pack_id not in self._unreadable_packs:
            self._unreadable_packs.add(section.pack_id)
            text = f"{key} cannot be read: {outcome.error}"
            yield Finding("error", "pack-unreadable", key, text, _RESTORE, pack=section.pack_id)
        if outcome.has_bad_padding:
            text = f"{key}: padding between bytes {section.start} and {section.stop} is not zero"
            yield Finding(
                "warning",
                "padding",
                key,
                text,
                "no chunk is affected; restore the pack from a copy",
                pack=section.pack_id,
            )
        for chunk in outcome.bad_chunks:
            self._damage_at[section.pack_id, chunk.location.offset] = outcome.error or "its bytes are damaged"
            text = f"{key}: chunk {short_hex(chunk.digest)} at offset {chunk.location.offset} is damaged"
            yield Finding(
                "warning", "chunk-damaged", key, text, "see the snapshots named below, if any",
                chunk=chunk.digest.hex(), pack=section.pack_id,
            )  # fmt: skip

    def _check_snapshots(self, roots: Roots) -> Iterator[Finding]:
        problems: list[_Problem] = []
        found = iter_manifests(self._store, [snapshot.manifest for snapshot in roots.current])
        for snapshot, read in zip(roots.current, found, strict=True):
            self.tally.snapshots += 1
            try:
                manifests = take_read(read)
                self._used_manifests.update((snapshot.manifest.manifest_id, *manifests.ids))
                yield from self._check_record_against(snapshot, manifests)
            except HoldfastError as error:
                if isinstance(error, NotFound) and not self._is_current(snapshot):
                    continue
                key = manifest_key(snapshot.manifest.manifest_id)
                text = f"snapshot {snapshot.name!r} cannot be read: {error}"
                yield Finding("error", "manifest-damaged", key, text, "restore it from a copy", snapshot=snapshot.name)
                self._has_unreadable = True
                continue
            self._used_packs.update(manifests.packs)
            if self._read:
                self._read_deltas(manifests)
            problems += self._iter_problems(snapshot, manifests.iter_entries())
        yield from self._report(problems)
        yield from self._report_packs()
        yield from self._report_unused()

    def _is_current(self, snapshot: CommittedSnapshot) -> bool:
        """Return whether a name still has its manifest: one that was deleted or overwritten since may be collected."""
        try:
            now = read_name(self._store, snapshot.name).snapshot
        except HoldfastError:
            return True
        return now is not None and now.manifest.manifest_id == snapshot.manifest.manifest_id

    def _report_unused(self) -> Iterator[Finding]:
        advice = "`holdfast gc --yes` removes it"
        if self._has_unreadable:
            advice = "keep it: a snapshot that cannot be read now may need it"
        for info in self._store.iter_objects(PACKS):
            pack_id = parse_pack_key(info.key)
            if pack_id and pack_id not in self._used_packs:
                text = f"no snapshot that can be read uses {info.key} ({info.size_bytes} bytes)"
                yield Finding("note", "pack-unused", info.key, text, advice, pack=pack_id)

    def _report_packs(self) -> Iterator[Finding]:
        """Yield packs that are damaged as a whole; a warning if no snapshot uses the pack."""
        for pack_id, text in self._damaged_packs.items():
            is_used = pack_id in self._used_packs
            severity: Severity = "error" if is_used else "warning"
            advice = f"its chunks may still be read by the snapshots that use it; {_RESTORE}"
            if not is_used:
                advice = "no snapshot that can be read uses it"
            yield Finding(severity, "pack-damaged", pack_key(pack_id), text, advice, pack=pack_id)

    def _check_record_against(self, snapshot: CommittedSnapshot, manifests: Manifests) -> Iterator[Finding]:
        self.tally.manifests += 1 + len(manifests.parts)
        self.tally.objects += 1 + len(manifests.parts)
        entries = list(manifests.view().iter_entries())
        found = manifests.digest(), len(entries), sum(entry.size_bytes for entry in entries)
        if found != (snapshot.digest, snapshot.num_entries, snapshot.logical_bytes):
            key = manifest_key(snapshot.manifest.manifest_id)
            text = f"snapshot {snapshot.name!r} does not have the content that its record states"
            advice = "save it again, or restore it from a copy"
            yield Finding("error", "digest-mismatch", key, text, advice, snapshot=snapshot.name)

    def _iter_problems(self, snapshot: CommittedSnapshot, entries: Iterable[Entry]) -> Iterator[_Problem]:
        for entry in entries:
            start = 0
            for ref in entry.chunks:
                reason = self._find_fault(ref)
                if reason:
                    yield _Problem(snapshot, entry, ref, start, reason)
                start += ref.size_bytes

    def _find_fault(self, ref: ChunkRef) -> str:
        """Return why a chunk cannot be read at its location in the manifest; an empty text if it can."""
        at = ref.location
        if at is None:
            return "" if hash_bytes(ref.inline) == ref.digest else "its inline bytes are damaged"
        fault = self._find_location_fault(at, ref.digest, ref.size_bytes)
        if fault or not at.base:
            return fault
        fault = self._find_location_fault(at.base.location, at.base.digest, ref.size_bytes)
        if fault:
            base = at.base
            return f"it is a delta, and of its base {short_hex(base.digest)} in pack {base.location.pack_id}: {fault}"
        is_wrong = (at.pack_id, at.offset) in self._wrong_deltas
        return "it is a delta that gives another chunk with its base" if is_wrong else ""

    def _read_deltas(self, manifests: Manifests) -> None:
        """Read the deltas of a snapshot with their bases, each once, and note those that do not give their chunk."""
        unread: dict[PackPosition, ChunkRef] = {}
        for ref in (ref for entry in manifests.iter_entries() for ref in entry.chunks):
            if ref.location and ref.location.base:
                unread[ref.location.pack_id, ref.location.offset] = ref
        positions = [position for position in unread if position not in self._read_positions]
        if not positions:
            return

        def is_right(position: PackPosition) -> bool:
            ref = unread[position]
            return ref.location is not None and self._is_intact(ref.location, ref.digest, ref.size_bytes)

        with Engine("holdfast-scrub", budget_bytes=self._budget_bytes, waits=True) as engine:
            results = engine.iter_results(is_right, ((position, 4 * CHUNK_BYTES) for position in positions))
            self._wrong_deltas |= {position for position, right in zip(positions, results, strict=True) if not right}
        self._read_positions.update(positions)

    def _find_location_fault(self, at: Location, digest: Digest, size_bytes: int) -> str:
        if (at.pack_id, at.offset) in self._damage_at:
            return self._damage_at[at.pack_id, at.offset]
        rows = self._find_rows(at.pack_id)
        if at.pack_id in self._bad_footers:
            if self._read and self._is_intact(at, digest, size_bytes):
                return ""
            return f"its pack is damaged: {self._bad_footers[at.pack_id]}"
        row = rows.get(at.offset)
        if row is None or (row.digest, row.size_bytes, row.location) != (digest, size_bytes, at._replace(base=None)):
            return "its pack has something else at that offset"
        return ""

    def _find_rows(self, pack_id: str) -> dict[int, PackedChunk]:
        """Return the chunks of a pack by offset, from a cache of recently used packs."""
        rows = self._footers.get(pack_id)
        if rows is not None:
            return rows
        if pack_id not in self._bad_footers:
            try:
                return self._keep_rows(pack_id, read_footer(self._store, pack_id))
            except NotFound:
                self._bad_footers[pack_id] = "the pack is missing"
            except (Corrupt, NewerFormat, StoreError) as error:
                self._bad_footers[pack_id] = str(error)
        return {}

    def _keep_rows(self, pack_id: str, footer: Footer) -> dict[int, PackedChunk]:
        rows = {chunk.location.offset: chunk for chunk in footer.chunks}
        self._footers.put(pack_id, rows)
        return rows

    def _is_intact(self, at: Location, digest: Digest, size_bytes: int) -> bool:
        if size_bytes > CHUNK_BYTES or not has_possible_size(at.codec, at.stored_bytes, size_bytes):
            return False  # sizes in a manifest are not trusted, so memory for them is bounded
        try:
            return hash_bytes(self._open(at, size_bytes)) == digest
        except (NotFound, Corrupt, StoreError):
            return False

    def _open(self, at: Location, size_bytes: int) -> memoryview:
        """Return the raw bytes of a chunk, unverified; raises NotFound or Corrupt."""
        data = memoryview(bytearray(at.stored_bytes))
        self._store.read_into(pack_key(at.pack_id), at.offset, data)
        if at.codec != DELTA:
            return open_stored(at, data, size_bytes)
        base = at.base or self._find_base(find_base_digest(data), size_bytes)
        if base is None or not self._is_intact(base.location, base.digest, size_bytes):
            raise Corrupt("the base of a delta is lost")
        return open_delta(at, data, self._open(base.location, size_bytes))

    def _find_base(self, digest: Digest, size_bytes: int) -> Base | None:
        """Return where the base of a delta is, if only its digest is known; reads all footers."""
        for pack_id, footer in iter_footers(self._store):
            for row in footer.chunks:
                is_copy = (row.digest, row.size_bytes) == (digest, size_bytes) and row.location.codec in WHOLE
                if is_copy and (pack_id, row.location.offset) not in self._damage_at:
                    return Base(digest, row.location)
        return None

    def _report(self, problems: list[_Problem]) -> Iterator[Finding]:
        """Yield a finding for each affected chunk: a warning if the store has an intact copy, otherwise an error."""
        copies = self._find_copies({problem.ref.digest for problem in problems})
        for problem in problems:
            at = problem.ref.location
            pack = at.pack_id if at else ""
            what = f"snapshot {problem.snapshot.name!r}, entry {problem.entry.name!r}"
            where = f"chunk {short_hex(problem.ref.digest)} at byte {problem.start}" + (
                f", pack {pack}" if pack else ""
            )
            copy = copies.get(problem.ref.digest)
            severity: Severity = "warning" if copy else "error"
            text = f"{what}: {where}: {problem.reason}"
            text += f"; an intact copy in pack {copy} is read instead" if copy else "; no other copy is in the store"
            yield Finding(
                severity, "chunk-hit" if copy else "chunk-lost", pack_key(pack) if pack else "", text,
                "save the snapshot again under another name to heal it" if copy else _RESTORE,
                problem.snapshot.name, problem.entry.name, problem.ref.digest.hex(), pack,
            )  # fmt: skip

    def _find_copies(self, wanted: set[Digest]) -> dict[Digest, str]:
        """Return a pack with an intact copy, for each wanted chunk that has one."""
        found: dict[Digest, str] = {}
        if wanted:
            for pack_id, footer in iter_footers(self._store):
                for chunk in footer.chunks:
                    position = (pack_id, chunk.location.offset)
                    is_wanted = chunk.digest in wanted and chunk.digest not in found and position not in self._damage_at
                    if is_wanted and self._is_intact(chunk.location, chunk.digest, chunk.size_bytes):
                        found[chunk.digest] = pack_id
        return found

    def _check_other_manifests(self, roots: Roots) -> Iterator[Finding]:
        """Report manifests that no current snapshot uses, and check that each can be decoded."""
        used = self._used_manifests | {snapshot.manifest.manifest_id for snapshot in roots.current}
        listed = list(self._store.iter_objects(MANIFESTS))
        size_bytes = sum(info.size_bytes for info in listed)
        self.tally.stored_bytes += size_bytes
        self.tally.bytes_read += size_bytes if self._read else 0
        unused = [info for info in listed if info.key.removeprefix(MANIFESTS) not in used]
        advice = "keep it: see the damaged records" if self._has_unreadable else "`holdfast gc --yes` removes it"
        works = ((partial(self._try_manifest, info.key), info.size_bytes) for info in unused)
        for info, error in zip(unused, self._store.iter_together(works), strict=True):
            self.tally.manifests += 1
            self.tally.objects += 1
            text = f"no snapshot that can be read uses {info.key} ({info.size_bytes} bytes)"
            yield Finding("note", "manifest-unused", info.key, text, advice)
            if error and not isinstance(error, NotFound):
                yield Finding("warning", "manifest-damaged", info.key, str(error), "no snapshot needs it")

    def _try_manifest(self, key: str) -> HoldfastError | None:
        try:
            decode_manifest(self._store.read(key, limit_bytes=_MAX_MANIFEST_BYTES), where=key)
        except HoldfastError as error:
            return error
        return None

    def _check_index(self) -> Iterator[Finding]:
        listed = list(self._store.iter_objects(INDEX))
        works = ((partial(self._try_fragment, info), info.size_bytes) for info in listed)
        for info, error in zip(listed, self._store.iter_together(works), strict=True):
            self.tally.objects += 1
            if error and not isinstance(error, NotFound):
                advice = "it is ignored; delete the file, it can be rebuilt from the packs"
                yield Finding("warning", "index-damaged", info.key, str(error), advice)

    def _try_fragment(self, info: ObjectInfo) -> HoldfastError | None:
        try:
            Fragment(self._store, info.key, info.size_bytes)
            if self._read and hash_bytes(
                self._store.read(info.key, limit_bytes=info.size_bytes)
            ).hex() != info.key.removeprefix(INDEX):
                raise Corrupt(f"{info.key} does not have the digest that names it", key=info.key)
        except HoldfastError as error:
            return error
        return None
