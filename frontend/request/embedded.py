"""Tokens and embeddings of a prompt, as engines hash them."""

import torch

from common.request_plane.protocol import Submit
from frontend.router import PromptEmbeds


def hashed_tokens(submit: Submit) -> list[int]:
    """Return a token for each position, zero where an embedding stands."""
    tokens, places = submit.prompt_token_ids, submit.prompt_is_token_ids
    if submit.prompt_embeds is None:
        return tokens or []
    if tokens is None or places is None:
        return [0] * len(submit.prompt_embeds)
    return [token if kept else 0 for token, kept in zip(tokens, places, strict=True)]


def hashed_embeds(submit: Submit) -> PromptEmbeds | None:
    """Return the rows of embeddings, which enter every block; None for a prompt without any."""
    embeds = submit.prompt_embeds
    if embeds is None:
        return None
    return PromptEmbeds(embeds.flatten().contiguous().view(torch.uint8).numpy().data, len(embeds))
