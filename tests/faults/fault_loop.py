"""The loop of sqlite: fail the n-th operation for n = 1, 2, 3, until a run passes; check the state after each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from holdfast.errors import CommitUnknown, HoldfastError, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import Crashed, Fault, FaultyStore, Operation
from tests.faults.scenario import State, Verb, check_store, read_state

Outcome = Literal["returned", "unknown", "failed", "died"]

# What a save that ended early may leave: a collector removes it, and nothing else is to be found.
_LEFT_BEHIND: Final = frozenset({"pack-unused", "manifest-unused"})


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a verb that met its fault at operation `at`."""

    verb: Verb
    fault: Fault
    at: int
    met: Operation
    outcome: Outcome
    error: BaseException | None
    store: ObjectStore
    """The clean store, as the run left it."""

    def __str__(self) -> str:
        error = f" ({type(self.error).__name__}: {self.error})" if self.error else ""
        return f"{self.verb}, {self.fault.name} at {self.at}, {self.met.name} {self.met.key}: {self.outcome}{error}"


def attempt(verb: Verb, store: ObjectStore) -> tuple[Outcome, BaseException | None]:
    """Run it, and return how it ended."""
    try:
        verb.act(store)
    except CommitUnknown as error:
        return "unknown", error
    except StoreError as error:
        # Whoever makes a place a store has no name that could be in doubt; the error itself says so.
        return ("unknown" if error.fate != "absent" and "config/" in error.key else "failed"), error
    except HoldfastError as error:
        return "failed", error
    except Crashed as error:
        return "died", error
    return "returned", None


def _as_it_is(store: ObjectStore) -> ObjectStore:
    return store


def iter_runs(
    verb: Verb,
    fault: Fault,
    open_clean: Callable[[], ObjectStore],
    *,
    wrap: Callable[[ObjectStore], ObjectStore] = _as_it_is,
    ats: Iterable[int] | None = None,
) -> Iterator[Run]:
    """Yield a run for each operation of `verb`, each on a store of its own, until one passes without the fault.

    What `wrap` puts around the clean store is not seen by the fault; `ats` thins the loop out.
    """
    for at in ats or count(1):
        clean = open_clean()
        faulty = FaultyStore(wrap(clean), fault=fault, at=at)
        outcome, error = attempt(verb, faulty)
        if len(faulty.log) < at:
            assert outcome == "returned", (verb, fault, at, error)
            return
        yield Run(verb, fault, at, faulty.log[at - 1], outcome, error, clean)


def find_wrong(run: Run, old: State, new: State) -> list[str]:
    """Return what is wrong with the state after a run; the next attempt must then reach the new state."""
    wrong = _find_wrong_state(run, old, new) + _find_wrong_findings(run)
    outcome, error = attempt(run.verb, run.store)
    if outcome != "returned" and not _is_done_already(run, new):
        wrong.append(f"the next attempt ended with {outcome}: {error!r}")
    # What a failure leaves must not block the next attempt; a death may leave more.
    if run.outcome in ("died", "unknown"):
        if not wrong and read_state(run.store) != new:
            wrong.append("the next attempt did not bring about the new state")
        wrong += _find_wrong_findings(run)
    return [f"{run}: {reason}" for reason in wrong]


def _find_wrong_state(run: Run, old: State, new: State) -> list[str]:
    allowed = {"returned": [new], "failed": [old], "unknown": [old, new], "died": [old, new]}[run.outcome]
    try:
        found = read_state(run.store)
    except HoldfastError as error:
        return [f"the store cannot be read: {type(error).__name__}: {error}"]
    # That an empty place has become a store is no part of a save: the config comes first.
    blank = [State(is_store=True)] if old == State() and run.verb.name != "init" else []
    return [] if found in allowed + blank else [f"the state is neither old nor new as it should be: {found}"]


def _find_wrong_findings(run: Run) -> list[str]:
    if not run.store.list(""):
        return []
    wrong = []
    for finding in check_store(run.store):
        is_torn = run.fault is Fault.TORN_WRITE and finding.key == run.met.key
        if finding.severity == "note" and finding.code in _LEFT_BEHIND:
            continue
        # Without atomic writes a torn file cannot be distinguished from a damaged one; but no
        # snapshot needs it, so it is no error.
        if is_torn and finding.severity in ("note", "warning"):
            continue
        wrong.append(f"check found {finding.severity} {finding.code}: {finding.message}")
    return wrong


def _is_done_already(run: Run, new: State) -> bool:
    """Tell whether the verb has nothing left to do: what was to be deleted or made is so."""
    return run.verb.name in ("delete", "delete tag", "init") and read_state(run.store) == new
