"""Texts of tokens are those of tokenizers' own stream, but where that repeats itself."""

from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import INVALID_PREFIX_ERR_MSG

from common.vllm_compat import text_streams
from common.vllm_compat.text_streams import MAX_SILENT, TextStream
from tests.byte_fallback import byte_fallback_tokenizer
from tests.demo_model import shared_demo_model

TEXT = "Grüße, 你好 and ♥ to all of you 👩‍👩‍👧 "
SPECIAL = "<|x|>"


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "byte level":
        model = shared_demo_model(tmp_path_factory)
        made = Tokenizer.from_file(str(model / "tokenizer.json"))
    else:
        made = byte_fallback_tokenizer("abcdefghijklmnopqrstuvwxyz")
    made.add_special_tokens([SPECIAL])
    return made


def said(stream: Any, tokenizer: Tokenizer, tokens: list[int]) -> list[str | None]:
    texts: list[str | None] = []
    try:
        for token in tokens:
            texts.append(stream.step(tokenizer, token))
    except Exception as error:  # noqa: BLE001 # of no type of its own: vLLM begins a new stream then
        assert str(error).startswith(INVALID_PREFIX_ERR_MSG)
        texts.append("invalid")
    return texts


def test_they_are_those_of_tokenizers(tokenizer: Any) -> None:
    random = Random(0)
    tokens = tokenizer.encode(TEXT * 3).ids
    special = tokenizer.token_to_id(SPECIAL)
    for _ in range(300):
        prompt = random.choices(tokens, k=random.choice([0, 3, 200]))
        if not prompt or tokenizer.decode(prompt).endswith("\ufffd"):
            prompt = tokenizer.encode("word " * random.randrange(40)).ids
        begun = random.randrange(len(tokens))
        answer = tokens[begun:] + [special] * 3 + random.choices([*tokens, special], k=40)
        skips = random.random() < 0.5
        theirs = said(DecodeStream(prompt, skips), tokenizer, answer)
        ours = said(TextStream(prompt, skip_special_tokens=skips), tokenizer, answer)
        assert ours == theirs


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_a_letter_that_a_prompt_began_is_all_that_is_said_of_it(
    tokenizer: Any, lacking: int
) -> None:
    tokens = tokenizer.encode("hello 👧").ids
    stream = TextStream(tokens[:-lacking])
    assert "".join(filter(None, said(stream, tokenizer, tokens[-lacking:]))) == "👧"


@pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd"])
def test_a_prompt_that_ends_without_a_letter_is_not_repeated(tokenizer: Any, end: str) -> None:
    prompt = tokenizer.encode("hello" + end).ids
    assert said(TextStream(prompt), tokenizer, tokenizer.encode("a").ids[-1:]) == ["a"]


def byte(tokenizer: Tokenizer) -> int:
    """A token that is the first byte of a letter."""
    return tokenizer.encode("é").ids[-2]


def test_bytes_that_are_no_letter_are_said_in_the_end(tokenizer: Any) -> None:
    count = 10 * MAX_SILENT
    stream = TextStream(tokenizer.encode("a").ids)
    rest = [tokenizer.encode("a").ids[-1], *tokenizer.encode("é").ids[-2:]]
    texts = said(stream, tokenizer, [byte(tokenizer)] * count + rest)
    assert "".join(filter(None, texts)) == "\ufffd" * count + "aé"
    assert all(text is not None for text in texts[MAX_SILENT - 1 : count : MAX_SILENT - 3])
    stream = TextStream([byte(tokenizer)] * count)  # of a prompt nothing is said
    assert said(stream, tokenizer, tokenizer.encode("a").ids[-1:]) == ["a"]


def test_tokens_that_are_skipped_are_not_read_again(tokenizer: Any) -> None:
    special = [tokenizer.token_to_id(SPECIAL)] * 10 * MAX_SILENT
    a, b = (tokenizer.encode(letter).ids[-1] for letter in "ab")
    stream = TextStream([a], skip_special_tokens=True)
    assert [*filter(None, said(stream, tokenizer, [b, *special, a, *special, b]))] == [*"bab"]
    assert len(stream._silent) < MAX_SILENT


def test_vllm_finds_it_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "DecodeStream", DecodeStream)
    text_streams.install()
    assert vars(decoders)["DecodeStream"] is TextStream
