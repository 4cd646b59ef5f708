"""The fleets of a frontend: one for each model.

With several models, a worker's served model names select the fleet for its card. A model comes with
its first worker and leaves with its last. A model beyond the limit is refused by name, and
considered again when another has left. In single-model mode the first card decides, and its fleet
stays and takes or refuses all other workers.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from common.aio.supervised import supervise
from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused, CardWatcher
from common.errors import (
    CardError,
    CardIncompatibleError,
    CardModelError,
    CardNameError,
    DiscoveryError,
)
from common.identity import WorkerId
from common.observability.telemetry import INTERNAL_ERRORS
from common.request_plane.card import WorkerCard, WorkerState
from common.transfer.base import Turns
from frontend.workers.contract import Contract, Refusals, nobody
from frontend.workers.fleet import Fleet
from frontend.workers.gauges import show_workers
from frontend.workers.members import Departures, Member, Run

logger = logging.getLogger(__name__)

RETRY_S: Final = 300.0
"""Pause before an unservable model is tried again: files may have come to this host."""

MAX_NAMES: Final = 64
MAX_NAME_LEN: Final = 512

Came = Callable[[Fleet, asyncio.Event], None]
"""Callback for a new model's fleet, with the event that is set once its last worker has left. It
owes :meth:`Fleets.closed` for each."""


class Fleets:
    """The fleets of all models; ``refusals`` and ``departures`` cover the workers of all."""

    def __init__(
        self,
        make: Callable[[Refusals], Fleet],
        came: Came,
        terms: Contract,
        *,
        most: int | None,
    ) -> None:
        """Make fleets for at most ``most`` models that fit ``terms``; None for a single model."""
        self.refusals = Refusals()
        self.departures = Departures()
        self._make = make
        self._came = came
        self._terms = terms
        self._most = most
        self._here: dict[Fleet, asyncio.Event] = {}
        self._leaving: list[Fleet] = []
        self._outside: dict[Run, WorkerCard] = {}
        self._namesakes: set[Run] = set()
        self._banned: dict[Run, CardError] = {}
        self._unservable: dict[Hashable, BaseException] = {}
        self._look_at: set[Run] | None = None
        self._closed = False
        show_workers(self, self.refusals, self.departures)

    def __iter__(self) -> Iterator[Fleet]:
        return iter(list(self._here))

    def of(self, name: str) -> Fleet | None:
        return next((fleet for fleet in self._here if name in fleet.names), None)

    def holder(self, worker_id: WorkerId) -> Member | None:
        held = (fleet.members.holder(worker_id) for fleet in self)
        return next((member for member in held if member is not None), None)

    def available(self) -> Iterator[Member]:
        return (member for fleet in self for member in fleet.members.available())

    def shown(self) -> list[Member]:
        return [member for fleet in self for member in fleet.members.shown()]

    def check_available(self) -> None:
        """Raise NoWorkerError if no worker is connected."""
        if any(fleet.connected for fleet in self._here):
            return
        raise nobody(len(self.refusals.by_worker()))

    def apply(self, change: CardChange) -> None:
        match change:
            case CardPresent(card):
                self._present(card)
            case CardRefused(worker_id, incarnation, error):
                self.refusals.add(Run(worker_id, incarnation), error)
            case CardGone(worker_id, incarnation):
                run = Run(worker_id, incarnation)
                self._outside.pop(run, None)
                self._namesakes.discard(run)
                self._banned.pop(run, None)
                self.refusals.take_back(run)
                for fleet in self:
                    fleet.apply(change)

    def give_up(self, fleet: Fleet, error: BaseException) -> None:
        """Refuse the workers of an unservable model for :data:`RETRY_S`."""
        model = _model_of(fleet.contract.first)
        self._unservable[model] = error
        asyncio.get_running_loop().call_later(RETRY_S, self._try_again, model)
        cards = [member.card for member in fleet.members]
        fleet.give_up(str(error))
        self._leave(fleet)
        for card in cards:
            self._present(card)

    def _try_again(self, model: Hashable) -> None:
        del self._unservable[model]
        self._look_again(self._outside)

    def _leave(self, fleet: Fleet) -> None:
        if gone := self._here.pop(fleet, None):
            self._leaving.append(fleet)
            gone.set()

    def closed(self, fleet: Fleet) -> None:
        self._here.pop(fleet, None)
        self._leaving = [each for each in self._leaving if each is not fleet]
        self._look_again(self._outside)

    def drain(self) -> None:
        """Let requests wait only for workers that have a card."""
        for fleet in self:
            fleet.draining = True

    async def close(self) -> None:
        """Leave every worker. Running requests fail."""
        self._closed = True
        for fleet in self:
            await fleet.close()

    def _present(self, card: WorkerCard) -> None:
        if self._closed:
            return
        run = Run(card.worker_id, card.incarnation)
        home = next((fleet for fleet in self._here if fleet.members.get(run) is not None), None)
        self._outside.pop(run, None)
        self._namesakes.discard(run)
        try:
            if run in self._banned:
                raise self._banned[run]
            if home is None:
                self._place(run, card)
                return
            self._check_unchanged(home, run, card)
            home.apply(CardPresent(card))
            if home.members.get(run) is None:  # it does not fit any more
                self._outside[run] = card
        except CardError as error:
            logger.error("%s", error)
            self.refusals.add(run, error, card)

    def _check_unchanged(self, home: Fleet, run: Run, card: WorkerCard) -> None:
        if self._most is None or card.served_model_names == home.names:
            return  # of a single model, the contract says so
        error = CardModelError(
            f"worker {card.worker_id} refused: it joined as one of {', '.join(home.names)}, and "
            f"its card says {', '.join(card.served_model_names)} now; start it again"
        )
        self._banned[run] = error
        home.expel(run, str(error))
        raise error

    def _place(self, run: Run, card: WorkerCard) -> None:
        """Give a card to its fleet, or keep it until that is possible."""
        if card.state is not WorkerState.READY:
            self.refusals.take_back(run)
            return
        self._terms.check(card)
        _check_names(card)
        fleet = self._fleet_for(card)
        self._outside[run] = card
        self._check_servable(card)
        self._check_worker_id(run, card, fleet)
        if fleet is None:
            self._check_room(card)
        made = fleet or self._make(self.refusals)
        made.members.departures = self.departures
        self.refusals.take_back(run)
        made.apply(CardPresent(card))
        if made.members.get(run) is not None:
            del self._outside[run]
        if fleet is None:
            made.members.left = lambda: self._look_again(self._namesakes)
            self._here[made] = gone = asyncio.Event()
            logger.info("the first worker of model %s has come", card.served_model_names[0])
            self._came(made, gone)

    def _check_servable(self, card: WorkerCard) -> None:
        if error := self._unservable.get(_model_of(card)):
            raise CardModelError(
                f"worker {card.worker_id} refused: its model {card.served_model_names[0]} can't be "
                f"served here: {error}; it is tried again every {RETRY_S:g} s"
            )

    def _fleet_for(self, card: WorkerCard) -> Fleet | None:
        if self._most is None:
            return next(iter(self._here), None)
        return next((one for one in self._here if one.names == card.served_model_names), None)

    def _check_worker_id(self, run: Run, card: WorkerCard, fleet: Fleet | None) -> None:
        """Raise CardNameError if another model has the worker id: all models share its records."""
        for other in (*self._here, *self._leaving):
            if other is not fleet and card.worker_id in other.members.names:
                self._namesakes.add(run)
                raise CardNameError(
                    f"worker {card.worker_id} refused: a worker of model {other.names[0]} has the "
                    "same worker id; give each worker a --worker-id of its own"
                )

    def _check_room(self, card: WorkerCard) -> None:
        """Raise CardError for a model beyond the limit or confusable with a present one."""
        others = [*self._here, *self._leaving]
        for other in others:
            theirs = other.contract.first
            assert theirs is not None, "a fleet has a card"
            if shared := sorted({*other.names} & {*card.served_model_names}):
                raise CardModelError(
                    f"worker {card.worker_id} refused: it serves its model as "
                    f"{', '.join(card.served_model_names)}, and another one that is served as "
                    f"{', '.join(other.names)} has the name {shared[0]} here"
                )
            _check_apart(theirs, card)
        if self._most is not None and len(others) >= self._most:
            raise CardModelError(
                f"worker {card.worker_id} refused: its model {card.served_model_names[0]} would be "
                f"one more than the {self._most} of --max-models"
            )

    def _look_again(self, runs: Iterable[Run]) -> None:
        """Reconsider cards without a fleet, soon: callers are in the middle of a change."""
        if self._closed:
            return
        if self._look_at is None:
            self._look_at = set()
            asyncio.get_running_loop().call_soon(self._look)
        self._look_at.update(runs)

    def _look(self) -> None:
        wanted, self._look_at = self._look_at or set(), None
        for fleet in self:
            if not len(fleet.members) and self._most is not None:
                logger.info("the last worker of model %s has left", fleet.names[0])
                self._leave(fleet)
        for run, card in list(self._outside.items()):
            if run in wanted:
                self._present(card)


def _model_of(card: WorkerCard | None) -> Hashable:
    assert card is not None, "a fleet has a card"
    return (*card.served_model_names, card.model.model_dump_json(), card.output.model_dump_json())


def _check_names(card: WorkerCard) -> None:
    """Raise CardModelError for names unfit for log lines, metrics and errors."""
    names = card.served_model_names
    if len(names) > MAX_NAMES or not all(
        0 < len(name) <= MAX_NAME_LEN and name.isprintable() for name in names
    ):
        raise CardModelError(
            f"worker {card.worker_id} refused: a model may have {MAX_NAMES} names, of up to "
            f"{MAX_NAME_LEN} printable characters each"
        )


def _check_apart(ours: WorkerCard, theirs: WorkerCard) -> None:
    """Raise CardIncompatibleError if process-wide settings differ, or media could be mixed up: vLLM
    names processed media by the model's path, not by other arguments of a worker.
    """
    if ours.environment != theirs.environment:
        raise CardIncompatibleError(
            theirs.worker_id, "environment", ours.environment, theirs.environment
        )
    if ours.model.model == theirs.model.model:
        for field in type(ours.model).model_fields:
            here, there = getattr(ours.model, field), getattr(theirs.model, field)
            if here != there:
                raise CardIncompatibleError(theirs.worker_id, f"model.{field}", here, there)


async def follow(watcher: CardWatcher, apply: Callable[[CardChange], None]) -> None:
    """Follow cards until cancelled. Raises DiscoveryError if unreadable or untrusted at first."""
    turns = Turns()

    async def following() -> None:
        async for change in watcher.changes():
            await turns.mine()  # thousands of cards may come at once
            try:
                apply(change)
            except Exception:  # counted; a bad card must not block other workers
                INTERNAL_ERRORS.labels("discovery").inc()
                logger.exception("handling a change of workers failed: %r", change)

    await supervise("discovery", following, fatal=(DiscoveryError,))
