"""Who may ask: the token, the host, the origin."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName
from holdfast.serving.server import make_access, verify_host

ACCESS = make_access("secret", "127.0.0.1", 8080)
GOOD = {"Host": "127.0.0.1:8080", "Authorization": "Bearer secret"}


def test_a_request_with_host_and_token_is_answered() -> None:
    assert ACCESS.check(GOOD, needs_token=True) is None
    assert (
        ACCESS.check(GOOD | {"Origin": "http://localhost:8080", "Sec-Fetch-Site": "same-origin"}, needs_token=True)
        is None
    )


@pytest.mark.parametrize("token", ["", "Bearer ", "Bearer wrong", "secret", "bearer secret", "Bearer secret\udc80"])
def test_a_wrong_token_is_refused(token: str) -> None:
    found = ACCESS.check(GOOD | {"Authorization": token}, needs_token=True)

    assert found is not None
    assert found.status == 401
    assert "holdfast serve" in found.sentence


@pytest.mark.parametrize(
    "host", ["", "evil.example:8080", "127.0.0.1", "127.0.0.1:8081", "localhost.evil.example:8080"]
)
def test_another_host_is_refused_even_for_the_page(host: str) -> None:
    # After DNS rebinding, the browser sends the name that the attacker's page was loaded under.
    for needs_token in (True, False):
        found = ACCESS.check(GOOD | {"Host": host}, needs_token=needs_token)
        assert found is not None
        assert found.status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:8080"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_a_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    found = ACCESS.check(GOOD | headers, needs_token=True)

    assert found is not None
    assert found.status == 403


def test_every_name_of_loopback_is_accepted_and_no_other_for_a_given_address() -> None:
    assert "[::1]:8080" in ACCESS.hosts
    assert make_access("t", "10.0.0.7", 8080).hosts == {"10.0.0.7:8080"}


def test_browsers_leave_out_port_80() -> None:
    access = make_access("secret", "127.0.0.1", 80)

    assert access.check(GOOD | {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"}, needs_token=True) is None
    assert access.check(GOOD | {"Host": "[::1]"}, needs_token=True) is None
    assert access.check(GOOD | {"Host": "evil.example"}, needs_token=True) is not None


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("127.1", "127.0.0.1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("FD00::0001", "fd00::1"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("some.name", "some.name"),
    ],
)
def test_an_address_is_written_as_browsers_write_it(host: str, written: str) -> None:
    assert verify_host(host) == written


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "0x0", "0.0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"])
def test_listening_everywhere_is_refused(host: str) -> None:
    with pytest.raises(BadName, match="name one address"):
        verify_host(host)
