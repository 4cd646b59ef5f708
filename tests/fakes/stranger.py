"""Somebody who knows where a worker's sockets are, and asks and listens with a key of his own, or
with none.

    python -m tests.fakes.stranger KEY_FILE REQUEST_ENDPOINT EVENT_ENDPOINT REPLAY_ENDPOINT

KEY_FILE may be ``none``. It says ``ready``, and when its standard input ends how many messages came
from each endpoint.
"""

import asyncio
import sys
from pathlib import Path

import zmq
import zmq.asyncio

from common.fleet_key import FleetKey
from common.fleet_sockets import frontend_context
from common.identity import Incarnation
from common.protocol import PROTOCOL_VERSION, Hello, ToWorker
from common.wire import Codec
from frontend.router.event_wire import SEQUENCE_BYTES


async def listen(key: FleetKey | None, requests: str, events: str, replays: str) -> list[int]:
    context = frontend_context(key)
    asked, heard, replayed = (context.socket(kind) for kind in (zmq.DEALER, zmq.SUB, zmq.DEALER))
    heard.subscribe(b"")
    asked.connect(requests)
    heard.connect(events)
    replayed.connect(replays)
    codec: Codec[ToWorker] = Codec(ToWorker)
    await asked.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, Incarnation("x"), b"{}")))
    await replayed.send_multipart([b"", bytes(SEQUENCE_BYTES)])
    counts = [0, 0, 0]

    async def count(place: int, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.recv_multipart()
            counts[place] += 1

    counting = [
        asyncio.create_task(count(place, socket))
        for place, socket in enumerate((asked, heard, replayed))
    ]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in counting:
        task.cancel()
    await asyncio.gather(*counting, return_exceptions=True)
    context.destroy(linger=0)
    return counts


if __name__ == "__main__":
    given = sys.argv[1]
    own_key = None if given == "none" else FleetKey.read(Path(given))
    print(*asyncio.run(listen(own_key, *sys.argv[2:])))
