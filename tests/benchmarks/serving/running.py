"""A contender that is up."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.benchmarks.serving.contenders import Contender, Role
from tests.benchmarks.serving.usage import Usage
from tests.e2e.processes import HttpServer, Process
from tests.simgpu.stats import WRITE_EVERY_S, Stats
from tests.simgpu.totals import read_totals

TOTALS_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Running:
    """A contender that is up.

    Attributes:
        url: where clients talk to it.
        pages: addresses of all servers that count something.
        totals: the folder of its engines' totals, which others may use too while it rests; None
            of real engines.
    """

    contender: Contender
    url: str
    pages: Sequence[str]
    totals: Path | None
    usage: Usage

    @classmethod
    def of(
        cls,
        contender: Contender,
        server: HttpServer,
        roots: Mapping[Role, Sequence[Process]],
        totals: Path | None,
        pages: Sequence[HttpServer] = (),
    ) -> "Running":
        """One whose processes are all there.

        Args:
            server: what clients talk to.
            roots: the processes that were started for it, which may have others.
            pages: the servers that count; ``server`` alone unless given.
        """
        usage = Usage({role: [each.pid for each in some] for role, some in roots.items()})
        counting = [each.url for each in pages or (server,)]
        return cls(contender, server.url, counting, totals, usage)

    async def done(self, requests: int = 0) -> Stats | None:
        """What its engines have done, once they are said to have had so many requests; None of
        real ones.

        Raises:
            TimeoutError: they never are.
        """
        if self.totals is None:
            return None
        async with asyncio.timeout(TOTALS_TIMEOUT_S):
            while True:
                await asyncio.sleep(2 * WRITE_EVERY_S)  # after which an engine at rest has told all
                totals = read_totals(self.totals)
                if totals.requests >= requests:
                    return totals
