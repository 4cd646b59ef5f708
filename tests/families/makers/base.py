"""What makers share: the vocabulary and chat template of the demo models, and small sizes.

Configurations are those of transformers and of vLLM, whose types are not followed here: they are
``Any``.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
_text = importlib.import_module("demo_models.text")
_weights = importlib.import_module("demo_models.weights")

HIDDEN: int = _weights.HIDDEN
HEADS: int = _weights.HEADS
HEAD = HIDDEN // HEADS
LAYERS: int = _weights.LAYERS
VISION_LAYERS = 2
PATCH, SIDE = 14, 112
CLIP_MEAN = [0.5, 0.5, 0.5]

Settings = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """A model without weights.

    Attributes:
        config: of transformers or vLLM, or what stands in ``config.json``.
        processor: what is saved beside the tokenizer, if anything.
        files: further files by name.
        drawn: whether vLLM can build it by itself, so that it gets weights. A draft model can't.
    """

    config: Any
    tokenizer: Any
    processor: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""
    drawn: bool = True

    def save(self, directory: Path) -> None:
        from transformers import GenerationConfig

        if isinstance(self.config, dict):
            (directory / "config.json").write_text(json.dumps(self.config, indent=1))
        else:
            if self.architecture:
                self.config.architectures = [self.architecture]
            self.config.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        if self.processor is not None:
            self.processor.save_pretrained(directory)
        for name, text in self.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        GenerationConfig(
            bos_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        ).save_pretrained(directory)


def vocabulary(template: str, *special: str, **named: str) -> Any:
    """A tokenizer.

    Args:
        special: tokens beside those of the chat and those that are named.
        named: attributes by which a processor finds some.
    """
    tokens = tuple(dict.fromkeys((*named.values(), *special)))
    return _text.make_tokenizer(tokens, template, **named)


def chat(image: str = "", video: str = "", audio: str = "") -> str:
    """A chat template that writes these for media."""
    return str(_text.chat_template(image=image, video=video, audio=audio))


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    return [int(token) for token in tokenizer.convert_tokens_to_ids(list(tokens))]


def decoder(tokenizer: Any, model_type: str | None = None, **more: Any) -> Settings:
    """Configuration of a small language model."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "tie_word_embeddings": False,
    }
    kind = {"model_type": model_type} if model_type else {}
    return dict(_text.text_config(tokenizer)) | sizes | kind | more


def vision(model_type: str | None = None, **more: Any) -> Settings:
    """Configuration of a small image encoder in the usual words."""
    kind = {"model_type": model_type} if model_type else {}
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
        **kind,
        **more,
    }


def tower(patch: int = PATCH, **more: Any) -> Settings:
    """Configuration of a small image encoder in Qwen's words."""
    return {
        "depth": VISION_LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": HEADS,
        "out_hidden_size": HIDDEN,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **more,
    }


def ears(seconds: int = 30, **more: Any) -> Settings:
    """Configuration of a small Whisper encoder."""
    return {
        "num_mel_bins": 32,
        "d_model": HIDDEN,
        "encoder_layers": VISION_LAYERS,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * HIDDEN,
        "max_source_positions": 50 * seconds,
        **more,
    }


def square(side: int = SIDE) -> dict[str, int]:
    return {"height": side, "width": side}


EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
MROPE: Settings = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
