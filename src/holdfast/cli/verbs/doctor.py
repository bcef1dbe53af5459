"""The verb `doctor`: checks a store and its filesystem or server, and gives a verdict on each fact."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.cli.lookup import verify_possible
from holdfast.cli.output import SEVERITY_STYLES, Output, count, format_bytes
from holdfast.cli.verb import add_json, document
from holdfast.errors import Corrupt, NewerFormat
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.local.probe import DirectoryFacts, locate_nearest_directory, probe_directory
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import find_path, open_store
from holdfast.repo.format.layout import CONFIG, INDEX, LEASES, MANIFESTS, PACKS
from holdfast.repo.handle.config import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    KNOWN_FEATURES,
    Config,
    read_config,
    read_unknown_prefix,
)
from holdfast.repo.names.leases import read_abandoned
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import DamagedName, iter_names, iter_tags
from holdfast.repo.upkeep.collect import read_idle_marks

if TYPE_CHECKING:
    from holdfast.objects.cloud.probe import BucketFacts

_SLOW_SYNC_MS: Final = 50.0
SMALL_SAVE_ROUNDS: Final = 11
"""How many requests a small save in a bucket waits for, one after the other; a test counts them."""
_SLOW_REQUEST_MS: Final = 200.0
_LOW_BYTES: Final = 1 << 30
_NOT_TESTED: Final = (
    "not tested, because that needs a write: whether two writers can overwrite each other, how fast a write becomes"
    " durable, direct I/O, upper and lower case in names; `holdfast doctor --write` tests them with scratch files"
)
_BUCKET_NOT_TESTED: Final = (
    "not tested, because that needs a write: whether two writers can overwrite each other, ranges, checksums, listings,"
    " deletes and the clock of the server; `holdfast doctor --write` tests them with scratch objects"
)


_Ability = tuple[str, "bool | None", str, str, Literal["note", "warning", "error"]]
"""A topic, whether the server has it, the sentences for yes and no, and the verdict for no."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the output: a verdict, its topic and a sentence."""

    verdict: Literal["ok", "note", "warning", "error"]
    topic: str
    text: str


def declare_doctor(parser: ArgumentParser) -> None:
    """Declare the verb `doctor`."""
    more = (
        "Writes nothing without --write. Some facts need a test write: whether two\n"
        "writers can overwrite each other, how fast a write becomes durable, and whether\n"
        "direct I/O works; in a bucket, also ranges, checksums, listings, deletes and the\n"
        "clock of the server. Also checks a place without a store. Exits with 1 if there\n"
        "is a warning or an error."
    )
    document(parser, more, examples=["holdfast doctor", "holdfast doctor --write s3://bucket/ckpts"])
    parser.add_argument("place", metavar="STORE", nargs="?", help="path or URL to check, instead of -s STORE")
    parser.add_argument("--write", action="store_true", help="test with scratch files or objects, and remove them")
    devices = "show how digests are computed on each accelerator, after a check there; needs torch"
    parser.add_argument("--devices", action="store_true", help=devices)
    add_json(parser)
    parser.set_defaults(run_verb=run_doctor)


def run_doctor(options: Namespace, url: str, output: Output) -> int:
    """Check a store, or a place without one, and its filesystem or server; writes only with --write."""
    store = open_store(url, read_only=True)
    verify_possible(store)
    if find_path(url) is None:
        place, where = _probe_bucket(url, write=options.write)
    else:
        directory = probe_directory(locate_nearest_directory(store.url), write=options.write)
        place, where = asdict(directory), list(_judge_directory(directory))
    counts: dict[str, int] = {}
    if store.list("", limit=1):
        counts = _count_objects(store)
        verdicts = [*_judge_format(store), *where, *_judge_counts(counts), *_judge_collection(store)]
    else:
        verdicts = [_judge_absence(store, place.get("path", store.url)), *where]
    if output.cache is not None:
        verdicts.append(_judge_cache(output.cache))
    if options.devices:
        verdicts += _judge_devices()
    if options.json:
        described = [asdict(verdict) for verdict in verdicts]
        output.json({"store": store.url, "verdicts": described, "place": place, "counts": counts})
    else:
        output.line(f"store {store.url}")
        for verdict in verdicts:
            output.line(f"{verdict.verdict:7}  {verdict.text}", style=SEVERITY_STYLES.get(verdict.verdict, ""))
    return 1 if {verdict.verdict for verdict in verdicts} & {"warning", "error"} else 0


def _judge_cache(cache: DiskCache) -> DoctorFinding:
    usage = cache.read_usage()
    size = f"{format_bytes(usage.size_bytes)} of at most {format_bytes(cache.limit_bytes)}"
    return DoctorFinding("ok", "cache", f"the cache in {cache.directory} has {count(usage.files, 'file')}, {size}")


def _judge_devices() -> Iterator[DoctorFinding]:
    from holdfast.tensors.device_digest.choice import choose_backend, list_accelerators

    devices = list_accelerators()
    if not devices:
        yield DoctorFinding("ok", "digests", "torch has no accelerator here: digests are computed by the CPU")
    for device in devices:
        choice = choose_backend(device)
        text = f"digests of bytes on {device} are computed by the backend {choice.backend!r}: {choice.reason}"
        yield DoctorFinding("warning" if choice.has_wrong else "ok", "digests", text)


