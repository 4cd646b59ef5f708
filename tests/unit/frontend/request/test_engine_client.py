"""What vLLM's routes ask of the engine as a whole."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Final, cast
from unittest.mock import MagicMock

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import EngineInput
from vllm.sampling_params import SamplingParams

from common.errors import NoWorkerError
from frontend.asgi import error_answer
from frontend.processes import Siblings
from frontend.processes.siblings import Tell
from frontend.processing import Preprocessor
from frontend.request import FaultSettings, RequestRunner, RoutedEngineClient
from frontend.request.deadlines import Deadlines
from frontend.request_context import begin
from frontend.router import Router, Slots
from frontend.router.selection import LoadTracker
from frontend.workers import Fleet

SLOTS: Final = Slots(64, 64, 0, 60_000)


class Process:
    """One of a frontend, and what its others are asked."""

    def __init__(self, siblings: bool, fleet: object = None) -> None:
        self.cleared = 0
        self.others: list[Process] = []
        self._tells: dict[str, Tell] = {}
        preprocessor = SimpleNamespace(
            vllm_config=None,
            model_config=None,
            renderer=None,
            input_processor=None,
            clear_media=self._clear,
        )
        self.client = RoutedEngineClient(
            cast(Preprocessor, preprocessor),
            cast(Fleet, fleet),
            cast(Router, SimpleNamespace(load=LoadTracker(time.monotonic))),
            cast(RequestRunner, None),
            1,
            cast(Siblings, self) if siblings else None,
        )

    def _clear(self) -> None:
        self.cleared += 1

    def tell(self, topic: str, tell: Tell) -> None:
        self._tells[topic] = tell

    async def ask(self, topic: str, argument: bytes = b"") -> dict[str, bytes]:
        return {str(n): other._tells[topic](argument) for n, other in enumerate(self.others)}


async def test_media_are_forgotten_by_all_processes() -> None:
    """Whichever of them the route was asked of."""
    asked, other = Process(True), Process(True)
    asked.others = [other]
    await asked.client.reset_mm_cache()
    assert (asked.cleared, other.cleared) == (1, 1)


async def test_media_are_forgotten_by_the_only_process() -> None:
    only = Process(False)
    await only.client.reset_mm_cache()
    assert only.cleared == 1


async def test_without_workers_health_says_what_it_says_before_the_first_one() -> None:
    def nobody() -> None:
        raise NoWorkerError("no worker is available")

    client = Process(False, SimpleNamespace(check_available=nobody)).client
    with pytest.raises(GracefulHTTPError) as caught:
        await client.check_health()
    later = create_error_response(caught.value).model_dump()
    assert later == json.loads(bytes(error_answer("no worker is available", 503).body))
    assert later["error"]["type"] == "Service Unavailable"


PICTURES: Final = {"prompt_token_ids": [1] * 90, "mm_placeholders": {"image": [None] * 20}}
SOUND: Final = {
    "type": "enc_dec",
    "encoder_prompt": {"prompt_token_ids": [0] * 1500},
    "decoder_prompt": {"prompt_token_ids": [1] * 4, "mm_placeholders": {"audio": [None]}},
}


def client_of(run: Callable[..., AsyncGenerator[object]]) -> RoutedEngineClient:
    """Return a client whose requests ``run`` answers."""
    return RoutedEngineClient(
        cast(Preprocessor, MagicMock()),
        cast(Fleet, None),
        cast(Router, SimpleNamespace(load=SimpleNamespace(slots=lambda: SLOTS))),
        cast(RequestRunner, SimpleNamespace(deadlines=lambda: Deadlines(FaultSettings()), run=run)),
        1024,
    )


async def test_the_name_of_a_session_reaches_no_engine() -> None:
    asked: list[object] = []

    async def run(request: object, computed: Callable[[], None]) -> AsyncGenerator[object]:
        asked.append(request)
        yield computed

    client = client_of(run)
    prompt = cast(EngineInput, {"type": "token", "prompt_token_ids": [1]})
    begin()
    async for _ in client.generate(prompt, SamplingParams(), "id", session_id="of a client"):
        pass
    assert asked and "of a client" not in repr(asked)


@pytest.mark.parametrize(
    ("prompt", "choices", "begun"), [(PICTURES, 1, 4), (PICTURES, 4, 1), (SOUND, 4, 5)]
)
async def test_calls_of_one_request_with_media_take_turns(
    prompt: object, choices: int, begun: int
) -> None:
    """Engines read all media again for each choice of each call, however few tokens they have."""
    started = 0
    end = asyncio.Event()

    async def run(request: object, computed: Callable[[], None]) -> AsyncGenerator[object]:
        nonlocal started
        started += 1
        await end.wait()
        yield request

    client = client_of(run)

    async def call() -> None:
        params = SamplingParams(n=choices)
        async for _ in client.generate(cast(EngineInput, prompt), params, "id"):
            pass

    begin()
    calls = [asyncio.create_task(call()) for _ in range(9)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert started == begun + 1  # the first is no bulk call
    end.set()
    await asyncio.gather(*calls)
