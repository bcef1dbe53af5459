"""Decides whether a request may be answered: the token, the Host header, and where the browser says it comes from."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from holdfast.errors import BadName

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_HTTP_PORT: Final = 80
_OWN_SITE: Final = ("same-origin", "none")
"""Values of Sec-Fetch-Site for a request by the page itself, and for one that the user typed."""
_BEARER: Final = "Bearer "


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered: an HTTP status, and a sentence."""

    status: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: requests to one of these hosts, and for data, with the token."""

    token: str
    hosts: frozenset[str]
    """Values of the Host header, each an address and the port. Any other value may be a rebound DNS name."""

    def check(self, headers: Mapping[str, str], *, needs_token: bool) -> Refusal | None:
        """Return why a request is refused, or None if it is not."""
        if headers.get("Host", "").lower() not in self.hosts:
            return Refusal(421, "This server answers only under the address that `holdfast serve` printed.")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return Refusal(403, "Pages of other sites may not read this store.")
        if not needs_token:
            return None
        if headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE:
            return Refusal(403, "Pages of other sites may not read this store.")
        given = headers.get("Authorization", "")
        expected = _BEARER + self.token
        # Compared as bytes, in constant time: a header may contain any character.
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()):
            return Refusal(401, "The token is missing or wrong: open the address that `holdfast serve` printed.")
        return None


def make_access(token: str, host: str, port: int) -> Access:
    """Return the access rules of a server that listens at an address and port."""
    names = [bracket(name).lower() for name in (LOOPBACK if host in LOOPBACK else (host,))]
    hosts = {f"{name}:{port}" for name in names}
    # Browsers leave out the port of plain HTTP.
    return Access(token, frozenset(hosts.union(names) if port == _HTTP_PORT else hosts))


def verify_host(host: str) -> str:
    """Return an address to listen on, as browsers write it; raises BadName for one that stands for all addresses."""
    address = _find_address(host)
    if not host or (address is not None and _is_everywhere(address)):
        raise BadName(
            f"{host!r} stands for every address of this machine, and the server must know under which it is asked:"
            " name one address"
        )
    # A scope, as in fe80::1%eth0, is not part of the address.
    return host if address is None or "%" in host else str(address)


def _find_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return a numeric address in any notation that sockets take, such as 127.1 or ::0; None for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError):
        return None


def _is_everywhere(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def bracket(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
