"""Explains a miss: finds the nearest stored artifact, and lists part by part what differs. Does not need torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.compile_cache.artifacts.artifact import read_parts
from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.compile_cache.artifacts.limits import StoredKey
from holdfast.compile_cache.key_parts import PARTS, GraphKey
from holdfast.errors import HoldfastError
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.texts import format_utc, shorten

_MAX_SHOWN: Final = 3
"""Differences per part in the one-line reason; `details` lists more."""
_MAX_DETAILS: Final = 40
_MAX_DIFF_LINES: Final = 120
_MAX_VALUE_CHARS: Final = 80
_MAX_READ: Final = 4
"""How many of the equally near artifacts are read and compared in detail."""
_ABSENT: Final = "absent"
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a stored artifact without reading it."""

    name: str
    digests: Mapping[str, str]
    """Part of its key -> digest of that part, in hex."""
    read_parts: Callable[[], Mapping[str, Json]]
    """Reads the parts of its key. May raise HoldfastError."""
    guards: str = ""
    """The sizes that it is valid for, as an expression."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why no stored artifact could be used."""

    reason: str
    """The reason, in one line."""
    nearest: str | None = None
    """Name of the nearest stored artifact, with which the key was compared."""
    changed: tuple[str, ...] = ()
    """The parts of the key that differ from that of `nearest`."""
    details: tuple[str, ...] = ()
    """The differences outside the graph, one per line."""
    graph_diff: tuple[str, ...] = ()
    """Unified diff from the stored graph to this one."""

    @property
    def headline(self) -> str:
        """The reason in one line, with the prefix `missed:`."""
        return f"missed: {self.reason}"

    @property
    def text(self) -> str:
        """The whole explanation, over several lines."""
        lines = [self.headline]
        if self.nearest is not None:
            lines.append(f"nearest stored: {self.nearest}")
        lines += [f"  {line}" for line in self.details]
        return "\n".join([*lines, *self.graph_diff])


def explain(key: GraphKey, candidates: Iterable[Candidate], *, guards: Sequence[str] = ()) -> Explanation:
    """Return why no stored artifact could be used for `key`, by comparing it with the nearest one.

    An artifact with the same graph is nearer than one with another graph; then the one with fewer different parts is.

    Args:
        key: the key that was missed.
        candidates: the stored artifacts. The guards of those with the same key are reported as not fulfilled.
        guards: guards of further artifacts with the same key that are not valid for the sizes of the call.
    """
    stored = list(candidates)
    same_key = [each for each in stored if not _find_changed(key, each)]
    if guards or same_key:
        return _explain_guards([*guards, *(each.guards for each in same_key)], same_key)
    if not stored:
        return Explanation("the store has no other compiled graph")
    nearest, parts = _find_nearest(key, stored)
    changed = _find_changed(key, nearest)
    if parts is None:
        reason = f"{_join(changed)} changed (the key of the nearest artifact cannot be read)"
        return Explanation(reason, nearest.name, changed)
    differences = {part: _describe_part(part, parts.get(part), key.parts[part]) for part in changed}
    details = [f"{part}: {line}" for part, lines in differences.items() if part != "graph" for line in lines]
    return Explanation(
        "; ".join(f"{part} changed ({_sum_up(lines)})" for part, lines in differences.items()),
        nearest.name,
        changed,
        _limit_lines(details, _MAX_DETAILS),
        _diff_graphs(parts.get("graph"), key.parts["graph"]) if "graph" in changed else (),
    )


def _find_changed(key: GraphKey, candidate: Candidate) -> tuple[str, ...]:
    return tuple(part for part in PARTS if key.digests[part] != candidate.digests.get(part))


def _explain_guards(guards: Sequence[str], same_key: Sequence[Candidate]) -> Explanation:
    count = "1 entry has this key, but its" if len(guards) == 1 else f"{len(guards)} entries have this key, but their"
    shown = [each or "(none)" for each in guards]
    return Explanation(
        f"{count} shape guards do not hold: {'; '.join(_limit_lines(shown, _MAX_SHOWN))}",
        same_key[0].name if same_key else None,
        details=_limit_lines([f"guards: {each}" for each in shown], _MAX_DETAILS) if len(shown) > 1 else (),
    )


def _find_nearest(key: GraphKey, stored: Sequence[Candidate]) -> tuple[Candidate, Mapping[str, Json] | None]:
    """Return the nearest candidate, and its parts or None if they cannot be read."""

    def distance(candidate: Candidate) -> tuple[bool, int]:
        changed = _find_changed(key, candidate)
        return "graph" in changed, len(changed)

    least = min(map(distance, stored))
    tied = [each for each in stored if distance(each) == least]
    read = [(each, parts) for each in tied[:_MAX_READ] if (parts := _read(each)) is not None]
    if not read:
        return tied[0], None
    return min(read, key=lambda pair: _count_differences(key, pair[1]))


def _read(candidate: Candidate) -> Mapping[str, Json] | None:
    try:
        return candidate.read_parts()
    except HoldfastError:
        return None  # the changed parts can still be named


def _count_differences(key: GraphKey, parts: Mapping[str, Json]) -> int:
    graph = _count_changed_lines(_list_lines(parts.get("graph")), _list_lines(key.parts["graph"]))
    others = (part for part in PARTS if part != "graph")
    return graph + sum(len(_describe_part(part, parts.get(part), key.parts[part])) for part in others)


