"""What is asked of AsyncLLM, and which of its answers are none."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from backend_worker.engine import calls as engine_calls
from common.errors import EngineFailedError, RequestRejectedError, WorkerBusyError
from common.identity import RequestId
from common.request_plane.protocol import Submit
from tests.fakes.engine import output, pooled

PARAMS = PoolingParams(task="embed")
SUBMIT = Submit(RequestId("r"), [1, 2], None, [], [], priority=3, pooling_params=PARAMS)


class Llm:
    """Says one vector, and remembers what it was asked."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.vllm_config = SimpleNamespace(parallel_config=None, lora_config=None)
        self.input_processor = self
        self.processed: list[dict[str, Any]] = []
        self.encoded: list[tuple[Any, Any, str, dict[str, Any]]] = []

    async def get_supported_tasks(self) -> list[str]:
        return ["embed"]

    def process_inputs(self, *given: Any, **options: Any) -> str:
        self.processed.append(options)
        return "processed"

    async def encode(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        self.encoded.append((prompt, params, request_id, options))
        yield pooled(1.0, 2.0)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_rank_is_told_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(engine_calls, "served_ranks", lambda _: list(range(ranks)))
    llm: Any = Llm(ranks)
    prompt: Any = {"type": "token"}
    outputs = [each async for each in engine_calls.ask(llm, SUBMIT, prompt, None, ranks - 1)]
    assert [each.outputs.data.tolist() for each in outputs] == [[1.0, 2.0]]
    ((given, params, request_id, options),) = llm.encoded
    assert (params, request_id, options["priority"]) == (PARAMS, "r", 3)
    assert given == ("processed" if ranks > 1 else prompt)
    assert [each["data_parallel_rank"] for each in llm.processed] == [1] * (ranks - 1)


@pytest.mark.parametrize(
    ("lora", "drafts", "fields", "refused"),
    [
        (object(), None, {"prompt_logprobs": 0}, "not with --enable-lora"),
        (object(), None, {"logprobs": 1}, ""),
        (None, object(), {"prompt_logprobs": 1}, ""),
        (None, object(), {"logprob_token_ids": [1]}, "not with --speculative-config"),
        (None, None, {"logprob_token_ids": [1]}, ""),
    ],
)
def test_an_engine_is_not_asked_for_what_ends_it_or_what_it_leaves_out(
    lora: object, drafts: object, fields: dict[str, Any], refused: str
) -> None:
    asked: list[str] = []
    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=lora, speculative_config=drafts),
        generate=lambda prompt, *_, **__: asked.append(prompt),
    )
    prompt: Any = "prompt"
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(**fields), [], [])
    if refused:
        with pytest.raises(RequestRejectedError, match=refused):
            engine_calls.ask(llm, submit, prompt, None, None)
    else:
        engine_calls.ask(llm, submit, prompt, None, None)
    assert asked == [] if refused else [prompt]


def test_what_is_no_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_calls.check(pooled(1.0))
    engine_calls.check(output("words", finished=True))
    with pytest.raises(WorkerBusyError, match="told to end"):
        engine_calls.check(pooled())
    monkeypatch.setattr(engine_calls, "MAX_POOLED_BYTES", 7)
    with pytest.raises(RequestRejectedError, match="shorten the input"):
        engine_calls.check(pooled(1.0, 2.0))


def test_what_failed_says_so() -> None:
    empty = PoolingOutput(torch.empty(0))
    error = RequestError("multimodal_cache_miss", "cache miss", retryable=True)
    failed = PoolingRequestOutput("r", empty, [1], 0, finished=True, error=error)
    assert engine_calls.has_failed(failed)
    assert not engine_calls.has_failed(pooled(1.0))
    with pytest.raises(EngineFailedError, match="cache miss"):
        engine_calls.check(failed)


def submitted(**options: Any) -> Submit:
    params = SamplingParams(**options)
    return Submit(RequestId("r"), [1, 2], params, [], [])


def test_a_form_of_answer_that_the_engine_can_not_write_is_the_users_fault() -> None:
    grammar = submitted(structured_outputs=StructuredOutputsParams(grammar="root ::= root"))
    failed = output("", finished=True)
    failed.outputs[0].finish_reason = "error"
    with pytest.raises(RequestRejectedError, match="structured outputs"):
        engine_calls.check_form(failed, grammar)
    engine_calls.check_form(output("a", finished=True), grammar)
    engine_calls.check_form(failed, submitted())
    engine_calls.check_form(pooled(1.0), SUBMIT)
