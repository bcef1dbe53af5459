"""Every key of the format and the rules for names; no other module builds a key."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.digest import DIGEST_BYTES, Digest, hash_bytes
from holdfast.errors import BadName, Corrupt
from holdfast.texts import mask_url

CONFIG: Final = "config/"
PACKS: Final = "packs/"
MANIFESTS: Final = "manifests/"
SNAPSHOTS: Final = "snapshots/"
TAGS: Final = "tags/"
LEASES: Final = "leases/"
MARKS: Final = "marks/"
BAD: Final = "bad/"
INDEX: Final = "index/"
PREFIXES: Final = (CONFIG, PACKS, MANIFESTS, SNAPSHOTS, TAGS, LEASES, MARKS, BAD, INDEX)
SHELVES: Final = tuple(f"{SNAPSHOTS}{number:02x}/" for number in range(32))
"""Snapshot records are spread over these directories, because finding a name means listing its directory."""

MAX_NAME_BYTES: Final = 4096
MAX_ESCAPED_BYTES: Final = 200
MAX_GENERATION: Final = 99_999_999
RESERVED: Final = "@"
"""Prefix of Holdfast's own names, such as those of compiled graphs, which users cannot save or list."""

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._-")
_ESCAPES: Final = tuple(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in range(256))
# An escaped name never holds "%_", so the digest form of a long name cannot be mistaken for one.
_DIGEST_FORM: Final = "%_"
_GENERATION: Final = re.compile(r"[0-9]{8}\Z")
_FILE_ID: Final = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}\Z")
_LEASE_ID: Final = re.compile(r"[0-9a-f]{24}\Z")
_LEASE_ID_CHARS: Final = 24
_FILE_ID_CHARS: Final = _LEASE_ID_CHARS + 1 + 16
_DIGITS: Final = re.compile(r"([0-9]+)")
_MAX_PART_BYTES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A reference to a manifest, with the digest and size of its file."""

    manifest_id: str
    digest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartRef:
    """A reference from the root of a snapshot to one of its parts."""

    manifest: ManifestRef
    digest: Digest
    """The content digest of the part."""

    def to_json(self) -> list[str | int]:
        """Return the reference as stored in a root."""
        return [self.manifest.manifest_id, self.manifest.digest.hex(), self.manifest.size_bytes, self.digest.hex()]


def parse_part(value: object, *, where: str) -> PartRef:
    """Parse a reference as stored in a root; raises Corrupt."""
    try:
        if not isinstance(value, list):
            raise TypeError
        manifest_id, digest, size_bytes, content = value
        if not (is_file_id(manifest_id) and type(size_bytes) is int and 0 < size_bytes < _MAX_PART_BYTES):
            raise ValueError
        manifest_digest, content_digest = bytes.fromhex(digest), bytes.fromhex(content)
        if {len(manifest_digest), len(content_digest)} != {DIGEST_BYTES}:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise Corrupt(f"{where}: a part is malformed", key=where) from error
    return PartRef(ManifestRef(manifest_id, Digest(manifest_digest), size_bytes), Digest(content_digest))


def verify_name(name: str, *, what: str = "snapshot") -> str:
    """Return `name` in NFC; raises BadName, which states the rule that it breaks."""
    why = _name_fault(name)
    if why:
        raise BadName(f"{what} name {mask_url(name)[:80]!r} is refused: {why}")
    return unicodedata.normalize("NFC", name)


def is_reserved(name: str) -> bool:
    """Return whether a name, or a prefix of names, is one of Holdfast's own."""
    return name.startswith(RESERVED)


def is_reserved_stem(stem: str) -> bool:
    """Return whether a snapshot's stem has one of Holdfast's own names; False for a name too long to be in the stem."""
    return split_stem(stem).startswith(_ESCAPES[ord(RESERVED)])


def verify_user_name(name: str, *, what: str = "snapshot") -> str:
    """Return `name` in NFC; raises BadName if it breaks a rule or is reserved for Holdfast."""
    if type(name) is not str:
        raise BadName(f"a {what} name is a text such as 'step-3', not the {type(name).__name__} {name!r}")
    if is_reserved(name):
        raise BadName(
            f"{what} name {name[:80]!r} is refused: names that begin with {RESERVED!r} are Holdfast's own;"
            " choose another"
        )
    return verify_name(name, what=what)


def _name_fault(name: str) -> str:
    """Return the rule that `name` breaks, or an empty string."""
    if not name:
        return "it is empty"
    try:
        encoded = unicodedata.normalize("NFC", name).encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if len(encoded) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        return "it contains control characters"
    if "\\" in name:
        return "it contains a backslash; use '/'"
    parts = name.split("/")
    if "" in parts:
        return "it begins or ends with '/', or has '//' in it"
    if "." in parts or ".." in parts:
        return "it has '.' or '..' between slashes"
    return ""


