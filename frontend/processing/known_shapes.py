"""How pictures of a shape are put into prompts, learned from those that were processed."""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.processing.processor import ResolvedPromptUpdate

from common.identity import MmHash
from common.placeholder import placeholder_digest
from frontend.processing.batch import Processed
from frontend.processing.outline import Outline

logger = logging.getLogger(__name__)

SHAPES_KEPT: Final = 10_000
"""The one asked for longest ago goes first."""

TOKENS_KEPT: Final = 8_000_000
"""Of the placeholders of all of them: those who send pictures choose how large they are."""

SURE: Final = 2
"""Different pictures of a shape that were put into prompts alike, before one is by it alone."""


class Shape(NamedTuple):
    """What pictures of a shape have in common.

    Attributes:
        prompt_updates: how vLLM puts their placeholders into a prompt.
        nbytes: of their tensors.
    """

    prompt_updates: Sequence[ResolvedPromptUpdate]
    nbytes: int


@dataclass
class _Learned:
    shape: Shape
    said: Hashable
    hashes: set[MmHash]
    tokens: int


class KnownShapes:
    """Shapes of one model. For one event loop.

    Attributes:
        hold: whether pictures turned out as their outlines said, all of them until now.
    """

    def __init__(self) -> None:
        self._shapes: OrderedDict[Hashable, _Learned] = OrderedDict()
        self._tokens = 0
        self.hold = True

    def recall(self, shape: Hashable) -> Shape | None:
        """What is known of a shape; None if that is too little."""
        known = self._shapes.get(shape)
        if known is None or len(known.hashes) < SURE or not self.hold:
            return None
        self._shapes.move_to_end(shape)
        return known.shape

    def wants(self, shape: Hashable) -> bool:
        """Whether another picture of it has to be looked at."""
        known = self._shapes.get(shape)
        return self.hold and (known is None or len(known.hashes) < SURE)

    def learn(self, outline: Outline, processed: Processed) -> None:
        """A picture was processed of which there was an outline."""
        said = placement(processed.prompt_updates)
        known = self._shapes.get(outline.shape)
        if outline.mm_hash != processed.mm_hash:
            self.doubt("a picture had another hash than its bytes said")
        elif known is None:
            nbytes = MultiModalCache.get_item_size(processed.item)
            shape = Shape(processed.prompt_updates, nbytes)
            tokens = sum(len(each.content.full) for each in processed.prompt_updates)
            self._shapes[outline.shape] = _Learned(shape, said, {processed.mm_hash}, tokens)
            self._tokens += tokens
            while len(self._shapes) > SHAPES_KEPT or self._tokens > TOKENS_KEPT:
                self._tokens -= self._shapes.popitem(last=False)[1].tokens
        elif known.said != said:
            self.doubt("two pictures of one size have different placeholders")
        elif len(known.hashes) < SURE:
            known.hashes.add(processed.mm_hash)

    def doubt(self, why: str) -> None:
        """Go by outlines no more."""
        if self.hold:
            self.hold = False
            logger.warning("pictures are all processed in this frontend from now on: %s", why)


def placement(prompt_updates: Sequence[ResolvedPromptUpdate]) -> Hashable:
    """What of a picture gets into prompts: tokens, and which of them are its embeddings. As long
    for many tokens as for few."""
    return tuple((each.mode, _placeholder(each)) for each in prompt_updates)


def _placeholder(update: ResolvedPromptUpdate) -> str:
    tokens, is_embed = update.content.full, update.content.is_embed
    mask = None if is_embed is None else is_embed(tokens).to(torch.uint8).numpy().tobytes()
    return placeholder_digest(tokens, mask)
