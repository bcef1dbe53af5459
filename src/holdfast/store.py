"""`Store`, the object that users work with, and `holdfast.open`.

Each method has a few lines over the layers below. What needs torch is imported inside methods: opening, listing and
collecting never load torch.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from io import BufferedReader
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from holdfast.compile_cache.choices import CompilerOptions, Strict
from holdfast.display.bars import make_progress
from holdfast.errors import StoreError
from holdfast.files.keep import (
    Paths,
    keep_files,
    plan_sources,
    restore_files,
    verify_other_store,
)
from holdfast.json_text import Json
from holdfast.objects.disk_cache import CACHE_BYTES, DiskCache
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import open_store, verify_path
from holdfast.progress import ProgressChoice, Silent
from holdfast.query.bisect import Bisection
from holdfast.query.lineage import LineageLog
from holdfast.query.select import BestMode, SortFields, parse_query
from holdfast.repo.files import Restored
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, HandleStatistics, Repository, open_repository
from holdfast.repo.names.snapshots import Tag, delete_snapshot, delete_tag, iter_tags
from holdfast.repo.read.reader import Verify, open_snapshot
from holdfast.repo.upkeep.check import Checker, Finding
from holdfast.repo.upkeep.collect import Collected, Rules, collect
from holdfast.repo.upkeep.prune import BestRule, Pruned, PrunePlan, apply_prune_in_groups, make_keep, read_prune_plan
from holdfast.repo.write.writer import SaveResult, WriteOptions
from holdfast.snapshot.gc_pause import pause_gc

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from holdfast.capture.compare.align import NameMap
    from holdfast.capture.compare.result import RunDiff
    from holdfast.capture.record.options import CompiledMode, Hashes, LevelName, Steps, WhenFull
    from holdfast.capture.record.recorder import Recorder
    from holdfast.capture.stored.events import Level
    from holdfast.capture.stored.runs import Run, RunFacts
    from holdfast.capture.stored.unshard import Dims
    from holdfast.checkpointing import CheckpointManager
    from holdfast.compile_cache.backend import Compiler
    from holdfast.diff.changes import Diff
    from holdfast.distributed.checkpoint.checkpoint import World
    from holdfast.formats.background import ExportHandle, ExportRunner
    from holdfast.formats.export import ExportResult
    from holdfast.formats.importing import ImportResult
    from holdfast.formats.reading.found import SourceFormat
    from holdfast.formats.receipt import ReceiptFinding
    from holdfast.mirror.mirror import Mirror
    from holdfast.series import Follower
    from holdfast.serving.server import StoreServer
    from holdfast.snapshot.batches import Aliases
    from holdfast.snapshot.finder import SnapshotFinder
    from holdfast.snapshot.into.held import HeldMemory
    from holdfast.snapshot.into.plan import ReplicaMode
    from holdfast.snapshot.lazy import Snapshot
    from holdfast.snapshot.save import SaveOptions
    from holdfast.snapshot.staging import AsyncSaver, SaveHandle, Staging
    from holdfast.snapshot.stateful import Optimizers
    from holdfast.trees.registered import Types

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How a store is opened, as a handle keeps it and pickles it; `open` describes each."""

    read_only: bool = False
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    single_writer: bool = False
    types: Sequence[type] = ()
    environment: bool = True
    change_hints: bool = False
    compression: Compression = "default"
    delta: DeltaChoice = "auto"
    create: bool = True
    storage_options: StorageOptions | None = None
    mirror: Callable[[Repository], Mirror] | None = None
    """Attaches the mirror that was chosen to a repository."""
    cache: DiskCache | None = None


