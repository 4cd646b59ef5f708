"""Workers, prompts and requests for a router, and a clock that stands still."""

from dataclasses import replace
from typing import Any

from common.identity import Incarnation, MmHash, MmIdentifier, RequestId, WorkerId
from frontend.router.hashing.block_hasher import MediaSpan
from frontend.router.inputs import MediaNeed, RoutableWorker, RoutingRequest

NONE_HASH = bytes(32)


BLOCK = 16


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(name: str, **fields: Any) -> RoutableWorker:
    made = RoutableWorker(
        worker_id=WorkerId(name),
        incarnation=Incarnation("1"),
        ranks=(0,),
        block_size=BLOCK,
        hash_algorithm="sha256_cbor",
        none_hash=NONE_HASH,
    )
    return replace(made, **fields)


numbers = iter(range(10**9))


def request(tokens: list[int], **fields: Any) -> RoutingRequest:
    return replace(RoutingRequest(RequestId(f"request-{next(numbers)}"), tokens), **fields)


def prompt(seed: int, blocks: int = 8) -> list[int]:
    return [seed * 1000 + position for position in range(blocks * BLOCK)]


def image(name: str, offset: int = 0, length: int = 32, nbytes: int = 6 << 20) -> MediaNeed:
    span = MediaSpan(MmIdentifier(name), offset, length)
    return MediaNeed(MmHash(name), span, num_tokens=length, nbytes=nbytes)
