"""Where a snapshot was saved: host, versions, world size."""

from __future__ import annotations

import platform
import socket
import sys

import torch

from holdfast.json_text import Json


def describe_environment() -> dict[str, Json]:
    """Return facts about this process that help whoever inspects a snapshot later."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{sys.platform}-{platform.machine()}",
        "world_size": torch.distributed.get_world_size() if is_distributed else 1,
    }
