"""A model whose processor is code that only its repository has: a small one stands in for it."""

import json

import transformers as hf

from tests.families.makers.base import PATCH, Tiny, decoder, vision, vocabulary
from tests.families.makers.chats import CODE
from tests.families.makers.qwens import TEMPLATE, VISION_TOKENS, geometry, media_ids

PROCESSOR = """\
import torch
from transformers import BatchFeature

PAD = "<|image_pad|>"


class LlavaOnevision2Processor:
    def __init__(self, image_processor, tokenizer, video_processor, codec_config):
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, text, images=None, return_tensors=None, **more):
        made = dict(self.image_processor(images=images, return_tensors="pt")) if images else {}
        grids = made["image_grid_thw"].tolist() if images else []
        if images:
            made["patch_positions"] = torch.cat([self.positions(*grid) for grid in grids])
        first, *rest = text.split(PAD)
        unit = self.image_processor.merge_size**2
        for (frames, height, width), after in zip(grids, rest, strict=True):
            first += PAD * (frames * height * width // unit) + after
        made["input_ids"] = self.tokenizer([first], return_tensors="pt")["input_ids"]
        return BatchFeature(made)

    def positions(self, frames, height, width):
        merge = self.image_processor.merge_size
        every = torch.cartesian_prod(*(torch.arange(size) for size in (frames, height, width)))
        blocks = every.view(frames, height // merge, merge, width // merge, merge, 3)
        return blocks.transpose(2, 3).reshape(-1, 3)
"""
VIDEOS = """\
class LlavaOnevision2VideoProcessor:
    def __init__(self, **settings):
        pass
"""


def llava_onevision2() -> Tiny:
    """LLaVA-OneVision-2: a position for each patch; a video's frames are images with seconds."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    config = {
        "architectures": ["LlavaOnevision2ForConditionalGeneration"],
        "model_type": "tiny_chat",
        "auto_map": {"AutoConfig": "configuration_chat.ChatConfig"},
        "dtype": "float32",
        "text_config": decoder(tokenizer, "qwen3", num_hidden_layers=4),
        "vision_config": vision(num_channels=3, spatial_merge_size=2, layer_norm_eps=1e-6),
        **media_ids(tokenizer),
    }
    loader = {"video_processor_type": "LlavaOnevision2VideoProcessor"}
    files = {
        "configuration_chat.py": CODE,
        "processing_llava_onevision2.py": PROCESSOR,
        "video_processing_llava_onevision2.py": VIDEOS,
        "video_preprocessor_config.json": json.dumps(loader),
    }
    pictures = hf.Qwen2VLImageProcessor(**geometry(PATCH) | {"temporal_patch_size": 1})
    return Tiny(config, tokenizer, pictures, files)
