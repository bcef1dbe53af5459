"""The methods of `Store` for trees of tensors and values: save and load, all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from holdfast.display.bars import make_progress
from holdfast.json_text import Json
from holdfast.progress import ProgressChoice
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.read.reader import Verify
from holdfast.repo.write.writer import SaveResult
from holdfast.store_methods.opened import OpenStore, StrPath

if TYPE_CHECKING:
    import torch

    from holdfast.distributed.checkpoint.choices import IntoChoices, SaveChoices
    from holdfast.snapshot.into.held import HeldMemory
    from holdfast.snapshot.load.options import Aliases
    from holdfast.snapshot.save.staging import AsyncSaver, SaveHandle, Staging
    from holdfast.snapshot.view.lazy import Snapshot


class TreeMethods(OpenStore):
    """Save and load trees."""

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

    @cached_property
    def _held(self) -> HeldMemory:
        from holdfast.snapshot.into.held import HeldMemory

        return HeldMemory()
