"""Acceptance of cards: the first that fits is the contract. Refused workers are told the reason."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

import zmq

from common.errors import (
    CardCodeError,
    CardError,
    CardIncompatibleError,
    CardKeyError,
    NoWorkerError,
)
from common.fleet_key import FleetKey
from common.identity import WorkerId
from common.observability.fleet_events import What, note
from common.observability.telemetry import REFUSED_CARDS
from common.request_plane.card import WorkerCard, check_compatible
from common.request_plane.fleet_sockets import (
    check_card,
    connect,
    frontend_context,
    leaves_host,
)
from common.request_plane.operations import MAX_MESSAGE_LEN
from common.request_plane.protocol import Refused, ToFrontend
from common.request_plane.wire import Codec
from frontend.workers.members import Run


class Contract:
    """The first card that fits; every later one must agree with it."""

    def __init__(
        self, vllm_version: str, key: FleetKey | None = None, *, trust_remote_code: bool = False
    ) -> None:
        """Accept any model. Without a key, workers must be on this host and have none either.
        ``trust_remote_code`` lets models run code of their own in this process.
        """
        self._vllm_version = vllm_version
        self._key = key
        self._trust_remote_code = trust_remote_code
        self._card: asyncio.Future[WorkerCard] = asyncio.get_running_loop().create_future()

    @property
    def first(self) -> WorkerCard | None:
        return self._card.result() if self._card.done() else None

    async def card(self) -> WorkerCard:
        return await asyncio.shield(self._card)

    def check(self, card: WorkerCard) -> None:
        """Raise CardError with the reason if a card does not fit."""
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
        if not self._card.done():
            self._card.set_result(card)


def nobody(refused: int) -> NoWorkerError:
    """Return the error for users. Only operators may see why workers are refused."""
    if not refused:
        return NoWorkerError("no worker is available: none has registered yet, or all are gone")
    return NoWorkerError(
        f"no worker is available: {refused} refused, and operators see why at "
        "/mmrouter/workers/refused"
    )


class Refusals:
    """Current reasons for refusing runs of workers, of all fleets together."""

    def __init__(self) -> None:
        self._reasons: dict[Run, str] = {}
        self._endpoints: dict[Run, str] = {}

    def add(self, run: Run, error: CardError, card: WorkerCard | None = None) -> None:
        """Refuse a run, replacing an earlier reason. The card says where to tell the run; omit it
        if it may be forged.
        """
        if card is not None and not isinstance(error, CardKeyError):
            self._endpoints[run] = card.request_endpoint
        else:
            self._endpoints.pop(run, None)
        if self._reasons.get(run) != str(error):
            note(What.REFUSED, run.worker_id, str(error))
        self._reasons[run] = str(error)
        REFUSED_CARDS.labels(error.field).inc()

    def take_back(self, run: Run) -> None:
        self._reasons.pop(run, None)
        self._endpoints.pop(run, None)

    def notices(self) -> Iterator["Notice"]:
        for run, endpoint in self._endpoints.items():
            yield Notice(run, endpoint, self._reasons[run])

    def take_back_if(self, run: Run, error: CardError) -> None:
        """Withdraw a refusal unless its reason has changed."""
        if self._reasons.get(run) == str(error):
            self.take_back(run)

    def by_worker(self) -> dict[WorkerId, str]:
        """Return the reasons for each worker with a refused run."""
        reasons: dict[WorkerId, str] = {}
        for (worker_id, _), reason in self._reasons.items():
            before = reasons.get(worker_id)
            reasons[worker_id] = reason if before is None else f"{before}; {reason}"
        return reasons


class Notice(NamedTuple):
    run: Run
    endpoint: str
    reason: str


TELL_S: Final = 10.0  # between rounds; workers log each frontend once a minute
LEAVE_S: Final = 0.5  # time for a message to leave before the next


async def tell_refused(
    notices: Callable[[], Iterable[Notice]], frontend: str, key: FleetKey | None
) -> None:
    """Tell refused workers why, for their logs, repeatedly until cancelled."""
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    while True:
        if told := [
            each for each in notices() if key is not None or not leaves_host(each.endpoint)
        ]:
            context = frontend_context(key)
            try:
                for notice in told:
                    if notice not in notices():  # accepted or gone since this round began
                        continue
                    reason = notice.reason.encode(errors="replace").decode()[:MAX_MESSAGE_LEN]
                    message = Refused(frontend, notice.run.incarnation, reason)
                    socket: Any = context.socket(zmq.DEALER, socket_class=cast(Any, zmq.Socket))
                    with suppress(zmq.ZMQError):  # the card's endpoint is unreachable
                        connect(socket, notice.endpoint)
                        socket.send_multipart(codec.encode(message), zmq.NOBLOCK)
                    await asyncio.sleep(LEAVE_S)
                    socket.close(linger=0)
            finally:
                context.destroy(linger=0)
        await asyncio.sleep(TELL_S)
