"""Sizes that belong to a model: its encoder can't compute media that were cut up in another way.

vLLM lets requests that may choose how media are processed (``--trust-request-mm-kwargs``) change
these too, and its engine ends with them.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from vllm.renderers import BaseRenderer

from common.errors import RequestRejectedError

FIXED: Final = ("merge_size", "patch_size", "spatial_merge_size", "temporal_patch_size")

_PARTS: Final = ("image_processor", "video_processor", "feature_extractor")


def check_geometry(renderer: BaseRenderer, options: Mapping[str, object]) -> None:
    """Refuse options that cut media up in another way than their model.

    Args:
        options: what a request tells the HF processor.

    Raises:
        RequestRejectedError: says what is another.
    """
    for name, value in _said(options):
        processor: object = renderer.get_mm_processor().info.get_hf_processor()
        parts = [processor, *(getattr(processor, part, None) for part in _PARTS)]
        for own in (getattr(part, name, None) for part in parts):
            if isinstance(own, int) and value != own:
                raise RequestRejectedError(
                    f"mm_processor_kwargs: {name} is {own} in this model, which takes no other"
                )


def _said(options: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Also for one kind of media: ``images_kwargs`` and the like."""
    for name, value in options.items():
        if name in FIXED:
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((each, value[each]) for each in FIXED if each in value)
