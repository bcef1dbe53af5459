"""Checks a store, its structure or every byte; yields a finding for each problem, with the snapshots it affects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.digest import Digest, hash_bytes, short_hex
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, StoreError
from holdfast.lru import LruCache
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import CHUNK_BYTES, DELTA, WHOLE, Base, ChunkRef, Location, has_possible_size
from holdfast.repo.format.codecs.codec import open_stored
from holdfast.repo.format.codecs.delta import find_base_digest, open_delta
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import INDEX, MANIFESTS, PACKS, manifest_key, pack_key
from holdfast.repo.format.manifest import decode_manifest
from holdfast.repo.format.manifests_ahead import iter_manifests, take_read
from holdfast.repo.format.pack import HEADER, Footer, PackedChunk, iter_pack_footers, parse_pack_key, read_footer
from holdfast.repo.format.rank_manifests import Manifests
from holdfast.repo.handle.index import Fragment
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.repo.read.copies import ROW_COST_BYTES, iter_footers
from holdfast.repo.stages import Stages
from holdfast.repo.upkeep.check_records import Roots, check_links, check_records
from holdfast.repo.upkeep.findings import Finding, Severity, Tally
from holdfast.repo.upkeep.scrub import PackSection, Scrubbed, Scrubber, cut_pack
from holdfast.repo.upkeep.usage import PackPosition

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
