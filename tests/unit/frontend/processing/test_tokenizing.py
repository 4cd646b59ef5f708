"""Long texts are tokenized aside, and no more of them than is used."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.pooling.scoring.utils import truncate_text_to_tokens
from vllm.exceptions import VLLMError
from vllm.renderers import TokenizeParams
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.utils.async_utils import make_async

from frontend import request_context
from frontend.processing.tokenizing import (
    AT_ONCE,
    LONG,
    MARGIN_TOKENS,
    MIN_LIMIT,
    TextCut,
    Tokenizing,
)
from frontend.request_context import Tenant
from tests.demo_model import shared_demo_model

CONTEXT = 1024
WORDS = "alpha beta gamma delta hello world "
TEXT = WORDS * (4 * LONG // len(WORDS))
SPACES = " " * (4 * LONG)
LIMIT = 1 << 20


class PlainRenderer:
    """The part of vLLM's that makes tokens of a text, and notes what it was given."""

    def __init__(self, tokenizer: Any, executor: Any) -> None:
        self.tokenizer = tokenizer
        self._executor = executor
        self.asked: list[tuple[int, str]] = []
        self._tokenize_prompt_async = make_async(self._tokenize_prompt, executor=executor)
        self._async_tokenizer_decode = make_async(self._decode, executor=executor)
        self.model_config = type("Config", (), {"max_model_len": CONTEXT})

    def _decode(self, tokens: list[int]) -> str:
        self.asked.append((len(tokens), threading.current_thread().name))
        return str(self.tokenizer.decode(tokens))

    def _tokenize_prompt(self, prompt: Any, params: TokenizeParams) -> Any:
        self.asked.append((len(prompt["prompt"]), threading.current_thread().name))
        ids = self.tokenizer(prompt["prompt"], **params.get_encode_kwargs())["input_ids"]
        return {**prompt, "prompt_token_ids": list(ids)}

    @staticmethod
    def _apply_prompt_char_offset(prompt: Any, offset: int) -> Any:
        return {**prompt, "offset": offset}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = shared_demo_model(tmp_path_factory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    maybe_make_thread_pool(tokenizer, 2)
    return tokenizer


@pytest.fixture
def renderer(tokenizer: Any) -> PlainRenderer:
    return PlainRenderer(tokenizer, None)


async def tokens(renderer: PlainRenderer, text: str, params: TokenizeParams) -> Any:
    tokenizing = Tokenizing(renderer, 120.0)
    try:
        return await tokenizing({"prompt": text}, params)
    finally:
        tokenizing.close()


async def test_short_texts_go_vllms_way(renderer: PlainRenderer) -> None:
    await tokens(renderer, "hello", TokenizeParams(CONTEXT))
    ((length, thread),) = renderer.asked
    assert length == 5
    assert not thread.startswith("long texts")


async def test_a_text_beyond_the_context_is_not_read_to_its_end(renderer: PlainRenderer) -> None:
    params = TokenizeParams(CONTEXT)
    prompt = await tokens(renderer, TEXT, params)
    assert max(length for length, _ in renderer.asked) < len(TEXT) // 2
    assert all(thread.startswith("long texts") for _, thread in renderer.asked)
    with pytest.raises(VLLMError, match="at least 1025 input tokens"):
        params.apply_post_tokenization(renderer.tokenizer, prompt)


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("wanted", [10, CONTEXT, -1])
async def test_what_is_cut_is_as_if_all_had_been_read(
    renderer: PlainRenderer, side: Any, wanted: int
) -> None:
    text = "first words, " + TEXT + " and the last words"
    params = TokenizeParams(CONTEXT, truncate_prompt_tokens=wanted, truncation_side=side)
    expected = renderer._tokenize_prompt({"prompt": text}, params)
    renderer.asked.clear()
    prompt = await tokens(renderer, text, params)
    assert max(length for length, _ in renderer.asked) < len(text) // 2
    assert prompt["prompt"] == text
    cut = params.apply_post_tokenization(renderer.tokenizer, prompt)
    plain: Any = params.apply_post_tokenization(renderer.tokenizer, expected)
    assert cut["prompt_token_ids"] == plain["prompt_token_ids"]
    assert (prompt["offset"] > 0) == (side == "left")


async def test_a_text_of_long_tokens_is_read_until_it_is_enough(renderer: PlainRenderer) -> None:
    params = TokenizeParams(CONTEXT, truncate_prompt_tokens=10)
    few = TokenizeParams(1 << 20)
    expected = renderer._tokenize_prompt({"prompt": SPACES}, few)
    prompt = await tokens(renderer, SPACES, few)
    assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]
    prompt = await tokens(renderer, SPACES, params)
    assert len(prompt["prompt_token_ids"]) == 10