class Store:
    """One content-addressed store. Thread-safe; a forked child reopens it on first use, unless it is in a bucket.

    Of a bucket that the parent has used, a child gets StoreError: start it with `spawn` or `forkserver`.

    Torch itself may hang in a forked child that computes with several threads: call `torch.set_num_threads(1)` there.
    """

    def __init__(
        self,
        store: ObjectStore,
        options: OpenOptions | None = None,
        *,
        store_id: str = "",
    ) -> None:
        """Open the repository in any object store. With `store_id`, refuse to change a store that has another id."""
        self._options = options or OpenOptions()
        self._attach(store, store_id)

    def _attach(self, store: ObjectStore, store_id: str) -> None:
        self._pid = os.getpid()
        options = self._options
        self._handle = open_repository(
            store,
            budget_bytes=options.budget_bytes,
            create=options.create,
            change_hints=options.change_hints,
            store_id=store_id,
            compression=options.compression,
            delta=options.delta,
        )
        self._saver: AsyncSaver | None = None
        self._lineage = LineageLog()
        self._exporter: ExportRunner | None = None
        self._named_mirrors: dict[str, Mirror] = {}
        self._mirror: Mirror | None = options.mirror(self._handle) if options.mirror else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL and the options; unpickling opens the store again."""
        return make_store, (self._verify_shared(), self._options, self._handle.identity.store_id)

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<Store {self.url}>"

    def __bool__(self) -> bool:
        """Return True: an empty store is a store."""
        return True

    @property
    def url(self) -> str:
        """The path or URL of the store."""
        return self._handle.store.url

    @property
    def mirror(self) -> Mirror | None:
        """The mirror that the store was opened with: its `state`, `sync` and `wait`; None without one."""
        return self._mirror

    @property
    def repository(self) -> Repository:
        """The underlying repository, for functions that take one."""
        if os.getpid() != self._pid:
            self._attach(_open_objects(self._verify_shared(), self._options), self._handle.identity.store_id)
        return self._handle

    def statistics(self) -> HandleStatistics:
        """Return how many entries this handle mapped or could not map so far, and how long each stage took."""
        return self.repository.counters.read()

    def close(self) -> None:
        """Wait for background saves, exports and uploads; raise an error that no `wait` raised; free staging memory."""
        workers = (self._saver, self._exporter, self._mirror, *self._named_mirrors.values())
        for worker in workers if os.getpid() == self._pid else ():
            if worker is not None:
                worker.close()

    def __enter__(self) -> Self:
        """Return this store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store; see `close`."""
        self.close()

    def save(
        self,
        name: str,
        tree: object,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Json] | None = None,
        base: str | None = None,
        allow_pickle: bool = False,
        grads: bool = False,
        compression: Compression = "default",
        delta: DeltaChoice | None = None,
        after_s: float = -math.inf,
        mirror: StrPath | None = None,
        collective: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        progress: ProgressChoice = None,
    ) -> SaveResult:
        """Save a tree under a name. When this returns, the whole snapshot is visible and durable.

        Objects with `state_dict()` are saved as what that method returns. Raises NameInUse if the name has other
        content, and Unsupported, naming the leaf, for a value that the format cannot store.

        If torch.distributed is initialised, all ranks of `process_group` must call this, and each writes its own part.
        If one rank fails, or is silent for `timeout_s`, all ranks raise RankError and the name keeps its old content;
        CommitUnknown if a rank cannot know that.

        Args:
            name: the name of the snapshot, such as "run1/step-100".
            tree: dicts, lists, tensors, plain values, and objects with `state_dict()`.
            overwrite: replace what the name has; without it, other content raises NameInUse. The same on all ranks.
            metadata: facts to find the snapshot by. Of many ranks, those of rank 0 are stored.
            base: a snapshot with similar content, whose chunks are reused; by default the latest with the same prefix.
            allow_pickle: pickle values that the format cannot store. Loading them can run any code, and must be
                allowed, too.
            grads: save the gradients of tensors as well.
            compression: how new bytes are stored: None, "fast", "small" or "auto"; "default" is the choice of
                `holdfast.open`.
            delta: store new bytes as the difference from the base: "auto", "off", or N (one save in N is whole). None
                is the choice of `holdfast.open`.
            after_s: the commit time is later than this, whatever the clock says: a series whose names are numbered
                stays in order.
            mirror: another store, to which this snapshot is uploaded in the background (see `holdfast.open`).
            collective: False to save from this process only.
            process_group: the ranks that take part; by default all ranks.
            timeout_s: how long a rank may give no sign of life while others wait for it, in seconds.
            progress: True for a progress bar (of tqdm, or else of rich), or a function that receives each
                `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world
        from holdfast.snapshot.save import SaveOptions

        options = SaveOptions(
            overwrite=overwrite,
            metadata=metadata or {},
            base=base,
            allow_pickle=allow_pickle,
            grads=grads,
            compression=compression,
            delta=delta,
            after_s=after_s,
        )
        world = find_world(collective=collective, process_group=process_group, timeout_s=timeout_s)
        return self._save(name, tree, options, mirror=mirror, world=world, progress=progress)

    def save_async(
        self,
        name: str,
        tree: object,
        *,
        staging: Staging = "full",
        overwrite: bool = False,
        metadata: Mapping[str, Json] | None = None,
        base: str | None = None,
        allow_pickle: bool = False,
        grads: bool = False,
        compression: Compression = "default",
        delta: DeltaChoice | None = None,
        after_s: float = -math.inf,
        mirror: StrPath | None = None,
        collective: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        progress: ProgressChoice = None,
    ) -> SaveHandle:
        """Copy the tree and save the copy in the background; the tree may change once this returns.

        Of tensors on a GPU, only what the store lacks is copied, unless most of the last saves was new. The handle's
        `wait` raises errors of the save, or the next save or `close`. If none of them has, the interpreter prints the
        error when it exits, and exits with status 120. See `save` for more about the parameters.

        Args:
            name: the name of the snapshot.
            tree: what `save` takes.
            staging: "full" copies the whole tree into memory; "budget" copies at most half of the memory budget, and
                returns when the rest is on disk.
            overwrite: replace what the name has; without it, other content raises NameInUse. The same on all ranks.
            metadata: facts to find the snapshot by. Of many ranks, those of rank 0 are stored.
            base: a snapshot with similar content, whose chunks are reused; by default the latest with the same prefix.
            allow_pickle: pickle values that the format cannot store.
            grads: save the gradients of tensors as well.
            compression: how new bytes are stored: None, "fast", "small", "auto", or "default".
            delta: store new bytes as the difference from the base: "auto", "off", or N (one save in N is whole).
            after_s: the commit time is later than this, whatever the clock says.
            mirror: another store, to which this snapshot is uploaded in the background.
            collective: False to save from this process only.
            process_group: the ranks that take part; by default all ranks.
            timeout_s: how long a rank may give no sign of life while others wait for it, in seconds.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import SAVE_ASYNC, find_world, reporting_early, start_together
        from holdfast.snapshot.save import SaveOptions

        options = SaveOptions(
            overwrite=overwrite,
            metadata=metadata or {},
            base=base,
            allow_pickle=allow_pickle,
            grads=grads,
            compression=compression,
            delta=delta,
            after_s=after_s,
        )
        world = find_world(collective=collective, process_group=process_group, timeout_s=timeout_s)
        with reporting_early(world, SAVE_ASYNC, str(name)):
            options = replace(options, environment=self._describe_environment(name, mirror))
            repo, saver, bar, types = self.repository, self._find_saver(), make_progress(progress), self._types
        handle = start_together(
            saver, repo, name, tree, options, types=types, world=world, staging=staging, progress=bar
        )
        self._lineage.note_saved(name)
        return handle

    def load(
        self,
        name: str | Snapshot,
        *,
        device: torch.device | str | None = "cpu",
        only: str | Sequence[str] | None = None,
        mmap: bool = False,
        verify: Verify = "full",
        rename: Mapping[str, str] | None = None,
        aliases: Aliases = "preserve",
        allow_pickle: bool = False,
        dtype: torch.dtype | None = None,
        progress: ProgressChoice = None,
    ) -> Any:
        """Load a tree into new memory, with the same containers, values, tensors and memory sharing as saved.

        Args:
            name: a name or tag, or a snapshot from `latest` or `snapshots`.
            device: the device for tensors; "saved" restores each tensor to the device it was saved from.
            only: patterns of leaf names, such as "model.*"; other leaves are not read.
            mmap: memory-map tensors whose bytes are contiguous on disk. Mapped tensors are not verified.
            verify: "full" checks BLAKE3; "device" checks it again after the copy to an accelerator; "fast" checks XXH3,
                which detects accidents only; False checks nothing.
            rename: prefixes of keys to replace.
            aliases: "preserve" restores memory sharing between tensors; "fresh" gives each tensor its own memory.
            allow_pickle: unpickle values that were saved as pickles. This can run arbitrary code.
            dtype: cast floating-point tensors to this dtype. Other tensors and registered types keep theirs.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.snapshot.batches import LoadOptions

        bar = make_progress(progress)
        options = LoadOptions(device, only, verify, mmap, rename or {}, aliases, allow_pickle, dtype, bar)
        snapshot = self._open_snapshot(name)
        tree = snapshot.load(options)
        self._lineage.note_loaded(snapshot.record)
        return tree

    def load_into(
        self,
        name: str | Snapshot,
        tree: Any,
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        assign: bool = False,
        verify: Verify = "full",
        allow_pickle: bool = False,
        replicas: ReplicaMode = "auto",
        atomic: bool = False,
        since: str | Snapshot | None = None,
        check_target: bool = False,
        collective: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        progress: ProgressChoice = None,
    ) -> Any:
        """Load a snapshot into an existing tree, in place, and return the tree.

        Tensors are filled, plain values in dicts and lists are replaced, and objects with `load_state_dict` are loaded
        through it. If anything does not fit, nothing changes and Mismatch lists every problem. As for `save`, all ranks
        must call this, and each reads the parts that it needs.

        An error lists the leaves that it left changed in `overwritten`, and those that may mix old and new values in
        `partly_written`.

        Args:
            name: a name or tag, or a snapshot from `latest` or `snapshots`.
            tree: the tree to fill; its keys, shapes and dtypes must be those of the snapshot.
            strict: False to ignore keys that only the tree or only the snapshot has.
            rename: prefixes of keys to replace.
            cast: convert tensors to the dtypes of the tree.
            assign: put new tensors in place instead of filling those of the tree.
            verify: "full" checks BLAKE3; "fast" checks XXH3, which detects accidents only; False checks nothing.
            allow_pickle: unpickle values that were saved as pickles. This can run arbitrary code.
            replicas: a tensor that all ranks need whole is read by "each" rank, or by one that sends it to the others
                ("broadcast"); with "auto", a measurement decides.
            atomic: an error changes no leaf on any rank; this needs memory for a second copy.
            since: the snapshot that the tree holds. Only the chunks that the tree lacks are read, into new memory,
                verified and then put in place, on all ranks or none. The statement is not trusted: a tensor that this
                store has loaded is known to be unchanged by its version counter, and the memory of any other is
                hashed, at 2 to 3 GB/s a core.
            check_target: with `since`, hash all of the tree. Version counters do not notice writes through `.data`, by
                numpy, by another process or by code outside torch.
            collective: False to load in this process only.
            process_group: the ranks that take part; by default all ranks.
            timeout_s: how long a rank may give no sign of life while others wait for it, in seconds.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import LOAD, find_world, load_into_together, reporting_early
        from holdfast.snapshot.into.held import make_since
        from holdfast.snapshot.into.plan import IntoOptions, Journal

        world = find_world(collective=collective, process_group=process_group, timeout_s=timeout_s)
        with reporting_early(world, LOAD):
            options = IntoOptions(
                strict=strict,
                rename=rename or {},
                cast=cast,
                assign=assign,
                verify=verify,
                allow_pickle=allow_pickle,
                replicas=replicas,
                atomic=atomic,
                since=make_since(since, check=check_target),
                held=self._held,
                progress=make_progress(progress),
            )
            finder, journal = self._finder, Journal()
        try:
            record, loaded = load_into_together(finder, name, tree, options, world=world, journal=journal)
            self._lineage.note_loaded(record)
            return loaded
        except BaseException as error:
            # Outside of every `with`: the end of one can raise MemoryError after everything was loaded.
            journal.report(error)
            raise

    def publish(
        self,
        series: str,
        tree: object,
        *,
        keep: int = 2,
        gc: bool = True,
        metadata: Mapping[str, Json] | None = None,
        base: str | None = None,
        allow_pickle: bool = False,
        grads: bool = False,
        compression: Compression = "default",
        delta: DeltaChoice | None = None,
        mirror: StrPath | None = None,
        collective: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        progress: ProgressChoice = None,
    ) -> SaveResult:
        """Save a tree as the next version of a series, "<series>/00000001" and so on, for others to `follow`.

        Chunks that did not change are not written. Once the version is committed, old ones are deleted. If two
        processes publish at once, each gets a number. Collective, as `save` is, and raises what `save` raises; see
        there for more about the parameters.

        Args:
            series: the prefix of the names; a slash at its end may be left out.
            tree: what `save` takes.
            keep: how many of the newest versions are not deleted. Tagged ones are not deleted either.
            gc: free the bytes of deleted versions; False leaves that to a later `gc`.
            metadata: facts to find the snapshot by. Of many ranks, those of rank 0 are stored.
            base: a snapshot with similar content, whose chunks are reused; by default the latest with the same prefix.
            allow_pickle: pickle values that the format cannot store.
            grads: save the gradients of tensors as well.
            compression: how new bytes are stored: None, "fast", "small", "auto", or "default".
            delta: store new bytes as the difference from the base: "auto", "off", or N (one save in N is whole).
            mirror: another store, to which this snapshot is uploaded in the background.
            collective: False to save from this process only.
            process_group: the ranks that take part; by default all ranks.
            timeout_s: how long a rank may give no sign of life while others wait for it, in seconds.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world
        from holdfast.series import PublishOptions, publish
        from holdfast.snapshot.save import SaveOptions

        saving = SaveOptions(
            metadata=metadata or {},
            base=base,
            allow_pickle=allow_pickle,
            grads=grads,
            compression=compression,
            delta=delta,
        )
        world = find_world(collective=collective, process_group=process_group, timeout_s=timeout_s)

        def save(version: str, options: SaveOptions) -> SaveResult:
            return self._save(version, tree, options, mirror=mirror, world=world, progress=progress)

        return publish(self.repository, series, PublishOptions(keep, gc, saving), world, save=save, collect=self.gc)

    def follow(
        self,
        prefix: str,
        *,
        since: str | Snapshot | None = None,
        every: bool = False,
        poll_s: float | None = None,
        timeout_s: float | None = None,
        collective: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> Follower:
        """Return an iterator over the newest snapshot under a prefix, and each newer one; it waits for them.

        Newer is what `latest` would return. It does no harm if snapshots are deleted or overwritten. Those in between
        are skipped, unless `every`.

        Args:
            prefix: the beginning of the names, such as "policy/".
            since: yield only snapshots that are newer than this one.
            every: yield every new snapshot in order, and not only the newest. One that was deleted meanwhile is not
                there.
            poll_s: the longest pause between two looks at the store, in seconds. By default 0.1 in a directory, where a
                look takes 32 calls of stat, and 5 in a bucket, where it takes one request for 1,000 snapshots.
            timeout_s: end the iteration after so many seconds without a new snapshot; None waits for ever.
            collective: False to follow in this process only.
            process_group: the ranks that take part; by default all ranks.
        """
        from holdfast.series import Follower, FollowOptions

        options = FollowOptions(
            since=None if since is None else self._open_snapshot(since).record,
            every=every,
            poll_s=poll_s,
            timeout_s=timeout_s,
            collective=collective,
            process_group=process_group,
        )
        return Follower(self, prefix, self._types, options)

    def manager(
        self,
        prefix: str,
        *,
        every: int | None = None,
        every_seconds: float | timedelta | str | None = None,
        keep_last: int = 0,
        keep_every: int = 0,
        keep_within: float | timedelta = 0.0,
        keep_tagged: bool = True,
        keep_best: BestRule | None = None,
        async_: bool = True,
        stop_after: float | timedelta | str | None = None,
        stop_signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        gc: bool = True,
        compression: Compression = "default",
        delta: DeltaChoice | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> CheckpointManager:
        """Return a manager that saves the checkpoints of a training run under `prefix`.

        `manager.step(step, state)` saves "<prefix>step-<step>" when a step is due, and deletes what no rule keeps, if
        there are rules (`keep_last`, `keep_every`, `keep_within`, `keep_best`). The newest is always kept, and a
        checkpoint is kept if any rule applies. `manager.resume(state)` loads the newest.

        Args:
            prefix: the beginning of the names, with a slash at its end, such as "run1/".
            every: save each time the step is a multiple of this.
            every_seconds: save each time so much time has passed: seconds, a timedelta, or a text such as "30m".
            keep_last: keep so many of the newest, by commit time.
            keep_every: keep those whose step, the last number in the name, is a multiple of this.
            keep_within: keep those committed within this time, in seconds or as a timedelta.
            keep_tagged: keep those that a tag points to.
            keep_best: keep those with the best values of a metric: `("val_loss", 2)` or `("accuracy", 2, "max")`.
            async_: False to save in the foreground.
            stop_after: save and stop after this time, such as "3h50m".
            stop_signals: signals that save and stop.
            gc: False to leave the space of deleted checkpoints to a later `gc`.
            compression: how new bytes are stored; by default as in `holdfast.open`.
            delta: whether new bytes are stored as the difference from the checkpoint before; by default as in
                `holdfast.open`.
            process_group: the ranks that take part; by default all ranks.
            timeout_s: how long a rank may give no sign of life while others wait for it, in seconds.
        """
        from holdfast.checkpointing import CheckpointManager, ManagerOptions

        options = ManagerOptions(
            every=every,
            every_seconds=every_seconds,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_within=keep_within,
            keep_tagged=keep_tagged,
            keep_best=keep_best,
            async_=async_,
            stop_after=stop_after,
            stop_signals=stop_signals,
            gc=gc,
            compression=compression,
            delta=delta,
            process_group=process_group,
            timeout_s=timeout_s,
        )
        return CheckpointManager(self, prefix, options)

    def __getitem__(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, without loading tensors; raises NotFound."""
        if not isinstance(name, str):
            raise TypeError(f"the keys of a store are names of snapshots, not {type(name).__name__}: {name!r:.80}")
        return self._open_snapshot(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a snapshot with that name or tag."""
        return self._finder.is_named(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the snapshots, in natural order, without Holdfast's own ("@...")."""
        return (snapshot.name for snapshot in self.snapshots())

    def __len__(self) -> int:
        """Return the number of snapshots, without Holdfast's own."""
        return len(self.snapshots())

    def snapshot(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, without loading tensors; raises NotFound."""
        return self._open_snapshot(name)

    def snapshots(
        self, prefix: str = "", *, where: str | None = None, sort: SortFields = None, limit: int | None = None
    ) -> list[Snapshot]:
        """Return the snapshots whose names begin with `prefix`, in natural order, without Holdfast's own ("@...").

        Args:
            prefix: the beginning of the names.
            where: a condition such as "loss < 0.3 and step >= 1000" (docs/reference/expressions.md).
            sort: a field, or several; "-loss" sorts descending. Snapshots without the field come last.
            limit: at most so many.
        """
        return self._finder.list_snapshots(prefix, parse_query(where=where, sort=sort, limit=limit))

    def latest(self, prefix: str = "") -> Snapshot | None:
        """Return the snapshot with the latest commit time whose name begins with `prefix`, or None."""
        return self._finder.open_latest(prefix)

    def best(self, prefix: str, metric: str, *, mode: BestMode = "min", where: str | None = None) -> Snapshot:
        """Return the snapshot with the best value of a metric, not NaN; of equal ones the newest. Raises NotFound.

        Args:
            prefix: the beginning of the names.
            metric: the key of a number in `metadata["metrics"]`, or in `metadata` itself.
            mode: "min" if smaller values are better, "max" if larger ones are.
            where: a condition, as for `snapshots`.
        """
        return self._finder.open_best(prefix, metric=metric, mode=mode, query=parse_query(where=where))

    def bisect(self, prefix: str, test: Callable[[Snapshot], bool | None]) -> Bisection[Snapshot]:
        """Return the first snapshot of a series for which `test` returns False, found by halving the series.

        They are ordered by step if each has another one, else by time; those after a bad one must be bad, too. `test`
        returns True for good, False for bad, None to skip. Raises NotBisectable if the first is bad or the last good.
        """
        return self._finder.bisect(prefix, test)

    def diff(
        self, a: str | Snapshot, b: object, *, values: bool = False, only: str | Sequence[str] | None = None
    ) -> Diff:
        """Return what was added, removed and changed from `a` to `b`; with `values`, by how much tensors differ.

        Args:
            a: a name or tag, or a snapshot.
            b: the same, or a tree in memory, such as `save` takes. Of such a tree, tensors on a GPU are hashed there,
                and those that are equal are not copied to the host.
            values: read the tensors that differ, and measure by how much.
            only: patterns of leaf names, such as "model.*".
        """
        from holdfast.diff.compare import compare
        from holdfast.diff.live import compare_with_tree
        from holdfast.diff.values import measure
        from holdfast.snapshot.lazy import Snapshot

        repo, before = self.repository, self._finder.open_here(a).record
        patterns = (only,) if isinstance(only, str) else tuple(only or ())
        if not isinstance(b, str | Snapshot):
            return compare_with_tree(repo, before, b, types=self._types, only=patterns, values=values)
        found = compare(repo, before, self._finder.open_here(b).record, only=patterns)
        return measure(repo, found) if values else found

    def copy(
        self, name: str | Snapshot, to: Store | StrPath, *, overwrite: bool = False, progress: ProgressChoice = None
    ) -> SaveResult:
        """Copy a snapshot to another store, with its metadata and commit time; only chunks that are missing there.

        Args:
            name: a name or tag, or a snapshot.
            to: the other store, or its path or URL.
            overwrite: replace the snapshot that has the name there, if there is one.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        if not isinstance(to, Store):
            verify_other_store(self.repository, os.fspath(to))
            to = make_store(os.fspath(to), OpenOptions(budget_bytes=self._options.budget_bytes), "")
        return self._finder.copy(name, to.repository, overwrite=overwrite, progress=make_progress(progress))

    def delete(self, name: str) -> None:
        """Delete a snapshot. `gc` then frees the bytes that no other snapshot uses. Raises NotFound."""
        delete_snapshot(self.repository.verify_same(), name)

    def tag(self, tag: str, name: str | Snapshot, *, move: bool = False) -> Tag:
        """Point a tag to a snapshot.

        Args:
            tag: the name of the tag.
            name: a name or tag, or a snapshot.
            move: point the tag there even if it points to another one, which otherwise raises NameInUse.
        """
        verify_user_name(tag, what="tag")
        return self._finder.set_tag(tag, name, move=move)

    def tags(self) -> list[Tag]:
        """Return all tags."""
        return [tag for tag in iter_tags(self.repository.store) if isinstance(tag, Tag)]

    def untag(self, tag: str) -> None:
        """Delete a tag; its snapshot is kept, and so is a copy of the tag in a mirror."""
        delete_tag(self.repository.verify_same(), tag)

    def _repr_html_(self) -> str:
        """Return a card for notebooks: the snapshots, the newest first."""
        from holdfast.snapshot.display import render_store

        return render_store(self.url, [snapshot.record for snapshot in self.snapshots()], self.tags())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys that a notebook offers after `store["`: the names of snapshots, and tags."""
        return [*self, *(tag.name for tag in self.tags())]

    def put(
        self,
        name: str,
        paths: Paths,
        *,
        metadata: Mapping[str, Json] | None = None,
        overwrite: bool = False,
        follow_links: bool = False,
        progress: ProgressChoice = None,
    ) -> SaveResult:
        """Save files and directories as one snapshot, on one rank; `get` restores them byte for byte.

        Files of tensors share bytes with the same tensors saved from memory.

        Args:
            name: the name of the snapshot.
            paths: a file or directory, or several. A directory `dir` becomes the entries `dir/...`; `dir/` stands for
                its files.
            metadata: facts to find the snapshot by.
            overwrite: replace the snapshot that has the name, if there is one.
            follow_links: follow symbolic links below a directory that lead outside of it, or to directories; otherwise
                they are an error.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        repo, bar = self.repository, make_progress(progress)
        options = WriteOptions(metadata=metadata or {}, overwrite=overwrite)
        return keep_files(repo, name, plan_sources(repo, paths, follow_links=follow_links), options, progress=bar)

    def get(
        self,
        name: str | Snapshot,
        folder: StrPath,
        *,
        only: str | None = None,
        overwrite: bool = False,
        raw: bool = False,
        progress: ProgressChoice = None,
    ) -> Restored:
        """Write the files of a snapshot below `folder`, each whole and verified, or not at all; follows no links there.

        If some files exist, NameInUse lists them and nothing is written, unless `overwrite`. A saved tree has no files:
        `export` writes it, and `raw` its tensors as raw bytes.

        Args:
            name: a name or tag, or a snapshot.
            folder: the target directory; created if it does not exist.
            only: a pattern of names, in which `*` also matches `/`.
            overwrite: replace files that exist.
            raw: also write entries that are no files, as bytes without a header.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        snapshot, bar = self._open_snapshot(name), make_progress(progress)
        with open_snapshot(repo := snapshot.repository, snapshot.record) as reader:
            return restore_files(repo, reader, folder, raw=raw, only=only, overwrite=overwrite, progress=bar)

    def open_file(self, name: str | Snapshot, path: str) -> BufferedReader:
        """Open a file of a snapshot as `open(path, "rb")` does; reads fetch and verify only the chunks they need."""
        return self._open_snapshot(name).open_file(path)

    def import_(
        self,
        source: StrPath,
        name: str,
        *,
        format: SourceFormat | None = None,
        rename: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        unpickle: bool = False,
        overwrite: bool = False,
        metadata: Mapping[str, Json] | None = None,
        follow_links: bool = False,
        progress: ProgressChoice = None,
    ) -> ImportResult:
        """Save a checkpoint of another library under a name, in pieces, and return the result with its receipt.

        Reads safetensors, torch.save, `save_pretrained`, DCP, content stores of PyTorch and ZeRO of DeepSpeed, and
        unpickles nothing. Raises BadFile or Untrusted, and writes nothing, if the source is damaged or could run code.

        Args:
            source: the file or folder.
            name: the name of the snapshot.
            format: which one, if a folder has several.
            rename: prefixes of keys to replace.
            dtype: cast floating-point tensors to this dtype; the receipt states the largest error.
            unpickle: load a file of torch.save that contains other objects. This can run arbitrary code.
            overwrite: replace what the name has.
            metadata: facts to find the snapshot by.
            follow_links: follow symbolic links in the folder that lead outside of it, or to directories; otherwise they
                are refused.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.formats.importing import ImportOptions, import_checkpoint
        from holdfast.snapshot.save import describe_environment

        verify_user_name(name)
        options = ImportOptions(
            format=format,
            rename=rename or {},
            dtype=dtype,
            unpickle=unpickle,
            overwrite=overwrite,
            metadata=metadata or {},
            follow_links=follow_links,
            environment=describe_environment() if self._options.environment else {},
        )
        repo, types, bar = self.repository, self._types, make_progress(progress)
        return import_checkpoint(repo, source, name, options, types=types, progress=bar)

    def verify_import(
        self,
        source: StrPath,
        name: str | Snapshot,
        *,
        unpickle: bool = False,
        follow_links: bool = False,
        progress: ProgressChoice = None,
    ) -> list[ReceiptFinding]:
        """Compare files with the receipt and snapshot of their import, read as then; return all differences.

        Args:
            source: the file or folder that was imported.
            name: a name or tag, or a snapshot.
            unpickle: as for `import_`, if the import did so.
            follow_links: as for `import_`, if the import did so.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.formats.verifying import check_imported

        record, bar = self._finder.open_here(name).record, make_progress(progress)
        path, chosen = os.fspath(source), {"unpickle": unpickle, "follow_links": follow_links}
        return list(check_imported(self.repository, record, path, progress=bar, **chosen))

    def export(
        self,
        name: str | Snapshot,
        destination: StrPath,
        *,
        format: str = "safetensors",
        select: str = "",
        exclude: str | Sequence[str] = (),
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        replace: bool = False,
        receipt: StrPath | None = None,
        progress: ProgressChoice = None,
    ) -> ExportResult:
        """Write a snapshot to files of other libraries; they appear whole and verified, or not at all.

        The receipt has the digests of all tensors.

        Args:
            name: a name or tag, or a snapshot.
            destination: the file, or the folder for "hf" and "dcp".
            format: "safetensors"; "hf": shards with an index, and the files beside the weights; "torch", for
                torch.load(weights_only=True); or "dcp", for torch.distributed.checkpoint on any number of ranks.
            select: only what is below this name, without the name itself; all by default.
            exclude: patterns of leaf names to leave out.
            dtype: cast floating-point tensors; the receipt states the errors.
            max_shard_size: the largest size of the files of "hf" and "dcp", in bytes or as a text such as "500MiB".
            replace: replace a file, or a folder of an earlier export, unless files were added to that folder since.
            receipt: where the receipt is written; by default beside the file, or in the folder.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.formats.export import ExportOptions, export

        options = ExportOptions(
            format=format,
            select=select,
            exclude=exclude,
            dtype=dtype,
            max_shard_size=max_shard_size,
            replace=replace,
            receipt=receipt,
        )
        snapshot, bar = self._open_snapshot(name), make_progress(progress)
        return export(snapshot.repository, snapshot.record, os.fspath(destination), options, progress=bar)

    def export_async(
        self,
        name: str | Snapshot,
        destination: StrPath,
        *,
        format: str = "safetensors",
        select: str = "",
        exclude: str | Sequence[str] = (),
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        replace: bool = False,
        receipt: StrPath | None = None,
    ) -> ExportHandle:
        """Start `export` in a process of low priority and return; `close` raises errors that no `wait` raised.

        Args:
            name: a name or tag, or a snapshot.
            destination: the file, or the folder for "hf" and "dcp".
            format: "safetensors"; "hf": shards with an index, and the files beside the weights; "torch", for
                torch.load(weights_only=True); or "dcp", for torch.distributed.checkpoint on any number of ranks.
            select: only what is below this name, without the name itself; all by default.
            exclude: patterns of leaf names to leave out.
            dtype: cast floating-point tensors; the receipt states the errors.
            max_shard_size: the largest size of the files of "hf" and "dcp", in bytes or as a text such as "500MiB".
            replace: replace a file, or a folder of an earlier export, unless files were added to that folder since.
            receipt: where the receipt is written; by default beside the file, or in the folder.
        """
        from holdfast.formats.background import ExportRunner
        from holdfast.formats.export import ExportOptions

        options = ExportOptions(
            format=format,
            select=select,
            exclude=exclude,
            dtype=dtype,
            max_shard_size=max_shard_size,
            replace=replace,
            receipt=receipt,
        )
        self._exporter = self._exporter or ExportRunner()
        path = os.path.abspath(verify_path(os.fspath(destination)))
        snapshot = self._open_snapshot(name)
        return self._exporter.export(snapshot.repository, snapshot.record, path, options)

    def verify_export(self, destination: StrPath, name: str | Snapshot) -> list[ReceiptFinding]:
        """Compare exported files, the receipt beside them and the snapshot; return a finding for each difference."""
        from holdfast.formats.verifying import check_all

        snapshot = self._open_snapshot(name)
        return list(check_all(snapshot.repository, snapshot.record, os.fspath(destination)))

    def compiler(
        self,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        strict: Strict = False,
        trust: bool = False,
        key_file: StrPath | None = None,
        versions: Mapping[str, str] | None = None,
        wait_s: float = 300.0,
        import_in_background: bool = False,
    ) -> Compiler:
        """Return a backend for `torch.compile` that caches compiled graphs in this store.

        Graphs are code: they load if only you can write to the store, if signed (`key_file`), or with `trust`.

        Args:
            mode: the mode of `torch.compile`, such as "max-autotune".
            options: the compiler options of `torch.compile`.
            strict: True raises CompileCacheError for graphs that cannot be cached and entries that cannot be used,
                instead of compiling them. "hit" also raises for graphs that are not stored. An unsupported torch raises
                at once.
            trust: load every entry of the store. If False, an entry is loaded only if it is signed with the secret, or
                if no other user can write to the store.
            key_file: path of a file with the secret that signs entries.
            versions: a version for each custom operator (`"ns::op"`) whose code the cache cannot read.
            wait_s: how long to wait for another process that is compiling the same graph, in seconds.
            import_in_background: import torch's compiler in a background thread, which saves about a second while the
                model loads. Concurrent imports of the same modules can fail, so import no other part of torch at that
                time.
        """
        with pause_gc():  # imports build many objects
            from holdfast.compile_cache.backend import make_compiler
        chosen = CompilerOptions(
            mode=mode,
            options=options,
            strict=strict,
            trust=trust,
            key_file=key_file,
            versions=versions,
            wait_s=wait_s,
            import_in_background=import_in_background,
        )
        return make_compiler(self.repository, chosen)

    def record(
        self,
        name: str,
        model: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        level: LevelName | Level | Mapping[str, LevelName | Level] = "digest",
        include: str | Iterable[str] = "*",
        exclude: str | Iterable[str] = (),
        kinds: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        max_bytes: int | str | None = None,
        queue_bytes: int | str = "512MiB",
        when_full: WhenFull = "block",
        compiled: CompiledMode = "boundary",
        drill: str | Iterable[str] = (),
        overwrite: bool = False,
        first_step: int = 0,
        segment_steps: int = 32,
        segment_s: float | None = None,
        bins: int = 32,
        hashes: Hashes = "auto",
    ) -> Recorder:
        """Return a context manager that records the tensors of a training loop.

        A step ends when every optimizer has stepped, or when `rec.step()` is called. Recording does not change results.
        Store errors do not stop the training: they become a warning and a note in the run.

        Args:
            name: name of the run; no part of it may begin with "@".
            model: the module that the training loop calls. Recorded names leave out wrappers such as DDP and FSDP.
            optimizer: one optimizer, a sequence of them, or None. Of one that a framework has wrapped, torch's
                optimizer inside is recorded.
            level: "off", "digest", "stats" or "full", or a mapping of name patterns to levels; the first match wins.
            include: patterns for the names of modules and parameters.
            exclude: patterns for names that are left out.
            kinds: what to record: any of "input output grad parameter buffer param_grad optimizer rng op log
                setting"; None is all of them.
            steps: which steps to record: "0-9,20,100:1000:100", numbers, or a function of the step number.
            max_bytes: limit for all copies of tensors in the run; after that, only digests and statistics are kept.
            queue_bytes: limit for copies that wait to be written.
            when_full: what to do at `queue_bytes`: "block" until there is room, "degrade" to statistics, or "raise".
            compiled: "boundary" records only the inputs and outputs of a compiled module, "eager" runs it uncompiled,
                "tap" compiles operations into it that record results and gradients. For "tap", start recording before
                the module is compiled.
            drill: names of modules whose single operations are recorded too.
            overwrite: replace an existing run of that name, also one that is still recorded: that recording then stops
                with a note and a warning.
            first_step: number of the first step, for a resumed run.
            segment_steps: commit after at most this many steps; the first ones are committed after 1, 3, 7, 15 ...
                steps. A crash loses the steps since the last commit: never more than were committed, plus one.
            segment_s: commit also after this many seconds. Equal runs are then cut at different steps, and their events
                are stored again.
            bins: number of histogram bins.
            hashes: "auto" hashes a tensor where it is: XXH3 on the CPU, BLAKE3 on an accelerator, whose bytes then stay
                there at level "digest". "both" computes both of every tensor, so that a run of an accelerator can be
                compared with one of the CPU by digests; it copies every tensor to the host.
        """
        from holdfast.capture.record.options import make_options
        from holdfast.capture.record.recorder import record

        options = make_options(
            level=level,
            include=include,
            exclude=exclude,
            kinds=kinds,
            steps=steps,
            max_bytes=max_bytes,
            queue_bytes=queue_bytes,
            when_full=when_full,
            compiled=compiled,
            drill=drill,
            overwrite=overwrite,
            first_step=first_step,
            segment_steps=segment_steps,
            segment_s=segment_s,
            bins=bins,
            hashes=hashes,
        )
        return record(self.repository, name, model, optimizer, options)

    def run(self, name: str | Run) -> Run:
        """Return a recorded run by name; raises NotFound."""
        from holdfast.capture.stored.runs import read_run

        return read_run(self.repository, name) if isinstance(name, str) else name

    def runs(self) -> list[RunFacts]:
        """Return a summary of each recorded run: name, status, number of ranks, start time, notes."""
        from holdfast.capture.stored.runs import iter_runs

        return list(iter_runs(self.repository))

    def diff_runs(
        self,
        a: str | Run,
        b: str | Run,
        *,
        noise: str | Run | None = None,
        reference: str | Run | None = None,
        tolerance: tuple[float, float] | None = None,
        factor: float = 4.0,
        margin: float = 2.0,
        names: NameMap | None = None,
        dims: Dims | None = None,
        steps: Collection[int] | None = None,
        shift: int = 0,
        progress: ProgressChoice = None,
    ) -> RunDiff:
        """Find where run `b` diverges from run `a`: the first tensor that differs although all its inputs are equal.

        Args:
            a: the first run, by name or as returned by `run`.
            b: the second run.
            noise: a repetition of `a`; tensors are then close if they differ about as little as `a` and `noise`.
            reference: a more exact run; tensors are then close if `b` is as near to it as `a`.
            tolerance: `(rtol, atol)` for all dtypes; None uses the table of torch.testing.
            factor: with `noise`, the largest difference that counts as close, as a multiple of the measured noise.
            margin: with `reference`, how far `b` may be from it, as a multiple of the distance of `a`.
            names: names of the first run to names of the second, for modules that were renamed.
            dims: how to combine the tensors of many ranks that are not DTensors, by name pattern.
            steps: compare only these steps.
            shift: added to the step numbers of `b`: for a resumed run whose steps count from 0.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.capture.compare.align import make_bounds
        from holdfast.capture.compare.compare import DiffOptions, diff_runs

        repeated, exact = (None if run is None else self.run(run) for run in (noise, reference))
        options = DiffOptions(
            bounds=make_bounds(tolerance, factor, margin),
            names=names or {},
            dims=dims or {},
            steps=steps,
            shift=shift,
            budget_bytes=self.repository.budget_bytes,
            progress=make_progress(progress) or Silent(),
        )
        return diff_runs(self.run(a), self.run(b), noise=repeated, reference=exact, options=options)

    def check(self, *, read: bool = False, progress: ProgressChoice = None) -> list[Finding]:
        """Check the structure of the store, and with `read` every byte. It is healthy if all findings are notes.

        Args:
            read: read and verify every byte, too.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        repo, bar = self.repository, make_progress(progress)
        if not repo.read_whether_made():
            return []
        return list(Checker(repo.store, read=read, progress=bar, stages=repo.counters.stages).iter_findings())

    def plan_prune(
        self,
        prefix: str = "",
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        keep_within: float | timedelta = 0.0,
        keep_tagged: bool = True,
        keep_best: BestRule | None = None,
    ) -> PrunePlan:
        """Return which snapshots under a prefix the rules would delete; delete nothing.

        A snapshot is kept if any rule applies.

        Args:
            prefix: the beginning of the names.
            keep_last: keep so many of the newest, by commit time.
            keep_every: keep those whose step, the last number in the name, is a multiple of this.
            keep_within: keep those committed within this time, in seconds or as a timedelta.
            keep_tagged: keep those that a tag points to.
            keep_best: keep those with the best values of a metric: `("val_loss", 2)` or `("accuracy", 2, "max")`.
        """
        from holdfast.mirror.retention import keep_unmirrored

        rules = make_keep(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_within=keep_within,
            keep_tagged=keep_tagged,
            keep_best=keep_best,
        )
        plan = read_prune_plan(self.repository.store, prefix, rules)
        return keep_unmirrored(self.repository, plan, only_reads=True)

    def apply_prune(self, plan: PrunePlan, *, progress: ProgressChoice = None) -> Pruned:
        """Delete the snapshots of a plan, except those tagged or overwritten since, and those that a mirror lacks.

        Args:
            plan: what `plan_prune` returned.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.mirror.retention import keep_unmirrored

        store = self.repository.verify_same()
        # Again, also for a plan of `plan_prune`: since it was made, the mirror may have lost what it had.
        checked = keep_unmirrored(self.repository, plan)
        doomed = {each.name for each in plan.delete}
        kept = tuple(each for each in checked.verdicts if each.reasons and each.snapshot.name in doomed)
        done = apply_prune_in_groups(store, checked, make_progress(progress) or Silent())
        return replace(done, kept=(*kept, *done.kept))

    def prune(
        self,
        prefix: str = "",
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        keep_within: float | timedelta = 0.0,
        keep_tagged: bool = True,
        keep_best: BestRule | None = None,
        collective: bool = True,
        progress: ProgressChoice = None,
    ) -> Pruned:
        """Delete the snapshots under a prefix that no rule keeps; `gc` frees their bytes. Collective, as `save` is.

        A snapshot is kept if any rule applies.

        Args:
            prefix: the beginning of the names.
            keep_last: keep so many of the newest, by commit time.
            keep_every: keep those whose step, the last number in the name, is a multiple of this.
            keep_within: keep those committed within this time, in seconds or as a timedelta.
            keep_tagged: keep those that a tag points to.
            keep_best: keep those with the best values of a metric: `("val_loss", 2)` or `("accuracy", 2, "max")`.
            collective: False to prune from this process only.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world, prune_together

        def read_plan() -> PrunePlan:
            rules = make_keep(
                keep_last=keep_last,
                keep_every=keep_every,
                keep_within=keep_within,
                keep_tagged=keep_tagged,
                keep_best=keep_best,
            )
            return read_prune_plan(self.repository.store, prefix, rules)

        world, apply = find_world(collective=collective), partial(self.apply_prune, progress=progress)
        return prune_together(read_plan, apply, world)

    def gc(self, rules: Rules | None = None, *, progress: ProgressChoice = None) -> Collected:
        """Delete what no snapshot needs. While other processes save, some of it may be left for the next call.

        Args:
            rules: when the collection acts: how old a file must be, and how long it waits for running saves.
            progress: True for a progress bar, or a function that receives each `ProgressUpdate`.
        """
        repo, bar = self.repository, make_progress(progress)
        if not repo.read_whether_made():
            return Collected()
        return collect(repo.store, rules, store_id=repo.identity.store_id, progress=bar)

    def serve(self, *, port: int = 0, host: str = "127.0.0.1") -> StoreServer:
        """Start a read-only web server on this machine, and return it: its `url` shows the store in a browser.

        Args:
            port: the port to listen on; 0 is any free one.
            host: the address to listen on; only programs on this machine can reach the default.
        """
        from holdfast.serving.server import StoreServer

        return StoreServer(self.repository, host=host, port=port).start()

    def _verify_shared(self) -> str:
        if self.url.startswith("memory://"):
            raise StoreError(f"{self.url} belongs to the process that opened it; use a path to share a store")
        return self.url

    @cached_property
    def _types(self) -> Types:
        from holdfast.trees.registered import Types

        return Types(self._options.types)

    @cached_property
    def _held(self) -> HeldMemory:
        from holdfast.snapshot.into.held import HeldMemory

        return HeldMemory()

    @property
    def _finder(self) -> SnapshotFinder:
        from holdfast.snapshot.finder import SnapshotFinder

        repo, mirror = self.repository, self._mirror
        return SnapshotFinder(repo, self._types, None if mirror is None else lambda: mirror.repository)

    def _open_snapshot(self, name: str | Snapshot) -> Snapshot:
        return self._finder.open(name)

    def _save(
        self,
        name: str,
        tree: object,
        options: SaveOptions,
        *,
        mirror: StrPath | None,
        world: World | None,
        progress: ProgressChoice,
    ) -> SaveResult:
        from holdfast.distributed.checkpoint.checkpoint import SAVE, reporting_early, save_together

        with reporting_early(world, SAVE, str(name)):
            options = replace(options, environment=self._describe_environment(name, mirror))
            repo, bar = self.repository, make_progress(progress)
            if self._saver is not None:
                self._saver.wait()
        result = save_together(repo, name, tree, options, types=self._types, world=world, progress=bar)
        self._lineage.note_saved(name)
        return result

    def _describe_environment(self, name: str, mirror: StrPath | None) -> Mapping[str, Json]:
        """Return what is stored with a snapshot besides the tree: host and versions, lineage, and its own mirror."""
        from holdfast.snapshot.save import describe_environment

        verify_user_name(name)
        noted: dict[str, Json] = {}
        if mirror is not None:
            from holdfast.mirror.mirror import note_mirror

            noted = note_mirror(self.repository, mirror, self._named_mirrors)
        return (
            {**describe_environment(), **self._lineage.describe(name), **noted} if self._options.environment else noted
        )

    def _find_saver(self) -> AsyncSaver:
        from holdfast.snapshot.staging import AsyncSaver

        self._saver = self._saver or AsyncSaver()
        return self._saver


def open(
    url: str | os.PathLike[str],
    *,
    read_only: bool = False,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    single_writer: bool = False,
    types: Iterable[type] = (),
    environment: bool = True,
    change_hints: bool = False,
    compression: Compression = "default",
    delta: DeltaChoice = "auto",
    create: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_wait: bool | float = True,
    mirror_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Store:
    """Open the store at a path or URL. Opening writes nothing; the first save creates the store if there is none.

    A handle changes only the store that it opened first: if that is unmounted or replaced, changes raise StoreGone.

    Args:
        url: a path, `file://...`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `memory://`
            for a store that exists only while it is open.
        read_only: refuse to write.
        budget_bytes: memory that a save or load may use for buffers, besides the tensors themselves. Bookkeeping for
            each tensor (name, spec, digests) comes on top: about 0.6 KB on save, 0.3 KB on load.
        single_writer: accept a filesystem or server where only one writer at a time is safe.
        types: enums, dataclasses, named tuples and tensor classes that trees may contain.
        environment: record host and versions with each snapshot.
        change_hints: skip BLAKE3 for bytes that, by XXH3-128 with a secret seed, have not changed since this handle
            saved them. Much faster if little changes. Not safe against an attacker inside this process.
        compression: of new bytes: None, "fast", "small", "auto"; "default" is "auto" in a bucket, None in a directory.
        delta: store new bytes as their difference from the latest snapshot with the same prefix, but one save in N
            whole: "off", N, or "auto", which is 10 with compression "fast" or "small", otherwise "off".
        create: let the first save create the store if there is none; False raises NotAStore here instead.
        storage_options: settings of obstore for a bucket, such as `endpoint`, `region` or `access_key_id`. Without
            them, credentials come from the environment, an AWS profile or the machine. None is stored or pickled.
        mirror: a second store, usually in a bucket. Each snapshot that is saved here is uploaded there in the
            background, and what is missing here is read from there. See `Store.mirror`.
        mirror_wait: whether `close` waits until the mirror has everything; a number is the longest time in seconds.
        mirror_options: what `storage_options` is for the store, for the mirror.
        cache_dir: a local directory that keeps what was read from a bucket; processes and stores may share it.
        cache_bytes: how much the cache may take; what was not used for longest is deleted first.
    """
    chosen_mirror = None
    if mirror is not None:
        from holdfast.mirror.mirror import choose_mirror

        chosen_mirror = choose_mirror(mirror, store_url=os.fspath(url), wait=mirror_wait, options=mirror_options)
    options = OpenOptions(
        read_only=read_only,
        budget_bytes=budget_bytes,
        single_writer=single_writer,
        types=tuple(types),
        environment=environment,
        change_hints=change_hints,
        compression=compression,
        delta=delta,
        create=create,
        storage_options=None if storage_options is None else StorageOptions(storage_options),
        mirror=chosen_mirror,
        cache=None if cache_dir is None else DiskCache(verify_path(os.fspath(cache_dir)), limit_bytes=cache_bytes),
    )
    return make_store(os.fspath(url), options, "")


def make_store(url: str, options: OpenOptions, store_id: str) -> Store:
    """Return the store at a path or URL; writes nothing."""
    return Store(_open_objects(url, options), options, store_id=store_id)


def _open_objects(url: str, options: OpenOptions) -> ObjectStore:
    store = open_store(
        url, read_only=options.read_only, single_writer=options.single_writer, storage_options=options.storage_options
    )
    store.use_cache(options.cache)
    return store
