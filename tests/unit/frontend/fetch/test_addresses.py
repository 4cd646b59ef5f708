"""Public or not, for every kind of address that has ever been a way round a filter."""

import pytest

from frontend.media_limits.addresses import is_own, is_public, parse_address

PUBLIC = [
    "8.8.8.8",
    "1.0.0.0",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.255.255",
    "223.255.255.255",
    "2606:4700:4700::1111",
    "2a00:1450:4001::200e",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "2606:4700::5efe:10.0.0.1",
    "2606:4700::200:5efe:10.0.0.1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert is_public(address)


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_not_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert not is_public(address)


@pytest.mark.parametrize(
    "text",
    ["", "x", "127.1", "0177.0.0.1", "2130706433", "0x7f000001", "1.2.3.4.", "[::1]", "fe80::1%lo"],
)
def test_other_spellings_are_no_addresses(text: str) -> None:
    assert parse_address(text) is None


def test_own_addresses() -> None:
    own, foreign = parse_address("127.0.0.1"), parse_address("192.0.2.1")
    assert own is not None and foreign is not None
    assert is_own(own)
    assert not is_own(foreign)
