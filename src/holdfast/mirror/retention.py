"""Keeps snapshots from being pruned of which a mirror of the store has no copy that can be proven.

Prune never removes the last copy that any reachable store can prove. A mirror proves a copy if it is the store that was
uploaded to, its record has this content, and all packs and manifests that the record needs are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, StoreError
from holdfast.mirror.plan import LocalListing, MirrorListing, is_mirrored, plan_mirror, read_there
from holdfast.mirror.setting import MirrorSetting, RecordedMirror, read_mirrors
from holdfast.mirror.worker import UploadWorker
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import manifest_key, pack_key
from holdfast.repo.format.rank_manifests import Manifests, iter_manifests
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.leases import read_marked
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.prune import PruneDecision, PrunePlan
from holdfast.repo.upkeep.usage import iter_positions


def keep_unmirrored(repo: Repository, plan: PrunePlan, *, only_reads: bool = False) -> PrunePlan:
    """Return the plan with a reason to keep each snapshot that a mirror is meant to have and cannot be proven to have.

    If a mirror cannot be reached, or this process lacks the options that reach it, everything that it may lack is kept.
    Unless this `only_reads`, what an upload of this handle had found in the mirror and is gone is uploaded again.
    """
    recorded = read_mirrors(repo.store) if plan.delete else {}
    attached: dict[str, UploadWorker] = repo.mirrors
    reasons: dict[str, list[str]] = {}
    for url in dict.fromkeys((*recorded, *attached)) if plan.delete else ():
        known, worker = recorded.get(url, RecordedMirror("named")), attached.get(url)
        scope = "all" if "all" in (known.scope, worker and worker.setting.scope) else known.scope
        doomed = {each.name: each for each in plan.delete if is_mirrored(each, url, scope)}
        lacking, unproven = _read_lacking(url, known, worker, doomed) if doomed else ({}, {})
        if worker is not None and not only_reads:
            worker.note_lacking(doomed[name] for name in lacking)
        for name, reason in (lacking | unproven).items():
            reasons.setdefault(name, []).append(reason)
    return replace(plan, verdicts=tuple(_add(verdict, reasons) for verdict in plan.verdicts)) if reasons else plan


def _add(verdict: PruneDecision, reasons: Mapping[str, list[str]]) -> PruneDecision:
    more = () if verdict.reasons else reasons.get(verdict.snapshot.name, ())
    return replace(verdict, reasons=(*verdict.reasons, *more))


def _read_lacking(
    url: str, known: RecordedMirror, worker: UploadWorker | None, doomed: Mapping[str, CommittedSnapshot]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return which snapshots the mirror lacks and of which it may have a copy that cannot be proven, and why."""
    try:
        store = _open(url, known, worker)
        lacking, copies = _compare(url, store, known, doomed)
        faults = _read_faults(store, copies)
    except HoldfastError as error:
        return {}, dict.fromkeys(doomed, f"its mirror {url} cannot be read: {error}")
    advice = f"`holdfast -s {url} repair --from ...` restores it"
    return lacking, {
        name: f"its copy in the mirror {url} is not whole: {fault}; {advice}" for name, fault in faults.items()
    }


def _open(url: str, known: RecordedMirror, worker: UploadWorker | None) -> ObjectStore:
    """Open the mirror as this process uploads to it; raises StoreError if only another process knows how."""
    if worker is not None:
        return worker.setting.open_objects(read_only=True)
    if known.options:
        # Not with what the environment says: that may be another server, whose records prove nothing.
        raise StoreError(
            f"it was opened with options ({', '.join(known.options)}) that this process lacks; open the store with"
            " mirror= and mirror_options="
        )
    return MirrorSetting(url).open_objects(read_only=True)


def _compare(
    url: str, store: ObjectStore, known: RecordedMirror, doomed: Mapping[str, CommittedSnapshot]
) -> tuple[dict[str, str], Mapping[str, CommittedSnapshot]]:
    """Return why the mirror has no copy of some snapshots, and its records of the others, by name.

    What was deleted there on purpose is in neither.
    """
    config = read_config(store)
    if config is not None and config.store_id != known.store_id:
        was = f"not the one that was uploaded to ({known.store_id})" if known.store_id else "nothing was uploaded to it"
        why = f"not in its mirror {url}: the store there is {config.store_id}, {was}; `holdfast mirror {url} --yes`"
        return dict.fromkeys(doomed, f"{why} uploads to it"), {}
    there = MirrorListing() if config is None else read_there(store, doomed.values())
    plan = plan_mirror(LocalListing(doomed), there)
    refused = {
        each.snapshot.name: f"not in its mirror {url}: {each.reason}" for each in plan.refused if each.is_lacking
    }
    return refused | {each.name: f"not in its mirror {url} yet" for each in plan.waiting}, plan.copies


def _read_faults(store: ObjectStore, copies: Mapping[str, CommittedSnapshot]) -> dict[str, str]:
    """Return which copies cannot be proven to be whole, and why: reads their manifests, asks for each pack once."""
    if not copies:
        return {}
    # Marks after records: a collector that publishes a mark later has read these records as roots.
    marked, faults = read_marked(store), dict[str, str]()
    ends: dict[str, dict[str, int]] = {}
    with closing(iter_manifests(store, [each.manifest for each in copies.values()])) as found:
        for (name, copy), manifests in zip(copies.items(), found, strict=True):
            if isinstance(manifests, NotFound | Corrupt | NewerFormat):
                faults[name] = str(manifests)
            elif isinstance(manifests, HoldfastError):
                raise manifests
            elif manifests.digest() != copy.digest:
                faults[name] = f"{manifest_key(copy.manifest.manifest_id)} has other content than its record"
            else:
                ends[name] = _find_ends(manifests) | dict.fromkeys(_list_manifests(copy, manifests), 0)
    packs = {key for own in ends.values() for key, end in own.items() if end}
    sizes = {key: info.size_bytes for key, info in store.stat_many(sorted(packs)).items()}
    for name, own in ends.items():
        lost = [key for key, end in own.items() if key in marked or (end and sizes.get(key, 0) < end)]
        if lost:
            faults[name] = f"{lost[0]} is missing, cut short, or about to be collected"
    return faults


def _list_manifests(copy: CommittedSnapshot, manifests: Manifests) -> list[str]:
    return [manifest_key(each) for each in (copy.manifest.manifest_id, *manifests.ids)]


def _find_ends(manifests: Manifests) -> dict[str, int]:
    """Return how long each pack must be at least for the chunks that a snapshot needs of it."""
    ends: dict[str, int] = {}
    for (pack_id, offset), size in iter_positions(manifests):
        key = pack_key(pack_id)
        ends[key] = max(ends.get(key, 0), offset + size.stored_bytes)
    return ends
