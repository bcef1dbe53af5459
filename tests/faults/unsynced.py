"""The calls of the kernel without its fsyncs, for tests in which no power is lost."""

from __future__ import annotations

from holdfast.objects.local.files import PosixFiles


class UnsyncedFiles(PosixFiles):
    """The calls of the kernel, but durability costs nothing."""

    def sync_file(self, handle: int) -> None:
        return

    def sync_directory(self, path: str) -> None:
        return
