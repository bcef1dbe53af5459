"""Findings: what a check reports, never raising, never stopping at the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: something saved cannot be read back. warning: damage that costs nothing yet. note: harmless left-overs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    code: str
    """Stable word for programs."""
    key: str
    """The object concerned."""
    message: str
    advice: str
    snapshot: str = ""
    entry: str = ""
    chunk: str = ""
    pack: str = ""


@dataclass(slots=True)
class Tally:
    """How much a check has looked at."""

    objects: int = 0
    snapshots: int = 0
    manifests: int = 0
    packs: int = 0
    chunks: int = 0
    bytes_read: int = 0
