"""The public API of Holdfast; each name is loaded from its module on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from holdfast.moved import install

if TYPE_CHECKING:
    from holdfast.compiling import compile
    from holdfast.distributed.checkpoint.training import TrainingState, training_state
    from holdfast.errors import (
        AmbiguousName,
        BadName,
        CommitUnknown,
        CompileCacheError,
        Corrupt,
        DigestMismatch,
        HoldfastError,
        LeaseLost,
        Mismatch,
        MissingChunk,
        NameInUse,
        NewerFormat,
        NotAStore,
        NotFound,
        NotShared,
        ObjectExists,
        OutOfMemory,
        RankError,
        ReadOnlyStore,
        ShardNotFound,
        SourceChanged,
        StoreError,
        StoreFull,
        StoreGone,
        TensorNotFound,
        TooLarge,
        Unsupported,
        Untrusted,
    )
    from holdfast.facade import Store
    from holdfast.opening import open
    from holdfast.snapshot.call import Call
    from holdfast.snapshot.resume import ResumableSampler, RngState
    from holdfast.snapshot.view.lazy import LazyTensor, Snapshot
    from holdfast.tensors.sharding.sharded import per_rank, shard

__version__ = "0.1.0.dev0"

__all__ = [
    "AmbiguousName",
    "BadName",
    "Call",
    "CommitUnknown",
    "CompileCacheError",
    "Corrupt",
    "DigestMismatch",
    "HoldfastError",
    "LazyTensor",
    "LeaseLost",
    "Mismatch",
    "MissingChunk",
    "NameInUse",
    "NewerFormat",
    "NotAStore",
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

# `import holdfast` and `holdfast ls` must not load torch, so names are resolved late. The imports above are the same
# table for type checkers; a test keeps the three lists equal.
_HOME: Final = {
    "AmbiguousName": "holdfast.errors",
    "BadName": "holdfast.errors",
    "Call": "holdfast.snapshot.call",
    "CommitUnknown": "holdfast.errors",
    "CompileCacheError": "holdfast.errors",
    "Corrupt": "holdfast.errors",
    "DigestMismatch": "holdfast.errors",
    "HoldfastError": "holdfast.errors",
    "LazyTensor": "holdfast.snapshot.view.lazy",
    "LeaseLost": "holdfast.errors",
    "Mismatch": "holdfast.errors",
    "MissingChunk": "holdfast.errors",
    "NameInUse": "holdfast.errors",
    "NewerFormat": "holdfast.errors",
    "NotAStore": "holdfast.errors",
    "NotFound": "holdfast.errors",
    "NotShared": "holdfast.errors",
    "OutOfMemory": "holdfast.errors",
    "ObjectExists": "holdfast.errors",
    "RankError": "holdfast.errors",
    "ReadOnlyStore": "holdfast.errors",
    "ResumableSampler": "holdfast.snapshot.resume",
    "RngState": "holdfast.snapshot.resume",
    "Snapshot": "holdfast.snapshot.view.lazy",
    "ShardNotFound": "holdfast.errors",
    "SourceChanged": "holdfast.errors",
    "Store": "holdfast.facade",
    "StoreError": "holdfast.errors",
    "StoreFull": "holdfast.errors",
    "StoreGone": "holdfast.errors",
    "TensorNotFound": "holdfast.errors",
    "TooLarge": "holdfast.errors",
    "TrainingState": "holdfast.distributed.checkpoint.training",
    "Unsupported": "holdfast.errors",
    "Untrusted": "holdfast.errors",
    "compile": "holdfast.compiling",
    "open": "holdfast.opening",
    "per_rank": "holdfast.tensors.sharding.sharded",
    "shard": "holdfast.tensors.sharding.sharded",
    "training_state": "holdfast.distributed.checkpoint.training",
}

install()


def __getattr__(name: str) -> object:
    """Load `name` from its module and cache it, so that this runs once per name."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
