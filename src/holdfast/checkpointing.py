"""`CheckpointManager`: decides in a training loop when to save, what to keep and when to stop, on all ranks alike."""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from typing_extensions import Self

from holdfast.distributed.checkpoint.checkpoint import DEFAULT_TIMEOUT_S, World, find_world
from holdfast.distributed.talk.failures import is_caused_by
from holdfast.errors import Corrupt, NotFound, RankError
from holdfast.json_text import Json
from holdfast.mirror.retention import keep_unmirrored
from holdfast.objects.at_exit import before_exit
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.handle.repository import Repository
from holdfast.repo.upkeep.prune import BestRule, Keep, apply_prune, find_metric, make_keep, read_prune_plan
from holdfast.snapshot.lazy import Snapshot
from holdfast.snapshot.staging import SaveHandle
from holdfast.texts import parse_duration

# Reasons to stop, in the order in which they win if ranks have different ones.
_NOTHING, _TIME_IS_UP, _SIGNAL = 0, 1, 2


class ManagedStore(Protocol):
    """The methods of a Store that a manager calls; `Store` says what they do."""

    @property
    def save(self) -> Callable[..., object]:
        """Save a tree."""

    @property
    def save_async(self) -> Callable[..., SaveHandle]:
        """Save a tree in the background."""

    @property
    def load_into(self) -> Callable[..., Any]:
        """Load a snapshot in place."""

    @property
    def snapshots(self) -> Callable[[str], list[Snapshot]]:
        """Return the snapshots under a prefix."""

    @property
    def repository(self) -> Repository:
        """The repository that the store is."""

    @property
    def gc(self) -> Callable[[], object]:
        """Delete what no snapshot needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """When a manager saves and stops, and what it keeps besides the newest; `Store.manager` describes each."""

    every: int | None = None
    every_seconds: float | timedelta | str | None = None
    keep_last: int = 0
    keep_every: int = 0
    keep_within: float | timedelta = 0.0
    keep_tagged: bool = True
    keep_best: BestRule | None = None
    async_: bool = True
    stop_after: float | timedelta | str | None = None
    stop_signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    gc: bool = True
    compression: Compression = "default"
    delta: DeltaChoice | None = None
    process_group: dist.ProcessGroup | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Saved:
    """The last checkpoint that a manager saved."""

    step: int
    name: str
    reason: str
    """Why it was saved: "every 500 steps", "SIGTERM" ..."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class CheckpointManager:
    """Saves when a step is due, deletes old checkpoints once the new one is durable, and stops in time.

    Call `step` once per training step, on every rank, and leave the loop when `should_stop` is true. Use it as a
    context manager, or call `close` at the end.
    """

    def __init__(self, store: ManagedStore, prefix: str, options: ManagerOptions) -> None:
        """Manage the checkpoints of `store` whose names begin with `prefix`; `Store.manager` describes the options."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"the prefix of a manager ends with a slash: {prefix + '/'!r}, not {prefix!r}")
        self._store, self._prefix = store, prefix
        # Other snapshots under the prefix are not the manager's: it never loads or deletes them.
        self._own_names = re.compile(re.escape(prefix) + "step-([0-9]+)")
        self._schedule = _Schedule(options)
        self._rules = _make_rules(options)
        self._options = options
        self._together: dict[str, Any] = {"process_group": options.process_group, "timeout_s": options.timeout_s}
        world = find_world(process_group=options.process_group, timeout_s=options.timeout_s)
        self._is_first_rank = world is None or world.is_first_rank
        self._votes = _Votes(world)
        self._signals = _Signals(options.stop_signals)
        self._saving: Saving | None = None
        self._last: Saved | None = None
        self._resumed_step: int | None = None
        self._stop_reason = ""

    @property
    def should_stop(self) -> bool:
        """Whether the training loop must end: a signal arrived or the time is up, and the state has been saved."""
        return bool(self._stop_reason)

    @property
    def stop_reason(self) -> str:
        """Why the loop must end: "SIGTERM", "SIGINT", "another rank was signalled", "the time is up"; or ""."""
        return self._stop_reason

    @property
    def last(self) -> Saved | None:
        """The last checkpoint that this manager has saved or is saving."""
        return self._last

    def __repr__(self) -> str:
        """Say where the manager is: where it resumed, what it saved last, and what it does next."""
        resumed = "" if self._resumed_step is None else f"resumed at step {self._resumed_step}, "
        last = resumed + (
            f"last saved step {self._last.step} ({self._last.reason})" if self._last else "nothing saved yet"
        )
        stop = f", stopping: {self._stop_reason}" if self._stop_reason else ""
        return f"<CheckpointManager {self._prefix!r}: {last}; {self._schedule}{stop}>"

    def __enter__(self) -> Self:
        """Return this manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager; after an error, an error of a save in the background is only a warning."""
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            warnings.warn(f"a checkpoint was not saved: {failed}", stacklevel=2)

    def resume(self, state: Any, **options: Any) -> int | None:
        """Load the newest checkpoint into `state`, in place, and return its step; None if there is none.

        A damaged checkpoint is skipped with a warning, and the one before is loaded. All ranks must call this.
        `options` are those of `Store.load_into`.
        """
        found = self.read_newest_first()
        loaded = load_first_intact(found, lambda each: self._store.load_into(each, state, **self._together, **options))
        self._resumed_step = None if loaded is None else self._find_step(loaded)
        return self._resumed_step

    def read_newest_first(self) -> list[Snapshot]:
        """Return the checkpoints of this manager, those of earlier processes too, the newest first."""
        found = [each for each in self._store.snapshots(self._prefix) if self._own_names.fullmatch(each.name)]
        return sorted(found, key=lambda each: (each.time, self._find_step(each)), reverse=True)

    def _find_step(self, snapshot: Snapshot) -> int:
        named = self._own_names.fullmatch(snapshot.name)
        assert named is not None, "it is one of this manager's checkpoints"
        return int(named[1])

    def step(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Json] | None = None,
        force: bool = False,
    ) -> bool:
        """Save `state` if this step is due, or with `force`; return whether it was saved.

        `state` is a tree, or a function without arguments that returns one and is called only if the step is due.
        `metrics` are stored with the checkpoint, for `keep_best`. A save in the background that has failed raises its
        error when the next one is due, or in `close`. All ranks must call this with the same step.
        """
        stop = self._votes.exchange(self._find_own_stop(), self._schedule.is_time_to_save())
        reason = self._schedule.find_reason(step, is_time=stop.is_time_to_save)
        if stop.code != _NOTHING and not self._stop_reason:
            self._stop_reason = self._describe_stop(stop.code)
            reason = self._stop_reason
        if force and not reason:
            reason = "force"
        if not reason:
            return False
        self._save(Saved(step, f"{self._prefix}step-{step}", reason, dict(metrics or {})), state, dict(metadata or {}))
        return True

    def _find_own_stop(self) -> int:
        if self._signals.received is not None:
            return _SIGNAL
        return _TIME_IS_UP if self._schedule.is_time_up() else _NOTHING

    def _describe_stop(self, code: int) -> str:
        if code == _TIME_IS_UP:
            return "the time is up"
        received = self._signals.received
        return "another rank was signalled" if received is None else received.name

    def _save(self, saved: Saved, state: object, metadata: dict[str, Json]) -> None:
        self.wait()
        tree = state() if callable(state) and not hasattr(state, "state_dict") else state
        metadata |= {"step": saved.step}
        if saved.metrics:
            metadata["metrics"] = {name: float(value) for name, value in saved.metrics.items()}
        is_async = self._options.async_ and not self._stop_reason
        save: Callable[..., object] = self._store.save_async if is_async else self._store.save
        how = {"compression": self._options.compression, "delta": self._options.delta, **self._together}
        result = save(saved.name, tree, overwrite=True, metadata=metadata, **how)
        self._last = saved
        self._schedule.note_saved()
        self._saving = Saving(result if isinstance(result, SaveHandle) else None, self._clean_up)
        if self._stop_reason:
            self.wait()

    def _clean_up(self) -> None:
        """Delete what no rule keeps; called on every rank when the new checkpoint is durable, and acts on one."""
        if self._rules is None or not self._is_first_rank or not self._has_metric(self._rules):
            return
        store = self._store.repository.verify_same()
        plan = read_prune_plan(store, self._prefix, self._rules, only=self._own_names)
        plan = keep_unmirrored(self._store.repository, plan)
        if apply_prune(store, plan).deleted and self._options.gc:
            self._store.gc()

    def _has_metric(self, rules: Keep) -> bool:
        """Return whether a checkpoint has the metric of `keep_best`; until one has it, nothing is deleted."""
        if rules.best is None:
            return True
        metric = rules.best.metric
        return any(find_metric(each.record, metric) is not None for each in self.read_newest_first())

    def wait(self) -> None:
        """Wait for the save in the background and for what it deletes; raise its error, if it had one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def close(self) -> None:
        """Wait for the save in the background, raise its error, and restore the signal handlers."""
        try:
            self.wait()
        finally:
            self._signals.restore()


