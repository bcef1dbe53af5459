"""Builds deltas that a hostile writer could store: on bases that are missing, of another length, or deltas, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from attacks.hostile import Nest
from attacks.hostile_codecs import change
from holdfast.digest import DIGEST_BYTES, Digest, fingerprint, hash_bytes
from holdfast.repo.format.chunk import BLOSC2, DELTA, RAW, Base, ChunkRef, Location
from holdfast.repo.format.codec import encode, encode_delta
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.pack import PackedChunk
from tests.kit.deltas import trained
from tests.kit.forging import forge_manifest, forge_pack
from tests.kit.saving import PACK_ID

SIZE: Final = 200_000
BASE: Final = trained(0, SIZE)
CHUNK: Final = trained(1, SIZE)
CLAIM: Final = hash_bytes(b"what it claims to be")
GONE: Final = f"{'7' * 24}-{'7' * 16}"
_STATED: Final = DIGEST_BYTES + 4
"""Offset of the raw length in a delta."""


class Stored(NamedTuple):
    """Bytes in a pack, and what its footer states of them."""

    digest: Digest
    data: bytes
    codec: int
    raw_bytes: int = SIZE


def make_delta(data: bytes = CHUNK, base: bytes = BASE) -> bytes:
    """Return a delta as Holdfast encodes it."""
    stored = encode_delta(memoryview(data), memoryview(base), hash_bytes(base), "small", 2)
    assert stored is not None
    return stored


def make_base(data: bytes = BASE) -> Stored:
    """Return a base as Holdfast stores it."""
    encoded = encode(memoryview(data), "small", 2)
    assert encoded is not None
    return Stored(hash_bytes(data), encoded, BLOSC2, len(data))


def locate(chunks: Sequence[Stored]) -> list[Location]:
    """Return where chunks are in the pack that contains them one after the other."""
    found, end = [], 64
    for chunk in chunks:
        found.append(Location(PACK_ID, end, len(chunk.data), chunk.codec, fingerprint(chunk.data)))
        end += len(chunk.data) + -len(chunk.data) % 64
    return found


def plant(
    chunks: Sequence[Stored],
    *,
    base: Base | str | None = "first",
    changes: dict[str, Sequence[int]] | None = None,
) -> Callable[[Nest], None]:
    """Return what adds a pack of chunks, and a snapshot `evil` whose only chunk is the last of them, a delta.

    Its manifest states the `base`, by default the first chunk; `changes` replace whole columns of it.
    """

    def act(nest: Nest) -> None:
        places = locate(chunks)
        rows = [PackedChunk(chunk.digest, chunk.raw_bytes, at) for chunk, at in zip(chunks, places, strict=True)]
        size = places[-1].offset + len(chunks[-1].data)
        pack = bytearray(forge_pack(rows, size=size + -size % 64))
        for chunk, at in zip(chunks, places, strict=True):
            pack[at.offset : at.offset + len(chunk.data)] = chunk.data
        nest.put(f"packs/{PACK_ID}", bytes(pack))
        stated = Base(chunks[0].digest, places[0]) if isinstance(base, str) else base
        last = chunks[-1]
        ref = ChunkRef(last.digest, last.raw_bytes, places[-1]._replace(base=stated))
        nest.put_manifest(forge_manifest(entries=[Entry("weights", last.raw_bytes, (ref,))], changes=changes))

    return act


def _plant_evil(stored: bytes, *, raw_bytes: int = SIZE, **options: object) -> Callable[[Nest], None]:
    """Return what plants a delta of these bytes on an honest base."""
    return plant([make_base(), Stored(CLAIM, stored, DELTA, raw_bytes)], **options)  # type: ignore[arg-type]


def _find_base() -> Location:
    return locate([make_base()])[0]


_ITSELF: Final = Stored(hash_bytes(CHUNK), hash_bytes(CHUNK) + make_delta()[DIGEST_BYTES:], DELTA)
_FIRST: Final = Stored(hash_bytes(BASE), make_delta(BASE, CHUNK), DELTA)
_SECOND: Final = Stored(hash_bytes(CHUNK), make_delta(), DELTA)
_ZEROS: Final = bytes(1 << 20)
_HONEST_BASE: Final = Base(hash_bytes(BASE), _find_base())

DELTA_ATTACKS: Final[dict[str, Callable[[Nest], None]]] = {
    "a delta that gives other bytes": _plant_evil(make_delta()),
    "a delta of zeros that stands for 1 MiB": _plant_evil(make_delta(_ZEROS, _ZEROS), raw_bytes=1 << 20),
    "a delta that states 2 GiB": _plant_evil(change(make_delta(), _STATED, 2**31 - 1, width="<I")),
    "a delta that is cut short": _plant_evil(make_delta()[:1000]),
    "a delta that ends after the digest of its base": _plant_evil(make_delta()[:DIGEST_BYTES]),
    "a delta of one byte": _plant_evil(b"x"),
    "a delta that names another base than its manifest": _plant_evil(bytes(DIGEST_BYTES) + make_delta()[DIGEST_BYTES:]),
    "a delta without a base": plant([_SECOND], base=None),
    "a delta on itself": plant([_ITSELF], base=Base(_ITSELF.digest, locate([_ITSELF])[0]._replace(codec=BLOSC2))),
    "a base that is stated as a delta": plant([_FIRST, _SECOND]),
    "two deltas on each other": plant(
        [_FIRST, _SECOND], base=Base(_FIRST.digest, locate([_FIRST])[0]._replace(codec=BLOSC2))
    ),
    "a base in a pack that is gone": plant(
        [_SECOND], base=_HONEST_BASE._replace(location=_find_base()._replace(pack_id=GONE))
    ),
    "a base of another length": plant([make_base(BASE[:-2]), Stored(CLAIM, make_delta(), DELTA)]),
    "a raw base of another length": plant(
        [make_base(), Stored(CLAIM, make_delta(), DELTA)],
        base=_HONEST_BASE._replace(location=_find_base()._replace(codec=RAW)),
    ),
    "a base beyond its pack": plant(
        [make_base(), Stored(CLAIM, make_delta(), DELTA)],
        base=_HONEST_BASE._replace(location=_find_base()._replace(offset=1 << 40)),
    ),
    "a base of an unknown codec": plant(
        [make_base(), Stored(CLAIM, make_delta(), DELTA)],
        base=_HONEST_BASE._replace(location=_find_base()._replace(codec=9)),
    ),
    "a base in a pack that is not listed": _plant_evil(make_delta(), changes={"base_pack": [2**32 - 1]}),
    "more bases than deltas": _plant_evil(make_delta(), changes={"base_pack": [0, 0]}),
    "fewer bases than deltas": _plant_evil(make_delta(), changes={"base_digest": []}),
}
"""What each attack plants into a sound store, by the name of the attack."""