def escape_name(name: str) -> str:
    """Turn a verified name into one key component that is the same on every filesystem."""
    # Not every name here was verified: a name that is only searched for may contain surrogates.
    encoded = name.encode(errors="surrogatepass")
    text = "".join(map(_ESCAPES.__getitem__, encoded))
    if text.startswith("."):
        text = "%2e" + text[1:]
    return text if len(text) <= MAX_ESCAPED_BYTES else _DIGEST_FORM + hash_bytes(encoded).hex()


def escape_prefix(prefix: str) -> str:
    """Turn the start of a name into the start of its escaped form; empty, which matches any name, if it is too long."""
    text = escape_name(prefix) if prefix else ""
    return "" if text.startswith(_DIGEST_FORM) else text


def may_start_with(stem: str, prefix: str) -> bool:
    """Return whether the name at a snapshot's stem may start with `prefix`; only its record is certain."""
    return make_stem_filter(prefix)(stem)


def make_stem_filter(prefix: str) -> Callable[[str], bool]:
    """Return `may_start_with` for one prefix and many stems."""
    # A stem in digest form may have any name, even if the prefix is short.
    starts = (escape_prefix(prefix), _DIGEST_FORM)
    return lambda stem: split_stem(stem).startswith(starts)


def split_stem(stem: str) -> str:
    """Return the escaped name in a stem."""
    return stem.rpartition("/")[2]


def split_prefix(name: str) -> str:
    """Return a name up to and including its last slash; empty if it has none."""
    return name[: name.rfind("/") + 1]


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which step-99 comes before step-100."""
    # Odd positions are what the pattern matched. Digits of other scripts, which int() may refuse, stay text.
    parts = enumerate(_DIGITS.split(name))
    return tuple((1, int(part), part) if position % 2 else (0, 0, part) for position, part in parts)


def snapshot_stem(name: str) -> str:
    """Return the key of a snapshot without its generation."""
    escaped = escape_name(name)
    return _shelve(escaped) + escaped


def find_shelf(name: str) -> str:
    """Return the shelf, a key prefix, that contains a snapshot's records."""
    return _shelve(escape_name(name))


def _shelve(escaped: str) -> str:
    # From the escaped name, so that a key alone shows whether it is on the right shelf.
    return SHELVES[hash_bytes(escaped.encode())[0] % len(SHELVES)]


def tag_stem(name: str) -> str:
    """Return the key of a tag without its generation."""
    return TAGS + escape_name(name)


def lease_stem(lease_id: str) -> str:
    """Return the key of a lease without its generation."""
    return LEASES + lease_id


def generation_key(stem: str, generation: int) -> str:
    """Return the key of one generation; generations of one stem sort by number."""
    if not 0 <= generation <= MAX_GENERATION:
        raise BadName(f"{stem} has used up its {MAX_GENERATION} generations; use another name")
    return f"{stem}{generation:08d}" if stem.endswith("/") else f"{stem}@{generation:08d}"


def split_generation(key: str) -> tuple[str, int] | None:
    """Split a key into stem and generation; return None if it does not have that form."""
    prefix, _, last = key.rpartition("/")
    stem, at, number = last.rpartition("@")
    is_config = prefix + "/" == CONFIG
    if not _GENERATION.match(number) or bool(at) == is_config or bool(stem) == is_config:
        return None
    return f"{prefix}/{stem}", int(number)


def pack_key(pack_id: str) -> str:
    """Return the key of a pack."""
    return PACKS + pack_id


def manifest_key(manifest_id: str) -> str:
    """Return the key of a manifest."""
    return MANIFESTS + manifest_id


def index_key(digest_hex: str) -> str:
    """Return the key of an index fragment."""
    return INDEX + digest_hex


def new_lease_id() -> str:
    """Return a random lease id."""
    return os.urandom(12).hex()


def new_file_id(lease_id: str) -> str:
    """Return a random id for a pack or manifest; it contains the lease id, so that a collector knows its writer."""
    return f"{lease_id}-{os.urandom(8).hex()}"


def new_write_id() -> str:
    """Return a random id that makes a record unique, so that its writer can recognize it."""
    # os.urandom and not secrets: that loads hmac and hashlib, which costs the command line 6 ms.
    return os.urandom(16).hex()


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of a pack or manifest id."""
    return bool(_FILE_ID.match(text))


def parse_file_key(key: str) -> str | None:
    """Return the id in the key of a pack or manifest; None for any other key, which is never swept."""
    prefix, slash, file_id = key.partition("/")
    return file_id if prefix + slash in (PACKS, MANIFESTS) and is_file_id(file_id) else None


def are_file_ids(texts: Sequence[str]) -> bool:
    """Return whether each of `texts` is a file id; checks all at once, because an index names thousands."""
    joined, dashes = "".join(texts), "-" * len(texts)
    if not set(map(len, texts)) <= {_FILE_ID_CHARS} or joined[_LEASE_ID_CHARS::_FILE_ID_CHARS] != dashes:
        return False
    # Every dash is in its place, so any other character that is not a hex digit would be left over.
    return joined.encode(errors="replace").translate(None, b"0123456789abcdef") == dashes.encode()


def is_lease_id(text: str) -> bool:
    """Return whether `text` has the form of a lease id."""
    return bool(_LEASE_ID.match(text))
