"""What engines hash of a prompt in which embeddings stand for tokens."""

import torch

from common.request_plane.protocol import Submit
from frontend.router import PromptEmbeds


def hashed_tokens(submit: Submit) -> list[int]:
    """A token for each place, zero where an embedding stands."""
    tokens, places = submit.prompt_token_ids, submit.prompt_is_token_ids
    if submit.prompt_embeds is None:
        return tokens or []
    if tokens is None or places is None:
        return [0] * len(submit.prompt_embeds)
    return [token if kept else 0 for token, kept in zip(tokens, places, strict=True)]


def hashed_embeds(submit: Submit) -> PromptEmbeds | None:
    """The rows themselves, which enter every block; None of a prompt that has none."""
    embeds = submit.prompt_embeds
    if embeds is None:
        return None
    return PromptEmbeds(embeds.flatten().contiguous().view(torch.uint8).numpy().data, len(embeds))
