"""Reading what messages say: unreadable ones are counted, and some kinds end it all."""

import logging

from frontend.router.event_wire import (
    EventBatch,
    MalformedEventError,
    decode_batch,
    decode_sequence,
)
from frontend.router.events.progress import Progress
from frontend.router.events.statistics import StreamStatistics

logger = logging.getLogger(__name__)


class Reader:
    """Reads the messages of one stream.

    Args:
        progress: which hashes of another width than ours make unusable.
        label: what to call the stream in log lines.
        counters: of the stream.
    """

    def __init__(self, progress: Progress, label: str, counters: StreamStatistics) -> None:
        self._progress = progress
        self._label = label
        self._malformed = counters.malformed

    def sequence(self, frame: bytes) -> int | None:
        """A message's number; ``None`` if it has none."""
        try:
            return decode_sequence(frame)
        except MalformedEventError as error:
            self.count(error)
            return None

    def batch(self, payload: bytes) -> EventBatch | None:
        """A message's event; ``None`` if it can't be read."""
        try:
            return decode_batch(payload)
        except MalformedEventError as error:
            self.count(error)
            if error.kind == "integer-hashes":
                self._progress.give_up(
                    "its events carry hashes cut to 64 bits; "
                    "start it without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
                )
            return None

    def count(self, error: MalformedEventError) -> None:
        """A message is not what vLLM sends. The first of each kind is logged."""
        self._malformed[error.kind] += 1
        if self._malformed[error.kind] == 1:
            logger.warning("%s: %s; further ones are only counted", self._label, error)
