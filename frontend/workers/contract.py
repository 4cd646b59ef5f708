"""Which cards fit: what this frontend demands of each, and the first of them, the contract."""

import asyncio

from common.errors import CardCodeError, CardIncompatibleError
from common.fleet_key import FleetKey
from common.request_plane.card import WorkerCard, check_compatible
from common.request_plane.fleet_sockets import check_card


class Contract:
    """The first card that fits; all others must agree with it."""

    def __init__(
        self, vllm_version: str, key: FleetKey | None = None, *, trust_remote_code: bool = False
    ) -> None:
        """
        Args:
            vllm_version: of this frontend.
            key: without one, workers must be on this host and have none either.
            trust_remote_code: whether models may bring code of their own, which would run here.
        """
        self._vllm_version = vllm_version
        self._key = key
        self._trust_remote_code = trust_remote_code
        self._card: asyncio.Future[WorkerCard] = asyncio.get_running_loop().create_future()

    @property
    def settled(self) -> bool:
        """Whether there has been a card that fits."""
        return self._card.done()

    @property
    def first(self) -> WorkerCard | None:
        """The first card that fits, None until there is one."""
        return self._card.result() if self._card.done() else None

    async def card(self) -> WorkerCard:
        """The first card that fits, once there is one."""
        return await asyncio.shield(self._card)

    def check(self, card: WorkerCard) -> None:
        """
        Raises:
            CardError: the card does not fit; the message says why.
        """
        check_card(card, self._key)
        if card.vllm_version != self._vllm_version:
            raise CardIncompatibleError(
                card.worker_id, "vllm_version", self._vllm_version, card.vllm_version
            )
        if card.model.trust_remote_code and not self._trust_remote_code:
            raise CardCodeError(
                f"worker {card.worker_id} refused: its model {card.model.model} brings code of "
                "its own, which would run in this frontend too; start the frontend with "
                "--trust-remote-code if you trust it"
            )
        if self._card.done():
            check_compatible(self._card.result(), card)

    def settle(self, card: WorkerCard) -> None:
        """A card that fits: the contract, if it is the first."""
        if not self._card.done():
            self._card.set_result(card)
