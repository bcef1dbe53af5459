"""Collective save, load and prune: each rank writes its share of the tree, and reads the chunks that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from holdfast.distributed.checkpoint.exchange import open_together
from holdfast.distributed.checkpoint.plan import Planned, plan_save, verify_passed_by_all
from holdfast.distributed.checkpoint.replicas import ReplicaExchange
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.failures import name_ranks
from holdfast.errors import BadName, HoldfastError, Mismatch
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.prune import Pruned, PrunePlan
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.into.journal import Journal
from holdfast.snapshot.into.load_into import load_into
from holdfast.snapshot.into.plan import IntoOptions
from holdfast.snapshot.load.merge_trees import warn_of_variants
from holdfast.snapshot.load.opened import Opened
from holdfast.snapshot.save.device_digests import add_digests
from holdfast.snapshot.save.save import SaveOptions, make_request, save_tree
from holdfast.snapshot.save.staging import AsyncSaver, SaveHandle, Staging
from holdfast.snapshot.view.lazy import Snapshot as LazySnapshot
from holdfast.texts import list_lines, list_some
from holdfast.trees.registered import Types

DEFAULT_TIMEOUT_S: Final = 300.0
SAVE: Final = "save"
SAVE_ASYNC: Final = "save in the background"
LOAD: Final = "load"
"""Names of collectives."""
_LISTED: Final = 50


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that take part in a collective operation."""

    group: dist.ProcessGroup | None = None
    """The process group; None for the default group."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long a rank may give no sign of life while others wait for it."""

    @property
    def is_first_rank(self) -> bool:
        """Return whether this process is rank 0 of the group."""
        return dist.get_rank(self.group) == 0

    def join(self, name: str, topic: str | None = None) -> Collectives:
        """Join the collective `name`/`topic`; all ranks must."""
        return Collectives(self.group, timeout_s=self.timeout_s, name=name, topic=topic)


