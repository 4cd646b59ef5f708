"""Requests over workers whose engines are scripted. Everything else is real: links, sessions,
routing, retries."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import torch
import zmq.asyncio
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from backend_worker.engine.vllm_engine import Items
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import MmRouterError
from common.identity import Incarnation, WorkerId
from common.request_plane.protocol import Submit
from common.transfer.inline import Render
from common.transfer.transports import TransferMode, receivers
from frontend.asgi import as_vllm_error
from frontend.processing.preprocessor import MediaItem, ProcessedPrompt
from frontend.request.resume import sampling_of
from frontend.request.runner import GenerateRequest, RequestRunner
from frontend.request.settings import FaultSettings
from frontend.router.inputs import RoutableWorker
from frontend.router.router import Router
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.fakes.model import ScriptedModel, stream, tokenizer
from tests.ports import free_port

ANSWER = "Größe: 3 m² – „schön“ 😀 日本語"

Script = Callable[[Submit, Items], AsyncGenerator[RequestOutput | PoolingRequestOutput]]


class Connected:
    """Workers whose links are there already."""

    def __init__(self, links: dict[WorkerId, WorkerLink]) -> None:
        self._links = links
        self.joined: dict[WorkerId, float] = {}
        self.arrival = asyncio.Event()
        self.closed = False
        self.check: Callable[[], None] = lambda: None

    def check_available(self) -> None:
        self.check()

    def link(self, worker_id: WorkerId) -> WorkerLink:
        return self._links[worker_id]

    def joined_since(self, worker_id: WorkerId, moment: float) -> bool:
        return self.joined[worker_id] > moment


class Lab:
    """Two workers and a client; a preprocessor and a fleet that know what they are told."""

    def __init__(self, settings: FaultSettings) -> None:
        self.model = ScriptedModel(ANSWER)
        self.router = Router()
        self.media_sender = MediaSender(None, TransferMode.SHM)
        self.context = zmq.asyncio.Context()
        self.links: dict[WorkerId, WorkerLink] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.services: dict[str, WorkerService] = {}
        self.serving: list[asyncio.Task[None]] = []
        self.asked: list[tuple[str, Submit]] = []
        self.prompts: list[weakref.ref[ProcessedPrompt]] = []
        self.embeds: torch.Tensor | None = None
        self.lora: LoRARequest | None = None
        self.media: list[MediaItem] = []
        self.render: Render = no_rendering
        self.tokenizer = tokenizer()
        self.vocabulary_size = len(self.tokenizer)

        self.fleet = Connected(self.links)
        self.runner = RequestRunner(self, self.fleet, self.router, self.media_sender, settings)

    async def process(self, *_: object) -> ProcessedPrompt:
        """The model's prompt, whatever is asked."""
        prompt = ProcessedPrompt(
            self.model.prompt, self.media, None, None, self.lora, self.embeds, None
        )
        self.prompts.append(weakref.ref(prompt))
        return prompt

    async def add(self, name: str) -> None:
        engine = self.engines[name] = ScriptedEngine()
        service = WorkerService(
            engine,
            MediaReceiver(receivers(self.render)),
            WorkerId(name),
            Incarnation(name),
            f"tcp://127.0.0.1:{free_port()}",  # not one that is just being freed
        )
        self.services[name] = service
        self.serving.append(asyncio.create_task(service.run()))
        card = make_card(worker_id=name, incarnation=name, request_endpoint=service.endpoint)
        link = WorkerLink(card, self.context, Incarnation("f"), lambda status: None)
        await link.open(self.media_sender.offer())
        self.links[WorkerId(name)] = link
        self.fleet.joined[WorkerId(name)] = time.monotonic()
        await self.router.roster.add(
            RoutableWorker(
                worker_id=WorkerId(name),
                incarnation=Incarnation(name),
                ranks=(0,),
                block_size=16,
                hash_algorithm="sha256_cbor",
                none_hash=bytes(32),
                event_sources=(),
                kv_tokens=1000,
                max_num_seqs=8,
                prefix_caching=False,
            )
        )
        engine.script = self.speaking(name)
        self.arrival()

    def arrival(self) -> None:
        """Whoever waits for a worker looks again."""
        self.fleet.arrival.set()
        self.fleet.arrival = asyncio.Event()

    async def remove(self, name: str) -> None:
        await self.router.roster.remove(WorkerId(name))
        await self.links.pop(WorkerId(name)).close()
        await self.services.pop(name).close()

    def speaking(self, name: str, steps: int | None = None, then: object = None) -> Script:
        """The model's answer, or its first steps and then an error, or silence."""

        async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
            self.asked.append((name, submit))
            tokens = submit.prompt_token_ids or self.model.prompt  # None of embeddings
            made = self.model.outputs(tokens, sampling_of(submit), steps)
            async for output in stream(made):
                yield output
            if isinstance(then, Exception):
                raise then
            if steps is not None:
                await asyncio.Event().wait()

        return script

    def disturb(self, steps: int, then: object = None) -> None:
        """Whoever gets the next request fails after so many steps; later ones succeed."""
        for name, engine in self.engines.items():

            def first(
                submit: Submit, items: Items, name: str = name
            ) -> AsyncGenerator[RequestOutput]:
                for other, each in self.engines.items():
                    each.script = self.speaking(other)
                return self.speaking(name, steps, then)(submit, items)

            engine.script = first

    async def ask(self, *, name: str = "r", **more: Any) -> list[RequestOutput]:
        given = {
            "temperature": 0.0,
            "max_tokens": 200,
            "output_kind": RequestOutputKind.DELTA,
        } | more
        async with asyncio.timeout(60), aclosing(self.generate(name, **given)) as answers:
            return [answer async for answer in answers]

    async def generate(self, name: str, **params: Any) -> AsyncGenerator[RequestOutput]:
        prompt: Any = {"type": "token", "prompt_token_ids": self.model.prompt}
        request = GenerateRequest(prompt, SamplingParams(**params), name)
        try:
            async with aclosing(self.runner.run(request)) as outputs:
                async for output in outputs:
                    yield output
        except MmRouterError as error:
            raise as_vllm_error(error) from error

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        for service in self.services.values():
            await service.close()
        await self.router.close()
        self.context.destroy(linger=0)
        self.media_sender.close()
