"""A Holdfast store that stays open for many saves, as in a training run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import holdfast
from bench.kit.arena import Arena
from bench.kit.measure import Contestant, WrongResult
from bench.kit.peers import sync_filesystem
from bench.kit.states import change_state
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.staging import SaveHandle


class RepeatedSaves:
    """An open store in a folder of an arena, and saves of the arena's state to it, each verified by a load."""

    def __init__(self, arena: Arena, folder: str = "again", **options: bool) -> None:
        self._arena = arena
        self.root = arena.work / folder
        arena.renew(self.root)
        open_store: Callable[..., holdfast.Store] = holdfast.open
        self.store = open_store(self.root, **options)
        self._numbers = count()

    def save(self) -> SaveResult:
        """Save the state under the next name."""
        return self.store.save(self._next_name(), dict(self._arena.state))

    def save_in_background(self) -> SaveHandle:
        """Save the state under the next name in the background; return when the state may be modified again."""
        return self.store.save_async(self._next_name(), dict(self._arena.state))

    def _next_name(self) -> str:
        return f"run/step-{next(self._numbers)}"

    def change(self, fraction: float) -> None:
        """Save the state, then change a part of it."""
        self.save()
        change_state(self._arena.state, fraction)
        sync_filesystem(self.root)

    def verify(self, result: object, *, fraction: float) -> None:
        """Raise unless the saved name loads as the current state, and the save wrote no more than it had to."""
        if not isinstance(result, SaveResult):
            raise WrongResult(f"Holdfast: a save returned {result}")
        # Tiny tensors are stored inline in the manifest, and count as new each time.
        if fraction == 0.0 and result.new_bytes > self._arena.size_bytes // 50:
            raise WrongResult(f"Holdfast: a save of an unchanged state wrote {result.new_bytes} new bytes")
        self._arena.verify_filled(lambda state: self.store.load_into(result.name, dict(state)), who="Holdfast")

    def verify_in_background(self, handle: object) -> None:
        """Raise unless a background save ends, and its name loads as the current state."""
        if not isinstance(handle, SaveHandle):
            raise WrongResult(f"Holdfast: save_async returned {handle}")
        self.verify(handle.wait(), fraction=1.0)

    def saving(self, fraction: float) -> Contestant:
        """Return a timed save of a state of which `fraction` has changed since the last save."""
        return Contestant(self.save, partial(self.change, fraction), partial(self.verify, fraction=fraction))
