"""Compiling a model with the graphs of a store: `torch.compile` in one call."""

from __future__ import annotations

import os
from typing import Any, TypeVar, Unpack

import torch

from holdfast.compile_cache.backend import CompilerOptions
from holdfast.facade import Store
from holdfast.opening import open as open_store

Model = TypeVar("Model")


def compile(
    model: Model,
    *,
    store: str | os.PathLike[str] | Store,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **choices: Unpack[CompilerOptions],
) -> Model:
    """Compile a module or function as `torch.compile` does; graphs that the store has are loaded from it.

    What is compiled anew goes there, so that the next process need not. `choices` are those of `Store.compiler`.
    """
    opened = store if isinstance(store, Store) else open_store(store)
    compiled: Any = torch.compile(
        model,  # type: ignore[call-overload]  # it takes and returns what it is given
        backend=opened.compiler(**choices),
        fullgraph=fullgraph,
        dynamic=dynamic,
    )
    found: Model = compiled
    return found
