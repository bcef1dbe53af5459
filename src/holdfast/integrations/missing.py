"""The error for a framework that is not installed."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


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
