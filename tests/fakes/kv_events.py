"""KV events as vLLM encodes them, and a publisher without sockets."""

from collections import deque
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from backend_worker.kv_events.event_log import EventLog
from common.identity import BlockHash
from frontend.router.event_wire import END_OF_REPLAY

BLOCK_SIZE = 16


def block(number: int) -> BlockHash:
    """A block hash for a number."""
    return BlockHash(number.to_bytes(32, "big"))


def blocks(*numbers: int) -> list[BlockHash]:
    """Block hashes for numbers."""
    return [block(number) for number in numbers]


def stored(*numbers: int, **fields: Any) -> BlockStored:
    """Blocks entered the cache, of a model with full attention unless told otherwise."""
    event: dict[str, Any] = {
        "block_hashes": blocks(*numbers),
        "parent_block_hash": None,
        "token_ids": list(range(BLOCK_SIZE * len(numbers))),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [(("x", -3), "salt"), None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(**{**event, **fields})


def removed(*numbers: int, **fields: Any) -> BlockRemoved:
    """Blocks left the cache."""
    event: dict[str, Any] = {
        "block_hashes": blocks(*numbers),
        "medium": "GPU",
        "group_idx": 0,
    }
    return BlockRemoved(**{**event, **fields})


def cleared() -> AllBlocksCleared:
    """The cache was reset."""
    return AllBlocksCleared()


def encode(events: list[KVCacheEvent], time: float = 0.0) -> bytes:
    """One message's payload."""
    return msgspec.msgpack.encode(KVEventBatch(ts=time, events=events, data_parallel_rank=0))


def frame(sequence: int) -> bytes:
    """A sequence number as on the wire."""
    return sequence.to_bytes(8, "big")


class Publisher:
    """What a worker publishes, and what it would replay.

    Args:
        buffer_steps: messages it keeps for replay.
        time: of its first message; each later one is a second younger.
        keeps_account: of what it holds, as a worker does until that is too much.
    """

    def __init__(
        self, buffer_steps: int = 100, time: float = 1000.0, *, keeps_account: bool = False
    ) -> None:
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._log = EventLog(self._buffer) if keeps_account else None
        self._next = 0
        self._time = time

    def publish(self, *events: KVCacheEvent) -> tuple[bytes, bytes]:
        """The next message: sequence frame and payload."""
        number, at = self._next, self._time
        message = self.publish_raw(encode(list(events), at))
        if self._log is not None:
            self._log.published(number, message[1], KVEventBatch(ts=at, events=list(events)))
        return message

    def publish_raw(self, payload: bytes) -> tuple[bytes, bytes]:
        """The next message with any payload."""
        sequence = self._next
        self._buffer.append((sequence, payload))
        self._next += 1
        self._time += 1.0
        return frame(sequence), payload

    def skip(self) -> None:
        """Use up a number without a message, as vLLM does when encoding fails."""
        self._next += 1

    def replay(self, start: int) -> list[tuple[bytes, bytes]]:
        """The answer to a replay request, its end included."""
        log = self._log
        if log is None:
            kept = [message for message in self._buffer if message[0] >= start]
        else:
            while (answer := log.answer(start)) is None:
                log.work()
            kept = answer
        messages = [(frame(number), payload) for number, payload in kept]
        return [*messages, (END_OF_REPLAY, b"")]
