"""Options of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from holdfast.progress import Progress
from holdfast.repo.read.reader import Verify, verify_mode

Aliases = Literal["preserve", "fresh"]
SAVED: Final = "saved"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load, and how."""

    device: torch.device | str | None = "cpu"
    only: str | Sequence[str] | None = None
    verify: Verify = "full"
    mmap: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    aliases: Aliases = "preserve"
    allow_pickle: bool = False
    dtype: torch.dtype | None = None
    """The dtype that floating tensors are cast to, except those of registered classes; None casts nothing."""
    progress: Progress | None = None
    """Receives the progress of a whole load."""

    def __post_init__(self) -> None:
        """Refuse unknown values."""
        if self.aliases not in ("preserve", "fresh"):
            raise ValueError(f"aliases must be 'preserve' or 'fresh', not {self.aliases!r}")
        verify_mode(self.verify)