def _judge_absence(store: ObjectStore, path: str) -> DoctorFinding:
    where = "" if path == store.url else f"; the following is about {path}, the nearest existing directory"
    text = f"there is no store here yet; `holdfast -s {store.url} init` or the first save creates it{where}"
    return DoctorFinding("warning", "format", text)


def _judge_format(store: ObjectStore) -> Iterator[DoctorFinding]:
    try:
        config = read_config(store)
    except Corrupt as error:
        yield DoctorFinding("error", "format", f"the config cannot be read: {error}; restore {CONFIG} from a copy")
        return
    if config is None:
        yield DoctorFinding(
            "error", "format", f"there is no config, so this is not a store; restore {CONFIG} from a copy"
        )
        return
    yield _judge_version(config)
    unknown = read_unknown_prefix(store)
    if unknown:
        text = f"{unknown} is not part of the format: a later Holdfast or another program created it; check what it is"
        yield DoctorFinding("warning", "foreign", text)


def _judge_collection(store: ObjectStore) -> Iterator[DoctorFinding]:
    abandoned = read_abandoned(store)
    idle = _read_idle(store) if abandoned else []
    unfinished = [key for key in abandoned if key.partition("@")[0] not in idle]
    if unfinished:
        text = (
            f"a garbage collection did not finish ({unfinished[0]}): saves do not reuse what it marked;"
            " run `holdfast gc --yes`"
        )
        yield DoctorFinding("warning", "collection", text)
    for stem in sorted({key.partition("@")[0] for key in abandoned}.intersection(idle)):
        text = (
            f"the mark {stem} names only files that are in use: this is harmless, but saves do not reuse them"
            " until `holdfast gc --yes` runs while no other process uses the store"
        )
        yield DoctorFinding("note", "collection", text)


def _read_idle(store: ObjectStore) -> list[str]:
    try:
        return read_idle_marks(store, read_live(store))
    except (Corrupt, NewerFormat):
        return []  # a root cannot be read, so what is in use is not known; see `_judge_counts`


def _judge_version(config: Config) -> DoctorFinding:
    version = f"format {config.major}.{config.minor}, store id {config.store_id}"
    needed = sorted({feature for features in config.features.values() for feature in features} - KNOWN_FEATURES)
    if needed:
        return DoctorFinding("note", "format", f"{version}; it needs {', '.join(needed)} for some operations")
    if config.minor > FORMAT_MINOR:
        own = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
        return DoctorFinding(
            "note", "format", f"{version}; this Holdfast knows {own} and can read it; upgrade when you can"
        )
    codec = "; chunks may be compressed, which the first versions refuse" if config.has_codec else ""
    codec += "; chunks may be deltas" if config.has_deltas else ""
    return DoctorFinding("ok", "format", f"{version}; this Holdfast reads and writes it{codec}")


def _judge_directory(directory: DirectoryFacts) -> Iterator[DoctorFinding]:
    kind = directory.filesystem or "unknown"
    yield _judge_filesystem(directory, kind)
    if not directory.durable:
        yield DoctorFinding("warning", "durable", f"{kind} is lost on reboot; store important data elsewhere")
    yield _judge_free_space(directory.free_bytes)
    if not directory.writable:
        text = f"the directory is not writable ({directory.refusal}): reading works, saving and deleting do not"
        yield DoctorFinding("note", "writable", text)
        return
    if not directory.tried:
        yield DoctorFinding("note", "untried", _NOT_TESTED)
        return
    yield _judge_exclusive_create(directory)
    yield _judge_sync(directory.sync_ms or 0.0)
    if directory.direct_io:
        yield DoctorFinding("ok", "direct-io", "direct I/O works: large packs can bypass the page cache")
    else:
        yield DoctorFinding("note", "direct-io", "direct I/O does not work here: large saves go through the page cache")
    case = "case-sensitive" if directory.case_sensitive else "not case-sensitive"
    yield DoctorFinding("ok", "case", f"names are {case}; the format uses lower case only, so either will do")


def _judge_filesystem(directory: DirectoryFacts, kind: str) -> DoctorFinding:
    if directory.network:
        text = f"the filesystem is {kind}, which other hosts may share: clocks and caches differ between them"
        return DoctorFinding("note", "filesystem", text)
    return DoctorFinding("ok", "filesystem", f"the filesystem is {kind}, local to this host")


def _judge_free_space(free_bytes: int) -> DoctorFinding:
    if free_bytes < _LOW_BYTES:
        return DoctorFinding(
            "warning", "room", f"only {format_bytes(free_bytes)} are free; free some space before you save"
        )
    return DoctorFinding("ok", "room", f"{format_bytes(free_bytes)} are free")


