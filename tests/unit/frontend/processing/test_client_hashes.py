"""Hashes that clients give media are never believed (vLLM's ``/inference/v1/generate``)."""

import copy
import gc
from argparse import Namespace
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest
import pytest_asyncio
import torch
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.sampling_params import SamplingParams

from common.errors import RequestRejectedError, SaltLostError, ThreadStuckError
from common.identity import MmHash
from common.media.cache_partition import hash_within, partition_of
from common.observability.watchdog import WATCHDOG
from common.request_plane.card import WorkerCard
from common.transfer.arena.arena import Arena
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy
from frontend.processing import preprocessor as preprocessor_module
from frontend.processing.client_tensors import HashedItems, content_hash
from frontend.processing.mrope import MropePositions
from frontend.processing.preprocessor import MediaItem, Preprocessor
from frontend.processing.settings import PreprocessSettings
from tests.fakes.hanging import Hanging
from tests.unit.frontend.http.asking import asking
from tests.unit.frontend.processing.media import image, same
from tests.waiting import until


@pytest_asyncio.fixture
async def preprocessor(
    card: WorkerCard, serve_args: Namespace, arena: Arena
) -> AsyncIterator[Preprocessor]:
    loader = MediaLoader(FetchPolicy(), 0)
    preprocessor = Preprocessor(
        card, serve_args, loader=loader, arena=arena, settings=PreprocessSettings()
    )
    yield preprocessor
    await preprocessor.close()
    await loader.close()


async def rendered(preprocessor: Preprocessor, name: str) -> Any:
    renderer = preprocessor.renderer
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": 1})
    return await renderer._process_multimodal_async(
        renderer.get_tokenizer().encode(text), {"image": [image(name)]}, None, None
    )


def as_a_client_sends_it(prompt: Any, mm_hash: str, *, data: bool = True) -> Any:
    (item,) = prompt["mm_kwargs"]["image"]
    sent = copy.deepcopy(item) if data else None
    return mm_input(
        prompt["prompt_token_ids"],
        {"image": [sent]},
        {"image": [mm_hash]},
        prompt["mm_placeholders"],
    )


async def medium(preprocessor: Preprocessor, prompt: Any) -> MediaItem:
    processed = await preprocessor.process(prompt, SamplingParams(), "r", None)
    (found,) = processed.media
    assert str(found.identifier) == str(found.part.mm_hash)
    return found


