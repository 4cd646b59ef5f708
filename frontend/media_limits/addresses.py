"""Which IP addresses belong to the public internet.

Written out instead of asking ``ipaddress``, whose answers follow the Python version and which calls
addresses global that embed a private one. Source: the IANA special-purpose address registries (RFC
6890 and its updates).
"""

import ipaddress
import socket
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC_V4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # "this host", reaches loopback on Linux
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's host agent, reachable from each of its machines
        "169.254.0.0/16",  # link-local, with the metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # IETF protocols, among them Teredo tunnels
        "2001:db8::/32",
        "2002::/16",  # 6to4 tunnels
        "3fff::/20",
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# RFC 5214, section 6.1: these precede the IPv4 address of a tunnel's end.
_ISATAP_INTERFACES = (0x00005EFE, 0x02005EFE)


def parse_address(text: str) -> Address | None:
    """Return the address, or None unless ``text`` is its canonical spelling, without a zone."""
    if "%" in text:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return whether an address, and any address that it embeds, is public."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:  # gives IPv6-only hosts access to IPv4 sites
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return (
        address in _GLOBAL_UNICAST_V6
        and not any(address in network for network in _NOT_PUBLIC_V6)
        and (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP_INTERFACES
    )


def is_own(address: Address) -> bool:
    """Return whether an address is this machine's, even a public one: connections to oneself pass
    no firewall. Asks the kernel for the route; sends no packet.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False  # no route, so no connection either
        return parse_address(probe.getsockname()[0]) == address