def find_world(
    *,
    collective: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> World | None:
    """Return the ranks that must take part; None if there is no process group, or if `collective` is False."""
    if not collective:
        return None
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    return World(process_group, timeout_s)


@contextmanager
def reporting_early(world: World | None, name: str, topic: str | None = None) -> Iterator[None]:
    """Report an error that is raised before this rank joins the collective `name`/`topic` to the ranks that join it.

    Otherwise they would wait for `timeout_s`, and the next call of this rank would meet their failed one.
    """
    try:
        yield
    except BaseException as error:
        if world is not None:
            with suppress(HoldfastError), world.join(name, topic) as ranks:
                if isinstance(error, BadName):
                    # Other ranks may have passed another name. Then they wait elsewhere, which this wait detects.
                    ranks.barrier(name)
                ranks.fail(error, step=name)
        raise


def save_together(
    repo: Repository,
    name: str,
    tree: object,
    options: SaveOptions,
    *,
    types: Types,
    world: World | None,
    progress: Progress | None = None,
) -> SaveResult:
    """Save a tree that is distributed over the ranks; all ranks must call this, with the same name."""
    if world is None:
        return save_tree(repo, name, tree, options, types=types, progress=progress)
    with world.join(SAVE, str(name)) as ranks:
        planned = _plan_together(name, tree, options, types, ranks)
        return _add_divergent(save(repo, add_digests(planned.request), ranks=ranks, progress=progress), planned)


def _plan_together(name: str, tree: object, options: SaveOptions, types: Types, ranks: Collectives) -> Planned:
    """Plan what this rank writes; reads or hashes every tensor that other ranks may also have, to compare them."""
    return plan_save(name, tree, options, types, ranks, ranks.global_ranks)


def _add_divergent(result: SaveResult, planned: Planned) -> SaveResult:
    """Return the result of a save, with the names whose values were found to differ between ranks."""
    return replace(result, divergent=planned.divergent)


def start_together(
    saver: AsyncSaver,
    repo: Repository,
    name: str,
    tree: object,
    options: SaveOptions,
    *,
    types: Types,
    world: World | None,
    staging: Staging,
    progress: Progress | None = None,
) -> SaveHandle:
    """Start a save that continues in the background, with its own `Collectives`; return its handle."""
    if world is None:
        return saver.start(repo, make_request(name, tree, options, types), staging=staging, progress=progress)
    with reporting_early(world, SAVE_ASYNC, str(name)):
        saver.wait()
    ranks = world.join(SAVE_ASYNC, str(name))
    try:
        planned = _plan_together(name, tree, options, types, ranks)

        def write(repo: Repository, request: Request, *, progress: Progress) -> SaveResult:
            with ranks:
                return _add_divergent(save(repo, request, ranks=ranks, progress=progress), planned)

        return saver.start(repo, planned.request, staging=staging, write=write, progress=progress)
    except BaseException as error:
        ranks.fail(error, step=f"save {name!r}")
        ranks.close()
        raise


def prune_together(
    read_plan: Callable[[], PrunePlan], apply: Callable[[PrunePlan], Pruned], world: World | None
) -> Pruned:
    """Plan on all ranks and delete on one; return what was deleted, on every rank.

    If this raises, some snapshots may have been deleted. Call it again to delete the rest.
    """
    if world is None:
        return apply(read_plan())
    plans: list[PrunePlan] = []
    done: list[Pruned] = []

    def act() -> list[str]:
        done.append(apply(plans[0]))
        return [snapshot.name for snapshot in done[0].deleted]

    with world.join("prune") as ranks:
        # All ranks plan before one deletes: a rank that planned later would find nothing left to delete.
        ranks.barrier("plan", lambda: plans.append(read_plan()))
        names = set(ranks.broadcast("prune", act))
    if done:
        return done[0]
    kept = (verdict for verdict in plans[0].verdicts if not verdict.reasons and verdict.snapshot.name not in names)
    return Pruned(tuple(snapshot for snapshot in plans[0].delete if snapshot.name in names), tuple(kept))


def load_into_together(
    repo: Repository,
    find: Callable[[], CommittedSnapshot],
    tree: Any,
    options: IntoOptions,
    *,
    types: Types,
    world: World | None,
    journal: Journal,
) -> Any:
    """Load in place into a tree that is distributed over the ranks; changes nothing unless it fits on all ranks.

    The caller adds to every error what the journal recorded.
    """
    if world is None:
        return LazySnapshot(repo, find(), types).load_into(tree, replace(options, replicas="each"), journal=journal)
    with world.join(LOAD) as ranks:
        journal.where = f"the target of rank {ranks.rank}"
        record = _agree_on_record(find, options, ranks)
        chunk_exchange = open_together(repo.store, record.manifest, ranks, name=record.name)
        variants = chunk_exchange.list_variants()
        if variants:
            # Warn in a step: if warnings are turned into errors, all ranks must raise.
            saved_by, loaded_by = chunk_exchange.num_parts, ranks.world_size
            ranks.broadcast(
                "warn", lambda: warn_of_variants(record.name, variants, saved_by=saved_by, loaded_by=loaded_by)
            )
        reader = SnapshotReader(
            repo,
            record,
            verify=options.verify,
            manifest=chunk_exchange.heads,
            progress=options.progress,
            cache=repo.store.cache,
            keep=True,
        )
        with Opened(reader) as opened:

            def load(replica_exchange: ReplicaExchange | None) -> Any:
                return load_into(
                    opened,
                    tree,
                    options,
                    types,
                    agree=partial(_agree_on_problems, record.name, ranks),
                    step=partial(ranks.barrier, "read"),
                    locate=chunk_exchange.locate,
                    exchange=replica_exchange,
                    journal=journal,
                )

            # With `since`, each rank reads what its own memory lacks.
            if options.replicas == "each" or options.since is not None or ranks.world_size == 1:
                return load(None)
            with ReplicaExchange(ranks, reader, mode=options.replicas, timeout_s=world.timeout_s) as replica_exchange:
                return load(replica_exchange)


def _agree_on_record(
    find: Callable[[], CommittedSnapshot], options: IntoOptions, ranks: Collectives
) -> CommittedSnapshot:
    """Return the snapshot that this rank finds; raise Mismatch unless all ranks find the same, and load it alike."""
    found: list[CommittedSnapshot] = []
    # The choices that decide which steps the ranks take.
    way = "since=" if options.since is not None else f"replicas={options.replicas!r}"

    def find_identity() -> tuple[tuple[str, int, bytes], bool, str]:
        found.append(find())
        return (found[0].name, found[0].generation, found[0].digest), options.is_transaction, way

    seen = [(tuple(identity), *choices) for identity, *choices in ranks.all_gather("load", find_identity)]
    verify_passed_by_all("since= or atomic=True", [is_transaction for _, is_transaction, _ in seen])
    if len({way for *_, way in seen}) > 1:
        given = list_some([f"rank {rank} {way}" for rank, (*_, way) in enumerate(seen)], _LISTED)
        raise Mismatch(f"the ranks load in different ways: {given}; pass the same options on all ranks")
    if len({identity for identity, *_ in seen}) > 1:
        names = [f"rank {rank} {name!r} (generation {number})" for rank, ((name, number, _), *_) in enumerate(seen)]
        raise Mismatch(
            f"the ranks load different snapshots: {list_some(names, _LISTED)}. Choose one on one rank and broadcast its"
            " name"
        )
    return found[0]


def _agree_on_problems(name: str, ranks: Collectives, problems: Sequence[str]) -> None:
    """Raise Mismatch on all ranks if any rank has problems; each line names the ranks that have the problem."""
    by_rank = ranks.all_gather("fit", lambda: list(problems))
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(by_rank):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        return
    all_ranks = list(range(ranks.world_size))
    lines = [text if found == all_ranks else f"{name_ranks(found)}: {text}" for text, found in by_text.items()]
    raise Mismatch(f"{name!r} does not fit; nothing was changed:{list_lines(lines, _LISTED)}", problems=tuple(lines))
