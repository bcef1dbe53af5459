"""One request to the API: its path and its parameters, with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, urlsplit

from holdfast.errors import BadName

MAX_TARGET_BYTES: Final = 16 << 10
"""A longer path and query is refused before it is parsed."""
_MAX_PARAMETERS: Final = 128
_MAX_OFFSET: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """The path of a request, and the values of each parameter."""

    path: str
    parameters: Mapping[str, Sequence[str]]

    def read_text(self, name: str, default: str = "") -> str:
        """Return a parameter; of several with one name, the last."""
        return self.parameters.get(name, (default,))[-1]

    def read_required(self, name: str) -> str:
        """Return a parameter; raises BadName if it is missing or empty."""
        value = self.read_text(name)
        if not value:
            raise BadName(f"the parameter {name!r} is missing")
        return value

    def read_texts(self, name: str, *, most: int) -> list[str]:
        """Return all values of a parameter; raises BadName if there are more than `most`."""
        values = list(self.parameters.get(name, ()))
        if len(values) > most:
            raise BadName(f"{len(values)} values of {name!r} are too many: ask for at most {most} at a time")
        return values

    def read_number(self, name: str, default: int, *, most: int) -> int:
        """Return a parameter that is a whole number from 0 to `most`; raises BadName for anything else."""
        text = self.read_text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 19) or int(text) > most:
            raise BadName(f"the parameter {name}={text[:40]!r} is not a whole number from 0 to {most}")
        return int(text)

    def read_page(self, default: int, *, most: int) -> tuple[int, int]:
        """Return the first row that is asked for, and how many rows: `default`, unless `limit` is given."""
        return self.read_number("offset", 0, most=_MAX_OFFSET), self.read_number("limit", default, most=most)

    def read_flag(self, name: str) -> bool:
        """Return whether a parameter is "true"; raises BadName for anything but "true", "false" and nothing."""
        text = self.read_text(name, "false")
        if text not in ("true", "false"):
            raise BadName(f"the parameter {name}={text[:40]!r} is neither true nor false")
        return text == "true"


def choose_sort(sort: str, fields: Sequence[str]) -> str:
    """Return the field of an order such as `-bytes`, or the first one; raises BadName if it is not one of `fields`."""
    field = sort.removeprefix("-") or fields[0]
    if field not in fields:
        raise BadName(f"rows cannot be sorted by {field[:40]!r}; choose one of {', '.join(fields)}")
    return field


def parse_request(target: str) -> ApiRequest:
    """Parse the target of a request line; raises BadName if it is too long or malformed."""
    if len(target) > MAX_TARGET_BYTES:
        raise BadName(f"the address of the request is longer than {MAX_TARGET_BYTES} characters")
    try:
        parts = urlsplit(target)
        found = parse_qs(
            parts.query,
            keep_blank_values=True,
            strict_parsing=bool(parts.query),
            max_num_fields=_MAX_PARAMETERS,
            errors="strict",
        )
    except ValueError as error:
        raise BadName(f"the address of the request is malformed: {error}") from error
    return ApiRequest(parts.path, found)
