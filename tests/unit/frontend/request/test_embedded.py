"""Prompts with embeddings get the block hashes that vLLM's scheduler gives them."""

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from common.identity import RequestId
from common.request_plane.protocol import Submit
from frontend.request.runner import hashed_embeds, hashed_tokens
from frontend.router.hashing.block_hasher import BlockHasher
from tests.fakes.none_hash import none_hash_for

PARAMS = SamplingParams(max_tokens=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 75])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_equal_to_vllm(dtype: torch.dtype, rows: int, mixed: bool, salt: str | None) -> None:
    embeds = torch.randn(rows, 6).to(dtype)
    places = [place % 5 < 3 for place in range(rows)] if mixed else None
    tokens = list(range(9, 9 + rows)) if mixed else None
    none_hash = none_hash_for("sha256_cbor")
    theirs = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=PARAMS,
        pooling_params=None,
        prompt_embeds=embeds,
        prompt_is_token_ids=places,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(16, sha256_cbor),
    )
    submit = Submit(
        RequestId("r"), tokens, PARAMS, [], [], prompt_embeds=embeds, prompt_is_token_ids=places
    )
    ours = hashed_embeds(submit)
    assert ours is not None
    hashed = BlockHasher(16, "sha256_cbor", none_hash).hash(
        hashed_tokens(submit), (), cache_salt=salt, embeds_digests=ours.digests(16)
    )
    assert hashed == theirs.block_hashes
    assert len(hashed) == rows // 16


def test_a_prompt_of_tokens_has_no_rows() -> None:
    submit = Submit(RequestId("r"), [1, 2], PARAMS, [], [])
    assert hashed_embeds(submit) is None
    assert hashed_tokens(submit) == [1, 2]
