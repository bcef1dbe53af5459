"""Old paths of modules: importing one returns the module that replaced it, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    # Not at run time: it loads pathlib, which would slow down every start of the command line.
    from importlib.abc import Loader

MOVED: Final = {
    "holdfast.store": "holdfast.objects",
    "holdfast.store.memory": "holdfast.objects.memory",
    "holdfast.store.protocol": "holdfast.objects.protocol",
    "holdfast.repo.boxes": "holdfast.repo.format.boxes",
    "holdfast.repo.check": "holdfast.repo.upkeep.check",
    "holdfast.repo.repository": "holdfast.repo.handle.repository",
    "holdfast.repo.source": "holdfast.repo.format.source",
    "holdfast.repo.stream": "holdfast.repo.read.stream",
    "holdfast.repo.writer": "holdfast.repo.write.writer",
    "holdfast.tensors.sharded": "holdfast.tensors.sharding.sharded",
    "holdfast.distributed.collectives": "holdfast.distributed.talk.collectives",
    "holdfast.distributed.module_sync": "holdfast.distributed.checkpoint.module_sync",
    "holdfast.capture.asserting": "holdfast.capture.compare.asserting",
    "holdfast.capture.nan": "holdfast.capture.compare.nan",
    "holdfast.capture.replay": "holdfast.capture.record.replay",
}
"""Old path -> new path, of the modules that the documentation mentioned; others were never public."""


class MovedModules:
    """A finder for `sys.meta_path` that finds moved modules and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a moved module; None for every other name."""
        return ModuleSpec(fullname, cast("Loader", _MovedLoader())) if fullname in MOVED else None


class _MovedLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} has moved: import {new} instead", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        # The import system puts the spec of the old name on the module; exec_module puts its own back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def install() -> None:
    """Make the old paths work in this process; a second call changes nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: below an old package, the ordinary finder would load a second copy of the module.
        sys.meta_path.insert(0, MovedModules())
