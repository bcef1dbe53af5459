"""`Store`, the object that users work with, and `holdfast.open`.

Each method has a few lines over the layers below. What needs torch is imported inside methods: opening, listing and
collecting never load torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from io import BufferedReader
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self, Unpack

from holdfast.display.bars import make_progress
from holdfast.errors import StoreError
from holdfast.files.keep import (
    GetChoices,
    KeepOptions,
    Paths,
    PutChoices,
    keep_files,
    plan_sources,
    restore_files,
    verify_other_store,
)
from holdfast.json_text import Json
from holdfast.objects.disk_cache import CACHE_BYTES, DiskCache
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import open_chosen, verify_path
from holdfast.progress import ProgressChoice, Silent
from holdfast.query.bisect import Bisection
from holdfast.query.lineage import LineageLog
from holdfast.query.select import BestMode, SortFields, parse_query
from holdfast.repo.files import Restored
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, HandleStatistics, Repository, open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.names.tags import Tag, delete_tag, iter_tags
from holdfast.repo.read.reader import Verify, open_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Collected, Rules, collect
from holdfast.repo.upkeep.findings import Finding
from holdfast.repo.upkeep.prune import KeepRules, Pruned, PrunePlan, apply_prune_in_groups, make_keep, read_prune_plan
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.gc_pause import pause_gc

if TYPE_CHECKING:
    import torch

    from holdfast.capture.compare.compare import DiffChoices
    from holdfast.capture.compare.result import RunDiff
    from holdfast.capture.record.options import RecordOptions as RecordChoices
    from holdfast.capture.record.recorder import Recorder
    from holdfast.capture.stored.runs import Run, RunFacts
    from holdfast.checkpointing import CheckpointManager, ManagerOptions
    from holdfast.compile_cache.backend import Compiler
    from holdfast.compile_cache.backend import CompilerOptions as CompilerChoices
    from holdfast.diff.changes import Diff
    from holdfast.distributed.checkpoint.choices import IntoChoices, PublishChoices, SaveChoices
    from holdfast.formats.background import ExportHandle, ExportRunner
    from holdfast.formats.export import ExportChoices, ExportResult
    from holdfast.formats.importing import ImportChoices, ImportResult
    from holdfast.formats.receipt import ReceiptFinding
    from holdfast.mirror.mirror import Mirror
    from holdfast.mirror.views import Views
    from holdfast.series.follow import FollowChoices, Follower
    from holdfast.serving.server import ServeChoices, StoreServer
    from holdfast.snapshot.into.held import HeldMemory
    from holdfast.snapshot.load.options import Aliases
    from holdfast.snapshot.optimizers import Optimizers
    from holdfast.snapshot.save.staging import AsyncSaver, SaveHandle, Staging
    from holdfast.snapshot.view.lazy import Snapshot
    from holdfast.trees.registered import Types

StrPath = str | os.PathLike[str]
_REPOSITORY_OPTIONS: Final = ("change_hints", "create", "compression", "delta")


class Store:
    """One content-addressed store. Thread-safe; a forked child reopens it on first use, unless it is in a bucket.

    Of a bucket that the parent has used, a child gets StoreError: start it with `spawn` or `forkserver`.

    Torch itself may hang in a forked child that computes with several threads: call `torch.set_num_threads(1)` there.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        types: Sequence[type] = (),
        options: Mapping[str, Any] | None = None,
        store_id: str = "",
    ) -> None:
        """Open the repository in any object store. With `store_id`, refuse to change a store that has another id."""
        self._classes, self._budget_bytes = tuple(types), budget_bytes
        self._options = dict(options or {})
        self._environment = self._options.get("environment", True)
        self._attach(store, store_id)

    def _attach(self, store: ObjectStore, store_id: str) -> None:
        self._pid = os.getpid()
        chosen = {"create": True} | {name: self._options[name] for name in _REPOSITORY_OPTIONS if name in self._options}
        self._handle = open_repository(store, budget_bytes=self._budget_bytes, store_id=store_id, **chosen)
        self._saver: AsyncSaver | None = None
        self._lineage = LineageLog()
        self._exporter: ExportRunner | None = None
        make_mirror = self._options.get("mirror")
        self._named_mirrors: dict[str, Mirror] = {}
        self._mirror: Mirror | None = make_mirror(self._handle) if make_mirror else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL and the options; unpickling opens the store again."""
        store_id = self._handle.identity.store_id
        return make_store, (self._verify_shared(), self._budget_bytes, self._classes, self._options, store_id)

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
            self._attach(open_chosen(self._verify_shared(), self._options), self._handle.identity.store_id)
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
        self, name: str, tree: object, *, progress: ProgressChoice = None, **choices: Unpack[SaveChoices]
    ) -> SaveResult:
        """Save a tree under a name. When this returns, the whole snapshot is visible and durable.

        Objects with `state_dict()` are saved as what that method returns. Raises NameInUse if the name has other
        content, and Unsupported, naming the leaf, for a value that the format cannot store.

        If torch.distributed is initialised, all ranks of `process_group` (default: all ranks) must call this, and each
        writes its own part. If one rank fails, or is silent for `timeout_s` (300), all ranks raise RankError and the
        name keeps its old content; CommitUnknown if a rank cannot know that. With `collective=False`, one rank saves.

        `SaveChoices` has all options; `overwrite=True` replaces what the name has.
        `progress=True` shows a progress bar (of tqdm, or else of rich); a function receives each `ProgressUpdate`.
        """
        from holdfast.distributed.checkpoint.checkpoint import SAVE, reporting_early, save_together
        from holdfast.distributed.checkpoint.choices import choose_world, make_save_options

        with reporting_early(choose_world(choices), SAVE, str(name)):
            lineage = self._describe_save(name, choices.get("mirror"))
            options, world = make_save_options(environment=self._environment, lineage=lineage, **choices)
            repo, bar = self.repository, make_progress(progress)
            if self._saver is not None:
                self._saver.wait()
        result = save_together(repo, name, tree, options, types=self._types, world=world, progress=bar)
        self._lineage.note_saved(name)
        return result

    def save_async(
        self,
        name: str,
        tree: object,
        *,
        staging: Staging = "full",
        progress: ProgressChoice = None,
        **choices: Unpack[SaveChoices],
    ) -> SaveHandle:
        """Copy the tree and save the copy in the background; the tree may change once this returns.

        `staging="full"` copies the whole tree into memory, `"budget"` at most half of the memory budget, and then
        returns when the rest is on disk. Of tensors on a GPU, only what the store lacks is copied, unless most of the
        last saves was new. The handle's `wait` raises errors of the save, or the next save or `close`. If none of them
        has, the interpreter prints the error when it exits, and exits with status 120.
        """
        from holdfast.distributed.checkpoint.checkpoint import SAVE_ASYNC, reporting_early, start_together
        from holdfast.distributed.checkpoint.choices import choose_world, make_save_options

        with reporting_early(choose_world(choices), SAVE_ASYNC, str(name)):
            lineage = self._describe_save(name, choices.get("mirror"))
            options, world = make_save_options(environment=self._environment, lineage=lineage, **choices)
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
        from holdfast.snapshot.load.options import LoadOptions

        bar = make_progress(progress)
        options = LoadOptions(device, only, verify, mmap, rename or {}, aliases, allow_pickle, dtype, bar)
        snapshot = self._open_snapshot(name)
        tree = snapshot.load(options)
        self._lineage.note_loaded(snapshot.record)
        return tree

    def load_into(
        self, name: str | Snapshot, tree: Any, *, progress: ProgressChoice = None, **choices: Unpack[IntoChoices]
    ) -> Any:
        """Load a snapshot into an existing tree, in place, and return the tree.

        Tensors are filled, plain values in dicts and lists are replaced, and objects with `load_state_dict` are loaded
        through it. If anything does not fit, nothing changes and Mismatch lists every problem. As for `save`, all ranks
        must call this, and each reads the parts that it needs. A tensor that all ranks need whole is read by "each"
        rank, or by one that sends it to the others ("broadcast"); with "auto", a measurement decides.

        An error lists the leaves that it left changed in `overwritten`, and those that may mix old and new values in
        `partly_written`. With `atomic`, it changes no leaf on any rank; this needs memory for a second copy.

        With `since`, the snapshot that the tree holds, only the chunks that the tree lacks are read, into new memory,
        verified and then put in place, on all ranks or none. `IntoChoices` has all options.
        """
        from holdfast.distributed.checkpoint.checkpoint import LOAD, load_into_together, reporting_early
        from holdfast.distributed.checkpoint.choices import choose_world, make_into_options
        from holdfast.snapshot.into.journal import Journal

        with reporting_early(choose_world(choices), LOAD):
            options, world = make_into_options(held=self._held, progress=make_progress(progress), **choices)
            repo, types, journal = self._views.choose_repository(name), self._types, Journal()
        try:
            with self._lineage.loading(lambda: self._open_snapshot(name).record) as find:
                return load_into_together(repo, find, tree, options, types=types, world=world, journal=journal)
        except BaseException as error:
            # Outside of every `with`: the end of one can raise MemoryError after everything was loaded.
            journal.report(error)
            raise

    def publish(
        self, series: str, tree: object, *, keep: int = 2, gc: bool = True, **choices: Unpack[PublishChoices]
    ) -> SaveResult:
        """Save a tree as the next version of a series, "<series>/00000001" and so on, for others to `follow`.

        Chunks that did not change are not written. Once the version is committed, all but the newest `keep` and the
        tagged ones are deleted, and `gc` frees their bytes; with gc=False, that is left to a later call. If two
        processes publish at once, each gets a number. Collective, as `save` is, and raises what `save` raises.
        """
        from holdfast.series.publish import PublishOptions, publish

        return publish(self, series, tree, PublishOptions(keep, gc), choices)

    def follow(self, prefix: str, **choices: Unpack[FollowChoices]) -> Follower:
        """Return an iterator over the newest snapshot under a prefix, and each newer one; it waits for them.

        Newer is what `latest` would return. It does no harm if snapshots are deleted or overwritten. Those in between
        are skipped, unless `every=True`. Ends after `timeout_s` without a new one, if given. See `FollowChoices`.
        """
        from holdfast.series.follow import Follower, make_follow_options

        return Follower(self, prefix, self._types, make_follow_options(self.snapshot, **choices))

    def manager(self, prefix: str, **options: Unpack[ManagerOptions]) -> CheckpointManager:
        """Return a manager that saves the checkpoints of a training run under `prefix`; see `ManagerOptions`.

        `manager.step(step, state)` saves "<prefix>step-<step>" when a step is due (`every=500`, `every_seconds`), and
        deletes what no rule keeps (`keep_last=3` ...), if there are rules. `manager.resume(state)` loads the newest.
        """
        from holdfast.checkpointing import CheckpointManager

        return CheckpointManager(self, prefix, options)

    def __getitem__(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, without loading tensors; raises NotFound."""
        if not isinstance(name, str):
            raise TypeError(f"the keys of a store are names of snapshots, not {type(name).__name__}: {name!r:.80}")
        return self._open_snapshot(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a snapshot with that name or tag."""
        return self._views.is_named(name)

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

        `where` is a condition such as "loss < 0.3 and step >= 1000" (docs/reference/expressions.md). `sort` is a field,
        or several; "-loss" sorts descending. Snapshots without the field come last.
        """
        return self._views.list_snapshots(prefix, parse_query(where=where, sort=sort, limit=limit))

    def latest(self, prefix: str = "") -> Snapshot | None:
        """Return the snapshot with the latest commit time whose name begins with `prefix`, or None."""
        return self._views.open_latest(prefix)

    def best(self, prefix: str, metric: str, *, mode: BestMode = "min", where: str | None = None) -> Snapshot:
        """Return the snapshot with the best value of a metric, not NaN; of equal ones the newest. Raises NotFound."""
        return self._views.open_best(prefix, metric=metric, mode=mode, query=parse_query(where=where))

    def bisect(self, prefix: str, test: Callable[[Snapshot], bool | None]) -> Bisection[Snapshot]:
        """Return the first snapshot of a series for which `test` returns False, found by halving the series.

        They are ordered by step if each has another one, else by time; those after a bad one must be bad, too. `test`
        returns True for good, False for bad, None to skip. Raises NotBisectable if the first is bad or the last good.
        """
        return self._views.bisect(prefix, test)

    def diff(
        self, a: str | Snapshot, b: object, *, values: bool = False, only: str | Sequence[str] | None = None
    ) -> Diff:
        """Return what was added, removed and changed from `a` to `b`; with `values`, by how much tensors differ.

        `b` is a snapshot, or a tree in memory, such as `save` takes. Of such a tree, tensors on a GPU are hashed there,
        and those that are equal are not copied to the host. `only`: patterns of leaf names, such as "model.*".
        """
        from holdfast.diff.compare import compare
        from holdfast.diff.live import compare_with_tree
        from holdfast.diff.values import measure
        from holdfast.snapshot.view.lazy import Snapshot

        repo, before = self.repository, self._views.open_here(a).record
        patterns = (only,) if isinstance(only, str) else tuple(only or ())
        if not isinstance(b, str | Snapshot):
            return compare_with_tree(repo, before, b, types=self._types, only=patterns, values=values)
        found = compare(repo, before, self._views.open_here(b).record, only=patterns)
        return measure(repo, found) if values else found

    def copy(
        self, name: str | Snapshot, to: Store | StrPath, *, overwrite: bool = False, progress: ProgressChoice = None
    ) -> SaveResult:
        """Copy a snapshot to another store, with its metadata and commit time; only chunks that are missing there."""
        if not isinstance(to, Store):
            verify_other_store(self.repository, os.fspath(to))
            to = make_store(os.fspath(to), self._budget_bytes, (), {}, "")
        return self._views.copy(name, to.repository, overwrite=overwrite, progress=make_progress(progress))

    def delete(self, name: str) -> None:
        """Delete a snapshot. `gc` then frees the bytes that no other snapshot uses. Raises NotFound."""
        delete_snapshot(self.repository.verify_same(), name)

    def tag(self, tag: str, name: str | Snapshot, *, move: bool = False) -> Tag:
        """Point a tag to a snapshot. Raises NameInUse if the tag points to another one and `move` is False."""
        verify_user_name(tag, what="tag")
        return self._views.set_tag(tag, name, move=move)

    def tags(self) -> list[Tag]:
        """Return all tags."""
        return [tag for tag in iter_tags(self.repository.store) if isinstance(tag, Tag)]

    def untag(self, tag: str) -> None:
        """Delete a tag; its snapshot is kept, and so is a copy of the tag in a mirror."""
        delete_tag(self.repository.verify_same(), tag)

    def _repr_html_(self) -> str:
        """Return a card for notebooks: the snapshots, the newest first."""
        from holdfast.snapshot.view.display import render_store

        return render_store(self.url, [snapshot.record for snapshot in self.snapshots()], self.tags())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys that a notebook offers after `store["`: the names of snapshots, and tags."""
        return [*self, *(tag.name for tag in self.tags())]

    def put(
        self, name: str, paths: Paths, *, progress: ProgressChoice = None, **choices: Unpack[PutChoices]
    ) -> SaveResult:
        """Save files and directories as one snapshot, on one rank; `get` restores them byte for byte.

        A directory `dir` becomes the entries `dir/...`; `dir/` stands for its files. Files of tensors share bytes.
        """
        repo, options, bar = self.repository, KeepOptions(**choices), make_progress(progress)
        sources = plan_sources(repo, paths, follow_links=options.follow_links)
        return keep_files(repo, name, sources, options, progress=bar)

    def get(
        self, name: str | Snapshot, folder: StrPath, *, progress: ProgressChoice = None, **choices: Unpack[GetChoices]
    ) -> Restored:
        """Write the files of a snapshot below `folder`, each whole and verified, or not at all; follows no links there.

        If some files exist, NameInUse lists them and nothing is written, unless `overwrite`. A saved tree has no files:
        `export` writes it, and `raw=True` its tensors as raw bytes.
        """
        snapshot, bar = self._open_snapshot(name), make_progress(progress)
        with open_snapshot(repo := snapshot.repository, snapshot.record) as reader:
            return restore_files(repo, reader, folder, progress=bar, **choices)

    def open_file(self, name: str | Snapshot, path: str) -> BufferedReader:
        """Open a file of a snapshot as `open(path, "rb")` does; reads fetch and verify only the chunks they need."""
        return self._open_snapshot(name).open_file(path)

    def import_(
        self, source: StrPath, name: str, *, progress: ProgressChoice = None, **choices: Unpack[ImportChoices]
    ) -> ImportResult:
        """Save a checkpoint of another library under a name, in pieces, and return the result with its receipt.

        Reads safetensors, torch.save, `save_pretrained`, DCP, content stores of PyTorch and ZeRO of DeepSpeed, and
        unpickles nothing. Raises BadFile or Untrusted, and writes nothing, if the source is damaged or could run code.
        """
        from holdfast.formats.importing import import_checkpoint, make_import_options

        verify_user_name(name)
        options = make_import_options(choices, environment=self._environment)
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
        """Compare files with the receipt and snapshot of their import, read as then; return all differences."""
        from holdfast.formats.measuring import check_imported

        record, bar = self._views.open_here(name).record, make_progress(progress)
        path, chosen = os.fspath(source), {"unpickle": unpickle, "follow_links": follow_links}
        return list(check_imported(self.repository, record, path, progress=bar, **chosen))

    def export(self, name: str | Snapshot, destination: StrPath, **choices: Unpack[ExportChoices]) -> ExportResult:
        """Write a snapshot to files of other libraries; they appear whole and verified, or not at all.

        `format` is "safetensors", "torch", "hf" or "dcp"; `ExportChoices` has all options. The receipt has all digests.
        """
        from holdfast.formats.export import export_chosen

        snapshot = self._open_snapshot(name)
        return export_chosen(snapshot.repository, snapshot.record, os.fspath(destination), choices)

    def export_async(
        self, name: str | Snapshot, destination: StrPath, **choices: Unpack[ExportChoices]
    ) -> ExportHandle:
        """Start `export` in a process of low priority and return; `close` raises errors that no `wait` raised."""
        from holdfast.formats.background import ExportRunner

        self._exporter = self._exporter or ExportRunner()
        path = os.path.abspath(verify_path(os.fspath(destination)))
        snapshot = self._open_snapshot(name)
        return self._exporter.export(snapshot.repository, snapshot.record, path, choices)

    def verify_export(self, destination: StrPath, name: str | Snapshot) -> list[ReceiptFinding]:
        """Compare exported files, the receipt beside them and the snapshot; return a finding for each difference."""
        from holdfast.formats.verifying import check_all

        snapshot = self._open_snapshot(name)
        return list(check_all(snapshot.repository, snapshot.record, os.fspath(destination)))

    def compiler(self, **choices: Unpack[CompilerChoices]) -> Compiler:
        """Return a backend for `torch.compile` that caches compiled graphs in this store.

        Graphs are code: they load if only you can write to the store, if signed (`key_file`), or with `trust=True`.
        """
        with pause_gc():  # imports build many objects
            from holdfast.compile_cache.backend import make_compiler
        return make_compiler(self.repository, **choices)

    def record(
        self, name: str, model: torch.nn.Module, optimizer: Optimizers = None, **choices: Unpack[RecordChoices]
    ) -> Recorder:
        """Return a context manager that records the tensors of a model; `level` is "digest", "stats" or "full".

        Recording does not change results, and an error of the store does not stop the training.
        """
        from holdfast.capture.record.recorder import record

        return record(self.repository, name, model, optimizer, **choices)

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
        progress: ProgressChoice = None,
        **options: Unpack[DiffChoices],
    ) -> RunDiff:
        """Find where run `b` diverges from run `a`: the first tensor that differs although all its inputs are equal.

        Tensors are close within the tolerances of torch.testing, or `tolerance`; with `noise`, a repetition of `a`, if
        they differ about as little as `a` and `noise`; with `reference`, a more exact run, if `b` is as near as `a`.
        """
        from holdfast.capture.compare.compare import diff_runs, make_diff_options

        repeated, exact = (None if run is None else self.run(run) for run in (noise, reference))
        chosen = make_diff_options(options, self.repository.budget_bytes, make_progress(progress))
        return diff_runs(self.run(a), self.run(b), noise=repeated, reference=exact, options=chosen)

    def check(self, *, read: bool = False, progress: ProgressChoice = None) -> list[Finding]:
        """Check the structure of the store, and with `read` every byte. It is healthy if all findings are notes."""
        repo, bar = self.repository, make_progress(progress)
        if not repo.read_whether_made():
            return []
        return list(Checker(repo.store, read=read, progress=bar, stages=repo.counters.stages).iter_findings())

    def plan_prune(self, prefix: str = "", **rules: Unpack[KeepRules]) -> PrunePlan:
        """Return which snapshots under a prefix the rules would delete; delete nothing."""
        from holdfast.mirror.retention import keep_unmirrored

        return keep_unmirrored(self.repository, self._read_prune_plan(prefix, rules), only_reads=True)

    def apply_prune(self, plan: PrunePlan, *, progress: ProgressChoice = None) -> Pruned:
        """Delete the snapshots of a plan, except those tagged or overwritten since, and those that a mirror lacks."""
        from holdfast.mirror.retention import keep_unmirrored

        store = self.repository.verify_same()
        # Again, also for a plan of `plan_prune`: since it was made, the mirror may have lost what it had.
        checked = keep_unmirrored(self.repository, plan)
        doomed = {each.name for each in plan.delete}
        kept = tuple(each for each in checked.verdicts if each.reasons and each.snapshot.name in doomed)
        done = apply_prune_in_groups(store, checked, make_progress(progress) or Silent())
        return replace(done, kept=(*kept, *done.kept))

    def prune(
        self, prefix: str = "", *, collective: bool = True, progress: ProgressChoice = None, **rules: Unpack[KeepRules]
    ) -> Pruned:
        """Delete the snapshots under a prefix that no rule keeps; `gc` frees their bytes. Collective, as `save` is."""
        from holdfast.distributed.checkpoint.checkpoint import find_world, prune_together

        world, apply = find_world(collective=collective), partial(self.apply_prune, progress=progress)
        return prune_together(lambda: self._read_prune_plan(prefix, rules), apply, world)

    def gc(self, rules: Rules | None = None, *, progress: ProgressChoice = None) -> Collected:
        """Delete what no snapshot needs. While other processes save, some of it may be left for the next call."""
        repo, bar = self.repository, make_progress(progress)
        if not repo.read_whether_made():
            return Collected()
        return collect(repo.store, rules, store_id=repo.identity.store_id, progress=bar)

    def serve(self, **choices: Unpack[ServeChoices]) -> StoreServer:
        """Start a read-only web server on this machine, and return it: its `url` shows the store in a browser."""
        from holdfast.serving.server import start_server

        return start_server(self.repository, **choices)

    def _verify_shared(self) -> str:
        if self.url.startswith("memory://"):
            raise StoreError(f"{self.url} belongs to the process that opened it; use a path to share a store")
        return self.url

    @cached_property
    def _types(self) -> Types:
        from holdfast.trees.registered import Types

        return Types(self._classes)

    @cached_property
    def _held(self) -> HeldMemory:
        from holdfast.snapshot.into.held import HeldMemory

        return HeldMemory()

    @property
    def _views(self) -> Views:
        from holdfast.mirror.views import Views

        return Views(self.repository, self.mirror, self._types)

    def _open_snapshot(self, name: str | Snapshot) -> Snapshot:
        return self._views.open_named(name) if isinstance(name, str) else name

    def _describe_save(self, name: str, mirror: StrPath | None) -> Mapping[str, Json]:
        verify_user_name(name)
        if mirror is None:
            return self._lineage.describe(name)
        from holdfast.mirror.mirror import note_mirror

        return {**self._lineage.describe(name), **note_mirror(self.repository, mirror, self._named_mirrors)}

    def _find_saver(self) -> AsyncSaver:
        from holdfast.snapshot.save.staging import AsyncSaver

        self._saver = self._saver or AsyncSaver()
        return self._saver

    def _read_prune_plan(self, prefix: str, rules: KeepRules) -> PrunePlan:
        return read_prune_plan(self.repository.store, prefix, make_keep(**rules))


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
    options: dict[str, Any] = {"read_only": read_only, "single_writer": single_writer}
    options |= {"environment": environment, "change_hints": change_hints, "create": create}
    options |= {"compression": compression, "delta": delta}
    if storage_options is not None:
        options["storage_options"] = StorageOptions(storage_options)
    if mirror is not None:
        from holdfast.mirror.mirror import choose_mirror

        store_url, more = os.fspath(url), mirror_options
        options["mirror"] = choose_mirror(mirror, store_url=store_url, wait=mirror_wait, options=more)
    if cache_dir is not None:
        options["cache"] = DiskCache(verify_path(os.fspath(cache_dir)), limit_bytes=cache_bytes)
    return make_store(os.fspath(url), budget_bytes, tuple(types), options, "")


def make_store(url: str, budget_bytes: int, types: Sequence[type], options: dict[str, Any], store_id: str) -> Store:
    """Return the store at a path or URL; writes nothing."""
    objects = open_chosen(url, options)
    return Store(objects, budget_bytes=budget_bytes, types=types, options=options, store_id=store_id)
