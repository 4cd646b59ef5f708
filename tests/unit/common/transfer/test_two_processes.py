"""Shared memory between real processes, and what is left when one is killed."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.errors import ArenaUnavailableError, StaleSegmentError
from common.transfer.arena.file import SHARED_MEMORY, ArenaMapping, reap_orphans
from common.transfer.arena.layout import ArenaOffer
from common.transfer.metadata import ShmMetadata
from common.transfer.shm import ShmReceiver
from tests.unit.common.transfer.items import is_image
from tests.unit.common.transfer.process import Process
from tests.waiting import until

FRONTEND = "tests.unit.common.transfer.frontend_process:frontend"


@pytest.fixture
def frontend() -> Iterator[Process]:
    with Process(FRONTEND, "shm", 200_000) as process:
        yield process


async def test_a_worker_reads_and_outlives_its_frontend(frontend: Process) -> None:
    offer = ArenaOffer.model_validate(frontend.read())
    path = SHARED_MEMORY / offer.name
    receiver = ShmReceiver()
    attachment = await receiver.attach(offer)

    first = ShmMetadata.model_validate(frontend.ask(["send", 1]))
    received = await receiver.receive(first)
    assert is_image(received.item, 1)

    # Room for two: the third evicts the first, once it is released.
    second = ShmMetadata.model_validate(frontend.ask(["send", 2]))
    frontend.ask(["release", 1])
    frontend.ask(["send", 3])
    with pytest.raises(StaleSegmentError):
        received.verify()
    received.release()
    with pytest.raises(StaleSegmentError):
        await receiver.receive(first)
    received = await receiver.receive(second)
    assert is_image(received.item, 2)

    reap_orphans()
    assert path.exists()
    frontend.kill()
    reap_orphans()
    await until(lambda: not path.exists())  # another process may be removing it

    # What is mapped stays: both what was received and what was not yet.
    received.verify()
    assert is_image(received.item, 2)
    with await receiver.receive(second) as again:
        assert is_image(again.item, 2)
    received.release()
    attachment.detach()
    with pytest.raises(ArenaUnavailableError):
        await receiver.attach(offer)
    await receiver.close()


async def test_a_worker_removes_the_arena_of_a_frontend_that_was_killed(frontend: Process) -> None:
    """No other may start on its host, and the memory would be held until the next boot."""
    offer = ArenaOffer.model_validate(frontend.read())
    path = SHARED_MEMORY / offer.name
    receiver = ShmReceiver()
    attachment = await receiver.attach(offer)
    metadata = ShmMetadata.model_validate(frontend.ask(["send", 1]))
    received = await receiver.receive(metadata)
    frontend.kill()
    attachment.detach()
    await until(lambda: not path.exists())
    assert is_image(received.item, 1)
    received.release()
    await receiver.close()


def test_only_the_owner_removes_its_arena(frontend: Process) -> None:
    offer = ArenaOffer.model_validate(frontend.read())
    code = (
        "import sys\n"
        "from common.transfer.arena.layout import ArenaOffer\n"
        "from common.transfer.arena.file import ArenaMapping\n"
        "ArenaMapping.open(ArenaOffer.model_validate_json(sys.argv[1]))\n"
    )
    # Python's own shared memory would unlink the segment when this reader exits.
    subprocess.run([sys.executable, "-c", code, offer.model_dump_json()], check=True, timeout=60)
    assert (SHARED_MEMORY / offer.name).exists()
    ArenaMapping.open(offer)
    frontend.__exit__()
    assert not (SHARED_MEMORY / offer.name).exists()
