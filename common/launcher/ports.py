"""Check that a frontend could listen on its port."""

import errno
import socket
from collections.abc import Collection

from common.errors import ConfigurationError


def free_port(
    host: str, wanted: int, taken: Collection[int], host_option: str, port_option: str
) -> int:
    """Return the wanted port, or for 0 a free one outside ``taken``. Raises ConfigurationError: it
    is in use, or the host is not of this machine."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            found = int(probe.getsockname()[1])
            if found not in taken:
                return found
            # This one is held meanwhile, so another is found.
            return free_port(host, wanted, (), host_option, port_option)
    except socket.gaierror as error:
        reason = f"{host_option}={host} is no address of this machine: {error.strerror}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {wanted} on {host} is in use: choose another one with {port_option}"
        else:
            reason = f"{host_option}={host} {port_option}={wanted}: {error.strerror}"
    raise ConfigurationError(reason)
