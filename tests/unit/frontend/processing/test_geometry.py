"""What of a model no request may change."""

import pytest
from vllm.renderers import BaseRenderer

from common.errors import RequestRejectedError
from frontend.processing.geometry import check_geometry


@pytest.mark.parametrize(
    "options",
    [
        {"merge_size": 3},
        {"patch_size": 7},
        {"patch_size": "14"},
        {"temporal_patch_size": None},
        {"images_kwargs": {"merge_size": 1}},
    ],
)
def test_media_are_cut_up_as_the_model_has_it(
    vllm_renderer: BaseRenderer, options: dict[str, object]
) -> None:
    """An engine would end with what comes of it."""
    with pytest.raises(RequestRejectedError, match="in this model, which takes no other"):
        check_geometry(vllm_renderer, options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"merge_size": 2, "patch_size": 14},
        {"min_pixels": 1, "size": {"shortest_edge": 5}},
        {"spatial_merge_size": 3},  # which this one does not have
    ],
)
def test_all_else_is_for_the_processor(
    vllm_renderer: BaseRenderer, options: dict[str, object]
) -> None:
    check_geometry(vllm_renderer, options)
