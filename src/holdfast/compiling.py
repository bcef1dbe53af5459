"""`holdfast.compile`: `torch.compile` that loads compiled graphs from a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Unpack

from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.snapshot.gc_pause import pause_gc

if TYPE_CHECKING:
    from holdfast.compile_cache.backend import CompilerOptions
    from holdfast.store import Store

Model = TypeVar("Model")


def compile(
    model: Model,
    *,
    store: str | os.PathLike[str] | Store,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    whole: bool = False,
    **choices: Unpack[CompilerOptions],
) -> Model:
    """Compile a module or function as `torch.compile` does, but load graphs that are in the store from there.

    Newly compiled graphs are saved in the store for the next process. `choices` are the arguments of `Store.compiler`.
    With `whole`, the compiled callable is saved, too, so that the next process starts without dynamo; see "Share a
    compile cache".
    """
    repo = _open(store)
    compiled: Any
    if whole:
        with pause_gc():  # imports build many objects
            from holdfast.compile_cache.whole.start import compile_whole

        compiled = compile_whole(model, repo, fullgraph=fullgraph, dynamic=dynamic, choices=choices)
    else:
        with pause_gc():
            from holdfast.compile_cache.backend import make_compiler

        compiled = torch.compile(
            model,  # type: ignore[call-overload]  # torch.compile accepts any callable and returns the same type
            backend=make_compiler(repo, **choices),
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