def _list_lines(graph: Json) -> list[str]:
    return [str(line) for line in graph] if isinstance(graph, list) else []


def _count_changed_lines(old: Sequence[str], new: Sequence[str]) -> int:
    """Estimate how many lines differ. Much cheaper than a diff."""
    return len(set(old) ^ set(new)) + abs(len(old) - len(new))


def _describe_part(part: str, old: Json, new: Json) -> list[str]:
    if part == "graph":
        return _describe_graphs(_list_lines(old), _list_lines(new))
    if part == "aliasing":
        return [f"{_describe_sharing(old)} -> {_describe_sharing(new)}"] if old != new else []
    return list(_iter_differences(part, old, new))


def _describe_graphs(old: Sequence[str], new: Sequence[str]) -> list[str]:
    if old == new:
        return []
    diff = [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if line[:3] not in ("---", "+++", "@@ ")]
    removed = sum(line.startswith("-") for line in diff)
    return [f"{removed} of {len(old)} lines removed, {len(diff) - removed} added"]


def _diff_graphs(old: Json, new: Json) -> tuple[str, ...]:
    lines = difflib.unified_diff(_list_lines(old), _list_lines(new), "stored", "now", lineterm="")
    return _limit_lines(list(lines), _MAX_DIFF_LINES)


def _describe_sharing(groups: Json) -> str:
    """Describe which inputs share memory, with their offsets in bytes."""
    if groups == []:
        return "no inputs share memory"
    try:
        texts = [_join([f"{number} (at byte {start})" for number, start in group]) for group in groups]
    except (TypeError, ValueError):
        return _shorten(groups)  # written by another version
    return f"inputs {', inputs '.join(texts)} share memory"


def _iter_differences(path: str, old: Json, new: Json) -> Iterator[str]:
    """Yield `path old -> new` for each value that differs."""
    if old == new and type(old) is type(new):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _iter_differences(f"{path}.{name}", old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif _is_table(old) and _is_table(new):
        if len(old) != len(new):
            yield f"{_format_path(path)} {len(old)} -> {len(new)}".strip()
        for number, (below, other) in enumerate(zip(old, new, strict=False)):
            yield from _iter_differences(f"{path}[{number}]", below, other)
    elif _is_word_list(old) and _is_word_list(new):
        lost, gained = sorted(set(old.split()) - set(new.split())), sorted(set(new.split()) - set(old.split()))
        yield f"{_format_path(path)} removed {' '.join(lost) or 'nothing'}, added {' '.join(gained) or 'nothing'}"
    else:
        yield f"{_format_path(path)} {_shorten(old)} -> {_shorten(new)}".strip()


def _is_table(value: Json) -> bool:
    """Return whether a list contains mappings, which are compared one by one. Other lists are shown whole."""
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _is_word_list(value: Json) -> bool:
    return isinstance(value, str) and len(value) > _MAX_VALUE_CHARS and " " in value


def _format_path(path: str) -> str:
    """Return a path for people: `inputs.inputs[2].size` becomes `input 2 size`."""
    _, _, rest = (
        path.replace("inputs.inputs[", "inputs.input ").replace("constants[", "constants.constant ").partition(".")
    )
    return rest.replace("].", " ").replace("]", "")


def _shorten(value: Json) -> str:
    if isinstance(value, str):
        if len(value) > 2 * 12 and _HEX.issuperset(value):
            return value[:12]
        text = value.removeprefix("torch.")
    else:
        text = repr(value)
    return shorten(text, _MAX_VALUE_CHARS)


def _sum_up(lines: Sequence[str]) -> str:
    return ", ".join(_limit_lines(lines, _MAX_SHOWN)) or "no visible difference"


def _limit_lines(lines: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(lines) if len(lines) <= count else (*lines[:count], f"and {len(lines) - count} more")


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def explain_key(repo: Repository, key: StoredKey, others: Sequence[StoredKey]) -> str:
    """Return how a key differs from the most similar of the other keys: why they were no hits for it."""
    found = find_undamaged(key)
    own = GraphKey(found.key_digest, found.digests, read_parts(repo, found))
    stored = [find_undamaged(each) for each in others]
    candidates = [Candidate(each.name, each.digests, partial(read_parts, repo, each), each.guards) for each in stored]
    return explain(own, candidates).text


def find_undamaged(key: StoredKey) -> StoredVariant:
    """Return the first variant of a key that is not damaged; any of them has the parts of the key."""
    return next((found for found in key.variants if not found.trouble), key.variants[0])


def describe_key(key: StoredKey) -> dict[str, Json]:
    """Return a key and its variants as JSON."""
    return {
        "key": key.digest,
        "bytes": key.size_bytes,
        "used": format_utc(key.used_s),
        "used_s": key.used_s,
        "used_days": key.used_days,
        "variants": [_describe_variant(found) for found in key.variants],
    }


def _describe_variant(found: StoredVariant) -> dict[str, Json]:
    return {
        "name": found.name,
        "bytes": found.size_bytes,
        "guards": found.guards,
        "digests": dict(found.digests),
        "compile_seconds": found.seconds,
        "torch": found.torch,
        "producer": found.producer,
        "signed": bool(found.mac),
        "damaged": str(found.trouble) if found.trouble else None,
    }
