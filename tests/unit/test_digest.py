"""The hashes are the published ones, and digests from a store are read strictly."""

from __future__ import annotations

import pytest

from holdfast.digest import authenticate, fingerprint, hash_bytes, hash_kind, parse_digest, short_hex
from holdfast.errors import Corrupt

EMPTY_BLAKE3 = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
KEYED_SECRET = b"whats the Elvish word for friend"
EMPTY_KEYED = "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"
EMPTY_XXH3_128 = "99aa06d3014798d86001c324468d497f"


def test_bytes_are_named_by_their_blake3() -> None:
    assert hash_bytes(b"").hex() == EMPTY_BLAKE3


def test_stored_bytes_are_guarded_by_their_xxh3() -> None:
    assert fingerprint(b"").hex() == EMPTY_XXH3_128


def test_a_content_digest_is_neither_that_of_another_kind_nor_that_of_the_bytes() -> None:
    digests = {hash_kind("entry", [b"same"]), hash_kind("snapshot", [b"same"]), hash_bytes(b"same")}
    assert len(digests) == 3


def test_a_digest_survives_its_hex_form() -> None:
    digest = hash_bytes(b"x")
    assert parse_digest(digest.hex(), where="here") == digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "0" * 63,
        "0" * 65,
        "g" * 64,
        "AB" * 32,
        " " * 64,
        "ab" * 31 + "  ",
        "ab" * 15 + "    " + "ab" * 15,
        "\u0660" * 64,
        None,
        5,
        ["00"],
    ],
)
def test_what_is_no_digest_is_refused_and_located(text: object) -> None:
    with pytest.raises(Corrupt, match=r"record x, field 'digest': .* is not a digest") as caught:
        parse_digest(text, where="record x, field 'digest'")
    assert caught.value.key == "record x, field 'digest'"


def test_messages_show_twelve_digits() -> None:
    assert short_hex(hash_bytes(b"")) == EMPTY_BLAKE3[:12]


def test_what_is_authenticated_depends_on_the_secret_and_the_bytes() -> None:
    secrets = [bytes([number]) * 32 for number in range(2)]
    found = {authenticate(data, secret=secret) for data in (b"", b"a", b"b") for secret in secrets}

    assert len(found) == 6
    assert authenticate(b"", secret=KEYED_SECRET).hex() == EMPTY_KEYED
