"""``kill -9`` of one of two frontends amid its answers: its clients' connections break, nobody
else notices, and the worker keeps nothing of it.

The worker's engine is scripted, so that answers stand still for as long as it takes.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from pathlib import Path

import aiohttp
from vllm.outputs import CompletionOutput, RequestOutput

from backend_worker.engine.vllm_engine import Items
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.discovery.file import FileCardPublisher
from common.errors import MediaMissingError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import Capacity
from common.request_plane.protocol import Submit
from common.transfer.arena import reap_orphans
from common.transfer.transports import receivers
from common.vllm_compat.features import INSTALLED
from tests.benchmarks.fleet_clients import Cut, Outcome, Whole, ask, connections
from tests.benchmarks.fleet_traffic import PICTURE, Ask, Message
from tests.e2e.processes import HttpServer, shared_memory_of, start_frontend
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.waiting import until

WORDS = 12
TOLD = 3
"""Words of an answer before it stands still."""

STREAMS = 4
"""Through each frontend."""


class Storyteller(ScriptedEngine):
    """Answers with a function of the prompt and its media.

    Attributes:
        go_on: whether answers go on after their first words.
        paused: answers that wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.paused = 0

    async def generate(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        wanted = [part.mm_hash for part in submit.media]
        if missing := [each for each in wanted if each not in items and each not in self.held]:
            raise MediaMissingError(missing, "not_held")
        self.held.update(items)
        self.running += 1
        content = f"{submit.prompt_token_ids} {wanted}".encode()
        ended = False
        try:
            for number in range(WORDS):
                if number == TOLD:
                    self.paused += 1
                    await self.go_on.wait()
                    self.paused -= 1
                word = blake2b(content + bytes([number]), digest_size=4).hexdigest() + " "
                yield _output(word, finished=number == WORDS - 1)
            ended = True
        finally:
            self.running -= 1
            self.aborted += not ended


def _output(text: str, *, finished: bool) -> RequestOutput:
    reason = "length" if finished else None
    completion = CompletionOutput(0, text, [1], None, None, finish_reason=reason)
    return RequestOutput("r", None, None, None, [completion], finished, num_cached_tokens=0)


@asynccontextmanager
async def worker(model: Path, cards: Path, engine: Storyteller) -> AsyncIterator[WorkerService]:
    """A worker in this process, as far as frontends can tell."""
    service = WorkerService(
        engine,
        MediaReceiver(receivers(no_rendering)),
        WorkerId("teller"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
    )
    card = make_card(
        "teller",
        vllm_version=INSTALLED,
        model={"model": str(model), "tokenizer": str(model)},
        capacity=Capacity(
            num_blocks=1 << 20,
            max_num_seqs=1024,
            max_num_batched_tokens=1 << 20,
            encoder_cache_tokens=1 << 20,
        ),
        request_endpoint=service.endpoint,
    )
    serving = asyncio.create_task(service.run())
    try:
        async with FileCardPublisher(cards) as publisher:
            await publisher.publish(card)
            yield service
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await service.close()


def about(name: str) -> Ask:
    """A question about a picture."""
    return Ask(0.0, 0, 0, (Message("user", (f"{PICTURE}{name}", f"What is {name}?")),))


async def answers(
    http: aiohttp.ClientSession, server: HttpServer, names: list[str]
) -> list[Outcome]:
    """Ask about several pictures at once."""
    bodies = [about(name).body(WORDS) for name in names]
    return await asyncio.gather(*(ask(http, server.url, body) for body in bodies))


def mapped_here(owner: int) -> bool:
    """Whether this process, the worker's, has the shared memory of another mapped."""
    return f"mmrouter-arena-{owner}-" in Path("/proc/self/maps").read_text()


async def test_who_is_killed_takes_nobody_along(model: Path, tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    engine = Storyteller()
    ours, theirs = ([f"{whose}-{n}" for n in range(STREAMS)] for whose in ("ours", "theirs"))
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(worker(model, cards, engine))
        stays, doomed = (start_frontend(name, cards, tmp_path) for name in ("stays", "doomed"))
        for server in (stays, doomed):
            stack.callback(server.stop)
        for server in (stays, doomed):
            await asyncio.to_thread(server.wait_for_status, 200)
        http = await stack.enter_async_context(connections())

        engine.go_on.set()
        right = await answers(http, stays, ours)
        assert all(isinstance(each, Whole) and each.tokens == WORDS for each in right)
        assert len({each.text for each in right if isinstance(each, Whole)}) == STREAMS

        engine.go_on.clear()
        lasting = asyncio.create_task(answers(http, stays, ours))
        broken = asyncio.create_task(answers(http, doomed, theirs))
        await until(lambda: engine.paused == 2 * STREAMS)
        assert mapped_here(doomed.pid)
        doomed.signal(signal.SIGKILL)
        await asyncio.to_thread(doomed.wait)
        assert all(isinstance(each, Cut) for each in await broken)
        await until(lambda: engine.aborted == STREAMS)
        await until(lambda: not mapped_here(doomed.pid))
        assert service.active_requests == STREAMS

        engine.go_on.set()
        assert _texts(await lasting) == _texts(right)
        # As whoever starts next does.
        await asyncio.to_thread(reap_orphans)
        await until(lambda: not shared_memory_of(doomed.pid))  # another may be removing it
        # Nor is anything missing that only the dead one had sent.
        again = await answers(http, stays, theirs)
        assert all(isinstance(each, Whole) for each in again)
        assert service.active_requests == 0
        assert engine.aborted == STREAMS


def _texts(outcomes: list[Outcome]) -> list[str]:
    return [each.text if isinstance(each, Whole) else repr(each) for each in outcomes]
