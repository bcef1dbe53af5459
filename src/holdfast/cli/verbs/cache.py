"""The verb `cache`: lists, explains and deletes compiled graphs."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.cli.lookup import open_for_plan, open_to_read
from holdfast.cli.output import Output, count, format_bytes, format_time
from holdfast.cli.verb import add_json, add_verb, add_yes, document
from holdfast.compile_cache.artifacts.artifact import read_parts
from holdfast.compile_cache.artifacts.catalog import StoredVariant, find_key_digest
from holdfast.compile_cache.artifacts.limits import (
    SYSTEM,
    CacheLimits,
    LimitsPlan,
    StoredKey,
    apply_limits,
    plan_clear,
    plan_limits,
    read_stored,
)
from holdfast.compile_cache.artifacts.why import describe_key, explain_key, find_undamaged
from holdfast.errors import AmbiguousName, BadName, NotFound
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.texts import parse_duration

if TYPE_CHECKING:
    from holdfast.cli.verb import Verbs

_SIZE: Final = re.compile(r"([0-9]{1,12})([KMGT]?)(?:i?B)?\Z")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SHORT: Final = 12
"""Digits of a key that are shown: enough to be unique in practice."""


def declare_cache(parser: ArgumentParser) -> None:
    """Declare the verb `cache` and its actions."""
    more = (
        "Compiled graphs are stored under @compiled/: one key for each graph, and one\n"
        "variant of the key for each set of shape guards. KEY is the beginning of a key,\n"
        "as `cache ls` prints it. prune and clear print their plan, and act only with\n"
        "--yes; `holdfast gc` then frees the space."
    )
    examples = ["holdfast cache ls", "holdfast cache prune --max-size 20G --max-age 30d --yes", "holdfast cache why"]
    document(parser, more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for declare in (_declare_ls, _declare_show, _declare_stat, _declare_prune, _declare_clear, _declare_why):
        declare(actions)


def parse_size(text: str) -> int:
    """Return a size such as `500M` or `20G` in bytes."""
    found = _SIZE.match(text)
    if not found:
        raise BadName(f"{text!r} is not a size; write a number and one of K, M, G, T, such as 20G")
    return int(found[1]) * _UNITS[found[2]]


def _declare_ls(actions: Verbs) -> None:
    parser = add_verb(actions, "ls", "list keys")
    more = "The most recently used key comes first. Exits with 1 if one is damaged."
    document(parser, more, examples=["holdfast cache ls"])
    add_json(parser)
    parser.set_defaults(run_verb=_run_ls)


def _run_ls(options: Namespace, url: str, output: Output) -> int:
    store = open_to_read(url, output).store
    keys = read_stored(store)
    if options.json:
        output.json({"store": store.url, "keys": [describe_key(key) for key in keys]})
    elif not keys:
        output.note(f"no compiled graph in {store.url}")
    else:
        rows = [
            [
                key.digest[:_SHORT],
                str(len(key.variants)),
                format_bytes(key.size_bytes),
                format_time(key.used_s),
                f"{max(found.seconds for found in key.variants):.1f} s",
                "damaged" if key.is_damaged else key.variants[0].torch,
            ]
            for key in keys
        ]
        output.table(["KEY", "VARIANTS", "SIZE", "USED", "COMPILED", "TORCH"], rows, right="VARIANTS SIZE COMPILED")
    return _note_damaged(keys, output)


def _declare_show(actions: Verbs) -> None:
    parser = add_verb(actions, "show", "show a key and its variants")
    document(parser, examples=["holdfast cache show 3f2a", "holdfast cache show 3f2a --part flags"])
    parser.add_argument("key", metavar="KEY", help="the beginning of a key")
    parser.add_argument("--part", metavar="PART", help="print this part of the key: graph, inputs, flags, ...")
    add_json(parser)
    parser.set_defaults(run_verb=_run_show)


def _run_show(options: Namespace, url: str, output: Output) -> int:
    repo = open_to_read(url, output)
    key = _find_key(read_stored(repo.store), options.key, repo)
    if options.part is not None:
        output.json(_read_part(repo, key, options.part))
        return 0
    if options.json:
        output.json(describe_key(key))
        return _note_damaged([key], output)
    facts = [("key", key.digest), ("used", format_time(key.used_s)), ("size", format_bytes(key.size_bytes))]
    undamaged = next((found for found in key.variants if not found.trouble), None)
    facts += [(f"part {part}", digest) for part, digest in (undamaged.digests if undamaged else {}).items()]
    output.columns(facts)
    for found in key.variants:
        output.line()
        output.columns(_list_facts(found))
    return _note_damaged([key], output)


def _declare_stat(actions: Verbs) -> None:
    parser = add_verb(actions, "stat", "show totals of the cache")
    document(parser, examples=["holdfast cache stat"])
    add_json(parser)
    parser.set_defaults(run_verb=_run_stat)


def _run_stat(options: Namespace, url: str, output: Output) -> int:
    store = open_to_read(url, output).store
    keys = read_stored(store)
    variants = [found for key in keys for found in key.variants]
    intact = [found for found in variants if not found.trouble]
    versions = sorted({found.torch for found in intact})
    seconds = sum(found.seconds for found in intact)
    totals = {
        "keys": len(keys),
        "variants": len(variants),
        "bytes": sum(key.size_bytes for key in keys),
        "signed": sum(bool(found.mac) for found in intact),
        "damaged": len(variants) - len(intact),
        "systems": len({found.digests.get(SYSTEM, "") for found in intact}),
    }
    if options.json:
        output.json({"store": store.url, **totals, "compile_seconds": seconds, "torch": versions})
    else:
        output.line(
            f"{count(len(keys), 'key')} with {count(len(variants), 'variant')} of {format_bytes(totals['bytes'])},"
            f" which took {seconds:.1f} s to compile"
        )
        output.line(
            f"{totals['signed']} signed, {totals['damaged']} damaged; for {count(totals['systems'], 'system')},"
            f" torch {', '.join(versions) or '-'}"
        )
    return _note_damaged(keys, output)


def _declare_prune(actions: Verbs) -> None:
    parser = add_verb(actions, "prune", "delete graphs that are over a limit")
    more = (
        "Deletes damaged graphs and graphs over a limit, and keeps the others. A process\n"
        "that may write to the store records once a day which graphs it uses; a graph\n"
        "without such a record counts as last used when it was saved."
    )
    examples = ["holdfast cache prune --max-size 20G", "holdfast cache prune --other-systems --yes"]
    document(parser, more, examples=examples)
    parser.add_argument("--max-size", metavar="SIZE", help="keep at most SIZE, the most recently used: 500M, 20G")
    parser.add_argument("--max-age", metavar="TIME", help="delete graphs that were not used for TIME: 12h, 30d, 8w")
    parser.add_argument(
        "--other-systems", action="store_true", help="delete graphs that torch on this machine cannot use; loads torch"
    )
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=_run_prune)


def _run_prune(options: Namespace, url: str, output: Output) -> int:
    try:
        limits = CacheLimits(
            max_bytes=parse_size(options.max_size) if options.max_size else None,
            max_age_s=parse_duration(options.max_age) if options.max_age else None,
            systems=_digest_systems() if options.other_systems else frozenset(),
        )
    except ValueError as error:
        raise BadName(str(error)) from error
    return _delete(options, url, output, lambda keys, now_s: plan_limits(keys, limits, now_s=now_s))


def _digest_systems() -> frozenset[str]:
    """Return the digests of the systems whose graphs torch on this machine can use."""
    from holdfast.compile_cache.key.system import digest_systems

    return digest_systems()


def _declare_clear(actions: Verbs) -> None:
    parser = add_verb(actions, "clear", "delete all compiled graphs")
    document(parser, examples=["holdfast cache clear --yes"])
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=_run_clear)


def _run_clear(options: Namespace, url: str, output: Output) -> int:
    return _delete(options, url, output, lambda keys, _: plan_clear(keys))


def _declare_why(actions: Verbs) -> None:
    parser = add_verb(actions, "why", "explain why a graph was compiled again")
    more = (
        "Shows part by part how two keys differ: the reason why the graph of one could\n"
        "not be used for the other. A defaults to the newest key, B to the key that is\n"
        "most similar to A."
    )
    document(parser, more, examples=["holdfast cache why", "holdfast cache why 3f2a", "holdfast cache why 3f2a 9c01"])
    parser.add_argument("a", metavar="A", nargs="?", help="the beginning of a key")
    parser.add_argument("b", metavar="B", nargs="?", help="the beginning of another key")
    add_json(parser)
    parser.set_defaults(run_verb=_run_why)


def _run_why(options: Namespace, url: str, output: Output) -> int:
    repo = open_to_read(url, output)
    keys = [key for key in read_stored(repo.store) if not key.is_damaged]
    if options.a is None and len(keys) < 2:
        raise NotFound(f"{repo.store.url} has {count(len(keys), 'key')}; two are needed to compare")
    newest = max(keys, key=_find_saved, default=None)
    a = _find_key(keys, options.a, repo) if options.a is not None or newest is None else newest
    others = [_find_key(keys, options.b, repo)] if options.b is not None else [key for key in keys if key is not a]
    lines = explain_key(repo, a, others).splitlines()
    if options.json:
        output.json({"store": repo.store.url, "key": a.digest, "lines": lines})
        return 0
    for line in lines:
        output.line(line)
    return 0


def _delete(
    options: Namespace, url: str, output: Output, make_plan: Callable[[Sequence[StoredKey], float], LimitsPlan]
) -> int:
    store = open_for_plan(url, output, is_applied=options.yes).store
    plan = make_plan(read_stored(store), store.clock())
    if options.json:
        gone = [
            {"key": decision.key.digest, "reason": decision.reason} for decision in plan.decisions if decision.reason
        ]
        output.json({"store": store.url, "delete": gone, "keep": [key.digest for key in plan.keep]})
    elif plan.decisions:
        _print_plan(plan, output)
    else:
        output.note(f"no compiled graph in {store.url}")
    what = f"{count(len(plan.delete), 'key')} of {format_bytes(sum(key.size_bytes for key in plan.delete))}"
    if options.yes:
        deleted = apply_limits(store, plan)
        output.note(f"deleted {count(len(deleted), 'variant')} of {what}; `holdfast gc --yes` frees the space")
    elif plan.delete:
        output.note(f"nothing was deleted; repeat with --yes to delete {what}")
    return 0


def _print_plan(plan: LimitsPlan, output: Output) -> None:
    rows = [
        [
            "delete" if decision.reason else "keep",
            decision.key.digest[:_SHORT],
            format_bytes(decision.key.size_bytes),
            format_time(decision.key.used_s),
            decision.reason,
        ]
        for decision in plan.decisions
    ]
    output.table(["", "KEY", "SIZE", "USED", "WHY"], rows, right="SIZE")


def _find_key(keys: Sequence[StoredKey], text: str, repo: Repository) -> StoredKey:
    by_digest = {key.digest: key for key in keys}
    found = find_key_digest(text, set(by_digest))
    if not found:
        raise NotFound(f"no key in {repo.store.url} begins with {text!r}; `holdfast cache ls` lists them", name=text)
    if len(found) > 1:
        raise AmbiguousName(f"{len(found)} keys begin with {text!r}, for example {found[0]}; give more digits")
    return by_digest[found[0]]


def _find_saved(key: StoredKey) -> float:
    return max(found.snapshot.time_s for found in key.variants if found.snapshot)


def _read_part(repo: Repository, key: StoredKey, part: str) -> Json:
    parts = read_parts(repo, find_undamaged(key))
    if part not in parts:
        raise NotFound(f"a key has no part {part!r}; its parts are {', '.join(parts)}", name=part)
    return parts[part]


def _note_damaged(keys: Sequence[StoredKey], output: Output) -> int:
    damaged = [found for key in keys for found in key.variants if found.trouble]
    for found in damaged:
        output.note(f"{found.name} cannot be used: {found.trouble}")
    return 1 if damaged else 0


def _list_facts(found: StoredVariant) -> list[tuple[str, str]]:
    facts = [("variant", found.name)]
    if found.trouble or found.snapshot is None:
        return [*facts, ("damaged", str(found.trouble))]
    return [
        *facts,
        ("saved", f"{format_time(found.snapshot.time_s)} on {found.producer}, torch {found.torch}"),
        ("size", f"{format_bytes(found.size_bytes)} in {count(found.snapshot.num_entries, 'entry')}"),
        ("compiled", f"in {found.seconds:.2f} s"),
        ("guards", found.guards or "none"),
        ("signed", "yes" if found.mac else "no"),
    ]
