"""Step 4 of a request: making processed media available to the chosen worker.

Owns the arena and the senders, and knows by which transport each worker is reached.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from common.errors import ArenaUnavailableError, ConfigurationError
from common.identity import WorkerId
from common.telemetry import ARENA_BYTES_USED, ARENA_LEASES, TENSOR_BYTES, TRANSFER_FALLBACKS
from common.transfer.arena import Arena, ArenaStatistics
from common.transfer.arena_file import reap_orphans
from common.transfer.base import Loan, MmKwargsSender
from common.transfer.choice import Choice, SenderSet, TransferMode, choose_transport
from common.transfer.handshake import TransferOffer, parse_reply
from common.transfer.inline import InlineSender
from common.transfer.nixl import NixlSender
from common.transfer.nixl_agent import nixl_installed
from common.transfer.reference import refer
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
        self._nixl: NixlSender | None = None
        if arena is not None:
            senders.append(ShmSender(arena))
            self._nixl = _make_nixl_sender(arena, mode)
        if self._nixl is not None:
            senders.append(self._nixl)
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
        if mode is TransferMode.DISABLED:
            return cls(None, mode)
        if arena_bytes == 0:
            if mode is not TransferMode.AUTO:
                raise ConfigurationError(
                    f"DYNAMO_MM_TRANSFER={mode.value} needs --mm-arena-gb above 0"
                )
            return cls(None, mode)
        try:
            return cls(Arena(arena_bytes), mode)
        except ArenaUnavailableError as error:
            if mode is not TransferMode.AUTO:
                raise ConfigurationError(str(error)) from error
            logger.warning("media will travel inline: %s", error)
            return cls(None, mode)

    def offer(self) -> bytes:
        """What we tell a worker when a session opens."""
        offer = TransferOffer(
            shm=self._arena.offer if self._arena and self._mode is not TransferMode.NIXL else None,
            nixl=self._nixl.offer if self._nixl else None,
        )
        return offer.model_dump_json().encode()

    def connect(self, worker_id: WorkerId, reply: bytes) -> Choice:
        """Take a worker's answer to the offer; says how media will travel to it.

        Raises:
            ProtocolError: the answer is malformed.
        """
        terms = parse_reply(reply)
        choice = choose_transport(self._mode, shm_proven=terms.shm, nixl_ready=terms.nixl)
        if choice.instead_of is not None:
            logger.warning(
                "worker %s: media travel by %s instead of %s: %s",
                worker_id,
                choice.transport,
                choice.instead_of,
                "; ".join(terms.refusals) or choice.reason,
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
                loan = await self._lend(choice, each)
                loans.append(loan)
                TENSOR_BYTES.labels(worker_id, loan.metadata.transport).inc(loan.metadata.nbytes)
        except BaseException:
            release(loans)
            raise
        return loans

    async def _lend(self, choice: Choice, media: MediaItem) -> Loan:
        mm_hash = media.part.mm_hash
        if choice.transport == "reference":
            if media.source is not None:
                return refer(mm_hash, media.source)
            TRANSFER_FALLBACKS.labels("reference", "no_encoded_form").inc()
            choice = INLINE
        held = self._senders.send_held(choice, mm_hash)
        return held or await _in_thread(self._senders, choice, media)

    @property
    def arena(self) -> Arena | None:
        """Where processed media are kept and lent from, None if there is no such place."""
        return self._arena

    def statistics(self) -> ArenaStatistics | None:
        """State of the arena, None if there is none."""
        return None if self._arena is None else self._arena.statistics()

    def close(self) -> None:
        """Remove the arena. Workers that still read keep their mapping."""
        self._senders.close()
        if self._arena is not None:
            self._arena.close()


def _make_nixl_sender(arena: Arena, mode: TransferMode) -> NixlSender | None:
    if mode is TransferMode.SHM or (mode is TransferMode.AUTO and not nixl_installed()):
        return None
    try:
        return NixlSender(arena)
    except (ConfigurationError, ArenaUnavailableError) as error:
        if mode is TransferMode.NIXL:
            raise ConfigurationError(f"DYNAMO_MM_TRANSFER=nixl can't be had: {error}") from error
        logger.warning("workers on other hosts will get media inline: %s", error)
        return None


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
