"""The public face: every name a user needs, each loaded from its own module when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.errors import (
        BadName,
        CommitUnknown,
        Corrupt,
        DigestMismatch,
        HoldfastError,
        LeaseLost,
        MissingChunk,
        NameInUse,
        NewerFormat,
        NotAStore,
        NotFound,
        ObjectExists,
        ReadOnlyStore,
        SourceChanged,
        StoreError,
        StoreFull,
        TooLarge,
        Unsupported,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "BadName",
    "CommitUnknown",
    "Corrupt",
    "DigestMismatch",
    "HoldfastError",
    "LeaseLost",
    "MissingChunk",
    "NameInUse",
    "NewerFormat",
    "NotAStore",
    "NotFound",
    "ObjectExists",
    "ReadOnlyStore",
    "SourceChanged",
    "StoreError",
    "StoreFull",
    "TooLarge",
    "Unsupported",
    "__version__",
]

# Torch must not load for `import holdfast` or `holdfast ls`, so names are looked up late. The imports above are
# the same table for type checkers; a test keeps the three lists equal.
_HOME: Final = {
    "BadName": "holdfast.errors",
    "CommitUnknown": "holdfast.errors",
    "Corrupt": "holdfast.errors",
    "DigestMismatch": "holdfast.errors",
    "HoldfastError": "holdfast.errors",
    "LeaseLost": "holdfast.errors",
    "MissingChunk": "holdfast.errors",
    "NameInUse": "holdfast.errors",
    "NewerFormat": "holdfast.errors",
    "NotAStore": "holdfast.errors",
    "NotFound": "holdfast.errors",
    "ObjectExists": "holdfast.errors",
    "ReadOnlyStore": "holdfast.errors",
    "SourceChanged": "holdfast.errors",
    "StoreError": "holdfast.errors",
    "StoreFull": "holdfast.errors",
    "TooLarge": "holdfast.errors",
    "Unsupported": "holdfast.errors",
}


def __getattr__(name: str) -> object:
    """Load `name` from its module and keep it, so that this runs once per name."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
