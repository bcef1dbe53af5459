"""Recording on several ranks: each writes its own series of segments, and they are read as one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.capture.stored.events import EventKind
from holdfast.capture.stored.runs import read_run
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from holdfast.testing.ranks import run_ranks
from tests.kit import ranks_training
from tests.kit.recorded_training import pick


@pytest.mark.slow  # two processes that import torch
def test_ranks_record_one_run_under_names_without_wrappers(tmp_path: Path) -> None:
    run_ranks(2, ranks_training.train_together, str(tmp_path), 2)

    run = read_run(open_repository(LocalStore(tmp_path)), "run")

    assert (run.facts.world, run.facts.status, tuple(run.ranks)) == (2, "complete", (0, 1))
    mine, theirs = run.events(1, 0), run.events(1, 1)
    assert [event.site for event in mine] == [event.site for event in theirs]
    kinds: tuple[EventKind, ...] = ("parameter", "param_grad")
    for kind in kinds:
        # With a path, a gradient is that of one rank, before it is reduced.
        both = ([event.digest for event in pick(side, kind) if not event.site.path] for side in (mine, theirs))
        assert next(both) == next(both)
    assert pick(mine, "input", "")[0].digest != pick(theirs, "input", "")[0].digest
    assert {event.site.fqn for event in pick(mine, "output")} == {"", "up", "activation", "down"}
