"""Arguments of torch.distributed.checkpoint that not every torch takes."""

from __future__ import annotations

from typing import Any, Final

from tests.kit.capabilities import find_in_torch, has_parameter

ALONE: Final[dict[str, Any]] = {"no_dist": True} if has_parameter("distributed.checkpoint.save", "no_dist") else {}
"""Makes a save or load one of a single process. Without the parameter it is one if no process group exists."""
ALONE_LATER: Final[dict[str, Any]] = (
    {"no_dist": True} if has_parameter("distributed.checkpoint.async_save", "no_dist") else {}
)
"""As `ALONE`, for an asynchronous save."""
_KINDS: Final = find_in_torch("distributed.checkpoint.state_dict_saver.AsyncCheckpointerType")
IN_THREAD: Final[dict[str, Any]] = {"async_checkpointer_type": _KINDS.THREAD} if _KINDS else {}
"""Makes an asynchronous save one in a thread, which is the only way without the parameter."""
IN_PROCESS: Final[dict[str, Any]] = {"async_checkpointer_type": _KINDS.PROCESS} if _KINDS else {}
"""Makes an asynchronous save one in another process."""
