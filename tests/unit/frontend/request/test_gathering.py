"""Pieces of an answer become the whole that vLLM makes of them, at a cost that grows as they do."""

import copy
import random
from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from frontend.request.state import GatheredAnswer


def piece(*outputs: CompletionOutput, last: bool = False, **more: Any) -> RequestOutput:
    return RequestOutput("r", "prompt", [1, 2], None, list(outputs), last, **more)


def choice(index: int, step: int, *, last: bool = False) -> CompletionOutput:
    token = 100 * index + step
    return CompletionOutput(
        index=index,
        text=f"{token} ",
        token_ids=[token],
        cumulative_logprob=-float(step),
        logprobs=[{token: Logprob(-float(step))}],
        finish_reason="length" if last else None,
    )


def pieces_of(choices: int, steps: int) -> list[RequestOutput]:
    """In the order of a busy engine: those of different choices mixed, some together."""
    random_ = random.Random(0)
    said = dict.fromkeys(range(choices), 0)
    found: list[RequestOutput] = []
    while said:
        now = random_.sample(sorted(said), min(len(said), random_.randint(1, 3)))
        outputs = [choice(each, said[each], last=said[each] == steps - 1) for each in now]
        for each in now:
            said[each] += 1
            if said[each] == steps:
                del said[each]
        found.append(piece(*outputs, last=not said, kv_transfer_params={"step": len(found)}))
    return found


def gathered(pieces: list[RequestOutput]) -> RequestOutput:
    answer = GatheredAnswer()
    *unfinished, whole = [answer.add(each) for each in pieces]
    assert unfinished == [None] * len(unfinished) and whole is not None
    return whole


def fields(output: RequestOutput) -> dict[str, Any]:
    return vars(output) | {"outputs": [vars(each) for each in output.outputs]}


@pytest.mark.parametrize("choices", [1, 2, 7])
def test_the_whole_is_what_vllm_makes_of_the_pieces(choices: int) -> None:
    pieces = pieces_of(choices, 5)
    first, *others = copy.deepcopy(pieces)
    for each in others:
        first.add(each, aggregate=True)
    first.outputs.sort(key=lambda output: output.index)
    assert fields(gathered(pieces)) == fields(first)


class CountedIndex(CompletionOutput):
    """A choice that counts how often somebody asks which one it is."""

    looks = 0

    @property
    def index(self) -> int:
        CountedIndex.looks += 1
        return self._index

    @index.setter
    def index(self, value: int) -> None:
        self._index = value


def looks(choices: int) -> int:
    CountedIndex.looks = 0
    pieces = [
        piece(CountedIndex(index, "a", [1], None, None), last=step == 1 and index == choices - 1)
        for step in range(2)
        for index in range(choices)
    ]
    assert len(gathered(pieces).outputs) == choices
    return CountedIndex.looks


def test_each_piece_looks_at_its_own_choice_alone() -> None:
    assert 0 < looks(2000) == 2 * looks(1000)


def test_flat_log_probabilities_are_joined_flat() -> None:
    expected: list[dict[int, Logprob]] = []
    pieces: list[RequestOutput] = []
    for step in range(4):
        said = choice(0, step, last=step == 3)
        expected += [{step: Logprob(-1.0, 1, "a"), 9: Logprob(-2.0)}] * (step != 2)
        said.logprobs = FlatLogprobs()
        said.logprobs.extend(expected[-1:] if step != 2 else [])
        pieces.append(piece(said, last=step == 3))
    found = gathered(pieces).outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    assert [*found] == expected
