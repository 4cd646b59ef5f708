"""A process that runs out of file handles while it connects to a worker, and then has some again.

    python -m tests.unit.frontend.workers.starved_fleet

Ends with status 0 if the worker was connected to as soon as that was possible, and another left
meanwhile without harm.
"""

import asyncio
import resource

from common.discovery.base import CardPresent
from common.observability.telemetry import TASK_FAILURES
from tests.fakes.cards import make_card
from tests.fakes.fleet import Town, gone
from tests.open_files import open_files
from tests.waiting import until


def failures() -> float:
    return float(TASK_FAILURES.labels("worker keeper")._value.get())


async def main() -> None:
    town = Town()
    await asyncio.sleep(0)  # its tasks have begun
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_files()), hard))
    town.news.say(CardPresent(town.card()))
    await until(lambda: failures() >= 2)
    assert not town.following.done()
    other = make_card("other")
    town.news.say(CardPresent(other))
    town.news.say(gone(other))
    await until(lambda: len(town.fleet.members.shown()) == 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until(lambda: town.fleet.connected)
    await town.close()


if __name__ == "__main__":
    asyncio.run(main())