async def test_media_are_judged_before_a_worker_gets_them(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[object] = []
    judge = lambda _, features, tokens: judged.extend((*features, tokens))  # noqa: E731
    monkeypatch.setattr(MropePositions, "check", judge)
    prompt = await rendered(preprocessor, "a")
    await medium(preprocessor, prompt)
    assert len(judged) == 2 and judged[1] == prompt["prompt_token_ids"]


async def test_what_we_rendered_keeps_its_hash(preprocessor: Preprocessor) -> None:
    prompt = await rendered(preprocessor, "a")
    (mm_hash,) = prompt["mm_hashes"]["image"]
    assert (await medium(preprocessor, prompt)).part.mm_hash == mm_hash
    # vLLM's beam search makes prompts of its own, of the same items.
    parts = ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders")
    again = mm_input(*(prompt[part] for part in parts))
    assert (await medium(preprocessor, again)).part.mm_hash == mm_hash


async def test_a_client_can_plant_nothing_under_anothers_hash(preprocessor: Preprocessor) -> None:
    (theirs,) = (await rendered(preprocessor, "theirs"))["mm_hashes"]["image"]
    mine = await rendered(preprocessor, "mine")
    planted = await medium(preprocessor, as_a_client_sends_it(mine, theirs))
    assert planted.part.mm_hash != theirs
    assert same(planted.item, mine["mm_kwargs"]["image"][0])
    again = await medium(preprocessor, as_a_client_sends_it(mine, "whatever"))
    assert again.part.mm_hash == planted.part.mm_hash
    with asking(salt="pepper"):
        salted = await medium(preprocessor, as_a_client_sends_it(mine, theirs))
    pepper = partition_of("pepper")
    assert salted.part.mm_hash == hash_within(planted.part.mm_hash, pepper)


async def test_hashing_that_hangs_fails_its_request_alone(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = WATCHDOG.stuck
    sent = as_a_client_sends_it(await rendered(preprocessor, "hangs"), "whatever")
    with Hanging(content_hash) as hanging:
        monkeypatch.setattr(preprocessor_module, "content_hash", hanging)
        with pytest.raises(ThreadStuckError, match="media thread"):
            await medium(preprocessor, sent)
        hanging.hangs = False
        await medium(preprocessor, sent)
    await until(lambda: WATCHDOG.stuck == stuck)


async def test_a_processor_that_hangs_fails_its_request_alone(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts share its thread, those of text too."""
    stuck = WATCHDOG.stuck
    processor = preprocessor.renderer.get_mm_processor()
    with Hanging(processor._apply_hf_processor) as hanging:
        monkeypatch.setattr(processor, "_apply_hf_processor", hanging)
        with pytest.raises(GracefulHTTPError, match="processor thread") as caught:
            await rendered(preprocessor, "never seen")
        assert caught.value.http_status is HTTPStatus.UNPROCESSABLE_ENTITY
        assert hanging.asked == 1
        hanging.hangs = False
        await medium(preprocessor, await rendered(preprocessor, "never seen"))
    await until(lambda: WATCHDOG.stuck == stuck)


async def test_a_client_can_not_ask_for_a_medium_by_its_hash(preprocessor: Preprocessor) -> None:
    prompt = await rendered(preprocessor, "a")
    (mm_hash,) = prompt["mm_hashes"]["image"]
    with pytest.raises(RequestRejectedError, match="image 1 is only named by a hash"):
        await medium(preprocessor, as_a_client_sends_it(prompt, mm_hash, data=False))


async def test_tensors_of_a_client_are_told_from_ours(preprocessor: Preprocessor) -> None:
    """An engine may end with them, and then no second one gets them."""
    prompt = await rendered(preprocessor, "a")
    ours = await preprocessor.process(prompt, SamplingParams(), "r", None)
    theirs = as_a_client_sends_it(prompt, "whatever")
    sent = await preprocessor.process(theirs, SamplingParams(), "r", None)
    assert not ours.has_client_tensors and sent.has_client_tensors


async def test_embeddings_in_a_prompt_are_a_clients_too(preprocessor: Preprocessor) -> None:
    rows = torch.zeros(3, preprocessor.model_config.get_inputs_embeds_size())
    prompt: Any = {"type": "embeds", "prompt_embeds": rows}
    made = await preprocessor.process(prompt, SamplingParams(), "r", None)
    assert made.has_client_tensors
    with pytest.raises(RequestRejectedError, match="prompt_logprobs: not of a prompt with"):
        await preprocessor.process(prompt, SamplingParams(prompt_logprobs=1), "r", None)
    words = await preprocessor.process(
        tokens_input([1, 2, 3]), SamplingParams(prompt_logprobs=1), "r", None
    )
    assert not words.has_client_tensors


async def test_a_client_can_not_have_an_encoder_asked(preprocessor: Preprocessor) -> None:
    """vLLM would take media without their tensors then, and its engine would end."""
    prompt = await rendered(preprocessor, "a")
    names = SamplingParams(extra_args={"ec_transfer_params": {"a": {"peer_host": "10.0.0.1"}}})
    with pytest.raises(RequestRejectedError, match="ec_transfer_params: no other server encodes"):
        await preprocessor.process(as_a_client_sends_it(prompt, "whatever"), names, "r", None)
    assert names.extra_args
    processed = await preprocessor.process(prompt, names, "r", None)
    assert not processed.has_client_tensors
    assert names.extra_args is None  # and no engine hears of it


async def test_media_and_blocks_are_kept_under_one_salt(preprocessor: Preprocessor) -> None:
    tokens = tokens_input([1, 2, 3])
    with asking(key="me", apart=True):
        prompt = await rendered(preprocessor, "a")
        for each in (prompt, tokens):
            processed = await preprocessor.process(each, SamplingParams(), "r", None)
            assert processed.cache_salt == partition_of(None, "me")
    assert "cache_salt" not in prompt and "cache_salt" not in tokens
    with pytest.raises(SaltLostError):
        await medium(preprocessor, prompt | {"cache_salt": "pepper"})
    with asking(salt="pepper"):
        processed = await preprocessor.process(
            prompt | {"cache_salt": "pepper"}, SamplingParams(), "r", None
        )
        assert processed.cache_salt == "pepper"
    assert MmHash(prompt["mm_hashes"]["image"][0]) == processed.media[0].part.mm_hash


def item(value: float, size: int = 4) -> MultiModalKwargsItem:
    tensor = torch.full((size,), value)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(tensor, MultiModalBatchedField())})


def test_items_are_told_apart_by_what_they_are_made_of() -> None:
    hashes = {
        content_hash("image", item(1.0), "blake3"),
        content_hash("image", item(2.0), "blake3"),
        content_hash("image", item(1.0, size=5), "blake3"),
        content_hash("audio", item(1.0), "blake3"),
    }
    assert len(hashes) == 4
    assert content_hash("image", item(1.0), "blake3") in hashes


def test_only_the_very_item_is_one_that_we_hashed() -> None:
    hashed, ours = HashedItems(), item(1.0)
    hashed.add(ours)
    assert ours in hashed
    assert item(1.0) not in hashed
    del ours
    gc.collect()
    assert not any(item(1.0) in hashed for _ in range(100))  # which may get its address
