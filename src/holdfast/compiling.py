"""`holdfast.compile`: `torch.compile` that loads compiled graphs from a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from holdfast.compile_cache.choices import CompilerOptions, Strict
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.snapshot.gc_pause import pause_gc

if TYPE_CHECKING:
    from holdfast.store import Store

Model = TypeVar("Model")


def compile(
    model: Model,
    *,
    store: str | os.PathLike[str] | Store,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    whole: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    strict: Strict = False,
    trust: bool = False,
    key_file: str | os.PathLike[str] | None = None,
    versions: Mapping[str, str] | None = None,
    wait_s: float = 300.0,
    import_in_background: bool = False,
) -> Model:
    """Compile a module or function as `torch.compile` does, but load graphs that are in the store from there.

    Newly compiled graphs are saved in the store for the next process.

    Args:
        model: the module or function.
        store: a store, or the path or URL of one.
        fullgraph: as for `torch.compile`.
        dynamic: as for `torch.compile`.
        whole: save the compiled callable, too, so that the next process starts without dynamo; see "Share a compile
            cache".
        mode: the mode of `torch.compile`, such as "max-autotune".
        options: the compiler options of `torch.compile`.
        strict: True raises CompileCacheError for graphs that cannot be cached and entries that cannot be used,
            instead of compiling them. "hit" also raises for graphs that are not stored. An unsupported torch raises
            at once.
        trust: load every entry of the store. If False, an entry is loaded only if it is signed with the secret, or
            if no other user can write to the store.
        key_file: path of a file with the secret that signs entries.
        versions: a version for each custom operator (`"ns::op"`) whose code the cache cannot read.
        wait_s: how long to wait for another process that is compiling the same graph, in seconds.
        import_in_background: import torch's compiler in a background thread, which saves about a second while the
            model loads. Concurrent imports of the same modules can fail, so import no other part of torch at that
            time.
    """
    repo = _open(store)
    chosen = CompilerOptions(
        mode=mode,
        options=options,
        strict=strict,
        trust=trust,
        key_file=key_file,
        versions=versions,
        wait_s=wait_s,
        import_in_background=import_in_background,
    )
    compiled: Any
    if whole:
        with pause_gc():  # imports build many objects
            from holdfast.compile_cache.whole.start import compile_whole

        compiled = compile_whole(model, repo, chosen, fullgraph=fullgraph, dynamic=dynamic)
    else:
        with pause_gc():
            from holdfast.compile_cache.backend import make_compiler

        compiled = torch.compile(
            model,  # type: ignore[call-overload]  # torch.compile accepts any callable and returns the same type
            backend=make_compiler(repo, chosen),
            fullgraph=fullgraph,
            dynamic=dynamic,
        )
    found: Model = compiled
    return found


def _open(store: str | os.PathLike[str] | Store) -> Repository:
    """Return the repository of a store, or of a path or URL: without `Store`, whose imports a hit does not need."""
    if isinstance(store, str | os.PathLike):
        return open_repository(open_store(os.fspath(store)), create=True)
    return store.repository
