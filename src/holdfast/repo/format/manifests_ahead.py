"""Reads the manifests of many snapshots in order, and those of later snapshots ahead of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TypeVar

from holdfast.errors import HoldfastError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import ManifestRef, PartRef
from holdfast.repo.format.manifest import read_head, read_manifest
from holdfast.repo.format.rank_manifests import Manifests, Needs, find_needs, join_parts

Part = TypeVar("Part")
Result = TypeVar("Result")


def iter_manifests(store: ObjectStore, refs: Sequence[ManifestRef]) -> Generator[Manifests | HoldfastError, None, None]:
    """Yield the manifests of each snapshot, or the error with which `read_manifests` would end."""
    return _iter_joined(store, refs, read_manifest, lambda root: root.parts, join_parts)


def iter_needs(store: ObjectStore, refs: Sequence[ManifestRef]) -> Generator[Needs | HoldfastError, None, None]:
    """Yield the files that each snapshot needs, or the error with which `read_needs` would end."""
    return _iter_joined(store, refs, read_head, lambda head: head[1], find_needs)


def take_read(found: Result | HoldfastError) -> Result:
    """Return what was read, or raise the error."""
    if isinstance(found, HoldfastError):
        raise found
    return found


def _iter_joined(
    store: ObjectStore,
    refs: Sequence[ManifestRef],
    read: Callable[[ObjectStore, ManifestRef], Part],
    find_parts: Callable[[Part], Sequence[PartRef]],
    join: Callable[[ManifestRef, Part, Iterable[Part]], Result],
) -> Generator[Result | HoldfastError, None, None]:
    """Read each root, then its parts, and join them; an error replaces the result."""
    roots: deque[tuple[ManifestRef, Part | HoldfastError, int]] = deque()

    def iter_parts() -> Iterator[tuple[Callable[[], Part | HoldfastError], int]]:
        works = ((partial(_attempt, read, store, ref), ref.size_bytes) for ref in refs)
        with closing(store.iter_together(works)) as found:
            for ref, root in zip(refs, found, strict=True):
                parts = () if isinstance(root, HoldfastError) else find_parts(root)
                roots.append((ref, root, len(parts)))
                for part in parts:
                    yield partial(_attempt, read, store, part.manifest), part.manifest.size_bytes
                if not parts:  # the root waits for its turn
                    yield partial(_return, root), ref.size_bytes

    with closing(store.iter_together(iter_parts())) as found:
        for first in found:
            ref, root, num_parts = roots.popleft()
            parts = [first, *islice(found, num_parts - 1)] if num_parts else []
            yield _join_read(partial(join, ref), root, parts)


def _join_read(
    join: Callable[[Part, Iterable[Part]], Result], root: Part | HoldfastError, parts: Sequence[Part | HoldfastError]
) -> Result | HoldfastError:
    if isinstance(root, HoldfastError):
        return root
    read = [part for part in parts if not isinstance(part, HoldfastError)]
    return join(root, read) if len(read) == len(parts) else next(e for e in parts if isinstance(e, HoldfastError))


def _attempt(
    read: Callable[[ObjectStore, ManifestRef], Part], store: ObjectStore, ref: ManifestRef
) -> Part | HoldfastError:
    try:
        return read(store, ref)
    except HoldfastError as error:
        return error


def _return(value: Result) -> Result:
    return value