def _make_rules(options: ManagerOptions) -> Keep | None:
    """Return the rules for pruning; None if there are none. The newest checkpoint is always kept."""
    if not (options.keep_last or options.keep_every or options.keep_within or options.keep_best):
        return None
    keep = make_keep(
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        keep_within=options.keep_within,
        keep_tagged=options.keep_tagged,
        keep_best=options.keep_best,
    )
    return replace(keep, last=max(1, keep.last))


def load_first_intact(
    snapshots: Iterable[Snapshot],
    load: Callable[[Snapshot], object],
    *,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Snapshot | None:
    """Call `load` with one snapshot after the other until one is not damaged, and return that one.

    Each damaged snapshot is a warning. If all are damaged, the error of the first is raised; if there are none, this
    returns None. On many ranks, `load` is collective, and all ranks end with the same snapshot. If `may_go_on` returns
    False after an error, the error is raised whatever it is.
    """
    first_error: Exception | None = None
    for snapshot in snapshots:
        try:
            load(snapshot)
        except (Corrupt, NotFound, RankError) as error:
            if not _is_damage(error) or not may_go_on():
                raise
            first_error = first_error or error
            warnings.warn(f"{snapshot.name!r} cannot be loaded, trying the one before: {error}", stacklevel=3)
        else:
            return snapshot
    if first_error is not None:
        raise first_error
    return None


def _is_damage(error: Exception) -> bool:
    """Return whether an error says that the snapshot is damaged; on many ranks it is the same answer on each."""
    return is_caused_by(error, Corrupt, NotFound) if isinstance(error, RankError) else True


def parse_seconds(value: float | timedelta | str) -> float:
    """Return a duration in seconds: a number, a timedelta, or a text such as "3h50m", "90m" or "2d"."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return parse_duration(value) if isinstance(value, str) else float(value)


class _Schedule:
    """When to save and when to stop, by this process's own clock."""

    def __init__(self, options: ManagerOptions) -> None:
        self._every = options.every
        every_s, stop_after = options.every_seconds, options.stop_after
        self._every_s = None if every_s is None else parse_seconds(every_s)
        self._stop_after_s = None if stop_after is None else parse_seconds(stop_after)
        if self._every is not None and self._every < 1:
            raise ValueError(f"every= is a number of steps, at least 1, not {self._every}")
        self._start_s = self._saved_s = time.monotonic()

    def __str__(self) -> str:
        """Describe the schedule."""
        rules = [f"every {self._every} steps"] if self._every else []
        rules += [f"every {self._every_s:g} s"] if self._every_s else []
        return "saves " + (" and ".join(rules) or "when it must stop")

    def find_reason(self, step: int, *, is_time: bool) -> str:
        if self._every and step % self._every == 0:
            return f"every {self._every} steps"
        return f"every {self._every_s:g} s" if is_time else ""

    def is_time_to_save(self) -> bool:
        return self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def is_time_up(self) -> bool:
        return self._stop_after_s is not None and time.monotonic() - self._start_s >= self._stop_after_s

    def note_saved(self) -> None:
        self._saved_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Vote:
    """What the ranks have agreed on."""

    code: int
    is_time_to_save: bool


class _Votes:
    """Agrees on one decision for all ranks without making a step wait.

    Each step starts an all-reduce of the ranks' own wishes and uses the result of the one that the step before has
    started, which has had a whole training step to finish. So every rank acts on the same wishes at the same step.
    """

    def __init__(self, world: World | None) -> None:
        self._is_alone = world is None or dist.get_world_size(world.group) == 1
        # Its own group: the user's may be NCCL, and its collectives must not be interleaved with these.
        self._group = None if self._is_alone else _make_group(world)
        self._pending: tuple[Any, torch.Tensor] | None = None

    def exchange(self, code: int, is_time_to_save: bool) -> _Vote:
        if self._is_alone:
            return _Vote(code, is_time_to_save)
        agreed = self._take_pending()
        wishes = torch.tensor([code, int(is_time_to_save)])
        self._pending = (dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self._group, async_op=True), wishes)
        return agreed

    def _take_pending(self) -> _Vote:
        if self._pending is None:
            return _Vote(_NOTHING, False)
        work, wishes = self._pending
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"another rank did not reach this training step: {error}", step="manager") from error
        code, is_time = wishes.tolist()
        return _Vote(code, bool(is_time))


