"""Findings: the problems that a check reports instead of raising an error for the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: saved data cannot be read. warning: damage that has lost no data yet. note: harmless leftovers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem in a store."""

    severity: Severity
    code: str
    """A stable identifier for programs."""
    key: str
    """The key of the affected object."""
    message: str
    advice: str
    snapshot: str = ""
    entry: str = ""
    chunk: str = ""
    pack: str = ""


@dataclass(slots=True)
class Tally:
    """How much a check has covered."""

    objects: int = 0
    snapshots: int = 0
    manifests: int = 0
    packs: int = 0
    chunks: int = 0
    stored_bytes: int = 0
    """The size of all packs and manifests."""
    bytes_read: int = 0
    """How many of these bytes were read and verified: all of them, if every byte is checked and can be read."""
