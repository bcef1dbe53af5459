"""Answers about many snapshots: a page of a list, columns for charts, and the sizes that need manifests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from holdfast.errors import BadName, NotFound, SnapshotGone
from holdfast.json_text import Json, describe_number, is_number
from holdfast.query.facts import MISSING, Facts, describe_damage, describe_snapshot, is_finite
from holdfast.query.globs import Glob, is_glob
from holdfast.query.lineage import parse_lineage
from holdfast.query.select import parse_query, select
from holdfast.repo.format.layout import snapshot_stem, split_prefix, tag_stem
from holdfast.repo.format.rank_manifests import Manifests, read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.usage import find_leases, find_stored_bytes, sum_new_bytes
from holdfast.serving.remembered import StoreState

MAX_PAGE: Final = 500
MAX_POINTS: Final = 20_000
"""Snapshots in the columns for charts; of more, the newest."""
MAX_METRICS: Final = 100
_MAX_NUMBERS: Final = 500_000
"""Numbers in the columns for charts: with very many snapshots, fewer metrics have a column, but at least 24."""
MAX_LOADS: Final = 2000
"""Loads before saves that are listed; of more, the newest."""
_EXPRESSION: Final = re.compile(r"[<>=~]|\bin\s*\(|\b(?:like|not)\s|\sexists\b")


def choose(state: StoreState, text: str, sort: str) -> list[Facts]:
    """Return what the filter box asks for, in order. Raises BadExpression.

    Names that begin with the text come first: names of series may look like conditions. A text with a comparison is
    an expression; any other is a glob, or a part of names.
    """
    text, facts = text.strip(), state.facts
    found = [each for each in facts if each.snapshot.name.startswith(text)]
    if not found and _EXPRESSION.search(text):
        return select(facts, parse_query(where=text, sort=sort or None))
    if not found and is_glob(text):
        glob = Glob(text)
        found = [each for each in facts if glob.matches(each.snapshot.name)]
    return select(found or [each for each in facts if text in each.snapshot.name], parse_query(sort=sort or None))


def describe_page(state: StoreState, found: Sequence[Facts], offset: int, limit: int, *, url: str) -> dict[str, Json]:
    """Return a part of the chosen snapshots, as `holdfast ls --json` prints them, with step, metrics and lineage."""
    return {
        "store": url,
        "state": state.mark,
        "total": len(found),
        "offset": offset,
        "metrics": find_metrics(state.facts),
        "snapshots": [describe_facts(state, each) for each in found[offset : offset + limit]],
        "damaged": [describe_damage(each) for each in state.damaged],
    }


def describe_facts(state: StoreState, facts: Facts) -> dict[str, Json]:
    """Return one snapshot as JSON: its record, step, numbers by name, and what it was saved from."""
    snapshot = facts.snapshot
    lineage = parse_lineage(snapshot.environment)
    step = facts.find_step()
    return {
        **describe_snapshot(snapshot, state.tags.get(snapshot.name, ())),
        "environment": snapshot.environment,
        "step": None if step is MISSING else step,
        "numbers": {name: describe_number(value) for name, value in _iter_numbers(facts)},
        "loaded": [origin.name for origin in lineage.loaded],
        "previous": lineage.previous or None,
    }


def _iter_numbers(facts: Facts) -> Iterable[tuple[str, Json]]:
    """Yield the metrics of a snapshot, and the numbers in its metadata."""
    yield from ((name, value) for name, value in facts.iter_metrics() if is_number(value))
    metadata = facts.snapshot.metadata.items()
    yield from ((name, value) for name, value in metadata if is_number(value) and name != "step")


def find_metrics(facts: Iterable[Facts]) -> list[str]:
    """Return the names of the numbers that snapshots have, the most frequent ones first."""
    counts = Counter(name for each in facts for name, _ in _iter_numbers(each))
    return sorted(counts, key=lambda name: (-counts[name], name))[:MAX_METRICS]


def describe_series(state: StoreState, found: Sequence[Facts]) -> dict[str, Json]:
    """Return the chosen snapshots as columns, oldest first: names, times, steps, sizes, each number, and lineage.

    A number that is not finite is null in its column, and named in `not_finite` by its place in the column.
    """
    shown = sorted(found, key=lambda each: each.snapshot.time_s)[-MAX_POINTS:]
    numbers = [dict(_iter_numbers(each)) for each in shown]
    metrics = find_metrics(found)[: max(24, _MAX_NUMBERS // max(1, len(shown)))]
    return {
        "state": state.mark,
        "total": len(found),
        "names": [each.snapshot.name for each in shown],
        "time_s": [each.snapshot.time_s for each in shown],
        "step": [step if is_finite(step := each.find_step()) else None for each in shown],
        "logical_bytes": [each.snapshot.logical_bytes for each in shown],
        "tags": {each.snapshot.name: list(each.tags) for each in shown if each.tags},
        "numbers": {name: [_plot(row.get(name)) for row in numbers] for name in metrics},
        "not_finite": {name: bad for name in metrics if (bad := dict(_iter_not_finite(numbers, name)))},
        "loads": list(_iter_loads(shown))[-MAX_LOADS:],
    }


def _iter_loads(shown: Sequence[Facts]) -> Iterator[Json]:
    """Yield a pair for each load that came before a save: the position of the saved one, and the name of the loaded.

    If the first saves of a run were deleted, the first one that is left stands for them.
    """
    names = {each.snapshot.name for each in shown}
    seen: set[tuple[str, str]] = set()
    for position, each in enumerate(shown):
        lineage = parse_lineage(each.snapshot.environment)
        origins = lineage.loaded or (() if lineage.previous in names else lineage.began)
        for origin in origins:
            pair = (split_prefix(each.snapshot.name), origin.name)
            if lineage.loaded or pair not in seen:
                yield [position, origin.name]
            seen.add(pair)


def _iter_not_finite(numbers: Iterable[Mapping[str, Json]], name: str) -> Iterator[tuple[str, Json]]:
    for at, row in enumerate(numbers):
        if name in row and not is_finite(row[name]):
            yield str(at), describe_number(row[name])


def _plot(value: Json) -> Json:
    return value if is_finite(value) else None


def find_named(state: StoreState, name: str) -> Facts:
    """Return the snapshot with a name, else the one with a tag; raises NotFound, or what is wrong with its record."""
    for facts in state.facts:
        if facts.snapshot.name == name:
            return facts
    for facts in state.facts:
        if name in facts.tags:
            return facts
    stems = {stem for make_stem in (snapshot_stem, tag_stem) for stem in _find_stem(make_stem, name)}
    for damaged in state.damaged:
        if damaged.stem in stems:
            raise damaged.error
    raise NotFound(f"there is no snapshot or tag {name!r}; it may have been deleted", name=name)


def read_present(repo: Repository, snapshot: CommittedSnapshot) -> Manifests:
    """Read the manifests of a snapshot; raises SnapshotGone if it was deleted or overwritten, and collected since."""
    try:
        return read_manifests(repo.store, snapshot.manifest)
    except NotFound as error:
        raise SnapshotGone(
            f"{snapshot.name!r} is gone: its manifest was collected or lost; list the snapshots again",
            name=snapshot.name,
        ) from error


def _find_stem(make_stem: Callable[[str], str], name: str) -> Iterator[str]:
    """Yield the stem of a name; none for a name that cannot exist."""
    with suppress(BadName):
        yield make_stem(name)


def read_sizes(repo: Repository, snapshot: CommittedSnapshot) -> dict[str, int]:
    """Read the manifest of a snapshot and return the bytes that its save wrote, reused and stores."""
    return describe_sizes(snapshot, read_present(repo, snapshot))


def describe_sizes(snapshot: CommittedSnapshot, manifests: Manifests) -> dict[str, int]:
    """Return the bytes that the save of a snapshot wrote, reused and stores, as `holdfast show --json` prints them."""
    new_bytes = sum_new_bytes(find_leases(snapshot, manifests), manifests)
    stored = find_stored_bytes(manifests)
    return {
        "new_bytes": new_bytes,
        "reused_bytes": manifests.content_bytes - new_bytes,
        "stored_bytes": stored.total_bytes,
        "packed_bytes": stored.packed_bytes,
        "raw_bytes": stored.raw_bytes,
        "manifest_bytes": stored.manifest_bytes,
    }


def describe_children(state: StoreState, name: str) -> list[str]:
    """Return the names of the snapshots that were saved from a snapshot: after it was loaded, or next in its series."""
    found = []
    for each in state.facts:
        lineage = parse_lineage(each.snapshot.environment)
        origins = [origin.name for origin in lineage.loaded] or [lineage.previous]
        if name in origins:
            found.append(each.snapshot.name)
    return sorted(found)[:MAX_PAGE]
