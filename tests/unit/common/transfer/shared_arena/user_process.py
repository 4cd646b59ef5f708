"""A process that uses a kept arena, until it is killed: does what it is told on its standard
input, and says what came of it.

    python -m tests.unit.common.transfer.shared_arena.user_process DESCRIPTOR OFFER
"""

import socket
import sys
from functools import partial

from common.identity import MmHash
from common.transfer.arena import ArenaOffer, Lease, SegmentLayout
from common.transfer.shared_arena import SharedArena
from common.transfer.shared_arena.messages import Claim

LAYOUT = SegmentLayout(8, (3968,))


def main() -> None:
    offer = ArenaOffer.model_validate_json(sys.argv[2])
    arena = SharedArena(offer, socket.socket(fileno=int(sys.argv[1])))
    held: list[object] = []
    for line in sys.stdin:
        command, name = line.split()
        if command == "lease":
            lease = arena.lease(MmHash(name))
            held.append(lease)
            print("none" if lease is None else f"leased {lease.note}", flush=True)
        elif command == "reserve":
            room = arena.reserve(MmHash(name), LAYOUT)
            held.append(room)
            print("leased" if isinstance(room, Lease) else "room", flush=True)
        elif command == "claim":
            arena.connection.ask(partial(Claim, key=name.encode())).result()
            print("claimed", flush=True)


if __name__ == "__main__":
    main()
