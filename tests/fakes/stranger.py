"""Somebody who knows where a worker's sockets are, and asks and listens there with several keys.

    python -m tests.fakes.stranger REQUESTS EVENTS REPLAYS HELLO KEY_FILE...

HELLO is how frontends begin, hexadecimal frames with commas; a KEY_FILE may be ``none``. It says
``ready``, and ``heard`` once something came from everywhere with the last key. When its standard
input ends it says, a line for each key, how many messages came from requests, events, replays.
"""

import asyncio
import sys
from pathlib import Path

import zmq
import zmq.asyncio

from common.fleet_key import FleetKey
from common.request_plane.fleet_sockets import frontend_context


class Ear:
    """Asks and listens with one key."""

    def __init__(self, key_file: str, endpoints: list[str], hello: list[bytes]) -> None:
        key = None if key_file == "none" else FleetKey.read(Path(key_file))
        self._context = frontend_context(key)
        self._sockets = [self._context.socket(kind) for kind in (zmq.DEALER, zmq.SUB, zmq.DEALER)]
        asked, heard, replayed = self._sockets
        heard.subscribe(b"")
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.connect(endpoint)
        self._first = ((asked, hello), (replayed, [b"", bytes(8)]))
        self.counts = [0] * len(self._sockets)
        self.heard = asyncio.Event()

    async def listen(self) -> None:
        for socket, message in self._first:
            await socket.send_multipart(message)
        await asyncio.gather(*(self._count(place) for place in range(len(self._sockets))))

    async def _count(self, place: int) -> None:
        while True:
            await self._sockets[place].recv_multipart()
            self.counts[place] += 1
            if all(self.counts):
                self.heard.set()

    def close(self) -> None:
        self._context.destroy(linger=0)


async def _say_when(heard: asyncio.Event) -> None:
    await heard.wait()
    print("heard", flush=True)


async def overhear(endpoints: list[str], hello: list[bytes], key_files: list[str]) -> None:
    ears = [Ear(key_file, endpoints, hello) for key_file in key_files]
    listening = [asyncio.create_task(ear.listen()) for ear in ears]
    print("ready", flush=True)
    listening.append(asyncio.create_task(_say_when(ears[-1].heard)))
    await asyncio.to_thread(sys.stdin.read)
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for ear in ears:
        print(*ear.counts)
        ear.close()


if __name__ == "__main__":
    first = [bytes.fromhex(frame) for frame in sys.argv[4].split(",")]
    asyncio.run(overhear(sys.argv[1:4], first, sys.argv[5:]))
