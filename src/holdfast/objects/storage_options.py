"""Options of a store in the cloud, as its user gave them; no text and no pickle contains a secret of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from holdfast.errors import BadName

_PREFIX: Final = re.compile(r"(aws|google|azure|azure_storage)_(?=.)")
_PLAIN: Final = frozenset(
    {
        "account_name",
        "base_url",
        "checksum_algorithm",
        "conditional_put",
        "default_region",
        "disable_bulk_delete",
        "disable_tagging",
        "endpoint",
        "endpoint_url",
        "endpoint_url_s3",
        "imdsv1_fallback",
        "profile",
        "region",
        "request_payer",
        "retry_config",
        "s3_express",
        "skip_signature",
        "unsigned_payload",
        "use_azure_cli",
        "use_emulator",
        "use_fabric_endpoint",
        "virtual_hosted_style_request",
    }
)
"""Options that are no secrets. An option that is not on this list is taken for one."""
_PLAIN_OF_CLIENT: Final = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "pool_idle_timeout", "read_timeout", "timeout"}
)
_CLIENT: Final = "client_options"


class StorageOptions(Mapping[str, Any]):
    """Settings of obstore for one store, such as `endpoint`, `region` or `access_key_id`.

    A pickle has only the options that are no secrets; `withheld` names the others there.
    """

    __slots__ = ("_values", "withheld")

    def __init__(self, values: Mapping[str, Any] | None = None, withheld: Iterable[str] = ()) -> None:
        """Take options; raises BadName if they are not a mapping of texts."""
        found: Any = {} if values is None else values
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise BadName("storage_options is a mapping of names to values, as in {'endpoint': 'https://...'}")
        self._values = dict(found)
        self.withheld = tuple(withheld)
        """Names of the options that were left out when this was pickled."""

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        """Show the names only."""
        return f"<StorageOptions {', '.join(sorted(self._values)) or 'none'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options that are no secrets."""
        return StorageOptions, (self.find_plain(), self._find_withheld())

    def __deepcopy__(self, memo: object) -> StorageOptions:
        """Return the same options: a copy within the process keeps the secrets."""
        return self

    def find_plain(self) -> dict[str, Any]:
        """Return the options that are no secrets."""
        plain = {name: value for name, value in self._values.items() if _is_plain(name, value)}
        client = self._values.get(_CLIENT)
        if isinstance(client, Mapping):
            plain[_CLIENT] = {name: value for name, value in client.items() if name in _PLAIN_OF_CLIENT}
        return plain

    def find_secrets(self) -> list[str]:
        """Return the texts that must not appear in a message."""
        return [str(value) for name, value in self._values.items() if not _is_plain(name, value) and name != _CLIENT]

    def _find_withheld(self) -> tuple[str, ...]:
        plain = self.find_plain()
        return (*self.withheld, *sorted(name for name in self._values if name not in plain))


def _is_plain(name: str, value: object) -> bool:
    # An address may have a user and a password in it, or a signature.
    return _PREFIX.sub("", name.lower()) in _PLAIN and not any(mark in str(value) for mark in "@?")
