"""Builds encoded chunks that a hostile writer could store: right digests around forged chunks of Blosc2."""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from attacks.hostile import Nest
from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import BLOSC2, CHUNK_BYTES, ChunkRef, Location
from holdfast.repo.format.codec import HEADER, CodecLevel, decode_into, encode
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.pack import PackedChunk
from tests.kit.encoded import halves
from tests.kit.forging import forge_manifest, forge_pack
from tests.kit.saving import PACK_ID

RAW: Final = halves(200_000)
MIB: Final = 1 << 20


def make_honest(level: CodecLevel = "small", data: bytes = RAW) -> bytes:
    """Return a chunk as Holdfast encodes it."""
    encoded = encode(memoryview(data), level, 2)
    assert encoded is not None
    return encoded


def change(stored: bytes, at: int, value: int, *, width: str = "<B") -> bytes:
    """Return encoded bytes with another number at an offset."""
    changed = bytearray(stored)
    struct.pack_into(width, changed, at, value)
    return bytes(changed)


def plant(stored: bytes, *, raw_bytes: int = len(RAW), codec: int = BLOSC2) -> Callable[[Nest], None]:
    """Return what adds a snapshot `evil` with one chunk, and a pack that states the same of it."""

    def act(nest: Nest) -> None:
        digest = Digest(hash_bytes(b"what it claims to be"))
        at = Location(PACK_ID, 64, len(stored), codec, fingerprint(stored))
        pack = forge_pack([PackedChunk(digest, raw_bytes, at)], size=64 + len(stored) + -len(stored) % 64)
        nest.put(f"packs/{PACK_ID}", pack[:64] + stored + pack[64 + len(stored) :])
        nest.put_manifest(forge_manifest(entries=[Entry("weights", raw_bytes, (ChunkRef(digest, raw_bytes, at),))]))

    return act


def _tiny_blocks() -> bytes:
    return change(make_honest(), 8, 1, width="<I")


CODEC_ATTACKS: Final[dict[str, Callable[[Nest], None]]] = {
    "an encoded chunk that is other bytes": plant(make_honest()),
    "32 bytes that stand for 1 MiB": plant(make_honest(data=bytes(MIB)), raw_bytes=MIB),
    "an encoded chunk that states 2 GiB": plant(change(make_honest(), 4, 2**31 - 1, width="<I")),
    "an encoded chunk that states 4 GiB in its footer": plant(make_honest(), raw_bytes=2**32 - 1),
    "an encoded chunk of 1 byte by its footer": plant(make_honest(), raw_bytes=1),
    "an encoded chunk that states another stored size": plant(change(make_honest(), 12, 2**31 - 1, width="<I")),
    "blocks of one byte": plant(_tiny_blocks()),
    "blocks of 2 GiB": plant(change(make_honest(), 8, 2**31 - 1, width="<I")),
    "items of 255 bytes": plant(change(make_honest(), 3, 255)),
    "items of no bytes": plant(change(make_honest(), 3, 0)),
    "an unknown codec": plant(make_honest(), codec=3),
    "an unknown compressor": plant(change(make_honest(), 2, 0x65)),
    "a compressor of a plug-in": plant(change(make_honest(), 2, 0xC5)),
    "a filter of a plug-in": plant(change(make_honest(), 21, 34)),
    "a filter of the user": plant(change(make_honest(), 21, 200)),
    "a lazy chunk": plant(change(make_honest(), 31, 8)),
    "a dictionary": plant(change(make_honest(), 31, 1)),
    "memory as it is": plant(change(make_honest(), 31, 0x40)),
    "blocks of different sizes": plant(change(make_honest(), 0, 6)),
    "an encoded chunk that is cut short": plant(make_honest()[:1000]),
    "an encoded chunk that ends after its header": plant(make_honest()[: HEADER.size]),
    "no encoded bytes": plant(b""),
    "a block that starts outside": plant(change(make_honest(), HEADER.size, 2**31 - 1, width="<I")),
    "a block that starts before the chunk": plant(change(make_honest(), HEADER.size, 2**32 - 1, width="<I")),
    "noise after a header": plant(make_honest()[:40] + random.Random(1).randbytes(len(make_honest()) - 40)),
}
"""What each attack plants into a sound store, by the name of the attack."""

_EXTREMES: Final = (0, 1, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 16, 2**32 - 1)


def iter_forged(seed: int, count: int) -> Iterator[bytes]:
    """Yield encoded chunks: every value in every byte of the header, false numbers behind it, random changes."""
    honest = [make_honest(level, data) for level in ("fast", "small") for data in (RAW, RAW[:4096], bytes(8192) + RAW)]
    for stored in honest[:1] + honest[3:4]:
        yield from (change(stored, at, value) for at in range(HEADER.size) for value in range(256))
    for stored in honest:
        yield from (stored[:length] for length in range(min(len(stored), 200)))
        places = range(HEADER.size, min(len(stored) - 4, HEADER.size + 64))
        yield from (change(stored, at, value, width="<I") for at in places for value in _EXTREMES)
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(rng.choice(honest))
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(HEADER.size, len(changed))] = rng.randrange(256)
        yield bytes(changed)


def decode_all(seed: int, count: int) -> tuple[int, float]:
    """Decode forged chunks between guarded bytes; return how many, and the longest time that one took."""
    memory, guard, longest, number = memoryview(bytearray(CHUNK_BYTES + 128)), bytes(64), 0.0, 0
    for stored in iter_forged(seed, count):
        stated = int.from_bytes(stored[4:8], "little")
        for raw_bytes in {len(RAW), min(max(len(stored) + 1, stated), CHUNK_BYTES)}:
            end = 64 + raw_bytes
            memory[end : end + 64] = guard
            started = time.process_time()
            with suppress(Corrupt):
                decode_into(memoryview(stored), memory[64:end])
            longest, number = max(longest, time.process_time() - started), number + 1
            if memory[:64] != guard or memory[end : end + 64] != guard:
                raise SystemExit("bytes outside of the target were written")
    return number, longest


def limit_memory(more_bytes: int) -> None:
    """Let this process have only so many bytes more than now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + more_bytes, now_bytes + more_bytes))


if __name__ == "__main__":
    make_honest()  # so that the library is loaded
    limit_memory(64 << 20)
    decoded, longest_s = decode_all(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(f"{decoded} {longest_s}")