async def test_a_text_that_is_only_counted_has_a_limit(renderer: PlainRenderer) -> None:
    unlimited = TokenizeParams(None)
    assert len((await tokens(renderer, TEXT, unlimited))["prompt_token_ids"]) > CONTEXT
    with pytest.raises(VLLMError, match="send parts of it"):
        await tokens(renderer, "x" * (MIN_LIMIT + 1), unlimited)
    with pytest.raises(VLLMError, match="beyond U\\+FFFF counts as 4"):
        await tokens(renderer, "\N{MUSICAL SYMBOL EIGHTH NOTE}" * (MIN_LIMIT // 4 + 1), unlimited)


async def test_long_texts_keep_no_short_one_waiting(renderer: PlainRenderer) -> None:
    going_on, release = threading.Event(), threading.Event()
    plain = renderer._tokenize_prompt

    def slow(prompt: Any, params: TokenizeParams) -> Any:
        going_on.set()
        release.wait()
        return plain(prompt, params)

    renderer._tokenize_prompt = slow  # type: ignore[method-assign]
    tokenizing = Tokenizing(renderer, 120.0)

    async def request() -> None:
        request_context.begin()
        await tokenizing({"prompt": TEXT}, TokenizeParams(None))

    long = asyncio.gather(*(request() for _ in range(AT_ONCE + 1)))
    await asyncio.to_thread(going_on.wait)
    try:
        assert (await tokenizing({"prompt": "hello"}, TokenizeParams(CONTEXT)))["prompt_token_ids"]
    finally:
        release.set()
    await long
    tokenizing.close()


@pytest.mark.parametrize("of_one", ["request", "key", "host"])
@pytest.mark.parametrize("decodes", [True, False])
async def test_texts_leave_turns_to_those_of_others(
    renderer: PlainRenderer, of_one: str, decodes: bool
) -> None:
    one, release = ThreadPoolExecutor(1), threading.Event()
    one.submit(release.wait)
    renderer = PlainRenderer(renderer.tokenizer, one)
    tokenizing, params = Tokenizing(renderer, 120.0), TokenizeParams(CONTEXT)

    async def request(client: str, text: str, texts: int) -> None:
        context = request_context.begin()
        context.tenant = Tenant(client if of_one == "key" else "")
        context.peer = "" if of_one == "key" else client
        work = (
            partial(tokenizing.decode, [1] * len(text))
            if decodes
            else partial(tokenizing, {"prompt": text}, params)
        )
        await asyncio.gather(*(work() for _ in range(texts)))

    requests = 1 if of_one == "request" else 100
    waiting = [asyncio.create_task(request("a", "many", 100 // requests)) for _ in range(requests)]
    waiting.append(asyncio.create_task(request("b", "the other's", 1)))
    for _ in range(3):  # requests, their texts, and their turns
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*waiting)
    tokenizing.close()
    one.shutdown()
    lengths = [length for length, _ in renderer.asked]
    assert len(lengths) == 101 and lengths.index(len("the other's")) == AT_ONCE


@pytest.mark.parametrize("tokenize", [True, False])
async def test_a_chat_that_becomes_tokens_at_once_is_measured_before(
    renderer: PlainRenderer, tokenize: bool
) -> None:
    """As with ``--enable-prompt-embeds``: 4 MB kept all other prompts waiting for 8 s."""
    chat = [{"role": "user", "content": [{"type": "text", "text": "a" * (MIN_LIMIT + 1)}]}]
    asked: list[Any] = []

    async def apply(*args: Any, **options: Any) -> None:
        asked.append((args, options))

    vars(renderer)["_apply_chat_template_async"] = apply
    tokenizing = Tokenizing(renderer, 120.0)
    try:
        if tokenize:
            with pytest.raises(VLLMError, match="characters, more than"):
                await tokenizing.apply_template(None, None, chat, tokenize=tokenize)
        else:
            await tokenizing.apply_template(None, None, chat, tokenize=tokenize)
    finally:
        tokenizing.close()
    assert bool(asked) != tokenize


class Noting:
    """A tokenizer that notes the texts that it is given."""

    def __init__(self, tokenizer: Any, *, is_fast: bool = True) -> None:
        self.is_fast = is_fast
        self.truncation_side = tokenizer.truncation_side
        self.texts: list[str] = []
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer(text, **options)


@pytest.mark.parametrize("document", [TEXT[:9000], TEXT[:900], "é" * 3000, SPACES[:9000]])
@pytest.mark.parametrize(
    "params",
    [
        TokenizeParams(CONTEXT),
        TokenizeParams(CONTEXT, truncate_prompt_tokens=100),
        TokenizeParams(CONTEXT, truncate_prompt_tokens=100, truncation_side="left"),
        TokenizeParams(CONTEXT, truncate_prompt_tokens=100, truncation_side="right"),
    ],
    ids=["refused", "cut", "left", "right"],
)
def test_a_pair_keeps_the_tokens_that_it_can_use(
    tokenizer: Any, document: str, params: TokenizeParams
) -> None:
    def used(query: str, document: str) -> Any:
        ids = tokenizer(query, document, **params.get_encode_kwargs())["input_ids"]
        return params.apply_post_tokenization(tokenizer, {"prompt_token_ids": ids})

    cut = TextCut(tokenizer, params, LIMIT)
    pair = cut("hello " * 2000), cut(document)
    for each in pair:
        count = len(tokenizer(each, add_special_tokens=False)["input_ids"])
        assert count <= CONTEXT + 2 * MARGIN_TOKENS
    if params.truncate_prompt_tokens is None:
        with pytest.raises(VLLMError, match="context length"):
            used(*pair)
    else:
        assert used(*pair) == used("hello " * 2000, document)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_more_of_a_text_is_read_than_is_used(tokenizer: Any, is_fast: bool, side: Any) -> None:
    """Tokenizers in Python and Mistral's don't know where tokens end."""
    noting = Noting(tokenizer, is_fast=is_fast)
    cut = TextCut(noting, TokenizeParams(CONTEXT, None, None, 50, side), LIMIT)
    kept = cut(TEXT)
    assert sum(map(len, noting.texts)) < len(TEXT) // 8
    assert (TEXT.endswith if side == "left" else TEXT.startswith)(kept)
    assert cut.tokens == 50 + MARGIN_TOKENS
    ids = tokenizer(kept, add_special_tokens=False)["input_ids"]
    all_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) >= 50 + MARGIN_TOKENS
    assert (ids[-50:] == all_ids[-50:]) if side == "left" else (ids[:50] == all_ids[:50])


def test_a_text_without_a_limit_of_its_own_has_that_of_the_request(tokenizer: Any) -> None:
    noting = Noting(tokenizer)
    TextCut(noting, TokenizeParams(None), 1000)(TEXT)
    assert max(map(len, noting.texts)) < len(TEXT) // 8


def test_a_tokenizer_that_does_not_know_where_tokens_end_cuts_no_part(tokenizer: Any) -> None:
    cut = TextCut(Noting(tokenizer, is_fast=False), TokenizeParams(CONTEXT), LIMIT)
    with pytest.raises(VLLMError, match="use `truncate_prompt_tokens`"):
        cut("hello", 10)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_start_is_kept_of_what_is_asked_for_by_tokens(tokenizer: Any, side: Any) -> None:
    params = TokenizeParams(CONTEXT, truncate_prompt_tokens=50, truncation_side=side)
    text = "alpha " + TEXT
    for limit in (10, 2 * CONTEXT):
        kept = TextCut(tokenizer, params, LIMIT)(text, limit)
        assert text.startswith(kept)
        assert len(kept) <= 8 * (limit + MARGIN_TOKENS)
        assert truncate_text_to_tokens(kept, tokenizer, min(limit, 50)) == (
            truncate_text_to_tokens(text, tokenizer, min(limit, 50))
        )


def test_parts_of_a_document_are_cut_together(tokenizer: Any) -> None:
    shown = {"type": "image_url", "image_url": {"url": "data:,"}}
    part = {"type": "text", "text": WORDS * 100}
    kept = TextCut(tokenizer, TokenizeParams(CONTEXT), LIMIT)([shown, *[part] * 50, shown])
    texts = [each["text"] for each in kept if "text" in each]
    assert [kept[0], kept[-1]] == [shown, shown]
    counts = [len(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in texts]
    assert CONTEXT < sum(counts) <= CONTEXT + 2 * MARGIN_TOKENS
