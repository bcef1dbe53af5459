"""`holdfast.compile`: `torch.compile` that loads compiled graphs from a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Unpack

from holdfast.facade import Store
from holdfast.opening import open as open_store

if TYPE_CHECKING:
    from holdfast.compile_cache.backend import CompilerOptions

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
    opened = store if isinstance(store, Store) else open_store(store)
    compiled: Any
    if whole:
        from holdfast.compile_cache.whole.start import compile_whole

        compiled = compile_whole(model, opened.repository, fullgraph=fullgraph, dynamic=dynamic, choices=choices)
    else:
        compiled = torch.compile(
            model,  # type: ignore[call-overload]  # torch.compile accepts any callable and returns the same type
            backend=opened.compiler(**choices),
            fullgraph=fullgraph,
            dynamic=dynamic,
        )
    found: Model = compiled
    return found
