"""Collective save, load and prune: each rank writes its share of the tree, and reads the chunks that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from holdfast.distributed.checkpoint.exchange import ReplicaExchange, open_together
from holdfast.distributed.checkpoint.plan import Planned, plan_save, verify_passed_by_all
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.failures import name_ranks
from holdfast.errors import BadName, HoldfastError, Mismatch
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.prune import Pruned, PrunePlan
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.finder import SnapshotFinder
from holdfast.snapshot.into.load_into import Loading, check_values, delaying_signals, load_into, match_tree, note_held
from holdfast.snapshot.into.plan import IntoOptions, IntoPlan, Journal
from holdfast.snapshot.lazy import Snapshot
from holdfast.snapshot.merge_trees import opening_whole, warn_of_variants
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.save import SaveOptions, add_digests, make_request, save_tree
from holdfast.snapshot.staging import AsyncSaver, SaveHandle, Staging
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
    finder: SnapshotFinder,
    name: str | Snapshot,
    tree: Any,
    options: IntoOptions,
    *,
    world: World | None,
    journal: Journal,
) -> tuple[CommittedSnapshot, Any]:
    """Load in place into a tree that is distributed over the ranks; changes nothing unless it fits on all ranks.

    Returns the record and the loaded tree. The caller adds to every error what the journal recorded.
    """
    if world is None:
        found = finder.open(name)
        with opening_whole(found.repository, found.record, options.verify, options.progress) as opened:
            alone = replace(options, replicas="each")
            return found.record, load_into(opened, tree, alone, finder.types, journal=journal)
    with world.join(LOAD) as ranks:
        journal.where = f"the target of rank {ranks.rank}"
        with ranks.gathering("load") as step:
            found = finder.open(name)
            step.given = _describe_load(found.record, options)
        _verify_alike(step.values)
        record, store = found.record, found.repository.store
        chunks = open_together(store, record.manifest, ranks, name=record.name)
        variants = chunks.list_variants()
        if variants:
            saved_by, loaded_by = chunks.num_parts, ranks.world_size
            warn = partial(warn_of_variants, record.name, variants, saved_by=saved_by, loaded_by=loaded_by)
            # Warn in a step: if warnings are turned into errors, all ranks must raise.
            ranks.broadcast("warn", warn)
        reader = SnapshotReader(
            found.repository,
            record,
            verify=options.verify,
            manifest=chunks.heads,
            progress=options.progress,
            cache=store.cache,
            keep=True,
        )
        with Opened(reader) as opened, opened.pausing_gc():
            plan = match_tree(opened, tree, options, finder.types)
            plan.relocate(chunks.locate(plan.list_wants()))
            check_values(plan)
            _agree_on_problems(plan, ranks)
            _apply_together(plan, ranks, journal, timeout_s=world.timeout_s)
    return record, plan.result


def _describe_load(record: CommittedSnapshot, options: IntoOptions) -> tuple[Any, ...]:
    """Return what must be the same on all ranks: the snapshot, and the choices that decide which steps they take."""
    way = "since=" if options.since is not None else f"replicas={options.replicas!r}"
    return (record.name, record.generation, record.digest), options.is_transaction, way


def _verify_alike(given: Sequence[Sequence[Any]]) -> None:
    """Raise Mismatch unless all ranks load the same snapshot in the same way."""
    verify_passed_by_all("since= or atomic=True", [is_transaction for _, is_transaction, _ in given])
    if len({way for *_, way in given}) > 1:
        ways = list_some([f"rank {rank} {way}" for rank, (*_, way) in enumerate(given)], _LISTED)
        raise Mismatch(f"the ranks load in different ways: {ways}; pass the same options on all ranks")
    if len({tuple(identity) for identity, *_ in given}) > 1:
        names = [f"rank {rank} {name!r} (generation {number})" for rank, ((name, number, _), *_) in enumerate(given)]
        raise Mismatch(
            f"the ranks load different snapshots: {list_some(names, _LISTED)}. Choose one on one rank and broadcast its"
            " name"
        )


def _apply_together(plan: IntoPlan, ranks: Collectives, journal: Journal, *, timeout_s: float) -> None:
    """Carry out a plan that fits on all ranks: on all of them, or, of a load that is a transaction, on none."""
    options = plan.options
    with ExitStack() as stack:
        replicas = None
        # With `since`, each rank reads what its own memory lacks.
        if options.replicas != "each" and options.since is None and ranks.world_size > 1:
            exchange = ReplicaExchange(ranks, plan.opened.reader, mode=options.replicas, timeout_s=timeout_s)
            replicas = stack.enter_context(exchange)
        stack.enter_context(journal.reporting())
        loading = stack.enter_context(Loading(plan, journal))
        if replicas is not None:
            left_out = replicas.choose(loading.targets)
            with ranks.step("read"):
                loading.read(left_out)
            with loading.receiving(left_out):
                replicas.send()
            with ranks.step("read"):
                loading.put()
        elif options.is_transaction:
            with ranks.step("read"):
                loading.read()
            with ranks.step("read"):
                loading.put()
        else:
            with ranks.step("read"):
                loading.read()
                loading.put()
        if options.is_transaction:
            # Up to here a failure of any rank rolls all ranks back; from here on none does.
            with delaying_signals():
                ranks.barrier("read")
                loading.settle()
        note_held(plan)


def _agree_on_problems(plan: IntoPlan, ranks: Collectives) -> None:
    """Raise Mismatch on all ranks if any rank has problems; each line names the ranks that have the problem."""
    by_rank = ranks.all_gather("fit", lambda: list(plan.problems))
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(by_rank):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        return
    all_ranks = list(range(ranks.world_size))
    lines = [text if found == all_ranks else f"{name_ranks(found)}: {text}" for text, found in by_text.items()]
    text = f"{plan.opened.name!r} does not fit; nothing was changed:{list_lines(lines, _LISTED)}"
    raise Mismatch(text, problems=tuple(lines))
