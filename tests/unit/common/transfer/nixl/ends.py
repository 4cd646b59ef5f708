"""Both ends of NIXL in one process of the tests, with the two processes that hold the agents."""

import mmap

from common.transfer.arena.arena import Arena
from common.transfer.base import Received
from common.transfer.handshake import NixlOffer
from common.transfer.metadata import NixlMetadata
from common.transfer.nixl.landing import LandingArea
from common.transfer.nixl.link import ReaderLink
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.network import NixlNetwork
from tests.unit.common.transfer.items import image, image_hash, is_image
from tests.waiting import until

ROOM_FOR_ITEMS = 1 << 20
"""Bytes: enough for thirteen images of 64 rows."""


class Ends:
    """A frontend's and a worker's end, both in this process, with their two processes."""

    def __init__(self, arena: Arena, network: NixlNetwork) -> None:
        self.arena = arena
        self.sender = NixlSender(arena, network)
        self.receiver = NixlReceiver(network, slots=2, memory=ROOM_FOR_ITEMS)

    @property
    def offer(self) -> NixlOffer:
        assert self.sender.offer is not None
        return self.sender.offer

    @property
    def pids(self) -> list[int]:
        return [pid for pid in (self.sender.pid, self.receiver._reading.pid) if pid is not None]

    @property
    def link(self) -> ReaderLink:
        link = self.receiver._reading._link
        assert link is not None
        return link

    @property
    def landing(self) -> LandingArea:
        return self.link.landing

    @property
    def landing_memory(self) -> mmap.mmap:
        """All of it, as whoever reads or writes there sees it."""
        area = self.landing.rooms._memory.obj
        assert isinstance(area, mmap.mmap)
        return area

    def send(self, seed: int, rows: int = 64) -> NixlMetadata:
        metadata = self.sender.send(image_hash(seed), image(seed, rows)).metadata
        assert isinstance(metadata, NixlMetadata)
        return metadata

    async def receive(self, seed: int, rows: int = 64) -> Received:
        """An image, held until it is released."""
        return await self.receiver.receive(self.send(seed, rows))

    async def carry(self, seed: int) -> bool:
        """Whether an image arrives as it was sent."""
        with await self.receive(seed) as received:
            return is_image(received.item, seed)

    async def served_again(self, former: str) -> None:
        """Wait until another process serves the arena, and connect to it."""
        await until(lambda: self.sender.offer is not None and self.offer.agent != former)
        self.receiver._peers.detach(former)
        await self.receiver.attach(self.offer)
