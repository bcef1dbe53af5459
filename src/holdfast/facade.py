"""The user's face of a store: every method is a line or three over a function of the layer that does the work.

This is the one module that reaches the layers of torch by late imports: opening, listing and collecting never load it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BufferedReader
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from holdfast.errors import StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.progress import Progress
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.format.record import Json
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, Repository, Statistics, open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.names.tags import Tag, delete_tag, iter_tags, set_tag
from holdfast.repo.read.reader import Verify
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Collected, Rules, collect
from holdfast.repo.upkeep.findings import Finding
from holdfast.repo.upkeep.prune import KeepRules, Pruned, PrunePlan, apply_prune, make_keep, read_prune_plan
from holdfast.repo.write.writer import SaveResult

if TYPE_CHECKING:
    import torch

    from holdfast.capture.compare.compare import DiffChoices
    from holdfast.capture.compare.result import RunDiff
    from holdfast.capture.record.options import RecordOptions as RecordChoices
    from holdfast.capture.record.recorder import Optimizers, Recorder
    from holdfast.capture.stored.runs import Run, RunFacts
    from holdfast.compile_cache.backend import Compiler
    from holdfast.compile_cache.backend import CompilerOptions as CompilerChoices
    from holdfast.diff.compare import Diff
    from holdfast.distributed.checkpoint.checkpoint import Together
    from holdfast.snapshot.into.plan import Replicas
    from holdfast.snapshot.load.options import Aliases
    from holdfast.snapshot.save.staging import AsyncSaver, SaveHandle, Staging
    from holdfast.snapshot.view.lazy import Snapshot
    from holdfast.trees.registered import Types


class Store:
    """One content-addressed store. Safe in any thread; in a forked child it opens itself again.

    Torch itself may hang in a forked child that computes with several threads: call `torch.set_num_threads(1)` there.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        types: Sequence[type] = (),
        options: Mapping[str, bool] | None = None,
        store_id: str = "",
    ) -> None:
        """Open the repository in `store`, which any object store can be; with `store_id`, change no other than that."""
        self._classes, self._budget_bytes = tuple(types), budget_bytes
        self._options = dict(options or {})
        self._environment = self._options.get("environment", True)
        self._attach(store, store_id)

    def _attach(self, store: ObjectStore, store_id: str) -> None:
        self._pid = os.getpid()
        hints, create = self._options.get("change_hints", False), self._options.get("create", True)
        self._handle = open_repository(
            store, budget_bytes=self._budget_bytes, create=create, change_hints=hints, store_id=store_id
        )
        self._saver: AsyncSaver | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self._handle.store.url

    @property
    def repository(self) -> Repository:
        """The repository below, for functions that take one."""
        if os.getpid() != self._pid:
            self._attach(self._reopen(), self._handle.identity.store_id)
        return self._handle

    def _reopen(self) -> ObjectStore:
        if self.url.startswith("memory://"):
            raise StoreError(f"{self.url} belongs to the process that opened it; use a path to share a store")
        return _open_place(self.url, self._options)

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<Store {self.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the URL and the options; whoever unpickles it opens it again."""
        if self.url.startswith("memory://"):
            raise StoreError(f"{self.url} belongs to this process and cannot be pickled; use a path to share a store")
        return make_store, (self.url, self._budget_bytes, self._classes, self._options, self._handle.identity.store_id)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save under way."""
        self.close()

    # Saving

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
        progress: Progress | None = None,
        **together: Unpack[Together],
    ) -> SaveResult:
        """Save a tree under a name: visible as a whole, and durable, once this returns.

        Objects with `state_dict()` are saved as what that returns. Raises NameInUse if the name holds other
        content, Unsupported, naming the leaf, for what has no form in the format.

        Where torch.distributed is initialised, all ranks of `process_group` (by default all there are) must call this,
        and each writes what it holds: raises RankError on all of them if one fails, or shows no sign of life for
        `timeout_s` (300), and the name holds what it held before; or CommitUnknown where a rank cannot tell whether
        the snapshot was committed before another was lost. With collective=False this process saves alone.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world, save_together
        from holdfast.snapshot.save.save import SaveOptions

        verify_user_name(name)
        options = SaveOptions(overwrite, metadata or {}, base, allow_pickle, grads, self._environment)
        repo, saver, world = self.repository, self._find_saver(), find_world(**together)
        saver.wait()
        return save_together(repo, name, tree, options, types=self._types, world=world, progress=progress)

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
        **together: Unpack[Together],
    ) -> SaveHandle:
        """Copy the tree and save the copy in the background; the tree may change once this returns.

        staging="full" copies all of it into memory; "budget" copies at most half of the budget, and returns when the
        rest is on disk. One save is under way at a time. Errors are raised by the handle's `wait`, or, if that is
        never called, by the next save or `close`.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world, start_together
        from holdfast.snapshot.save.save import SaveOptions

        verify_user_name(name)
        options = SaveOptions(overwrite, metadata or {}, base, allow_pickle, grads, self._environment)
        repo, saver, world = self.repository, self._find_saver(), find_world(**together)
        return start_together(saver, repo, name, tree, options, types=self._types, world=world, staging=staging)

    # Loading

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
    ) -> Any:
        """Load a tree into new memory: the same containers, values, tensors and sharing of memory.

        Args:
            name: a name, or a snapshot from `latest` or `snapshots`.
            device: where tensors go; "saved" restores each to where it was.
            only: patterns of leaf names, such as "model.*"; what does not fit is not read.
            mmap: map tensors instead of reading them, where they lie in one piece; what is mapped is not verified.
            verify: "full" checks BLAKE3, "fast" checks XXH3, which finds accidents only, False nothing.
            rename: prefixes of keys to replace.
            aliases: "preserve" what shared memory, or give each tensor "fresh" memory.
            allow_pickle: unpickle what was pickled, which may run any code.
            dtype: what floating tensors are cast to; all others, and those of registered types, are as they were saved.
        """
        from holdfast.snapshot.load.options import LoadOptions

        options = LoadOptions(device, only, verify, mmap, rename or {}, aliases, allow_pickle, dtype)
        return self._find(name).load(options)

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
        replicas: Replicas = "auto",
        atomic: bool = False,
        **together: Unpack[Together],
    ) -> Any:
        """Load into a tree that is there, in place, and return it; nothing changes unless everything fits.

        Tensors are filled, plain values in dicts and lists replaced, objects with `load_state_dict` loaded through
        it. Raises Mismatch that lists everything that does not fit. As for `save`, all ranks must call this; each
        reads what it holds, however many have saved it. What all of them want as a whole is read by "each", or by one
        and sent to the others ("broadcast"); "auto" measures, if it is much, what is faster.

        An error of any type lists the leaves that it left changed in `overwritten`, those that may be a mixture in
        `partly_written`. With `atomic`, it leaves none on any rank; that takes memory for a second copy of the tree.
        """
        from holdfast.distributed.checkpoint.checkpoint import find_world, load_into_together
        from holdfast.snapshot.into.plan import IntoOptions

        options = IntoOptions(strict, rename or {}, cast, assign, verify, allow_pickle, replicas, atomic)
        repo, types, world = self.repository, self._types, find_world(**together)
        return load_into_together(repo, lambda: self._find(name).record, tree, options, types=types, world=world)

    def open_file(self, name: str | Snapshot, entry: str) -> BufferedReader:
        """Open an entry, such as a file, as a stream to read and seek in; only what is read is read, and verified."""
        return self._find(name).open_file(entry)

    # Names

    def snapshot(self, name: str) -> Snapshot:
        """Return the snapshot of a name or tag, to look into; raises NotFound."""
        return self._find(name)

    def snapshots(self, prefix: str = "") -> list[Snapshot]:
        """Return the snapshots whose names begin with `prefix`, in natural order; not Holdfast's own, named "@..."."""
        from holdfast.snapshot.view.lookup import list_snapshots

        return list_snapshots(self.repository, prefix, self._types)

    def latest(self, prefix: str = "") -> Snapshot | None:
        """Return the newest snapshot whose name begins with `prefix`, by commit time; None if there is none."""
        from holdfast.snapshot.view.lookup import find_latest

        return find_latest(self.repository, prefix, self._types)

    def delete(self, name: str) -> None:
        """Delete a name; its bytes are freed by `gc`, unless others share them. Raises NotFound."""
        delete_snapshot(self.repository.verify_same(), name)

    def tag(self, tag: str, name: str | Snapshot, *, move: bool = False) -> Tag:
        """Point a tag to a snapshot; one that points elsewhere is moved only if told."""
        verify_user_name(tag, what="tag")
        return set_tag(self.repository.verify_same(), tag, self._find(name).record, move=move)

    def tags(self) -> list[Tag]:
        """Return all tags."""
        return [tag for tag in iter_tags(self.repository.store) if isinstance(tag, Tag)]

    def untag(self, tag: str) -> None:
        """Remove a tag; the snapshot stays."""
        delete_tag(self.repository.verify_same(), tag)

    # Compiled graphs and recorded runs

    def compiler(self, **choices: Unpack[CompilerChoices]) -> Compiler:
        """Return a backend for `torch.compile` that keeps compiled graphs here: what was compiled once is loaded.

        Graphs are code: they are loaded if the store is this user's alone, or they are signed with the secret in
        `key_file`, or with `trust=True`. See `make_compiler`.
        """
        from holdfast.compile_cache.backend import make_compiler

        return make_compiler(self.repository, **choices)

    def record(
        self, name: str, model: torch.nn.Module, optimizer: Optimizers = None, **choices: Unpack[RecordChoices]
    ) -> Recorder:
        """Record what flows through a model while the `with` lasts: `level="digest"`, "stats" or "full", by name.

        Results are not changed, and trouble with the store does not reach the training. See `capture.record`.
        """
        from holdfast.capture.record.recorder import record

        return record(self.repository, name, model, optimizer, **choices)

    def run(self, name: str | Run) -> Run:
        """Return a run that was recorded; raises NotFound."""
        from holdfast.capture.stored.runs import read_run

        return read_run(self.repository, name) if isinstance(name, str) else name

    def runs(self) -> list[RunFacts]:
        """Return what is known of all recorded runs."""
        from holdfast.capture.stored.runs import iter_runs

        return list(iter_runs(self.repository))

    def diff_runs(
        self,
        a: str | Run,
        b: str | Run,
        *,
        noise: str | Run | None = None,
        reference: str | Run | None = None,
        **ways: Unpack[DiffChoices],
    ) -> RunDiff:
        """Find where run `b` parts from run `a`: the first tensor that differs though all that it comes from is equal.

        Close is what torch.testing calls so, or `tolerance`; with `noise`, a repetition of `a`, what differs no more
        than these two do; with `reference`, a more exact run, what is about as near to it as `a`.
        """
        from holdfast.capture.compare.compare import diff_runs, make_ways

        repeated, exact = (None if run is None else self.run(run) for run in (noise, reference))
        return diff_runs(self.run(a), self.run(b), noise=repeated, reference=exact, ways=make_ways(ways))

    # Health and space

    def check(self, *, read: bool = False, progress: Progress | None = None) -> list[Finding]:
        """Check the store, with `read` every byte of it; nothing but notes means that all is well."""
        stages = self.repository.counters.stages
        return list(Checker(self.repository.store, read=read, progress=progress, stages=stages).iter_findings())

    def diff(self, a: str | Snapshot, b: str | Snapshot, *, values: bool = False) -> Diff:
        """Tell what was added, removed and changed from `a` to `b`; with `values`, by how much."""
        from holdfast.diff.compare import compare
        from holdfast.diff.values import measure

        found = compare(self.repository, self._find(a).record, self._find(b).record)
        return measure(self.repository, found) if values else found

    def plan_prune(self, prefix: str = "", **rules: Unpack[KeepRules]) -> PrunePlan:
        """Decide which snapshots under a prefix to delete, and delete none."""
        return read_prune_plan(self.repository.store, prefix, make_keep(**rules))

    def apply_prune(self, plan: PrunePlan) -> Pruned:
        """Delete what a plan would delete, but for what was tagged or overwritten since."""
        return apply_prune(self.repository.verify_same(), plan)

    def prune(self, prefix: str = "", *, collective: bool = True, **rules: Unpack[KeepRules]) -> Pruned:
        """Delete the snapshots under a prefix that no rule keeps; `gc` frees their bytes. As collective as `save`."""
        from holdfast.distributed.checkpoint.checkpoint import find_world, prune_together

        world = find_world(collective=collective)
        return prune_together(lambda: self.plan_prune(prefix, **rules), self.apply_prune, world)

    def gc(self, rules: Rules | None = None) -> Collected:
        """Free what no snapshot needs; beside saves under way, a part may be left to the next time."""
        return collect(self.repository.store, rules, store_id=self.repository.identity.store_id)

    def statistics(self) -> Statistics:
        """Return what this handle has done so far, and where the time went."""
        return self.repository.counters.read()

    def close(self) -> None:
        """Wait for a save under way, raising its error if nobody was told, and give back the memory for copies."""
        if self._saver and os.getpid() == self._pid:
            self._saver.close()

    @cached_property
    def _types(self) -> Types:
        from holdfast.trees.registered import Types

        return Types(self._classes)

    def _find_saver(self) -> AsyncSaver:
        from holdfast.snapshot.save.staging import AsyncSaver

        self._saver = self._saver or AsyncSaver()
        return self._saver

    def _find(self, name: str | Snapshot) -> Snapshot:
        from holdfast.snapshot.view.lookup import find_snapshot

        return find_snapshot(self.repository, name, self._types) if isinstance(name, str) else name


def make_store(url: str, budget_bytes: int, types: Sequence[type], options: dict[str, bool], store_id: str) -> Store:
    """Open the store at a path or URL; nothing is written."""
    return Store(_open_place(url, options), budget_bytes=budget_bytes, types=types, options=options, store_id=store_id)


def _open_place(url: str, options: Mapping[str, bool]) -> ObjectStore:
    return open_store(url, **{name: options.get(name, False) for name in ("read_only", "single_writer")})
