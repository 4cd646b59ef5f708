"""A frontend with all that makes metrics but vLLM's app: fleet, router and runner over real sockets
to workers with scripted engines, and its two pages over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Histogram, make_asgi_app
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from backend_worker.plane.load_report import OwnMetrics
from common.discovery.base import CardPresent
from common.identity import WorkerId
from common.observability.telemetry import FIRST_TOKEN_S, STAGE_S
from common.observability.watchdog import measure_loop_delay
from frontend.http.operator.merged_metrics import worker_metrics_routes
from frontend.processing.preprocessor import ProcessedPrompt
from frontend.request.runner import GenerateRequest, RequestRunner
from frontend.request.settings import FaultSettings
from tests.fakes.fleet import Town
from tests.waiting import until

WORKERS = (WorkerId("w0"), WorkerId("w1"))


class Monitored:
    """The frontend, and a client of it.

    Attributes:
        port: where its pages are, on 127.0.0.1.
    """

    def __init__(self, town: Town) -> None:
        self.town = town
        self.port = 0
        self.salt: str | None = None
        self._runner = RequestRunner(
            self, town.fleet, town.router, town.media_sender, FaultSettings()
        )

    tokenizer = None
    vocabulary_size = 1000

    async def process(self, *_: object) -> ProcessedPrompt:
        """Some tokens, whatever is asked."""
        return ProcessedPrompt(list(range(40)), [], None, self.salt, None, None, None)

    async def ask(self, client_id: str = "r") -> list[RequestOutput]:
        """One request, from its beginning to its end."""
        prompt: Any = {"type": "token", "prompt_token_ids": [1]}
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        request = GenerateRequest(prompt, params, client_id)
        async with asyncio.timeout(60), aclosing(self._runner.run(request)) as outputs:
            return [output async for output in outputs]


def _of_an_engine() -> CollectorRegistry:
    """Some of what vLLM counts, in a registry of each worker's own."""
    made = CollectorRegistry()
    labels = {"model_name": "demo", "engine": "0"}
    Counter("vllm:num_preemptions", "", labels, registry=made).labels(**labels).inc()
    first = Histogram(
        "vllm:time_to_first_token_seconds", "", labels, buckets=FIRST_TOKEN_S, registry=made
    )
    first.labels(**labels).observe(0.1)
    stages = Histogram("mmrouter_stage_seconds", "", ["stage"], buckets=STAGE_S, registry=made)
    stages.labels("inject").observe(0.001)
    return made


class _Server(uvicorn.Server):
    """Signals stay the test's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def monitored() -> AsyncIterator[Monitored]:
    """Two workers are there; the event loop is watched."""
    town = Town()
    frontend = Monitored(town)
    for worker_id in WORKERS:
        worker = town.start(f"run-of-{worker_id}")
        worker.service._metrics = OwnMetrics(worker.service._send, _of_an_engine())
        town.news.say(CardPresent(worker.card(worker_id)))
    await until(lambda: len(list(town.fleet.members.available())) == len(WORKERS))
    app = FastAPI()
    app.include_router(worker_metrics_routes(town.fleet.members))
    app.mount("/metrics", make_asgi_app())
    server = _Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(measure_loop_delay())]
    try:
        await until(lambda: server.started)
        frontend.port = server.servers[0].sockets[0].getsockname()[1]
        yield frontend
    finally:
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await town.close()
