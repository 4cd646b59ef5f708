"""Idefics3: images cut into tiles, whose placeholders have text between them (``is_embed``)."""

from pathlib import Path

from demo_models.text import chat_template, make_tokenizer, text_config, token_ids
from demo_models.weights import HEADS, HIDDEN, LAYERS, draw

VISION_LAYERS = 2
PATCH, SCALE = 14, 2
TILE = 8 * PATCH
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
TILES = 3  # in each direction, besides the whole picture in small
MEDIA_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TEMPLATE = chat_template(image="<image>")


def write(directory: Path) -> None:
    from transformers import Idefics3ForConditionalGeneration

    tokenizer = make_tokenizer(MEDIA_TOKENS, TEMPLATE)
    model = Idefics3ForConditionalGeneration(make_config(tokenizer))
    embedding = model.model.text_model.embed_tokens.weight
    gains = {"vision_model": 1.5, "connector": 1.5}
    draw(model, tokenizer, embedding, model.lm_head.weight, gains)
    model.save_pretrained(directory)
    make_processor(tokenizer).save_pretrained(directory)


def make_processor(tokenizer):
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    return Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": TILES * TILE}, max_image_size={"longest_edge": TILE}
        ),
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=TEMPLATE,
    )


def make_config(tokenizer):
    from transformers import Idefics3Config

    (image,) = token_ids(tokenizer, "<image>")
    text = text_config(tokenizer)
    return Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        text_config=text
        | {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
        },
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": HEADS,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        scale_factor=SCALE,
        image_token_id=image,
        pad_token_id=text["pad_token_id"],
        tie_word_embeddings=False,
        dtype="float32",
    )
