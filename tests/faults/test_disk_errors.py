"""A filesystem call fails: what was not seen to be durable is never called saved, and the next save works."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from holdfast.errors import CommitUnknown, NotAStore, NotFound, StoreError
from holdfast.objects.local.local_store import LocalStore
from tests.faults.disk_scenario import ROOT, WORK, Work, find_wrong, open_disk, prepared_disk
from tests.faults.scenario import State, read_state
from tests.faults.thinning import THINNED, find_first
from tests.faults.troubled_files import Trouble, TroubledFiles


def rehearse(work: Work) -> tuple[State, State, int]:
    disk = prepared_disk(work)
    old = read_state(open_disk(disk))
    files = TroubledFiles(disk)
    work.act(LocalStore(ROOT, files=files))
    return old, read_state(open_disk(disk)), files.mutations


@pytest.mark.parametrize("trouble", [Trouble.FAILS, Trouble.LIES], ids=lambda trouble: trouble.name.lower())
@pytest.mark.parametrize("work", WORK, ids=str)
@THINNED
def test_a_call_that_fails_leaves_the_old_or_the_new_state_and_what_returned_is_durable(
    work: Work, trouble: Trouble, step: int
) -> None:
    old, new, mutations = rehearse(work)
    blank = [State(is_store=True)] if not old.is_store else []
    wrong = []
    for at in range(find_first(WORK.index(work) + (trouble is Trouble.LIES), step), mutations + 1, step):
        disk = prepared_disk(work)
        files = TroubledFiles(disk, at=at, trouble=trouble)
        what = f"{trouble.name} at call {at}"
        try:
            work.act(LocalStore(ROOT, files=files))
            allowed = [new]
            # An fsync that failed may have dropped the bytes: no second one can mend that.
            if files.met.startswith("sync"):
                wrong.append(f"{what}, {files.met} failed and was passed over")
        except CommitUnknown:
            allowed = [old, new, *blank]
        except StoreError as error:
            # Making a store has no name that could be in doubt: its error may come when it is there already.
            allowed = [new, old] if str(work) == "init" else [old, *blank]
            if error.errno != errno.EIO and not isinstance(error.__cause__, StoreError):
                wrong.append(f"{what}, {files.met}: the error hides its cause: {error}")
        if read_state(open_disk(disk)) not in allowed:
            wrong.append(f"{what}, {files.met}: the state is {read_state(open_disk(disk))}")
        wrong += [f"{what}, {files.met}, then power is lost: {why}" for why in find_wrong(disk.power_loss(), allowed)]
        assert disk.open_handles == 0, what
    assert wrong == []


@pytest.mark.parametrize("work", WORK, ids=str)
@THINNED
def test_what_is_done_again_after_an_interruption_is_durable(work: Work, step: int) -> None:
    old, new, mutations = rehearse(work)
    blank = [State(is_store=True)] if not old.is_store else []
    wrong = []
    for at in range(find_first(WORK.index(work), step), mutations + 1, step):
        disk = prepared_disk(work)
        files = TroubledFiles(disk, at=at, trouble=Trouble.INTERRUPTED)
        with pytest.raises(KeyboardInterrupt):
            work.act(LocalStore(ROOT, files=files))
        what = f"interrupted after {files.met}, call {at}"
        if read_state(open_disk(disk)) not in [old, new, *blank]:
            wrong.append(f"{what}, the state is {read_state(open_disk(disk))}")
        with suppress(NotFound, NotAStore):  # it was deleted, or made
            work.act(open_disk(disk))
            wrong += [f"{what}, then power is lost: {why}" for why in find_wrong(disk.power_loss(), [new])]
    assert wrong == []
