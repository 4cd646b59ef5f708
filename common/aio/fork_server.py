"""Import the modules of a frontend's processes once and fork each: ``fork_server MODULE FD``, or
:func:`start`.

Importing vLLM takes ten seconds of CPU and hundreds of megabytes; a fork takes neither. Each child
runs ``MODULE.main(FILE_DESCRIPTOR)``. Python's own fork server listens on a socket in a directory
and searches the current one for modules; this one serves only the frontend that holds the other end
of the socket FD: :mod:`frontend.bounded.fork_supply`.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from types import ModuleType
from typing import Any, Final

import setproctitle

from common.aio.processes import ForkedProcess, freeze_heap

FORK: Final = b"fork"
"""Request for a child, with its file descriptor. The answer is the child's pid, and its pidfd."""


def main() -> None:
    """Fork for the frontend until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the frontend
    frontend = os.pidfd_open(os.getppid())
    gc.disable()  # a fifth of the time is looking through what stays
    module = importlib.import_module(sys.argv[1])
    gc.enable()
    # Freezing keeps children's garbage collection from copying imported objects.
    freeze_heap()
    _fork_for(frontend, socket.socket(fileno=int(sys.argv[2])), module)


def start(module: ModuleType, title: str) -> ForkedProcess:
    """Start a fork server by forking this process: in milliseconds, with what it has imported.
    ``title`` is what ``ps`` shows of it and of its children. Raises OSError."""
    frontend = os.pidfd_open(os.getpid())

    def run(client: socket.socket) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        setproctitle.setproctitle(title)
        gc.freeze()
        _fork_for(frontend, client, module)

    try:
        return ForkedProcess(run, socket.SOCK_SEQPACKET, [frontend])
    finally:
        os.close(frontend)


def _fork_for(frontend: int, client: socket.socket, module: Any) -> None:
    """Fork until the frontend of this pidfd is gone; in a child, run the module's ``main``."""
    connection = _serve(client)
    if connection is not None:
        client.close()
        _end_with(frontend)
        module.main(connection)


def _serve(client: socket.socket) -> int | None:
    """Return the file descriptor in each child; None in the server, once all have ended."""
    children: dict[int, int] = {}  # pid by pidfd
    poll = select.poll()
    poll.register(client, select.POLLIN)
    asked = True
    while asked or children:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.waitpid(children.pop(descriptor), 0)
                os.close(descriptor)
                continue
            given = _asked(client)
            if given is None:
                poll.unregister(client)
                asked = False
                continue
            pid = os.fork()
            if pid == 0:
                for each in children:
                    os.close(each)
                return given
            os.close(given)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            with contextlib.suppress(OSError):  # the frontend is gone, and the child soon
                socket.send_fds(client, [str(pid).encode()], [pidfd])
    return None


def _asked(client: socket.socket) -> int | None:
    """Return the file descriptor for the next child; None at the end."""
    try:
        message, given, _, _ = socket.recv_fds(client, len(FORK), 1)
    except ConnectionError:
        return None
    return given[0] if message else None


def _end_with(frontend: int) -> None:
    """End this process when the frontend of this pidfd does, even during a hanging batch.
    ``PR_SET_PDEATHSIG`` won't do: it follows a thread, and the parent is a fork server.
    """

    def wait() -> None:
        select.select([frontend], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="frontend", daemon=True).start()


if __name__ == "__main__":
    main()
