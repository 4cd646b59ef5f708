"""Media as the loader hands them over, and a look at items."""

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import ImageMediaIO

from common.identity import MmHash
from frontend.fetch.content import Content, DeferredMedium
from frontend.processing.batch import Batch, MediaOptions, Medium, Processed
from tests.pictures import picture


def image(name: str, size: tuple[int, int] = (112, 112)) -> DeferredMedium:
    return broken_image(picture(name, size))


def broken_image(encoded: bytes) -> DeferredMedium:
    return DeferredMedium(Content.of(encoded), ImageMediaIO(), "a data URL")


def batch_of(*images: DeferredMedium) -> Batch:
    media = [Medium(each.content, each.media_io) for each in images]
    return Batch("image", media, MediaOptions({}, {}))


def made_up(name: str, nbytes: int = 4096) -> Processed:
    """A processed item of no model."""
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalSharedField

    field = MultiModalSharedField(batch_size=1)
    data = torch.full((nbytes,), len(name), dtype=torch.uint8)
    item = MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=data, field=field)})
    return Processed(MmHash(name), item, [])


def same(one: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    """Equal, but for where each item stood in its batch, which vLLM's fields remember."""
    return one.keys() == other.keys() and all(
        torch.equal(one[key].data, other[key].data)
        and type(one[key].field) is type(other[key].field)
        for key in one
    )
