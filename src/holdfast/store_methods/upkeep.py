"""The methods of `Store` for the store as a whole: check it, prune it, free space, show it in a browser."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from holdfast.display.bars import make_progress
from holdfast.progress import ProgressChoice, Silent
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Collected, Rules, collect
from holdfast.repo.upkeep.findings import Finding
from holdfast.repo.upkeep.prune import KeepRules, Pruned, PrunePlan, apply_prune_in_groups, make_keep, read_prune_plan
from holdfast.store_methods.opened import OpenStore

if TYPE_CHECKING:
    from holdfast.serving.server import ServeChoices, StoreServer


class UpkeepMethods(OpenStore):
    """Check, prune, collect and serve a store."""

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

    def _read_prune_plan(self, prefix: str, rules: KeepRules) -> PrunePlan:
        return read_prune_plan(self.repository.store, prefix, make_keep(**rules))

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
