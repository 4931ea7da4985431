"""Public, private and loopback IP addresses. Pure.

A URL that someone else may have chosen must not turn us into a proxy to our own network: loopback,
private ranges, link-local addresses (where clouds serve credentials), and every IPv6 notation of
such an IPv4 address.
"""

import ipaddress
import re
from urllib.parse import urlsplit

#: IPv4 addresses in the IPv6 notation that a network's translator (NAT64) connects to.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

#: The only block from which public IPv6 addresses are assigned.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

#: Blocks within it for IPv4 addresses (Teredo, 6to4), local addresses, or examples.
_WITHIN_GLOBAL = tuple(
    ipaddress.IPv6Network(block)
    for block in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)

#: From IANA's registry of special addresses. Python's own classification varies by version.
_SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
        # Public by its number, but in a cloud's virtual machine the host answers there.
        "168.63.129.16/32",
    )
)

#: This machine and private networks. Link-local addresses are excluded: clouds serve credentials
#: there.
_INTERNAL = tuple(
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/32",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        # Virtual machines on developers' computers.
        "198.18.0.0/15",
        "::/128",
        "::1/128",
        "fc00::/7",
    )
)

#: Private by their numbers, but clouds serve credentials there (Alibaba, Amazon, Google).
_CREDENTIALS = tuple(
    map(ipaddress.ip_address, ("100.100.100.200", "fd00:ec2::254", "fd20:ce::254"))
)


def is_internal(address: str) -> bool:
    """Return whether an IP address is this machine's or private; False if it is not an address.

    Addresses that are neither public nor internal are link-local, reserved, or a cloud's own. A
    zone (``fd00:ec2::254%eth0``) changes nothing.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    plain: ipaddress.IPv4Address | ipaddress.IPv6Address = parsed
    if isinstance(parsed, ipaddress.IPv6Address):
        # With its zone it would not equal any address in the list.
        plain = parsed.ipv4_mapped or ipaddress.IPv6Address(int(parsed))
    return plain not in _CREDENTIALS and any(plain in block for block in _INTERNAL)


def is_public(address: str) -> bool:
    """Return whether an IP address is public; False if it is not an address.

    A zone (``fe80::1%eth0``) makes an address local.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_public_v4(parsed)
    # A zone names a network interface of this machine.
    if parsed.scope_id is not None:
        return False
    # Every socket treats ::ffff:a.b.c.d as that IPv4 address.
    if parsed.ipv4_mapped is not None:
        return _is_public_v4(parsed.ipv4_mapped)
    if parsed in _NAT64:
        return _is_public_v4(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    return parsed in _GLOBAL_UNICAST and not any(parsed in block for block in _WITHIN_GLOBAL)


def names_local_address(url: str) -> bool:
    """Return whether a URL's host is written as a local address or as ``localhost``.

    Other names are unknown until they are resolved.
    """
    host = url_host(url)
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not is_public(host)


def names_public_address(url: str) -> bool:
    """Return whether a URL's host is written as a public address."""
    return is_public(url_host(url))


def url_host(url: str) -> str:
    """Return the host of a URL; empty if it has none or is malformed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::[0-9]{1,5})?")


def host_name(host: str) -> str:
    """Return the host of a ``Host`` header or authority, without its port; empty if malformed."""
    match = _HOST.fullmatch(host.partition("/")[0].strip())
    return match[1].casefold().rstrip(".") if match else ""


def is_loopback(name: str) -> bool:
    """Return whether a host is a loopback address or ``localhost``."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    # ::ffff:127.0.0.1 is a loopback address as well; some versions of Python deny it.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_local_bind(address: str) -> bool:
    """Return whether an address in the settings accepts only local connections.

    For ``fd:`` this is unknown; only the service manager knows the address.
    """
    return address.startswith(("unix:", "fd:")) or is_loopback(host_name(address))


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return not any(address in block for block in _SPECIAL_V4)
