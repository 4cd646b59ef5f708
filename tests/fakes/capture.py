"""Writes every frame that any network device here sends or receives to a file.

    python -m tests.fakes.capture FILE

It says ``ready`` and ends with its standard input, when all that had come by then is written.
"""

import select
import socket
import sys
from pathlib import Path

_EVERYTHING = 3  # ETH_P_ALL
_BUFFER = 256 << 20


def capture(file: Path) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING)) as tap,
        file.open("wb") as output,
    ):
        tap.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), _BUFFER)
        print("ready", flush=True)
        ended = False
        while True:
            ready, _, _ = select.select([tap] if ended else [tap, sys.stdin], [], [], 0)
            if not ready and ended:
                return
            if not ready:
                ready, _, _ = select.select([tap, sys.stdin], [], [])
            ended = ended or sys.stdin in ready
            if tap in ready:
                output.write(tap.recv(1 << 17))


if __name__ == "__main__":
    capture(Path(sys.argv[1]))
