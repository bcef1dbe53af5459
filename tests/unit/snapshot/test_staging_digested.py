"""Saving chunks with digests in the background: the caller copies what the store lacks, and never waits in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import NameInUse
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request
from holdfast.snapshot import staging
from holdfast.snapshot.staging import AsyncSaver, Staging
from tests.kit.hooking import hooked
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


@pytest.mark.parametrize("has_digests", [True, False], ids=["with digests", "without"])
@pytest.mark.parametrize("way", ["full", "budget"])
def test_an_interrupt_while_the_thread_starts_leaves_no_thread_that_waits(way: Staging, has_digests: bool) -> None:
    repo, saver = new_repo(), AsyncSaver()
    request = make_request("x", noise(5000), noise(5000, 1))
    request = request if has_digests else replace(request, digests={})
    start = BackgroundThread.start

    def start_and_interrupt(self: BackgroundThread) -> None:
        start(self)
        raise KeyboardInterrupt

    with hooked(BackgroundThread, "start", start_and_interrupt), pytest.raises(KeyboardInterrupt):
        saver.start(repo, request, staging=way)

    saver.start(repo, replace(request, name="y"), staging=way).wait()

    assert load_bytes(repo, "y") == {"device": noise(5000), "host": noise(5000, 1)}
