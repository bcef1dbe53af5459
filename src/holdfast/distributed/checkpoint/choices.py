"""Keyword arguments of `Store.save`, `Store.load_into` and the like, and the options that they become."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypedDict

import torch.distributed as dist

from holdfast.distributed.checkpoint.checkpoint import World, find_world
from holdfast.json_text import Json
from holdfast.progress import Progress
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.read.reader import Verify
from holdfast.snapshot.into.held import HeldMemory, make_since
from holdfast.snapshot.into.plan import IntoOptions, ReplicaMode
from holdfast.snapshot.save.save import SaveOptions
from holdfast.snapshot.view.lazy import Snapshot


class Together(TypedDict, total=False):
    """Keyword arguments that choose which ranks take part in a collective operation."""

    collective: bool
    """False to run in this process only."""
    process_group: dist.ProcessGroup | None
    timeout_s: float


class PublishChoices(Together, total=False):
    """Keyword arguments of `Store.publish` and of all saves."""

    metadata: Mapping[str, Json] | None
    """Facts to find the snapshot by. Of many ranks, those of rank 0 are stored."""
    base: str | None
    """A snapshot with similar content, whose chunks are reused; by default the latest with the same prefix."""
    allow_pickle: bool
    """Pickle values that the format cannot store. Loading them can run any code, and must be allowed, too."""
    grads: bool
    """Save the gradients of tensors as well."""
    compression: Compression
    """How new bytes are stored: None, "fast", "small" or "auto"; "default" is the choice of `holdfast.open`."""
    delta: DeltaChoice
    """Store new bytes as the difference from the base: "auto", "off", or N (one save in N is whole)."""
    mirror: str | os.PathLike[str] | None
    """Another store, to which this snapshot is uploaded in the background (see `holdfast.open`)."""


class SaveChoices(PublishChoices, total=False):
    """Keyword arguments of `Store.save` and `Store.save_async`."""

    overwrite: bool
    """Replace what the name has; without it, other content raises NameInUse. The same on all ranks."""
    after_s: float
    """The commit time is later than this, whatever the clock says: a series whose names are numbered stays in order."""


class IntoChoices(Together, total=False):
    """Keyword arguments of `Store.load_into`."""

    strict: bool
    """False to ignore keys that only the tree or only the snapshot has."""
    rename: Mapping[str, str] | None
    """Prefixes of keys to replace."""
    cast: bool
    """Convert tensors to the dtypes of the tree."""
    assign: bool
    """Put new tensors in place instead of filling those of the tree."""
    verify: Verify
    """"full" checks BLAKE3; "fast" checks XXH3, which detects accidents only; False checks nothing."""
    allow_pickle: bool
    """Unpickle values that were saved as pickles. This can run arbitrary code."""
    replicas: ReplicaMode
    atomic: bool
    since: str | Snapshot | None
    """The snapshot that the tree holds: only chunks that the tree lacks are read. It is not trusted: a tensor that this
    store has loaded is known to be unchanged by its version counter, and the memory of any other is hashed, at 2 to 3
    GB/s a core."""
    check_target: bool
    """With `since`, hash all of the tree. Version counters do not notice writes through `.data`, by numpy, by another
    process or by code outside torch."""


def choose_world(choices: Mapping[str, Any]) -> World | None:
    """Return the ranks that take part in an operation with these keyword arguments, of which others may be wrong."""
    return find_world(**{key: choices[key] for key in Together.__annotations__ if key in choices})


def make_save_options(
    *,
    environment: bool,
    lineage: Mapping[str, Json],
    overwrite: bool = False,
    metadata: Mapping[str, Json] | None = None,
    base: str | None = None,
    allow_pickle: bool = False,
    grads: bool = False,
    compression: Compression = "default",
    delta: DeltaChoice | None = None,
    after_s: float = -math.inf,
    mirror: object = None,
    **together: Any,
) -> tuple[SaveOptions, World | None]:
    """Return the options of a save, and the ranks that take part; the caller has noted the `mirror` in `lineage`."""
    _verify_known(together, "save", SaveChoices)
    options = SaveOptions(
        overwrite,
        metadata or {},
        base,
        allow_pickle,
        grads,
        compression,
        environment,
        lineage,
        after_s=after_s,
        delta=delta,
    )
    return options, find_world(**together)


def make_into_options(
    *,
    held: HeldMemory,
    progress: Progress | None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    assign: bool = False,
    verify: Verify = "full",
    allow_pickle: bool = False,
    replicas: ReplicaMode = "auto",
    atomic: bool = False,
    since: str | Snapshot | None = None,
    check_target: bool = False,
    **together: Any,
) -> tuple[IntoOptions, World | None]:
    """Return the options of a load into a tree, and the ranks that take part."""
    _verify_known(together, "load_into", IntoChoices)
    belief = make_since(since, check=check_target)
    options = IntoOptions(
        strict, rename or {}, cast, assign, verify, allow_pickle, replicas, atomic, progress, held, belief
    )
    return options, find_world(**together)


def _verify_known(together: Mapping[str, Any], method: str, choices: type) -> None:
    """Raise TypeError for an argument that no method has, and name the one that was probably meant."""
    for name in together:
        if name not in Together.__annotations__:
            known = [*choices.__annotations__, "progress"]
            meant = "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, known, n=1))
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{meant}")
