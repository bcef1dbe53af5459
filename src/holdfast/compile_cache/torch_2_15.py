"""The interface to the compiler of torch 2.15: what differs from other versions; `bundle` contains the rest."""

from __future__ import annotations

from typing import Final

from holdfast.compile_cache.bundle.compiler import BundleCompiler
from holdfast.compile_cache.bundle.guards import SHARED_NAMES, GuardLanguage

COMPILER: Final = BundleCompiler(GuardLanguage(SHARED_NAMES | {"torch.sym_max", "torch.sym_min"}))
