"""Media reach the engine in the frontend's order, with masks and all."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.inputs import split_enc_dec_input
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import argsort_mm_positions

from backend_worker.engine.calls import encoded, media_input
from common.errors import RequestRejectedError
from common.request_plane.protocol import MediaPart, Submit, ToWorker
from common.request_plane.wire import Codec
from frontend.processing.preprocessor import Preprocessor
from tests.unit.common.transfer.items import image

MASK = torch.tensor([True, False, True, True])

placeholders = st.builds(
    lambda offset, masked: PlaceholderRange(offset, 4, MASK if masked else None),
    st.integers(0, 3).map(lambda n: n * 4),
    st.booleans(),
)


@settings(deadline=None)  # other work may run on this machine
@given(
    st.permutations(["image", "video", "audio"]).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: st.lists(placeholders, max_size=3) for name in names}
        )
    )
)
def test_the_engine_sees_what_the_frontend_saw(rendered: dict[str, list[PlaceholderRange]]) -> None:
    features = [
        MultiModalFeatureSpec(
            data=image(0),
            modality=modality,
            identifier=f"{modality}-{index}",
            mm_position=rendered[modality][index],
            mm_hash=f"{modality}-{index}",
        )
        for modality, index in argsort_mm_positions(rendered)
    ]
    preprocessor = Preprocessor.__new__(Preprocessor)
    preprocessor._sources, preprocessor._takes_embeds = None, False
    preprocessor._processing = None
    parts = [preprocessor._media_item(feature).part for feature in features]
    message, _ = Codec[ToWorker](ToWorker).decode(
        [memoryview(frame) for frame in Codec[ToWorker](ToWorker).encode(submit(parts))]
    )
    assert isinstance(message, Submit)
    prompt = media_input([0] * 16, message.media, [None] * len(parts), None)
    again = [
        (prompt["mm_hashes"][modality][index], prompt["mm_placeholders"][modality][index])
        for modality, index in argsort_mm_positions(prompt["mm_placeholders"])
    ]
    assert again == [(feature.mm_hash, feature.mm_position) for feature in features]
    for (_, position), feature in zip(again, features, strict=True):
        assert position.get_num_embeds() == feature.mm_position.get_num_embeds()


def submit(parts: list[MediaPart]) -> Submit:
    from vllm import SamplingParams

    return Submit("r", [0] * 16, SamplingParams(), parts, [])  # type: ignore[arg-type]


def test_an_order_that_cannot_be() -> None:
    parts = [
        MediaPart(modality, "h", offset, 4, None)  # type: ignore[arg-type]
        for offset, modality in itertools.chain(
            ((0, "audio"), (0, "video")), ((4, "video"), (4, "audio"))
        )
    ]
    with pytest.raises(RequestRejectedError, match="no order"):
        media_input([0] * 8, parts, [None] * 4, None)


def test_a_prompt_of_a_decoder_keeps_its_media() -> None:
    """vLLM takes an encoder's media, whose places are in its own prompt, from the decoder's."""
    part = MediaPart("audio", "h", 0, 1500, None)  # type: ignore[arg-type]
    prompt = media_input([7, 8], [part], [None], "salt")
    encoder, decoder = split_enc_dec_input(encoded(prompt))
    assert decoder == prompt
    assert encoder is not None and encoder["prompt_token_ids"] == []
