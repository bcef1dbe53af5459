"""Options of a compiler whose graphs are cached; `Store.compiler` describes each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Strict = bool | Literal["hit"]
WAIT_S: Final = 300.0
"""How long to wait for another process that is compiling the same graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerOptions:
    """How graphs are compiled, and which stored ones are loaded."""

    mode: str | None = None
    options: Mapping[str, Any] | None = None
    strict: Strict = False
    trust: bool = False
    key_file: str | os.PathLike[str] | None = None
    versions: Mapping[str, str] | None = None
    wait_s: float = WAIT_S
    import_in_background: bool = False