def _make_group(world: World | None) -> dist.ProcessGroup:
    assert world is not None, "there are several ranks"
    ranks = None if world.group is None else dist.get_process_group_ranks(world.group)
    group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    assert isinstance(group, dist.ProcessGroup), "this process is one of its ranks"
    return group


class _Signals:
    """Notes signals that ask the process to end, so that the training loop can save first.

    A second signal of the same kind does what it did before there was a manager: SIGINT raises KeyboardInterrupt.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self.received: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for each in wanted:
                self._replaced[each] = signal.signal(each, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        previous = self._replaced.pop(self.received, None)
        signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def restore(self) -> None:
        for each, handler in self._replaced.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._replaced.clear()


class Saving:
    """A checkpoint on its way: waits for the save in the background, then runs `after`."""

    def __init__(self, handle: SaveHandle | None, after: Callable[[], None]) -> None:
        """Start waiting; without a handle, the checkpoint is durable already."""
        self._handle, self._after = handle, after
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-manager", daemon=False)
        self._thread.start()
        self._forget = before_exit(self.wait)

    def _run(self) -> None:
        try:
            if self._handle is not None:
                self._handle.wait()
            self._after()
        except BaseException as error:  # noqa: BLE001  # `wait` raises it in the caller's thread
            self._error = error

    def wait(self) -> None:
        """Wait for the save and for `after`; raise the error of either."""
        self._thread.join()
        self._forget()
        if self._error is not None:
            raise self._error
