"""One state, a folder for each contestant that saves it, verification by loading, and result rows with ratios."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.measure import Contestant, Goal, Result, Timings, list_files, release_pages
from bench.kit.peers import HOLDFAST, Peer, sync_filesystem
from bench.kit.states import Shape, State, clear_state, count_state, make_empty, make_state, verify_state


@dataclass(frozen=True, slots=True)
class Arena:
    """A state that all contestants save, and the folder in which they do."""

    label: str
    state: State
    target: State
    """Tensors of the same shapes to load into: verifying in place needs no new pages from the kernel."""
    work: Path
    rounds: int

    @property
    def size_bytes(self) -> int:
        """The bytes of the state."""
        return count_state(self.state)

    def folder(self, peer: Peer) -> Path:
        """Return the folder in which a peer saves."""
        return self.work / peer.name.replace(" ", "-")

    def files(self, peer: Peer) -> list[Path]:
        """Return the files that a peer has saved."""
        return list_files(self.folder(peer))

    def renew(self, folder: Path) -> None:
        """Re-create a folder empty, and wait until pending writes are on disk."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        sync_filesystem(folder)

    def save(self, peer: Peer) -> None:
        """Let a peer save the state in an empty folder, and drop the files from the page cache."""
        self.renew(self.folder(peer))
        peer.save(self.folder(peer), self.state)
        self.release(peer)

    def release(self, peer: Peer) -> None:
        """Drop the files of a peer from the page cache, so that the next contestant can use the memory."""
        release_pages(self.files(peer))

    def verify_saved(self, peer: Peer) -> None:
        """Raise unless a peer loads the current state."""
        self.verify_filled(partial(peer.fill, self.folder(peer)), who=peer.name)

    def verify_filled(self, fill: Callable[[State], object], *, who: str) -> None:
        """Raise unless a load in place yields the current state."""
        clear_state(self.target)
        fill(self.target)
        verify_state(self.target, self.state, who=who)

    def verify_loaded(self, found: object, *, who: str) -> None:
        """Raise unless this is the current state; then release its memory, or its memory map."""
        verify_state(found, self.state, who=who)
        if isinstance(found, dict):
            found.clear()

    def saving(self, peer: Peer, *, most_rounds: int | None = None) -> Contestant:
        """Return a timed first save; that of Holdfast is verified in every round."""
        folder = self.folder(peer)
        return Contestant(
            lambda: peer.save(folder, self.state),
            partial(self.renew, folder),
            lambda _: self.verify_saved(peer),
            partial(self.release, peer),
            verify_once=not is_own(peer),
            most_rounds=most_rounds,
        )

    def loading(self, peer: Peer, prepare: Callable[[], None]) -> Contestant:
        """Return a timed load into new memory; that of Holdfast is verified in every round."""
        folder = self.folder(peer)
        return Contestant(
            lambda: peer.load(folder, self.state),
            prepare,
            partial(self.verify_loaded, who=peer.name),
            verify_once=not is_own(peer),
        )

    def close(self) -> None:
        """Delete the folder with all saved files."""
        shutil.rmtree(self.work, ignore_errors=True)


def is_own(peer: Peer) -> bool:
    """Return whether this peer is a variant of Holdfast, whose results are verified in every round."""
    return peer.name.startswith(HOLDFAST.name)


def open_arena(shape: Shape, work: Path, *, rounds: int, seed: int) -> Arena:
    """Create a state and a folder for it."""
    folder = work / shape.name.replace(" ", "-")
    folder.mkdir()
    state = make_state(shape, seed=seed)
    return Arena(shape.name, state, make_empty(state), folder, rounds)


def compare(
    workload: str,
    timings: Mapping[str, Timings],
    own: str,
    rivals: Iterable[str],
    *,
    size_bytes: int,
    goal: Goal | None,
) -> Result:
    """Return the GB/s of one contestant against the fastest rival, best rounds compared; medians are in the note."""
    found = {name: timings[name] for name in rivals}
    fastest = min(found, key=lambda name: found[name].best)
    gigabytes = size_bytes / 1e9
    others = ", ".join(f"{name} {gigabytes / timing.best:.2f}" for name, timing in found.items() if name != fastest)
    medians = f"medians {gigabytes / timings[own].median:.2f} and {gigabytes / found[fastest].median:.2f}"
    samples = {name: timing.seconds for name, timing in (found | {own: timings[own]}).items()}
    return Result(
        workload,
        gigabytes / timings[own].best,
        "GB/s",
        fastest,
        gigabytes / found[fastest].best,
        goal,
        f"{medians}; {others}" if others and len(found) <= MOST_NAMED else medians,
        samples,
        {name: gigabytes / timings[name].best for name in samples},
    )


MOST_NAMED: Final = 7
"""The note of a row names up to this many rivals; the variants of a raw read are more."""


def compare_ms(workload: str, timings: Mapping[str, Timings], own: str, goal: Goal | None = None) -> Result:
    """Return the milliseconds of one contestant; those of the others are in the note."""
    rivals = {name: timing for name, timing in timings.items() if name != own}
    fastest = min(rivals, key=lambda name: rivals[name].best)
    others = ", ".join(f"{name} {1e3 * timing.best:.2f}" for name, timing in rivals.items())
    return Result(
        workload,
        1e3 * timings[own].best,
        "ms",
        fastest,
        1e3 * rivals[fastest].best,
        goal,
        f"median {1e3 * timings[own].median:.2f}; {others}",
        {name: timing.seconds for name, timing in timings.items()},
        {name: 1e3 * timing.best for name, timing in timings.items()},
    )


def at_least(ratio: float) -> Goal:
    """Return the goal that the ratio is at least `ratio`."""
    return Goal("ratio", ">=", ratio)


def names_like(timings: Iterable[str], *beginnings: str) -> list[str]:
    """Return the names that begin with one of `beginnings`."""
    return [name for name in timings if name.startswith(beginnings)]
