"""Texts that people read and write: names, lists, sizes, times, durations, and URLs without the secrets in them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final

from holdfast.errors import BadName

_DURATION: Final = re.compile(
    r"(?:([0-9]{1,12})w)?(?:([0-9]{1,12})d)?(?:([0-9]{1,12})h)?(?:([0-9]{1,12})m)?(?:([0-9]{1,12})s)?"
)
_URL: Final = re.compile(r"([^/\s]*:/+)(.*)", re.DOTALL)
_PARAMETERS: Final = re.compile(r"[?#&;=:]|%(?:2[36]|3[abdf])", re.IGNORECASE)
"""Where a password, a query or a fragment can begin, also in the escaped form."""
_URL_IN_TEXT: Final = re.compile(r"(?<![A-Za-z0-9+.:-])[A-Za-z][A-Za-z0-9+.:-]*:/[^\s'\"]*[^\s'\".,;:)]")
_HARMLESS: Final = re.compile(
    r"https?://[A-Za-z0-9.\[\]-]*(?::[0-9]+)?(?:[/#][^@?&;%]*)?"
    r"|file://[^@?&;%]*"
    r"|(?:s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9!_.*'()=@+,/-]*)?"
)
"""A page, perhaps with a fragment, a file, or a store that can be opened: neither user, password nor query."""
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_UNITS_S: Final = (7 * 86400, 86400, 3600, 60, 1)


def list_some(names: Sequence[str], limit: int) -> str:
    """Return at most `limit` names, separated by commas, and how many are left out: `a, b, c and 7 more`."""
    left_out = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {left_out} more" if left_out > 0 else "")


def list_lines(lines: Sequence[str], limit: int) -> str:
    """Return at most `limit` lines, each indented below the text before it, and how many are left out."""
    left_out = len(lines) - limit
    shown = [*lines[:limit], *([f"and {left_out} more"] if left_out > 0 else [])]
    return "".join(f"\n  {line}" for line in shown)


def shorten(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; a longer one ends in `...`."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def mask_url(url: str) -> str:
    """Return a URL without what can be a secret: user, password, query and fragment; any other text as it is."""
    found = _URL.match(url)
    if not found:
        return url
    # A password may contain any character, so it ends at the last @ only.
    rest = found[2]
    at = max(rest.rfind("@") + len("@"), rest.rfind("%40") + len("%40") if "%40" in rest else 0)
    user, place = "***@" if at else "", rest[at:]
    end = _PARAMETERS.search(place)
    return found[1] + user + (place if end is None else f"{place[: end.start()]}{end[0]}***")


def mask_urls(text: str) -> str:
    """Return a text in which `mask_url` was applied to each URL that can have a secret."""
    return _URL_IN_TEXT.sub(lambda url: url[0] if _HARMLESS.fullmatch(url[0]) else mask_url(url[0]), text)


def format_bytes(size_bytes: int) -> str:
    """Return a size with three or four digits and a binary unit."""
    size, unit = float(size_bytes), 0
    while abs(size) >= 1000 and unit + 1 < len(_BYTE_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} B" if not unit else f"{size:.{0 if abs(size) >= 100 else 1}f} {_BYTE_UNITS[unit]}"


def format_utc(time_s: float) -> str | None:
    """Return a time as ISO 8601 in UTC, or None if it is no date."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        # A record can contain any number; not every number is a date.
        return None


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 entry, 2 entries, 3 keys, 4 leaves."""
    if noun.endswith("leaf"):
        return f"{number} {noun if number == 1 else noun[:-1] + 'ves'}"
    plural = noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, once. Tracebacks show it from Python 3.11 on; pytest shows it with any Python."""
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list) and text not in notes:
        notes.append(text)


def parse_duration(text: str) -> float:
    """Return a duration such as `7d`, `90m` or `3h50m` in seconds; raises BadName, which is a ValueError."""
    found = _DURATION.fullmatch(text)
    if not found or not text:
        raise BadName(f"{text[:40]!r} is not a duration; write numbers with w, d, h, m or s, such as 7d or 3h50m")
    return float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True)))
