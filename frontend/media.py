"""Step 4 of a request: making processed media available to the chosen worker.

Owns the arena and the senders, and knows by which transport each worker is reached.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from common.errors import ArenaUnavailableError, ConfigurationError
from common.identity import WorkerId
from common.telemetry import ARENA_BYTES_USED, ARENA_LEASES, TENSOR_BYTES
from common.transfer.arena import Arena, ArenaStatistics
from common.transfer.arena_file import reap_orphans
from common.transfer.base import Loan, MmKwargsSender
from common.transfer.choice import Choice, SenderSet, TransferMode, choose_transport
from common.transfer.handshake import TransferOffer, parse_reply
from common.transfer.inline import InlineSender
from common.transfer.shm import ShmSender
from frontend.preprocess import MediaItem

logger = logging.getLogger(__name__)

INLINE = Choice("inline")


class MediaLender:
    """Lends media items to workers."""

    def __init__(self, arena: Arena | None, mode: TransferMode) -> None:
        """
        Args:
            arena: shared memory to lend from, or None to send everything inline.
        """
        self._arena = arena
        self._mode = mode
        senders: list[MmKwargsSender] = [InlineSender()]
        if arena is not None:
            senders.append(ShmSender(arena))
        self._senders = SenderSet(senders)
        self._choices: dict[WorkerId, Choice] = {}
        if arena is not None:
            ARENA_LEASES.set_function(lambda: arena.statistics().leases)
            ARENA_BYTES_USED.set_function(lambda: arena.statistics().bytes_used)

    @classmethod
    def create(cls, arena_bytes: int, mode: TransferMode) -> "MediaLender":
        """Make the arena. Takes as long as touching all its pages.

        Raises:
            ConfigurationError: shared memory is asked for and can't be had.
        """
        reap_orphans()
        if arena_bytes == 0:
            if mode is TransferMode.SHM:
                raise ConfigurationError("DYNAMO_MM_TRANSFER=shm needs --mm-arena-gb above 0")
            return cls(None, mode)
        try:
            return cls(Arena(arena_bytes), mode)
        except ArenaUnavailableError as error:
            if mode is TransferMode.SHM:
                raise ConfigurationError(str(error)) from error
            logger.warning("media will travel inline: %s", error)
            return cls(None, mode)

    def offer(self) -> bytes:
        """What we tell a worker when a session opens."""
        shm = None if self._arena is None else self._arena.offer
        return TransferOffer(shm=shm).model_dump_json().encode()

    def connect(self, worker_id: WorkerId, reply: bytes) -> Choice:
        """Take a worker's answer to the offer; says how media will travel to it.

        Raises:
            ProtocolError: the answer is malformed.
        """
        terms = parse_reply(reply)
        choice = choose_transport(self._mode, shm_proven=terms.shm, nixl_ready=False)
        if choice.instead_of is not None:
            logger.warning(
                "worker %s: media travel by %s instead of %s: %s",
                worker_id,
                choice.transport,
                choice.instead_of,
                terms.shm_refusal or choice.reason,
            )
        self._choices[worker_id] = choice
        return choice

    def transport(self, worker_id: WorkerId) -> str | None:
        """How media travel to a worker, None if it is not connected."""
        choice = self._choices.get(worker_id)
        return None if choice is None else choice.transport

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._choices.pop(worker_id, None)

    async def lend(
        self, worker_id: WorkerId, media: Iterable[MediaItem], *, inline: bool = False
    ) -> list[Loan]:
        """Make items available to a worker. The caller releases every loan.

        Copies run in a thread. After an error or a cancellation nothing is lent.

        Args:
            inline: send the bytes themselves, since the worker could not get at them.

        Raises:
            UnsupportedItemError: an item that no transport can carry.
        """
        choice = INLINE if inline else self._choices.get(worker_id, INLINE)
        loans: list[Loan] = []
        try:
            for each in media:
                mm_hash = each.part.mm_hash
                loan = self._senders.send_held(choice, mm_hash)
                if loan is None:
                    loan = await _in_thread(self._senders, choice, each)
                loans.append(loan)
                TENSOR_BYTES.labels(worker_id, loan.metadata.transport).inc(loan.metadata.nbytes)
        except BaseException:
            release(loans)
            raise
        return loans

    def statistics(self) -> ArenaStatistics | None:
        """State of the arena, None if there is none."""
        return None if self._arena is None else self._arena.statistics()

    def close(self) -> None:
        """Remove the arena. Workers that still read keep their mapping."""
        self._senders.close()
        if self._arena is not None:
            self._arena.close()


def release(loans: Sequence[Loan]) -> None:
    """Give loans back that no worker will ack."""
    for loan in loans:
        loan.release()


async def _in_thread(senders: SenderSet, choice: Choice, media: MediaItem) -> Loan:
    sending = asyncio.ensure_future(
        asyncio.to_thread(senders.send, choice, media.part.mm_hash, media.item)
    )
    try:
        return await asyncio.shield(sending)
    except asyncio.CancelledError:
        # The thread goes on; what it lends must not stay lent.
        sending.add_done_callback(_release_late)
        raise


def _release_late(sending: "asyncio.Future[Loan]") -> None:
    if sending.exception() is None:
        sending.result().release()
