"""Public interface for torch.distributed.checkpoint: storage writer, storage reader, and `install`."""

from __future__ import annotations

from holdfast.distributed.dcp.install import Installed, install, uninstall
from holdfast.distributed.dcp.reader import StorageReader
from holdfast.distributed.dcp.writer import StorageWriter

__all__ = ["Installed", "StorageReader", "StorageWriter", "install", "uninstall"]
