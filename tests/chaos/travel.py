"""How media travel: whether a fall-back to another transport ends once its cause is gone."""

import asyncio
import time
from collections import Counter
from contextlib import suppress

import aiohttp

from tests.chaos.clients import Clients
from tests.chaos.fleet import Fleet, Frontend

PROBE_EVERY_S = 15.0
PROBES = 4
"""New pictures at once, so that load spreads them over the workers."""

LASTS_S = 150.0
"""A fall-back may take so long to end: a connection that broke is tried again once a minute."""

Pair = tuple[str, str]
"""A frontend and a worker, by name."""


class Travel:
    """Keeps sending new pictures, and looks by which transport they reach each worker.

    Attributes:
        lasting: pairs between which media went another way than usual, and no other, for too long
            although neither of them was disturbed.
        fallbacks: how often a look showed a fall-back of any kind.
    """

    def __init__(self, fleet: Fleet, clients: Clients) -> None:
        self.lasting: Counter[Pair] = Counter()
        self.fallbacks = 0
        self._fleet = fleet
        self._clients = clients
        self._since: dict[Pair, float] = {}
        self._probes = 0

    async def watch(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            for frontend in self._fleet.frontends:
                if frontend.down or frontend.busy.locked():
                    self._forget(frontend)
                    continue
                with suppress(aiohttp.ClientError, TimeoutError):
                    await self._look(frontend)

    async def settle(self) -> None:
        """Now that all is put right: look until media go the usual way everywhere, or for so long
        that what doesn't lasts."""
        deadline = time.monotonic() + LASTS_S
        waiting = {
            (frontend.name, worker.name)
            for frontend in self._fleet.frontends
            for worker in self._fleet.workers
        }
        while waiting and time.monotonic() < deadline:
            for frontend in self._fleet.frontends:
                waiting -= await self._look(frontend)
        self.lasting.update(waiting - self.lasting.keys())

    async def _look(self, frontend: Frontend) -> set[Pair]:
        """Send new pictures. Returns the pairs between which some went the usual way."""
        before = await frontend.moved()
        async with asyncio.TaskGroup() as group:
            for _ in range(PROBES):
                self._probes += 1
                name = f"{frontend.name}-{self._probes}"
                group.create_task(self._clients.probe(frontend, name))
        after = await frontend.moved()
        if frontend.down or frontend.busy.locked():
            self._forget(frontend)
            return set()
        usual: set[Pair] = set()
        for worker in self._fleet.workers:
            pair = frontend.name, worker.name
            ways = {
                way
                for (name, way), size in after.items()
                if name == worker.name and size > before.get((name, way), 0)
            }
            if ways - {frontend.transport}:
                self.fallbacks += 1
            if frontend.transport in ways:
                usual.add(pair)
            if frontend.transport in ways or worker.busy.locked():
                self._since.pop(pair, None)
            elif ways:
                self._lasts(pair)
        return usual

    def _lasts(self, pair: Pair) -> None:
        """Media went between them, in another way only."""
        now = time.monotonic()
        if now - self._since.setdefault(pair, now) > LASTS_S:
            self.lasting[pair] += 1
            self._since[pair] = now

    def _forget(self, frontend: Frontend) -> None:
        """Something happens to a frontend."""
        self._since = {pair: at for pair, at in self._since.items() if pair[0] != frontend.name}
