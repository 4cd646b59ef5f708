"""An answer that was cut at any place goes on as if nothing had happened."""

import copy
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from common.errors import NotResumableError
from common.identity import RequestId
from common.request_plane.protocol import Submit
from frontend.request.resume import (
    Beginning,
    Continuation,
    GeneratedSoFar,
    Regeneration,
    Resume,
    plan_resume,
    sampling_of,
)
from tests.fakes.model import ScriptedModel, tokenizer

ANSWER = "Größe: 3 m² – „schön“ 😀👨‍👩‍👧 日本語 the END of it, END"


def params(**more: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": 200, "output_kind": RequestOutputKind.DELTA} | more
    return SamplingParams(**given)


def submit(model: ScriptedModel, sampling: SamplingParams, **more: Any) -> Submit:
    return Submit(RequestId("r"), model.prompt, sampling, [], [], **more)


@dataclass
class Whole:
    """All deltas put together."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: CompletionOutput) -> None:
        assert self.finish_reason is None, "it went on after its end"
        self.text += output.text
        self.token_ids += tuple(output.token_ids)
        self.logprobs += len(output.logprobs or [])
        self.cumulative_logprob = output.cumulative_logprob
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


def told(outputs: list[RequestOutput]) -> Whole:
    whole = Whole()
    for output in outputs:
        whole.add(output.outputs[0])
    return whole


def cut(model: ScriptedModel, sampling: SamplingParams, places: list[int]) -> tuple[Whole, Resume]:
    """The answer when a worker is lost after so many steps, the next after more, ..."""
    original = submit(model, sampling)
    generated, whole = GeneratedSoFar(), Whole()
    resume: Resume = Beginning(original)
    for steps in [*places, None]:
        resume = plan_resume(original, generated, tokenizer(), seen=True)
        asked = resume.submit
        assert asked.prompt_token_ids is not None
        for output in model.outputs(asked.prompt_token_ids, sampling_of(asked), steps):
            joined = resume.join(output.outputs)
            generated.add(joined)
            for one in joined:
                whole.add(one)
            if whole.finish_reason:
                return whole, resume
    raise AssertionError("it never ended")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 37},
    "min_tokens": {"min_tokens": 20, "stop": ["m"]},
    "no eos": {"ignore_eos": True, "max_tokens": 200},
    "stop string": {"stop": ["END"]},
    "stop string kept": {"stop": ["END"], "include_stop_str_in_output": True},
    "stop string of many tokens": {"stop": ["日本語 the", "never"]},
    "special tokens shown": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "ids only": {"detokenize": False},
    "logprobs": {"logprobs": 0},
    "repetition penalty": {"repetition_penalty": 1.2},
    "logit bias": {"logit_bias": {3: 1.0}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_cut_after_every_token_nothing_is_lost_or_repeated(kind: str) -> None:
    model = ScriptedModel(ANSWER)
    sampling = params(**KINDS[kind])
    expected = told(model.outputs(model.prompt, sampling))
    assert expected.finish_reason
    how = set()
    for place in range(1, len(expected.token_ids)):
        whole, resume = cut(model, sampling, [place])
        assert whole == expected, place
        how.add(type(resume))
    assert Continuation in how
    assert how <= ({Continuation, Regeneration} if kind == "logprobs" else {Continuation})


def test_cut_again_and_again() -> None:
    model = ScriptedModel(ANSWER)
    sampling = params(stop=["it, END"])
    expected = told(model.outputs(model.prompt, sampling))
    for step in (1, 2, 3, 7):
        whole, _ = cut(model, sampling, [step] * 60)
        assert whole == expected


def test_unseeded_sampling_goes_on_from_its_tokens() -> None:
    model = ScriptedModel(ANSWER)
    whole, resume = cut(model, params(temperature=1.0), [5])
    assert isinstance(resume, Continuation)
    assert whole.text == ANSWER


def test_what_is_asked_is_what_is_left() -> None:
    model = ScriptedModel(ANSWER)
    sampling = params(max_tokens=30, min_tokens=10, stop=["END"], prompt_logprobs=1)
    before = copy.deepcopy(sampling)
    generated = GeneratedSoFar()
    for output in model.outputs(model.prompt, sampling, 12):
        generated.add(output.outputs)
    resume = plan_resume(submit(model, sampling), generated, tokenizer(), seen=True)
    asked = sampling_of(resume.submit)
    assert (asked.max_tokens, asked.min_tokens, asked.stop) == (18, 0, [])
    assert asked.prompt_logprobs is None, "given with the first output"
    assert resume.submit.prompt_token_ids == model.prompt + model.answer[:12]
    assert sampling == before, "the original serves the next attempt as well"


STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({"seed": 7, "temperature": 1.0}, {}, "random generator"),
    "presence": ({"presence_penalty": 0.5}, {}, "penalty"),
    "frequency": ({"frequency_penalty": 0.5}, {}, "penalty"),
    "structure": ({"structured_outputs": StructuredOutputsParams(regex="a+")}, {}, "structure"),
    "bad words": ({"bad_words": ["river"]}, {}, "forbidden"),
    "thinking": ({"thinking_token_budget": 5}, {}, "budget"),
    "repetition": (
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3)},
        {},
        "repetition",
    ),
    "plug-ins": ({"extra_args": {"mine": 1}}, {}, "plug-ins"),
    "embeddings": ({}, {"prompt_embeds": torch.zeros(2, 4)}, "embeddings"),
    "several": ({"n": 2}, {}, "several answers"),
}


@pytest.mark.parametrize("state", STATES)
def test_state_that_is_not_in_the_tokens_is_made_again(state: str) -> None:
    more, fields, _ = STATES[state]
    model = ScriptedModel(ANSWER)
    sampling = params(**{"seed": 7, "temperature": 1.0} if state == "several" else {}, **more)
    original = submit(model, sampling, **fields)
    expected, whole, generated = Whole(), Whole(), GeneratedSoFar()
    plain = params(stop=sampling.stop)
    for output in model.outputs(model.prompt, plain, 9):
        generated.add(output.outputs)
        whole.add(output.outputs[0])
    resume = plan_resume(original, generated, tokenizer(), seen=True)
    assert isinstance(resume, Regeneration) and resume.submit is original
    for output in model.outputs(model.prompt, plain):
        expected.add(output.outputs[0])
        for one in resume.join(output.outputs):
            whole.add(one)
    assert whole == expected


@pytest.mark.parametrize("state", [state for state in STATES if state != "seed"])
def test_state_that_is_not_in_the_tokens_is_named_where_outputs_are_random(state: str) -> None:
    more, fields, reason = STATES[state]
    model = ScriptedModel(ANSWER)
    original = submit(model, params(**more, temperature=0.7), **fields)
    generated = GeneratedSoFar()
    for output in model.outputs(model.prompt, params(), 9):
        generated.add(output.outputs)
    with pytest.raises(NotResumableError, match=f"{reason}.*, and it is neither greedy nor seeded"):
        plan_resume(original, generated, tokenizer(), seen=True)
    resume = plan_resume(original, generated, tokenizer(), seen=False)
    assert isinstance(resume, Beginning), "what nobody has seen is made again"
    assert not generated.choices


def replaying(answer: str, steps: int = 9) -> tuple[ScriptedModel, Regeneration]:
    model = ScriptedModel(answer)
    sampling = params()
    generated = GeneratedSoFar()
    for output in model.outputs(model.prompt, sampling, steps):
        generated.add(output.outputs)
    return model, Regeneration(submit(model, sampling), generated)


def test_a_replay_that_comes_out_differently_is_an_error() -> None:
    model, resume = replaying(ANSWER)
    other = ScriptedModel(ANSWER[:4] + "something else")
    with pytest.raises(NotResumableError, match="another worker answered something else"):
        for output in other.outputs(model.prompt, params()):
            resume.join(output.outputs)


def test_a_replay_that_ends_too_early_is_an_error() -> None:
    model, resume = replaying(ANSWER)
    with pytest.raises(NotResumableError):
        for output in model.outputs(model.prompt, params(max_tokens=3)):
            resume.join(output.outputs)


def test_several_answers_are_replayed_each_at_its_place() -> None:
    def delta(index: int, text: str, end: str | None = None) -> CompletionOutput:
        return CompletionOutput(index, text, [ord(c) for c in text], None, None, finish_reason=end)

    generated = GeneratedSoFar()
    generated.add([delta(0, "ab"), delta(1, "xyz", "stop")])
    original = Submit(RequestId("r"), [1], params(n=2, seed=1, temperature=1.0), [], [])
    resume = plan_resume(original, generated, None, seen=True)
    fresh = [resume.join([one]) for one in (delta(0, "a"), delta(1, "xyz", "stop"), delta(0, "bc"))]
    assert fresh == [[], [], [delta(0, "c")]]
    assert resume.join([delta(0, "d", "length")]) == [delta(0, "d", "length")]


def test_text_that_does_not_follow_from_the_tokens_is_an_error() -> None:
    model = ScriptedModel(ANSWER)
    generated = GeneratedSoFar()
    generated.add(model.outputs(model.prompt, params(), 3)[0].outputs)
    generated.choices[0].pieces.append("?")
    with pytest.raises(NotResumableError, match="text"):
        plan_resume(submit(model, params()), generated, tokenizer(), seen=True)


def test_a_continuation_travels() -> None:
    from common.request_plane.protocol import ToWorker
    from common.request_plane.wire import Codec

    model = ScriptedModel(ANSWER)
    generated = GeneratedSoFar()
    for output in model.outputs(model.prompt, params(stop=["END"]), 4):
        generated.add(output.outputs)
    resume = plan_resume(submit(model, params(stop=["END"])), generated, tokenizer(), seen=True)
    codec: Codec[ToWorker] = Codec(ToWorker)
    frames = [memoryview(frame) for frame in codec.encode(resume.submit)]
    decoded, _ = codec.decode(frames)
    assert msgspec.to_builtins(decoded) == msgspec.to_builtins(resume.submit)
