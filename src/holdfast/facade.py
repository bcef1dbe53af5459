"""`Store`, the object that users work with; its methods are in `store_methods`, and call the layers below.

Here are the methods that need those of several groups, or another store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from holdfast.display.bars import make_progress
from holdfast.files.keep import verify_other_store
from holdfast.objects.url import open_chosen
from holdfast.progress import ProgressChoice
from holdfast.repo.write.writer import SaveResult
from holdfast.store_methods.files import FileMethods
from holdfast.store_methods.models import ModelMethods
from holdfast.store_methods.opened import StrPath
from holdfast.store_methods.snapshots import SnapshotMethods
from holdfast.store_methods.trees import TreeMethods
from holdfast.store_methods.upkeep import UpkeepMethods

if TYPE_CHECKING:
    from holdfast.checkpointing import CheckpointManager, ManagerOptions
    from holdfast.distributed.checkpoint.choices import PublishChoices
    from holdfast.series.follow import FollowChoices, Follower
    from holdfast.snapshot.view.lazy import Snapshot


class Store(TreeMethods, FileMethods, SnapshotMethods, ModelMethods, UpkeepMethods):
    """One content-addressed store. Thread-safe; a forked child reopens it on first use, unless it is in a bucket.

    Of a bucket that the parent has used, a child gets StoreError: start it with `spawn` or `forkserver`.

    Torch itself may hang in a forked child that computes with several threads: call `torch.set_num_threads(1)` there.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL and the options; unpickling opens the store again."""
        store_id = self._handle.identity.store_id
        return make_store, (self._verify_shared(), self._budget_bytes, self._classes, self._options, store_id)

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

    def copy(
        self, name: str | Snapshot, to: Store | StrPath, *, overwrite: bool = False, progress: ProgressChoice = None
    ) -> SaveResult:
        """Copy a snapshot to another store, with its metadata and commit time; only chunks that are missing there."""
        if not isinstance(to, Store):
            verify_other_store(self.repository, os.fspath(to))
            to = make_store(os.fspath(to), self._budget_bytes, (), {}, "")
        return self._views.copy(name, to.repository, overwrite=overwrite, progress=make_progress(progress))


def make_store(url: str, budget_bytes: int, types: Sequence[type], options: dict[str, Any], store_id: str) -> Store:
    """Return the store at a path or URL; writes nothing."""
    objects = open_chosen(url, options)
    return Store(objects, budget_bytes=budget_bytes, types=types, options=options, store_id=store_id)