def _judge_exclusive_create(directory: DirectoryFacts) -> DoctorFinding:
    if directory.hard_links:
        return DoctorFinding("ok", "exclusive", "hard links work: two writers cannot overwrite each other")
    if directory.rename_noreplace:
        text = "there are no hard links, but rename without replacement works: two writers cannot overwrite each other"
        return DoctorFinding("ok", "exclusive", text)
    text = (
        "neither hard links nor rename without replacement work: two writers could overwrite each other."
        " Use another filesystem, or single_writer=True if there is only ever one"
    )
    return DoctorFinding("warning", "exclusive", text)


def _judge_sync(sync_ms: float) -> DoctorFinding:
    text = f"making a small write durable takes {sync_ms:.1f} ms; a small save needs about six of them"
    if sync_ms > _SLOW_SYNC_MS:
        return DoctorFinding("note", "sync", text + ", which is slow: save less often, or to another disk")
    return DoctorFinding("ok", "sync", text)


def _count_objects(store: ObjectStore) -> dict[str, int]:
    names = [isinstance(name, DamagedName) for name in iter_names(store)]
    tags = [isinstance(tag, DamagedName) for tag in iter_tags(store)]
    packs = [info.size_bytes for info in store.iter_objects(PACKS)]
    return {
        "snapshots": names.count(False),
        "tags": tags.count(False),
        "damaged_names": names.count(True) + tags.count(True),
        "packs": len(packs),
        "pack_bytes": sum(packs),
        "manifests": sum(1 for _ in store.iter_objects(MANIFESTS)),
        "index_fragments": sum(1 for _ in store.iter_objects(INDEX)),
        "lease_records": sum(1 for _ in store.iter_objects(LEASES)),
    }


def _judge_counts(counts: dict[str, int]) -> Iterator[DoctorFinding]:
    packs = f"{count(counts['packs'], 'pack')} of {format_bytes(counts['pack_bytes'])} together"
    text = f"{count(counts['snapshots'], 'snapshot')}, {count(counts['tags'], 'tag')}, {packs}"
    yield DoctorFinding("ok", "counts", f"{text}, {count(counts['manifests'], 'manifest')}")
    if counts["damaged_names"]:
        text = f"{count(counts['damaged_names'], 'damaged name')}: run `holdfast check`"
        yield DoctorFinding("error", "damaged", text)
    if counts["lease_records"]:
        text = f"{count(counts['lease_records'], 'lease record')}: saves under way, or left by saves that were killed"
        yield DoctorFinding("note", "leases", text)


def _probe_bucket(url: str, *, write: bool) -> tuple[dict[str, Any], list[DoctorFinding]]:
    """Return the facts about a bucket, and what they mean."""
    from holdfast.objects.cloud.cloud_store import CloudStore
    from holdfast.objects.cloud.probe import probe_bucket

    store = open_store(url)
    assert isinstance(store, CloudStore)
    facts = probe_bucket(store, write=write)
    return asdict(facts), list(_judge_bucket(facts))


def _judge_bucket(facts: BucketFacts) -> Iterator[DoctorFinding]:
    waits = f"a small save waits for {SMALL_SAVE_ROUNDS}, one after the other"
    text = f"a small request takes {facts.request_ms:.1f} ms; {waits}"
    yield DoctorFinding("note" if facts.request_ms > _SLOW_REQUEST_MS else "ok", "latency", text)
    if not facts.tried:
        yield DoctorFinding("note", "untried", _BUCKET_NOT_TESTED)
        return
    if not facts.writable:
        yield DoctorFinding("note", "writable", f"objects cannot be created, so only reading works: {facts.refusal}")
        return
    for topic, is_good, good, bad, verdict in _list_abilities(facts):
        if is_good is None:
            yield DoctorFinding("note", topic, f"the test failed, so it is not known whether {good}")
        else:
            yield DoctorFinding("ok" if is_good else verdict, topic, good if is_good else bad)
    yield _judge_skew(facts.skew_s or 0.0)


def _list_abilities(facts: BucketFacts) -> list[_Ability]:
    return [
        (
            "exclusive",
            facts.conditional_create,
            "the server refuses to create what exists: two writers cannot overwrite each other",
            "the server ignores the condition that an object must not exist yet: two writers could overwrite each"
            " other. Use another server, or single_writer=True if there is only ever one",
            "warning",
        ),
        (
            "ranges",
            facts.ranges,
            "parts of objects can be read",
            "parts of objects cannot be read: no load works",
            "error",
        ),
        (
            "checksum",
            facts.checksums,
            "the server refuses bytes that do not fit their checksum",
            "the server does not verify checksums: damage on the way is found when the bytes are read",
            "note",
        ),
        (
            "listing",
            facts.listed,
            "an object is listed as soon as it was created",
            "an object is not listed as soon as it was created: saves and collections are not safe here",
            "error",
        ),
        ("delete", facts.deletable, "objects can be deleted", "objects cannot be deleted: gc frees nothing", "warning"),
    ]


def _judge_skew(skew_s: float) -> DoctorFinding:
    if not skew_s:
        return DoctorFinding("ok", "clock", "the clocks of the server and of this host agree")
    ahead = "ahead of" if skew_s > 0 else "behind"
    text = f"the clock of the server is {abs(skew_s):.0f} s {ahead} this host's; collections allow for it"
    return DoctorFinding("note", "clock", text)
