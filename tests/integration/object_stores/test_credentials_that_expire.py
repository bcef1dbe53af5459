"""Credentials that stop working in the middle of a save: from one request on, the server refuses every request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

import holdfast
from holdfast.errors import CommitUnknown, HoldfastError
from tests.kit.s3_server import Fault, Request, S3Server
from tests.unit.objects.cloud.servers import QUICK

REFUSALS: Final[dict[str, Fault]] = {
    "expired token": (400, "ExpiredToken"),
    "revoked key": (403, "InvalidAccessKeyId"),
    "no permission": "403",
}


def make_state(number: int) -> dict[str, Any]:
    """Return a state that shares no chunk with those of other numbers."""
    return {"weight": torch.arange(2000.0) + 3000.0 * number, "step": number}


def equals(loaded: Any, saved: dict[str, Any]) -> bool:
    return bool(loaded["step"] == saved["step"] and torch.equal(loaded["weight"], saved["weight"]))


def save(store: holdfast.Store, state: dict[str, Any]) -> None:
    store.save("run", state, overwrite=True)


def save_behind(store: holdfast.Store, state: dict[str, Any]) -> None:
    store.save_async("run", state, overwrite=True).wait()


def refuse_from(server: S3Server, number: int, fault: Fault) -> list[Request]:
    """Let all requests after the first `number` be refused; return the list of those that are."""
    refused: list[Request] = []
    allowed = iter(range(number))

    def choose(request: Request) -> Fault | None:
        if next(allowed, None) is not None:
            return None
        refused.append(request)
        return fault

    server.fault_of = choose
    return refused


@pytest.mark.slow  # a save, a load and a save again for each request of a save
@pytest.mark.parametrize("act", [save, save_behind])
@pytest.mark.parametrize("refusal", list(REFUSALS))
def test_a_save_whose_credentials_expire_at_any_request_says_so_and_can_be_repeated(
    server: S3Server, act: Callable[[holdfast.Store, dict[str, Any]], None], refusal: str
) -> None:
    store = holdfast.open("s3://bucket/ckpts", storage_options={**server.options, "retry_config": QUICK})
    act(store, make_state(0))
    kept, number = make_state(0), 0
    ends = set()
    while True:
        wanted = make_state(number + 1)
        refused = refuse_from(server, number, REFUSALS[refusal])
        end, told = "saved", "credentials"
        try:
            act(store, wanted)
        except HoldfastError as error:
            end, told = "unknown" if isinstance(error, CommitUnknown) else "failed", str(error)
        assert "credentials" in told
        server.fault_of = lambda request: None
        ends.add(end)

        fresh = holdfast.open("s3://bucket/ckpts", storage_options={**server.options, "retry_config": QUICK})
        loaded = fresh.load("run")
        is_new = equals(loaded, wanted)
        assert is_new or equals(loaded, kept), (number, end)
        assert end == "unknown" or is_new == (end == "saved"), (number, end)
        # The handle goes on once the credentials work again.
        kept = make_state(-number - 1)
        act(store, kept)
        assert equals(fresh.load("run"), kept)
        if not refused:
            break
        number += 1
    assert ends == {"saved", "unknown", "failed"}
    assert number >= 10
    assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []
