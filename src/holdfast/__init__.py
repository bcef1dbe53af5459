"""The public API of Holdfast; each name, and each module as an attribute of its package, is loaded on first use."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.compiling import compile
    from holdfast.distributed.checkpoint.training import TrainingState, training_state
    from holdfast.errors import (
        AmbiguousName,
        BadExpression,
        BadFile,
        BadName,
        CommitUnknown,
        CompileCacheError,
        Corrupt,
        DeviceFault,
        DigestMismatch,
        HoldfastError,
        LeaseLost,
        Mismatch,
        MissingChunk,
        NameInUse,
        NewerFormat,
        NotAStore,
        NotBisectable,
        NotFound,
        NotShared,
        ObjectExists,
        OutOfMemory,
        RankError,
        ReadOnlyStore,
        ShardNotFound,
        SnapshotGone,
        SourceChanged,
        StoreError,
        StoreFull,
        StoreGone,
        TensorNotFound,
        TooLarge,
        Unsupported,
        Untrusted,
    )
    from holdfast.snapshot.call import Call
    from holdfast.snapshot.lazy import LazyTensor, Snapshot
    from holdfast.snapshot.resume import ResumableSampler, RngState
    from holdfast.store import Store, open
    from holdfast.tensors.sharding import per_rank, shard

__version__ = "0.1.0.dev0"

__all__ = [
    "AmbiguousName",
    "BadExpression",
    "BadFile",
    "BadName",
    "Call",
    "CommitUnknown",
    "CompileCacheError",
    "Corrupt",
    "DeviceFault",
    "DigestMismatch",
    "HoldfastError",
    "LazyTensor",
    "LeaseLost",
    "Mismatch",
    "MissingChunk",
    "NameInUse",
    "NewerFormat",
    "NotAStore",
    "NotBisectable",
    "NotFound",
    "NotShared",
    "ObjectExists",
    "OutOfMemory",
    "RankError",
    "ReadOnlyStore",
    "ResumableSampler",
    "RngState",
    "ShardNotFound",
    "Snapshot",
    "SnapshotGone",
    "SourceChanged",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreGone",
    "TensorNotFound",
    "TooLarge",
    "TrainingState",
    "Unsupported",
    "Untrusted",
    "__version__",
    "compile",
    "open",
    "per_rank",
    "shard",
    "training_state",
]

# `import holdfast` and `holdfast ls` must not load torch, so each name is loaded when it is first used. These are the
# modules of the names that are not errors; a test compares them, `__all__` and the imports for type checkers above.
_HOME: Final = {
    "Call": "holdfast.snapshot.call",
    "LazyTensor": "holdfast.snapshot.lazy",
    "ResumableSampler": "holdfast.snapshot.resume",
    "RngState": "holdfast.snapshot.resume",
    "Snapshot": "holdfast.snapshot.lazy",
    "Store": "holdfast.store",
    "TrainingState": "holdfast.distributed.checkpoint.training",
    "compile": "holdfast.compiling",
    "open": "holdfast.store",
    "per_rank": "holdfast.tensors.sharding",
    "shard": "holdfast.tensors.sharding",
    "training_state": "holdfast.distributed.checkpoint.training",
}


class _Package(ModuleType):
    """A package whose modules are attributes without an import: `holdfast.dcp` works after `import holdfast`."""

    def __getattr__(self, name: str) -> Any:
        """Import the module that is called `name`; only called for what is not an attribute yet."""
        path = f"{self.__name__}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:  # the module exists, and needs a package that is not installed
                    raise
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; Python sets every module that it has imported as an attribute of its package."""
        if type(value) is ModuleType and value.__name__ == f"{self.__name__}.{name}" and "__path__" in vars(value):
            value.__class__ = _Package
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name: Ray and Dask send functions to other processes with the modules that these refer to."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Load `name` from its module and cache it, so that this runs once per name."""
        if name not in __all__:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        # Beside torch, imports trigger full collections, which take longer than the imports themselves.
        with import_module("holdfast.snapshot.gc_pause").pause_gc():
            value = getattr(import_module(_HOME.get(name, "holdfast.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
