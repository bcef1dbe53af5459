"""What the server of a bucket can do: found by reading alone, or with scratch objects that are deleted again."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreError
from holdfast.objects.cloud.probe import probe_bucket
from tests.kit.s3_server import Fault, S3Server
from tests.unit.objects.cloud.servers import open_cloud


def test_without_write_nothing_is_created(server: S3Server) -> None:
    facts = probe_bucket(open_cloud(server))

    assert {request.kind for request in server.requests} == {"LIST"}
    assert (facts.service, facts.tried, facts.writable) == ("s3", False, None)
    assert facts.request_ms > 0


def test_a_good_server_can_do_everything_and_is_left_as_it_was(server: S3Server) -> None:
    facts = probe_bucket(open_cloud(server), write=True)

    assert facts.writable
    assert facts.conditional_create
    assert facts.ranges
    assert facts.checksums
    assert facts.listed
    assert facts.deletable
    assert facts.skew_s == 0.0
    assert server.objects == {}


def test_a_server_that_ignores_conditions_and_checksums_is_found(server: S3Server) -> None:
    server.ignores_conditions = server.ignores_checksums = True

    facts = probe_bucket(open_cloud(server), write=True)

    assert facts.conditional_create is False
    assert facts.checksums is False
    assert server.objects == {}


@pytest.mark.parametrize("skew_s", [-4000.0, 4000.0])
def test_the_difference_of_the_clocks_is_found(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s

    facts = probe_bucket(open_cloud(server), write=True)

    assert facts.skew_s is not None
    assert abs(facts.skew_s - skew_s) < 30


def refuse(server: S3Server, kind: str, fault: Fault) -> None:
    server.fault_of = lambda request: fault if request.kind == kind else None


def test_a_bucket_without_permission_to_write_says_why(server: S3Server) -> None:
    refuse(server, "PUT", "403")

    facts = probe_bucket(open_cloud(server), write=True)

    assert facts.writable is False
    assert "credentials do not allow this" in facts.refusal


def test_a_bucket_without_permission_to_delete_is_found(server: S3Server) -> None:
    refuse(server, "DELETE", "403")

    facts = probe_bucket(open_cloud(server), write=True)

    assert facts.writable
    assert facts.deletable is False


def test_a_server_without_ranges_is_found(server: S3Server) -> None:
    refuse(server, "GET", (400, "NotImplemented"))

    assert probe_bucket(open_cloud(server), write=True).ranges is False


def test_a_bucket_that_cannot_be_listed_is_an_error(server: S3Server) -> None:
    refuse(server, "LIST", "403")

    with pytest.raises(StoreError, match="credentials do not allow this"):
        probe_bucket(open_cloud(server), write=True)
