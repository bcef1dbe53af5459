"""`Mirror`: a second store that receives every snapshot of an open store, and what a user can ask about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from holdfast.display.bars import make_progress
from holdfast.errors import StoreError
from holdfast.json_text import Json
from holdfast.mirror.plan import MIRROR_NOTE, compare_stores
from holdfast.mirror.setting import MirrorSetting, make_setting, record_mirror
from holdfast.mirror.upload import MirrorState, UploadJob, UploadNews, UploadTurn, upload_all
from holdfast.mirror.worker import UploadWorker
from holdfast.progress import ProgressChoice
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.write.writer import SaveResult


class Mirror:
    """A second store with the same snapshots, uploaded in the background after each save. Safe in any thread."""

    def __init__(self, repo: Repository, setting: MirrorSetting) -> None:
        """Mirror what is committed in `repo`; nothing is opened yet."""
        self._repo = repo
        self._setting = setting
        self._worker = UploadWorker(repo, setting)
        repo.commits.watch(self._worker.note_commit)
        repo.mirrors.setdefault(setting.url, self._worker)

    @property
    def url(self) -> str:
        """The path or URL of the mirror."""
        return self._setting.url

    @property
    def state(self) -> MirrorState:
        """What is waiting and being uploaded, as far as this process knows; asks neither store."""
        return self._worker.news.read()

    def __repr__(self) -> str:
        """Show the URL, and how many snapshots are waiting."""
        return f"<Mirror {self.url}: {len(self.state.waiting)} waiting>"

    @cached_property
    def repository(self) -> Repository:
        """The repository of the mirror; opened when it is first used."""
        return self._setting.open(self._repo.budget_bytes)

    def read_state(self) -> MirrorState:
        """Compare both stores, and return what the mirror has and lacks."""
        return read_mirror_state(self._repo, self._setting)

    def fetch(self, name: str, *, progress: ProgressChoice = None) -> SaveResult:
        """Copy a snapshot of the mirror into the store; raises NotFound, or NameInUse if the name has other content."""
        source = self.repository
        return copy_snapshot(source, read_snapshot(source.store, name), self._repo, progress=make_progress(progress))

    def sync(self, *, progress: ProgressChoice = None) -> MirrorState:
        """Upload in this thread all that the mirror lacks, and return its state; raises StoreError if that fails.

        This also uploads what earlier processes have left. `progress` is as for `Store.save`.
        """
        self._worker.wait()
        news = upload_now(self._repo, self._setting, progress=progress)
        return news.read()

    def wait(self, timeout_s: float | None = None) -> MirrorState:
        """Wait for the uploads of this process; raises StoreError if one failed, TimeoutError if it takes longer."""
        if not self._worker.is_idle and self._worker.wait(0):
            self._worker.start()  # the last attempt failed
        if not self._worker.wait(timeout_s):
            raise TimeoutError(f"the upload to {self.url} is still under way after {timeout_s} s")
        if not self._worker.is_idle:
            raise StoreError(f"the upload to {self.url} failed: {self.state.last_error}")
        return self.state

    def close(self) -> None:
        """Wait for the uploads as `mirror_wait` says; an error is a warning, because the snapshots are saved."""
        self._worker.finish()


def choose_mirror(
    url: str | os.PathLike[str],
    *,
    store_url: str,
    wait: bool | float = True,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Repository], Mirror]:
    """Return a function that attaches a mirror to a repository; it can be pickled. Raises BadName, ValueError."""
    return partial(Mirror, setting=make_setting(url, store_url=store_url, wait=wait, options=options))


def read_mirror_state(repo: Repository, setting: MirrorSetting) -> MirrorState:
    """Compare a store with a mirror, which need not exist yet; shows also whether another process uploads."""
    plan = compare_stores(repo, setting.open(repo.budget_bytes), scope=setting.scope)
    turn = UploadTurn(repo.store, setting.url)
    return MirrorState(
        setting.url,
        len(plan.present),
        tuple(each.name for each in plan.waiting),
        plan.waiting_bytes,
        {each.snapshot.name: each.reason for each in plan.refused},
        uploading="another process is uploading" if turn.is_held() else "",
        last_error=turn.read_note().error,
    )


def upload_now(repo: Repository, setting: MirrorSetting, *, progress: ProgressChoice = None) -> UploadNews:
    """Upload in this thread all that a mirror lacks; raises the error of a store that cannot be used."""
    news = UploadNews(setting.url, progress=make_progress(progress))
    record = partial(record_mirror, repo, setting.url, setting.scope, options=setting.option_names)
    record()
    try:
        upload_all(UploadJob(repo, setting.open(repo.budget_bytes), setting.scope), news)
    finally:
        record(store_id=news.store_id)
    return news


def note_mirror(repo: Repository, url: str | os.PathLike[str], attached: dict[str, Mirror]) -> dict[str, Json]:
    """Attach the mirror of a single save, unless it is attached; return the note for the snapshot's environment.

    The note is committed with the snapshot, so that another process can finish the upload after a crash.
    """
    setting = replace(make_setting(url, store_url=repo.store.url), scope="named")
    if setting.url not in repo.mirrors:  # else it is attached, perhaps with options, which a save does not take
        attached[setting.url] = Mirror(repo, setting)
    return {MIRROR_NOTE: setting.url}
