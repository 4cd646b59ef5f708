"""A model that says what a test tells it to, behind vLLM's own output processor, so with
its detokenizer, its stop strings and its way of merging outputs. No engine."""

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from examples.demo_models.text import make_tokenizer

PROMPT = "What is on the picture?"

Speech = Callable[[Sequence[int], int], list[int]]
"""From all tokens so far and the length of the user's prompt to the whole answer."""


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The demo model's byte-level BPE: most letters beyond ASCII take several tokens."""
    made: PreTrainedTokenizerBase = make_tokenizer(("<|image_pad|>",), "")
    return made


def tokens(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


class ScriptedModel:
    """Gives ``answer``, one token a step, after a prompt of ``PROMPT`` and some of it."""

    def __init__(self, answer: str, eos: bool = True) -> None:
        self.answer = tokens(answer) + ([tokenizer().eos_token_id] if eos else [])
        self.prompt = tokens(PROMPT)

    def outputs(
        self, prompt: list[int], params: SamplingParams, steps: int | None = None
    ) -> list[RequestOutput]:
        """What vLLM streams, each step of one token an output.

        Args:
            steps: how many before the engine is lost; None to the end.
        """
        processor = OutputProcessor(tokenizer(), log_stats=False)
        request = EngineCoreRequest(
            "r-1", prompt, None, params, None, 0.0, None, None, None, external_req_id="r"
        )
        queue = RequestOutputCollector(params.output_kind, "r")
        processor.add_request(request, None, queue=queue)
        position = len(prompt) - len(self.prompt)
        assert prompt == self.prompt + self.answer[:position], "the model was told something else"
        made: list[RequestOutput] = []
        for count, token in enumerate(self.answer[position:], start=1):
            if steps is not None and count > steps:
                return made
            core = EngineCoreOutput("r-1", [token])
            if token == tokenizer().eos_token_id:
                core.finish_reason = FinishReason.STOP
            elif count == params.max_tokens:
                core.finish_reason = FinishReason.LENGTH
            if params.logprobs is not None:
                core.new_logprobs = LogprobsLists(
                    np.array([[token]]), np.array([[-0.5]]), np.array([1])
                )
            processor.process_outputs([core])
            output = queue.get_nowait()
            if output is not None:
                assert isinstance(output, RequestOutput)
                made.append(output)
                if output.finished:
                    return made
        return made


async def stream(outputs: Sequence[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    for output in outputs:
        yield output
