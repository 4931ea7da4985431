"""The origin of a request: its sender's address, and whether the sender used HTTPS. Pure.

Behind a proxy both come from headers that anyone can send, so only headers set by a trusted proxy
count.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec

from ..base.http import TOKEN, Headers
from ..config.fields import ForwardedHeaders
from ..errors import OptionsValidationError, Problem


def source_of(address: str | None) -> str | int | None:
    """Return the key by which a source is counted: its IPv4 address, or the /64 of its IPv6
    address."""
    if address is None or ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else int(parsed) >> 64


#: The word in TrustedProxies for the peer of a unix socket, which has no address.
UNIX: Final = "unix"

#: The longest text that is an address: IPv6 with an IPv4 tail, a zone, brackets and a port.
_MAX_ADDRESS_LENGTH: Final = 80
#: The longest forwarding list that is read, in characters: enough for over forty proxies. A sender
#: may put anything before the first proxy's entry, and reading a whole large head would cost more
#: than the rest of a delivery. A longer list proves nothing.
_MAX_FORWARDING_LENGTH: Final = 2048
_IPV4_IN_IPV6: Final = IPv6Network("::ffff:0:0/96")

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network


class RequestOrigin(msgspec.Struct, frozen=True):
    """The sender of a request, as the checks of rate, source and HTTPS see it.

    ``address`` is the sender's IP address in its usual spelling (IPv4 in IPv6 as IPv4), or None
    when it cannot be known: a unix socket, or a trusted proxy that hides it. ``secure`` is whether
    the sender itself used HTTPS.
    """

    address: str | None
    secure: bool


@lru_cache(maxsize=1024)
def _parse_short_address(text: str) -> _Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _parse_address(text: str) -> _Address | None:
    # The length is checked before the cache, so that the cache is bounded in size, not only in
    # number of entries.
    return _parse_short_address(text) if len(text) <= _MAX_ADDRESS_LENGTH else None


def _parse_networks(key: str, texts: Iterable[str]) -> tuple[_Network, ...]:
    networks: list[_Network] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            networks.append(_unmapped(ip_network(text)))
        except ValueError as error:
            problems.append(
                Problem(key, f"{error}; write an address or a block such as 10.0.0.0/8")
            )
    if problems:
        raise OptionsValidationError(problems)
    return tuple(networks)


def _unmapped(network: _Network) -> _Network:
    """Return an IPv4 block that was written as IPv6 (``::ffff:10.0.0.0/104``) as IPv4.

    A socket that serves both families reports IPv4 peers so, and operators copy that into settings.
    """
    if isinstance(network, IPv6Network) and network.subnet_of(_IPV4_IN_IPV6):
        mapped = network.network_address.ipv4_mapped
        return IPv4Network((int(mapped or 0), network.prefixlen - 96))
    return network


def _contains(networks: tuple[_Network, ...], address: _Address) -> bool:
    return any(address in network for network in networks)


@lru_cache(maxsize=1024)
def _direct_origin(peer_host: str | None, scheme: str) -> RequestOrigin:
    """Return the origin without trusted proxies: the peer, whatever the headers claim."""
    peer = _parse_address(peer_host) if peer_host else None
    return RequestOrigin(
        str(peer) if peer is not None else (peer_host or None), _is_encrypted(scheme)
    )


def _is_encrypted(scheme: str) -> bool:
    return scheme in ("https", "wss")


class _GarbageError(ValueError):
    """The part that a trusted proxy vouches for cannot be read."""


class _ContradictionError(_GarbageError):
    """The two families of headers disagree: the sender may have set one of them."""


class _Sender(msgspec.Struct, frozen=True):
    """The machine that a proxy names as its sender; ``address`` is None if the proxy hides it."""

    address: _Address | None


class _Reading(msgspec.Struct, frozen=True):
    """The claims of one family of headers: ``sender`` and ``protocol``, None where absent."""

    sender: _Sender | None
    protocol: str | None


class TrustedProxies:
    """The proxies whose forwarding headers are believed (``Sdk:Server:TrustedProxies``).

    Args:
        cidrs: addresses and CIDR blocks, IPv4 and IPv6; ``unix`` stands for the peer of a unix
            socket.
        family: which headers are read (``Sdk:Server:ForwardedHeaders``).
        on_contradiction: called with the peer's address the first time that the two families
            contradict each other.

    Raises:
        OptionsValidationError: some are neither; each is listed.
    """

    __slots__ = ("_family", "_networks", "_on_contradiction", "_unix")

    def __init__(
        self,
        cidrs: Sequence[str],
        family: ForwardedHeaders = ForwardedHeaders.AUTO,
        on_contradiction: Callable[[str | None], object] | None = None,
    ) -> None:
        self._family = family
        self._on_contradiction = on_contradiction
        self._unix = UNIX in cidrs
        self._networks = _parse_networks(
            "Sdk:Server:TrustedProxies", (text for text in cidrs if text != UNIX)
        )

    def resolve(self, peer_host: str | None, scheme: str, headers: Headers) -> RequestOrigin:
        """Return the sender of a request, and whether it used HTTPS.

        ``X-Forwarded-Proto: https, http`` is read at the entry of the outermost trusted proxy,
        because only that proxy saw the sender's connection. A single entry was written or passed on
        by a trusted proxy and counts for all. Lines of a repeated header are joined. If the trusted
        part cannot be read, the origin is the peer, not secure; likewise if ``Forwarded`` and
        ``X-Forwarded-*`` both came and disagree, as one may be the sender's own.

        Args:
            peer_host: the address of the socket's peer; None or empty for a unix socket.
            scheme: ``https`` if the socket itself is encrypted, as in the ASGI scope.
            headers: the request's headers as ASGI gives them.

        Never raises, whatever the headers contain.
        """
        if not (self._networks or self._unix):
            return _direct_origin(peer_host, scheme)
        direct = _is_encrypted(scheme)
        peer = _parse_address(peer_host) if peer_host else None
        peer_text = str(peer) if peer is not None else (peer_host or None)
        if not self._trusts(peer_host, peer):
            return RequestOrigin(peer_text, direct)
        try:
            reading = self._read(_forwarding_headers(headers))
        except _GarbageError as error:
            if isinstance(error, _ContradictionError) and self._on_contradiction is not None:
                report, self._on_contradiction = self._on_contradiction, None
                report(peer_text)
            return RequestOrigin(peer_text, secure=False)
        secure = direct if reading.protocol is None else reading.protocol == "https"
        if reading.sender is None:
            return RequestOrigin(peer_text, secure)
        address = reading.sender.address
        return RequestOrigin(None if address is None else str(address), secure)

    def trusts(self, peer_host: str | None) -> bool:
        """Return whether the peer of a socket is a trusted proxy; None or empty for a unix
        socket."""
        return self._trusts(peer_host, _parse_address(peer_host) if peer_host else None)

    def _trusts(self, peer_host: str | None, peer: _Address | None) -> bool:
        if not peer_host:
            return self._unix
        return peer is not None and _contains(self._networks, peer)

    def _is_proxy(self, sender: _Sender) -> bool:
        return sender.address is not None and _contains(self._networks, sender.address)

    def _read(self, joined: dict[bytes, str]) -> _Reading:
        readings: list[_Reading] = []
        if self._family is not ForwardedHeaders.X_FORWARDED and _entries(
            joined.get(_FORWARDED, "")
        ):
            readings.append(self._read_forwarded(joined[_FORWARDED]))
        senders, protocols = joined.get(_FOR, ""), joined.get(_PROTO, "")
        if self._family is not ForwardedHeaders.FORWARDED and (
            _entries(senders) or _entries(protocols)
        ):
            readings.append(self._read_x_forwarded(senders, protocols))
        if not readings:
            return _Reading(None, None)
        # A missing claim contradicts a claim of the other family. Otherwise a proxy that sets only
        # X-Forwarded-For would vouch for the sender's own ``Forwarded: proto=https``.
        if readings[0] != readings[-1]:
            raise _ContradictionError
        return readings[0]

    def _read_forwarded(self, text: str) -> _Reading:
        sender: _Sender | None = None
        protocol: str | None = None
        for element in _elements_from_right(text):
            pairs = _parse_pairs(element)
            protocol = _parse_protocol(pairs["proto"]) if "proto" in pairs else None
            if "for" not in pairs:
                break
            sender = _parse_sender(pairs["for"])
            if not self._is_proxy(sender):
                break
        return _Reading(sender, protocol)

    def _read_x_forwarded(self, senders: str, protocols: str) -> _Reading:
        sender: _Sender | None = None
        hops = 0
        for entry in reversed(_entries(senders)):
            sender = _parse_sender(entry)
            hops += 1
            if not self._is_proxy(sender):
                break
        # Without X-Forwarded-For only the entry that the peer itself wrote can be trusted.
        return _Reading(sender, _vouched_protocol(_entries(protocols), max(1, hops)))


class AllowedSources:
    """The addresses that may deliver (``Sdk:Webhooks:AllowedSourceIpRanges``); if none are given,
    all may.

    Args:
        cidrs: addresses and CIDR blocks, IPv4 and IPv6.

    Raises:
        OptionsValidationError: some are neither; each is listed.
    """

    __slots__ = ("_networks",)

    def __init__(self, cidrs: Sequence[str]) -> None:
        self._networks = _parse_networks("Sdk:Webhooks:AllowedSourceIpRanges", cidrs)

    def allows(self, address: str | None) -> bool:
        """Return whether a sender may deliver, by its :attr:`RequestOrigin.address`.

        If ranges are given, an unknown address (None) or one that is not an IP address is refused.
        """
        if not self._networks:
            return True
        parsed = None if address is None else _parse_address(address)
        return parsed is not None and _contains(self._networks, parsed)


_FORWARDED: Final = b"forwarded"
_FOR: Final = b"x-forwarded-for"
_PROTO: Final = b"x-forwarded-proto"
#: The headers that an origin depends on.
ORIGIN_HEADERS: Final = frozenset({_FORWARDED, _FOR, _PROTO})

#: One ``name=value`` of a Forwarded element (RFC 7239, 4). Unquoted colons are read as well: the
#: grammar requires quotes around them, and many proxies omit these.
_match_pair = re.compile(
    r"[ \t]*(" + TOKEN + r""")=(?:"([^"\\]*)"|([^",; \t]+))[ \t]*(?:;|$)"""
).match
#: An address in brackets, or IPv4, and an optional port (a number or an obfuscated one).
_match_with_port = re.compile(r"(?:\[([^\]]*)\]|([0-9.]+))(?::(?:\d{1,5}|_[\w.-]+))?").fullmatch


def _forwarding_headers(headers: Headers) -> dict[bytes, str]:
    joined: dict[bytes, str] = {}
    for name, value in headers:
        name = name.lower()
        if name in ORIGIN_HEADERS:
            text = value.decode("latin-1")
            joined[name] = f"{joined[name]},{text}" if name in joined else text
            if len(joined[name]) > _MAX_FORWARDING_LENGTH:
                raise _GarbageError
    return joined


def _entries(text: str) -> list[str]:
    """Split a list; empty entries do not count (RFC 9110, 5.6.1)."""
    return [entry for part in text.split(",") if (entry := part.strip(" \t"))]


def _elements_from_right(text: str) -> Iterator[str]:
    """Yield the elements of Forwarded, the last one first.

    Commas inside quotes do not separate. Reading from the right, a quote that a sender left open
    cannot swallow the elements that proxies have added after it.
    """
    end = len(text)
    quoted = False
    for position in range(len(text) - 1, -1, -1):
        if text[position] == '"':
            quoted = not quoted
        elif text[position] == "," and not quoted:
            if element := text[position + 1 : end].strip(" \t"):
                yield element
            end = position
    if element := text[:end].strip(" \t"):
        yield element


def _parse_pairs(element: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    position = 0
    while position < len(element):
        pair = _match_pair(element, position)
        if pair is None or (name := pair[1].lower()) in pairs:
            raise _GarbageError
        pairs[name] = pair[2] if pair[2] is not None else pair[3]
        position = pair.end()
    return pairs


def _parse_sender(text: str) -> _Sender:
    if text.lower() == "unknown" or text.startswith("_"):
        return _Sender(None)
    address = _parse_address(text)
    if address is None and (parts := _match_with_port(text)):
        address = _parse_address(parts[1] if parts[1] is not None else parts[2])
    if address is None:
        raise _GarbageError
    return _Sender(address)


def _parse_protocol(text: str) -> str:
    protocol = text.lower()
    if protocol not in ("http", "https"):
        raise _GarbageError
    return protocol


def _vouched_protocol(entries: list[str], hops: int) -> str | None:
    """Return the protocol between the sender and the outermost of ``hops`` trusted proxies."""
    if not entries:
        return None
    protocols = [_parse_protocol(entry) for entry in entries[-hops:]]
    # A single entry was set for all hops. With fewer entries than proxies it is unknown which proxy
    # added which, so the request is secure only if all of them agree on https.
    if len(protocols) in (1, hops):
        return protocols[0]
    return "https" if set(protocols) == {"https"} else "http"
