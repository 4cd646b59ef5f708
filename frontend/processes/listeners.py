"""The sockets on which all processes of a frontend listen.

One socket that all accept from: whoever has time takes the next connection, and one that is gone
or busy leaves it to the others. With a socket for each (``SO_REUSEPORT``) the kernel would go on
giving connections to a process that is gone or hangs.
"""

import contextlib
import socket
import stat
from pathlib import Path
from typing import Final

from common.errors import ConfigurationError

BACKLOG: Final = 2048
"""As uvicorn has it."""


class ListenError(ConfigurationError):
    """There is nowhere to listen."""


def listen(host: str | None, port: int, uds: str | None) -> list[socket.socket]:
    """Listen where a frontend is to be found.

    Args:
        host: a name or an address; None or empty for all addresses.
        port: 0 for any that is free.
        uds: path of a Unix socket to listen on instead.

    Raises:
        ListenError: it can't be had.
    """
    place = uds if uds is not None else f"{host or '*'}:{port}"
    with contextlib.ExitStack() as opened:
        try:
            sockets = [_on_path(uds)] if uds is not None else _on_port(host, port, opened)
        except OSError as error:
            raise ListenError(f"can't listen on {place}: {error}") from error
        opened.pop_all()
    for each in sockets:
        each.listen(BACKLOG)
        each.setblocking(False)
    return sockets


def _on_port(host: str | None, port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        each = opened.enter_context(socket.socket(family, kind, protocol))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.bind(address)
        sockets.append(each)
    return sockets


def _on_path(path: str) -> socket.socket:
    mode = 0o666
    with contextlib.suppress(FileNotFoundError):
        found = Path(path).stat().st_mode
        if stat.S_ISSOCK(found):  # of one that is gone; its mode is kept, as uvicorn does
            mode = stat.S_IMODE(found)
            Path(path).unlink()
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(path)
        Path(path).chmod(mode)
    except OSError:
        made.close()
        raise
    return made


def name_of(listener: socket.socket) -> str:
    """Where it listens, for people."""
    where = listener.getsockname()
    return where if isinstance(where, str) else f"{where[0]}:{where[1]}"
