"""Log probabilities have vLLM's texts, of tokens that are decoded once."""

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from backend_worker.engine.token_texts import FEW, PART, remember_texts
from tests.byte_fallback import byte_fallback_tokenizer
from tests.demo_model import shared_demo_model

CANDIDATES = 21


@pytest.fixture(params=["byte level", "byte fallback"])
def tokenizers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """vLLM's tokenizer, and one that remembers."""
    model = shared_demo_model(tmp_path_factory)
    theirs, ours = (get_tokenizer(str(model)) for _ in range(2))
    if request.param == "byte fallback":
        words = [*"abcdefghi", "▁a", "▁▁b"]
        theirs, ours = (
            PreTrainedTokenizerFast(tokenizer_object=byte_fallback_tokenizer(words))
            for _ in range(2)
        )
    assert ours is not theirs
    remember_texts(ours)
    yield theirs, ours


def _texts(tokenizer: Any, answer: np.ndarray) -> list[str | None]:
    processor = LogprobsProcessor.from_new_request(
        tokenizer,
        # It reads nothing else of a request.
        type("Request", (), {"sampling_params": SamplingParams(logprobs=20, flat_logprobs=True)})(),
    )
    for place in answer:
        processor._update_sample_logprobs(
            LogprobsLists(place[None], np.zeros((1, CANDIDATES), np.float32), np.ones(1, np.int32))
        )
    assert isinstance(processor.logprobs, FlatLogprobs)
    return processor.logprobs.decoded_tokens


def test_texts_are_vllms(tokenizers: tuple[Any, Any]) -> None:
    theirs, ours = tokenizers
    random = np.random.default_rng(7)
    for _ in range(2):
        answer = random.integers(0, len(theirs), (100, CANDIDATES))
        wanted = _texts(theirs, answer)
        assert any(text and text != "\ufffd" for text in wanted)
        assert _texts(ours, answer) == wanted == _texts(ours, answer)


def test_a_token_is_decoded_once(tokenizers: tuple[Any, Any]) -> None:
    tokenizer, _ = tokenizers
    with patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        remember_texts(tokenizer)
        for _ in range(3):
            assert tokenizer.decode([40, 41]) and tokenizer.decode([42])
        assert decode.call_count == 3
        long = Random(1).choices(range(len(tokenizer)), k=FEW + 1)
        assert tokenizer.decode(long, skip_special_tokens=True) == tokenizer.decode(long)
        assert tokenizer.decode([40], skip_special_tokens=False) == tokenizer.decode([40])
        assert decode.call_count == 7


def test_parts_of_characters_are_not_decoded_anew_after_each_text(
    tokenizers: tuple[Any, Any],
) -> None:
    """Candidates are hundreds of such tokens, in texts of emojis or of rare scripts."""
    tokenizer, _ = tokenizers
    parts = [token for token in range(len(tokenizer)) if tokenizer.decode([token]) == PART]
    assert len(parts) > 100
    assert all(tokenizer.decode([40, 41, part]).endswith(PART) for part in parts)
    with patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        remember_texts(tokenizer)
        assert all(tokenizer.decode([40, 41, part]).endswith(PART) for part in parts)
        assert decode.call_count < len(parts) + 10, "each once, and the text before once"
        assert all(tokenizer.decode([41, 40, part]).endswith(PART) for part in parts)
        assert decode.call_count < len(parts) + 10


def test_a_token_of_no_vocabulary_is_told_each_time(tokenizers: tuple[Any, Any]) -> None:
    theirs, ours = tokenizers
    for _ in range(2):
        with pytest.raises(OverflowError):
            theirs.decode([-1])
        with pytest.raises(OverflowError):
            ours.decode([-1])


def test_a_token_of_the_model_alone_has_no_text() -> None:
    words = {1: "one", 2: " two"}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(words[each] for each in ids))
    remember_texts(tokenizer)
    assert tokenizer.decode([1, 2]) == "one two"
    assert tokenizer.decode([7]) == ""
    assert tokenizer.decode([1, 7, 2]) == "one two"
