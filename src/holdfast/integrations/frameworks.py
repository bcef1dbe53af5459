"""What plug-ins share: the error for a missing framework, and calls whose error is one of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from typing_extensions import Self

from holdfast.distributed.checkpoint.checkpoint import find_world


class RequiredLibrary:
    """Turns an ImportError in its `with` block into one that says what to install."""

    def __init__(self, library: str, extra: str) -> None:
        """Name the library as people know it, and the extra of Holdfast that installs it."""
        self._library, self._extra = library, extra

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise an ImportError that names the extra, if the block raised an ImportError."""
        if isinstance(error, ImportError):
            raise ImportError(
                f"this needs {self._library}, which cannot be imported ({error});"
                f" install it with: pip install 'holdfast[{self._extra}]'",
                name=error.name,
            ) from error


def call_together(topic: str, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on all ranks and return their results, by rank; if one raises, all raise.

    All ranks must call this, with the same topic. The results must be plain values.
    """
    world = find_world()
    if world is None:
        return [act()]
    with world.join("integration", topic) as ranks:
        return ranks.all_gather(topic, act)
