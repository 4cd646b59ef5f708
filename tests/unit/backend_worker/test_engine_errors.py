"""What an engine raises for a request, or says of it, as the worker tells it to the frontend."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import (
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    VLLMValidationError,
)
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from backend_worker.engine.vllm_engine import Engine
from common.errors import (
    EngineFailedError,
    EngineGoneError,
    MediaMissingError,
    MmRouterError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.identity import MmHash, RequestId
from common.request_plane.protocol import MediaPart, Submit
from tests.fakes.engine import output

CAT = MmHash("cat")
SUBMIT = Submit(RequestId("r"), [1, 2], SamplingParams(), [], [])
CATS = [MediaPart("image", CAT, 0, 1, None)]
OF_A_CAT = Submit(RequestId("r"), [1, 2], SamplingParams(), CATS, [])


class Renderer:
    """Forgets what an engine misses at once, as vLLM 0.32 does, or when it is told to."""

    def __init__(self, *, later: bool) -> None:
        self.held = {CAT}
        self._missing: set[str] = set()
        if later:
            self._drain_mm_cache_invalidations = self._forget
        self.later = later

    def queue_mm_cache_invalidations(self, missing: list[str]) -> None:
        self._missing.update(missing)
        if not self.later:
            self._forget()

    def _forget(self) -> None:
        self.held -= self._missing
        self._missing.clear()

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.held

    def touch_sender_cache_item(self, mm_hash: str) -> None: ...

    def release_sender_touches(self) -> None: ...

    def get_and_update_item(self, item: object, mm_hash: str) -> tuple[None, list[object]]:
        return None, []


class Llm:
    """Raises, or misses a picture that it is said to hold."""

    def __init__(self, raises: BaseException | None, renderer: Renderer) -> None:
        self._raises = raises
        self.renderer = renderer
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[Any, None]:
        if self._raises is not None:
            raise self._raises
        self.renderer.queue_mm_cache_invalidations([CAT])
        failed = output("", finished=True)
        failed.outputs[0].finish_reason = "error"
        yield failed


def engine(raises: BaseException | None = None, *, later: bool = True) -> Engine:
    made = object.__new__(Engine)
    renderer: Any = Renderer(later=later)
    made._llm = Llm(raises, renderer)
    made._cache = renderer
    made._ranks = [0]
    made._copies_items = False
    made.adapters = SimpleNamespace(named=lambda _: None)  # type: ignore[assignment]
    return made


async def outcome(asked: Engine, submit: Submit) -> MmRouterError:
    with pytest.raises(MmRouterError) as caught:
        async for _ in asked.generate(submit, {}):
            raise AssertionError("there is no output")
    return caught.value


@pytest.mark.parametrize(
    ("raised", "told", "retryable"),
    [
        (RetryableRequestError("Generation is paused."), WorkerBusyError, True),
        (GenerationError("Internal server error"), EngineFailedError, False),
        (QueueOverflowError(), WorkerBusyError, True),
        (VLLMValidationError("too long"), RequestRejectedError, False),
        (EngineGenerateError(), EngineFailedError, False),
        (EngineDeadError(), EngineGoneError, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_what_is_raised_says_whether_another_worker_may_try(
    raised: Exception, told: type[MmRouterError], retryable: bool
) -> None:
    error = await outcome(engine(raised), SUBMIT)
    assert type(error) is told
    assert error.retryable is retryable


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
async def test_a_picture_that_the_engine_evicted_is_asked_for(later: bool) -> None:
    """Also where vLLM notes it, and forgets it when something is rendered: nothing ever is."""
    asked = engine(later=later)
    error = await outcome(asked, OF_A_CAT)
    assert isinstance(error, MediaMissingError)
    assert (error.missing, error.reason) == ([CAT], "engine_evicted")
    assert not asked.holds(CAT)


async def test_what_nobody_noticed_is_forgotten_before_the_next_request() -> None:
    """Its request was given up before its engine had said that it misses something."""
    asked = engine(AssertionError("it must not be asked"))
    asked._llm.renderer.queue_mm_cache_invalidations([CAT])
    error = await outcome(asked, OF_A_CAT)
    assert isinstance(error, MediaMissingError) and error.reason == "not_held"


def test_vllms_renderer_has_what_the_one_here_has() -> None:
    queues = hasattr(BaseRenderer, "queue_mm_cache_invalidations")
    assert queues == hasattr(BaseRenderer, "_drain_mm_cache_invalidations")


async def test_a_structure_that_fails_in_the_middle_of_an_answer_is_its_requests_fault() -> None:
    """As one does that takes the engine ever longer."""
    asked = engine()

    async def words(*_: object, **__: object) -> AsyncGenerator[Any, None]:
        yield output("a", finished=False)
        failed = output("b", finished=True)
        failed.outputs[0].finish_reason = "error"
        yield failed

    vars(asked._llm)["generate"] = words
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a|aa)*"))
    outputs = asked.generate(Submit(RequestId("r"), [1, 2], params, [], []), {})
    assert (await anext(outputs)).outputs[0].text == "a"
    with pytest.raises(RequestRejectedError, match="too long for each token"):
        await anext(outputs)
