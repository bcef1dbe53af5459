"""Saving chunks with digests in the background: the caller copies what the store lacks, and never waits in vain."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import NameInUse
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request
from holdfast.snapshot.save import staging
from holdfast.snapshot.save.staging import AsyncSaver
from tests.kit.saving import load_bytes, new_repo, noise


def make_request(name: str, on_device: bytes, on_host: bytes) -> Request:
    """Return a request of two sources of one chunk each; that of the first has a digest."""
    sources = [BytesSource("device", on_device), BytesSource("host", on_host)]
    return Request(name, sources, digests={0: [hash_bytes(on_device)]})


def test_a_name_that_another_process_takes_at_the_last_moment_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo, saver = new_repo(), AsyncSaver()
    saver.start(repo, make_request("x", noise(5000), noise(5000, 1)), staging="full").wait()
    # As if the name had been free when the caller decided that one pass suffices.
    monkeypatch.setattr(staging, "_needs_two_passes", lambda *_: False)

    same = saver.start(repo, make_request("x", noise(5000), noise(5000, 1)), staging="budget")
    assert same.wait().existed

    other = saver.start(repo, make_request("x", noise(5000), noise(5000, 2)), staging="budget")
    with pytest.raises(NameInUse):
        other.wait()
    assert load_bytes(repo, "x") == {"device": noise(5000), "host": noise(5000, 1)}
