"""Checks that a handle still refers to the store it opened: its path may get another store, or lose it, meanwhile."""

from __future__ import annotations

from holdfast.errors import StoreGone
from holdfast.repo.handle.config import Config


class StoreIdentity:
    """The id of the store that a handle saw first; changes to any other store are refused. Safe in any thread."""

    def __init__(self, store_id: str = "") -> None:
        """Expect the store `store_id`; if empty, the first store that is seen."""
        self.store_id = store_id

    def verify(self, config: Config | None, *, url: str) -> None:
        """Raise StoreGone unless `config`, just read, is that of the expected store; None means there is no store."""
        found_id = config.store_id if config else ""
        if not self.store_id:
            self.store_id = found_id
        if found_id == self.store_id:
            return
        what = (
            f"another store ({found_id}) is there now, and not the one that was opened ({self.store_id})"
            if found_id
            else f"the store that was opened ({self.store_id}) is gone, and no other is there"
        )
        raise StoreGone(
            f"{url}: {what}. Was a filesystem unmounted, or the directory moved or deleted? Put the store back and try"
            " again; to use what is there now, open it again",
            expected_id=self.store_id,
            found_id=found_id,
        )
