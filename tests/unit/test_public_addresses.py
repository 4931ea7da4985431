import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.public_addresses import is_internal, is_public, names_local_address

PUBLIC_V4 = ["93.184.216.34", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.255.255",
             "100.128.0.1", "192.167.255.255", "169.253.1.1", "223.255.255.254"]  # fmt: skip
PRIVATE_V4 = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "100.64.0.1",  # shared by the customers of a carrier
    "100.127.255.255",
    "100.100.100.200",  # metadata of a cloud
    "169.254.169.254",  # metadata of most clouds
    "168.63.129.16",  # the host of a virtual machine
    "192.0.0.192",  # metadata of a cloud
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
]
PUBLIC_V6 = ["2606:4700:4700::1111", "2a00:1450:4001::1", "2003::1"]
PRIVATE_V6 = [
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%eth0",
    "fc00::1",
    "fd00:ec2::254",  # metadata of a cloud
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "2001::1",
    "2001:10::1",
    "3fff::1",
    "100::1",
    "5f00::1",
    "64:ff9b:1::1",
]


@pytest.mark.parametrize("address", [*PUBLIC_V4, *PUBLIC_V6])
def test_public_addresses(address):
    assert is_public(address)
    assert not names_local_address(f"https://{f'[{address}]' if ':' in address else address}/in")


@pytest.mark.parametrize("address", [*PRIVATE_V4, *PRIVATE_V6])
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("prefix", ["::ffff:", "::", "2002:", "64:ff9b::", "64:ff9b:1::"])
@pytest.mark.parametrize("inner", PRIVATE_V4)
def test_private_addresses_in_any_ipv6_clothes(prefix, inner):
    if prefix == "2002:":
        high, low = divmod(int(ipaddress.IPv4Address(inner)), 65536)
        assert not is_public(f"2002:{high:x}:{low:x}::1")
    else:
        assert not is_public(f"{prefix}{inner}")


@pytest.mark.parametrize("inner", PUBLIC_V4)
def test_public_addresses_that_a_translator_reaches(inner):
    assert is_public(f"::ffff:{inner}")
    assert is_public(f"64:ff9b::{inner}")


@given(st.ip_addresses(v=4))
def test_nothing_is_public_that_python_calls_otherwise(address):
    if is_public(str(address)):
        assert address.is_global
        assert not any([address.is_private, address.is_loopback, address.is_link_local])
    assert is_public(f"::ffff:{address}") == is_public(str(address))


@given(st.ip_addresses(v=6))
def test_nothing_of_ipv6_is_public_that_python_calls_otherwise(address):
    if address.ipv4_mapped is None and is_public(str(address)):
        local = [address.is_private, address.is_loopback, address.is_link_local]
        assert not any([*local, address.is_multicast, address.is_site_local])


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "127.1", "0x7f.1", "2130706433", "a.b"])
def test_an_invalid_address_is_not_public(text):
    assert not is_public(text)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("https://localhost/in", True),
        ("https://LOCALHOST:8443", True),
        ("https://a.localhost/", True),
        ("https://[::1]/", True),
        ("https://[::ffff:10.0.0.1]/", True),
        ("https://10.0.0.1/", True),
        ("https://example.com/", False),
        ("", False),
        ("https://[::1", False),
    ],
)
def test_urls_that_are_local_as_they_are_written(url, local):
    assert names_local_address(url) is local


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "::1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1"),
        *("fd12::1", "::ffff:10.0.0.1"),
    ],
)
def test_this_machine_and_private_networks_are_internal(address):
    assert is_internal(address)


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "::ffff:169.254.169.254", "fe80::a9fe:a9fe", "fd00:ec2::254"),
        *("fd00:ec2::254%eth0", "fd20:ce::254%1", "fe80::1%eth0", "2606:4700::1%eth0"),
        *("168.63.129.16", "192.0.0.192", "100.100.100.200", "::ffff:100.100.100.200"),
        *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd20:ce::254", "8.8.8.8", "no address"),
    ],
)
def test_addresses_where_clouds_serve_credentials_are_not_internal(address):
    assert not is_internal(address)


@given(st.ip_addresses())
def test_no_address_is_public_and_internal(address):
    assert not (is_public(str(address)) and is_internal(str(address)))
